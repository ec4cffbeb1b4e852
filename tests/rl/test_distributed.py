"""Processes under gloo: DDP and FSDP2 give the update of one process, whatever one of them lacks, and never hang."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from transformers import AutoModelForCausalLM

from grpo_moe.rl.metrics import read_metrics
from grpo_moe.rl.run_folder import list_checkpoints
from grpo_moe.rl.run_lock import folder_lock

SCRIPT = Path(__file__).with_name("distributed_run.py")
CONFIGS = SCRIPT.parents[2] / "recipes" / "accelerate"


def environment_of(name):
    """What ``accelerate launch --config_file`` would set for the processes, in full precision."""
    parsed = launch_command_parser().parse_args(["--config_file", str(CONFIGS / name), "run.py"])
    made = prepare_multi_gpu_env(_validate_launch_command(parsed)[0])
    wanted = {k: v for k, v in made.items() if k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))}
    return {**wanted, "ACCELERATE_MIXED_PRECISION": "no"}


KINDS = {"ddp": environment_of("ddp.yaml"), "fsdp2": environment_of("fsdp2.yaml")}
COMPARED = {
    "reward", "loss", "grad_norm", "entropy", "completions/mean_length", "eval_reward", "routing/max_violation",
    "reward_faults/scripted_reward/exception", "sampling/groups_generated", "sampling/groups_kept",
}  # fmt: skip
SECONDS = 240


def start(folder, processes, variables=None, **options):
    folder.mkdir(exist_ok=True)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *torchrun, str(SCRIPT), str(folder), json.dumps(options)]
    paths = [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **(variables or {})}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def run(folder, processes, variables=None, **options):
    return results(start(folder, processes, variables, **options), folder, processes)


def results(running, folder, processes):
    said, _ = running.communicate(timeout=SECONDS)
    assert running.returncode == 0, said[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


def assert_equal_parameters(ours, expected, **tolerance):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("family", [None, "qwen3_moe"])
def test_what_one_process_lacks_changes_nothing(tmp_path, family):
    """See ScriptedEngine; with one to four tokens on a process most of its 16 experts have none."""
    options = {
        "scripted": True, "family": family, "max_steps": 5, "learning_rate": 1e-4, "gradient_accumulation_steps": 2,
        "num_iterations": 1, "eval_steps": 2, "num_generations_eval": 2,
    }  # fmt: skip
    (alone,) = run(tmp_path / "one", 1, per_device_train_batch_size=4, **options)
    for kind, variables in KINDS.items():
        first, second = run(tmp_path / kind, 2, variables, per_device_train_batch_size=2, **options)
        assert first["sharded"] == second["sharded"] == (kind == "fsdp2")
        assert alone["skipped"] == first["skipped"] == 0
        if kind == "ddp":
            assert_equal_parameters(first["parameters"], second["parameters"], rtol=0, atol=0)
        assert_equal_parameters(first["parameters"], alone["parameters"], rtol=0, atol=1e-6)
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / kind / "model").state_dict()
        assert_equal_parameters(saved, alone["parameters"], rtol=0, atol=1e-6)
        logged = [json.loads(line) for line in (tmp_path / kind / "metrics.jsonl").read_text().splitlines()]
        one = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
        for ours, expected in zip(logged, one, strict=True):  # a name that one process alone knows is not lost
            assert ours.keys() == expected.keys()
            for name in COMPARED & ours.keys():
                assert ours[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert {name for line in logged for name in line} >= COMPARED


@pytest.mark.slow
def test_a_process_without_groups_keeps_in_step(tmp_path):
    first, second = run(
        tmp_path / "two", 2, per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=8,
        max_steps=4, dynamic_sampling=True, nothing_on_the_last_rank=True, max_completion_length=8,
    )  # fmt: skip
    assert first["skipped"] == 0
    assert_equal_parameters(first["parameters"], second["parameters"], rtol=0, atol=0)


@pytest.mark.slow
def test_rollouts_ahead_of_the_update_give_that_of_one_process(tmp_path):
    """And a run goes on, without a lost or repeated prompt, from a checkpoint written while both were generating."""
    options = {
        "own_weights": True, "rollout_lag": 1, "sampler_correction": "token_truncate", "max_steps": 5,
        "max_completion_length": 8, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    two = {"per_device_train_batch_size": 4, "save_steps": 3, **options}
    started = start(tmp_path / "one", 1, per_device_train_batch_size=8, **options)
    first, second = run(tmp_path / "two", 2, KINDS["ddp"], **two)
    (alone,) = results(started, tmp_path / "one", 1)
    assert_equal_parameters(first["parameters"], second["parameters"], rtol=0, atol=0)
    assert_equal_parameters(first["parameters"], alone["parameters"], rtol=0, atol=1e-6)
    calls = [made["calls"][:5] for made in (first, second, alone)]  # after them one process evaluates
    for mine, other, whole in zip(*calls, strict=True):
        assert mine[0] + other[0] == whole[0] and mine[1:] == other[1:] == whole[1:]
    assert [call[2:] for call in calls[0]] == [(0, False), (0, True), (1, True), (2, True), (3, True)]
    one, ours = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    assert [line["sampling/lag"] for line in ours if "sampling/lag" in line] == [0, 1, 1, 1, 1]  # not an evaluation's
    for line, expected in zip(ours, one, strict=True):
        for name in {*COMPARED, "sampling_logp_difference_mean"} & line.keys():
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name

    resumed = run(tmp_path / "two", 2, KINDS["ddp"], resume_from_checkpoint=f"{tmp_path}/two/checkpoint-3", **two)
    for made, before in zip(resumed, calls, strict=False):
        assert [call[:2] for call in made["calls"][:2]] == [call[:2] for call in before[3:]]
    assert_equal_parameters(resumed[0]["parameters"], resumed[1]["parameters"], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_process_ends_the_run_which_goes_on_with_any_number_of_processes(tmp_path, kind):
    """The dead process is named; with as many processes the run goes on to the bit, with others to rounding.

    Four windows a rollout, over rows of both processes that are shuffled as one list, and two passes.
    """
    options = {
        "gradient_accumulation_steps": 1, "steps_per_generation": 4, "num_iterations": 2, "beta": 0.01,
        "max_completion_length": 8, "save_steps": 8, "save_total_limit": 9,
    }  # fmt: skip
    whole, second = run(
        tmp_path / "whole", 2, KINDS[kind], max_steps=16, per_device_train_batch_size=4, doctor=True, **options
    )
    if kind == "ddp":
        assert_equal_parameters(whole["parameters"], second["parameters"], rtol=0, atol=0)

    killed = tmp_path / "killed"
    running = start(killed, 2, KINDS[kind], max_steps=4000, per_device_train_batch_size=4, **options)
    deadline = time.monotonic() + SECONDS
    while not list_checkpoints(killed):
        assert running.poll() is None and time.monotonic() < deadline, running.communicate()[0][-3000:]
        time.sleep(0.05)
    os.kill(int((killed / "1.pid").read_text()), signal.SIGKILL)
    said, _ = running.communicate(timeout=60)
    assert running.returncode != 0 and "rank      : 1 (local_rank: 1)" in said and "SIGKILL" in said

    options |= {"max_steps": 16, "resume_from_checkpoint": str(killed / "checkpoint-8")}
    resumed, _ = run(killed, 2, KINDS[kind], per_device_train_batch_size=4, **options)
    assert_equal_parameters(resumed["parameters"], whole["parameters"], rtol=0, atol=0)
    processes, size = {"ddp": (1, 8), "fsdp2": (4, 2)}[kind]
    others = run(killed, processes, KINDS[kind], per_device_train_batch_size=size, **options)
    assert_equal_parameters(others[0]["parameters"], whole["parameters"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_hybrid_sharding_gives_the_update_of_one_process(tmp_path):
    options = {"gradient_accumulation_steps": 1, "steps_per_generation": 4, "max_completion_length": 8, "max_steps": 8}
    (alone,) = run(tmp_path / "one", 1, per_device_train_batch_size=8, **options)
    variables = environment_of("fsdp2_hybrid.yaml")
    variables |= {"PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    first, *_ = run(tmp_path / "four", 4, variables, per_device_train_batch_size=2, **options)
    assert first["sharded"]
    assert_equal_parameters(first["parameters"], alone["parameters"], rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_folder_in_training_is_refused_on_every_process(tmp_path):
    with folder_lock(tmp_path):
        running = start(tmp_path, 2, KINDS["ddp"], max_steps=1, per_device_train_batch_size=4)
        said, _ = running.communicate(timeout=SECONDS)
    assert running.returncode and said.count("ValueError: output_dir must be of no run that is training") == 2, said
