"""The main job as a user runs it: launched, on two processes, interrupted and resumed, and with wrong arguments."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "dapo_gptoss.py")
SHORT = ["--warm_start_steps", "4", "--per_device_train_batch_size", "16", "--preset", "cpu", "--use_cpu"]
SHORT += ["--max_completion_length", "10"]


def launch(folder, *arguments, launcher=()):
    command = [sys.executable, "-m", "accelerate.commands.launch", *launcher, RECIPE]
    command = command if launcher else [sys.executable, RECIPE]
    paths = ["--output_dir", str(folder / "run"), "--cache_dir", str(folder / "cache")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        [*command, *(x for x in SHORT if not (launcher and x == "--use_cpu")), *paths, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=folder,
    )


def finish(process, timeout=240):
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, output


@pytest.mark.slow
def test_interrupted_by_a_signal_it_goes_on_where_it_stopped(tmp_path):
    process = launch(tmp_path, "--max_steps", "400", "--max_train_seconds", "600")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 180
    while not (metrics.exists() and metrics.read_text().count("\n") > 2) and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130 and "--resume_from_checkpoint to go on" in output
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    stopped = int(checkpoint.name.split("-")[1])

    code, output = finish(launch(tmp_path, "--resume_from_checkpoint", "--max_steps", str(stopped + 4)))
    assert code == 0, output
    assert "warm start" not in output  # from the cache
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == stopped + 4
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [line["step"] for line in lines if "reward" in line]
    assert steps == list(range(4, stopped + 5, 4))


def test_help_lists_the_options_of_the_recipe_and_of_training(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setattr(sys, "argv", [RECIPE, "--help"])
    import dapo_gptoss

    with pytest.raises(SystemExit) as ended:
        dapo_gptoss.main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and all(f"--{name}" in shown for name in ("task", "loss_type", "max_steps", "config"))


@pytest.mark.slow
def test_accelerate_launch_starts_the_processes_it_is_asked_for(tmp_path):
    launcher = ["--cpu", "--num_processes", "2"]
    code, output = finish(launch(tmp_path, "--max_steps", "4", launcher=launcher))
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_processes"] == 2 and summary["steps"] == 4
    assert output.count("held-out pass_rate") == 1
    # tests/rl/test_distributed.py compares the parameters of two processes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--loss_type", "ppo"], "loss_type must be one of"),
        (["--num_generations", "1"], "num_generations must be at least 2, got 1"),
        (["--num_generations", "7"], "num_generations must be a divisor of"),
        (["--preset", "huge"], "preset must be one of cpu, gpu, h200, got 'huge'"),
        (
            ["--model_name_or_path", "./nowhere"],
            "model_name_or_path must be in a folder or on the hub, got './nowhere'",
        ),
        (["--task", "chess"], "model_name_or_path must be set with another task"),
        (["--task", "chess", "--model_name_or_path", "./x"], "task must be countdown or reasoning_gym:<name>"),
        (["--task", "chess", "--dataset_name", "x", "--model_name_or_path", "./x"], "task must be left out"),
        (["--resume_from_checkpoint", "/nowhere"], "resume_from_checkpoint must be 'latest' or"),
        (["--output_dir", "/proc/nowhere"], "output_dir must be a folder that can be written"),
        (["--config", "/nowhere.yaml"], "--config must be a YAML file"),
        (
            ["--dataset_name", "./nowhere.jsonl", "--model_name_or_path", "./x"],
            "dataset_name must be a hub dataset",
        ),
        (["--max_completion_length", "300"], "max_completion_length must be below 128"),
    ],
)
def test_wrong_arguments_end_with_one_clear_line(tmp_path, arguments, message, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", [RECIPE, *SHORT, "--cache_dir", str(tmp_path), *arguments])
    import dapo_gptoss

    with pytest.raises(ValueError, match=message):
        dapo_gptoss.main()
