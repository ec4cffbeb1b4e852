"""Checkpoints: whole or absent, checked before they are loaded, rotated by step, the best one kept."""

import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from grpo_moe.rl import checkpoint
from grpo_moe.rl.checkpoint import load_checkpoint, save_checkpoint
from grpo_moe.rl.run_folder import best_checkpoint, find_checkpoint, list_checkpoints, read_state, start_run

CONFIG = {
    "learning_rate": 0.1, "max_steps": 9, "lr_scheduler_type": "constant", "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2, "steps_per_generation": 4, "dynamic_sampling": False,
}  # fmt: skip


class Run:
    """A model, its optimiser and its checkpoints; `step` changes the weights."""

    def __init__(self, folder, seed=0, width=4, run_id=None):
        torch.manual_seed(seed)
        self.folder = str(folder)
        self.accelerator = Accelerator(cpu=True)
        self.model = torch.nn.Linear(3, width)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        self.run_id = run_id or start_run(folder)

    def step(self):
        self.model(torch.randn(2, 3)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, step, keep=9, best=None, **state):
        values = {"step": step, "num_processes": 1, "config": CONFIG, "run_id": self.run_id, **state}
        values |= {} if best is None else {"best": {"step": best, "value": 0.5}}
        return save_checkpoint(self.accelerator, values, self.folder, keep=keep, best=best)

    def load(self, path, **config):
        return load_checkpoint(self.accelerator, Path(path), {**CONFIG, **config})

    def weights(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def draws():
    return [random.random(), np.random.rand(), float(torch.rand(()))]


def steps(folder):
    return [int(path.name.split("-")[1]) for path in list_checkpoints(folder)]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


# --- round trip


def test_tied_weights_are_saved_once_without_a_word_and_loaded_into_both(tmp_path, caplog):
    run = Run(tmp_path, width=3)
    run.model.tied = torch.nn.Linear(3, 3)
    run.model.tied.weight = run.model.weight
    run.step()
    path, saved = run.save(1), run.weights()
    assert not caplog.records
    run.step()
    run.load(path)
    assert run.model.tied.weight is run.model.weight and same(run.weights(), saved)


def test_weights_optimiser_and_state_come_back(run, tmp_path):
    run.step()
    path = run.save(1, source={"position": 7}, phase_seconds={"rollout": 0.1 + 0.2})
    saved, moments = run.weights(), run.optimizer.state_dict()["state"]
    other = Run(tmp_path / "other", seed=5)
    state = other.load(path, max_steps=20)
    assert same(other.weights(), saved)
    for number, values in moments.items():
        assert same(values, other.optimizer.state_dict()["state"][number])
    assert state["source"] == {"position": 7} and state["phase_seconds"] == {"rollout": 0.1 + 0.2}


def test_every_random_stream_comes_back(run):
    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    draws()
    np.random.randn()  # leaves a second normal value in the stream's memory
    path = run.save(1)
    expected = [*draws(), np.random.randn()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    run.load(path)
    assert [*draws(), np.random.randn()] == expected


def test_random_streams_that_do_not_come_back_are_an_error(run, monkeypatch):
    path = run.save(1)
    draws()
    monkeypatch.setattr(np.random, "set_state", lambda state: None)
    with pytest.raises(ValueError, match="checkpoint-1 must bring back the random streams numpy, got others"):
        run.load(path)


def test_a_missing_file_of_random_states_is_an_error(run):
    path = run.save(1)
    (path / "random_states_0.pkl").unlink()
    with pytest.raises(ValueError, match="must be a whole checkpoint of this model, got no random_states_0.pkl"):
        run.load(path)


# --- damage


def flip_a_bit(path, share):
    content = bytearray(path.read_bytes())
    content[int(share * (len(content) - 1))] ^= 1
    path.write_bytes(content)


def test_a_flipped_bit_in_any_file_is_found_before_anything_changes(run):
    first = run.save(1)
    run.step()
    second = run.save(2)
    run.step()
    weights, moments = run.weights(), run.optimizer.state_dict()
    files = sorted(p.relative_to(second) for p in second.rglob("*") if p.is_file())
    assert {"model.safetensors", "optimizer.bin", "random_states_0.pkl", "grpo_state.json"} <= set(map(str, files))
    for name in files:
        for share in (0.0, 0.3, 0.7, 1.0):
            whole = (second / name).read_bytes()
            flip_a_bit(second / name, share)
            random_streams = (random.getstate(), torch.get_rng_state())
            with pytest.raises(ValueError, match=f"{name}.*the one before is whole: resume_from_checkpoint='{first}'"):
                run.load(second)
            assert same(run.weights(), weights) and str(run.optimizer.state_dict()) == str(moments)
            assert random.getstate() == random_streams[0] and torch.equal(torch.get_rng_state(), random_streams[1])
            (second / name).write_bytes(whole)
    run.load(second)


def test_truncated_and_missing_files_are_named_with_their_sizes(run):
    path = run.save(1)
    size = (path / "optimizer.bin").stat().st_size
    with open(path / "optimizer.bin", "r+b") as file:
        file.truncate(100)
    (path / "model.safetensors").unlink()
    message = f"got no model.safetensors, optimizer.bin of 100 bytes instead of {size}; there is no whole one before it"
    with pytest.raises(ValueError, match=message):
        run.load(path)


def test_the_way_back_goes_past_other_damaged_checkpoints(run):
    paths = [run.save(step) for step in (1, 2, 3)]
    for path in paths[1:]:
        flip_a_bit(path / "model.safetensors", 0.9)
    with pytest.raises(ValueError, match=f"resume_from_checkpoint='{paths[0]}'"):
        run.load(paths[2])
    run.load(paths[0])


def test_a_damaged_state_is_refused_for_latest_and_does_not_stop_a_run(run, tmp_path):
    first, second = run.save(1), run.save(2)
    (second / "grpo_state.json").write_text("{")
    message = f"{second}/grpo_state.json must be JSON, got a damaged file; .*resume_from_checkpoint='{first}'"
    for name in ("latest", True, str(second)):
        with pytest.raises(ValueError, match=message):
            find_checkpoint(name, str(tmp_path))
    assert steps(tmp_path) == [1]
    run.save(3)
    assert find_checkpoint("latest", str(tmp_path)).name == "checkpoint-3"


def test_the_state_of_another_program_is_refused(run, tmp_path):
    path = run.save(1)
    (path / "grpo_state.json").write_text('{"step": 1}')
    with pytest.raises(ValueError, match="must be the state of a run, got other content; there is no whole one"):
        find_checkpoint(str(path), str(tmp_path))
    with pytest.raises(ValueError, match="checkpoint folder with grpo_state.json, got .*; checkpoints in .*: none"):
        find_checkpoint(str(tmp_path), str(tmp_path))


def test_another_model_options_and_processes_are_refused(run, tmp_path):
    path = run.save(1)
    with pytest.raises(ValueError, match="(?s)must be a checkpoint of this model, got: .*size mismatch"):
        Run(tmp_path / "other", width=5).load(path)
    with pytest.raises(ValueError, match="got changes learning_rate: 0.1 -> 0.2; drop them or start anew"):
        run.load(path, learning_rate=0.2)
    with pytest.raises(ValueError, match="a rollout must be 16 completions for 2 updates .*, got 8 for 2 on 1 proc"):
        run.load(run.save(2, num_processes=2))
    with pytest.raises(ValueError, match="a rollout must be 16 completions for 2 updates .*, got 16 for 4 on 1 proc"):
        run.load(run.save(3, num_processes=2), steps_per_generation=8)


def test_the_split_over_processes_and_micro_batches_may_change(run):
    path = run.save(1, num_processes=2)
    assert run.load(path, per_device_train_batch_size=4)["step"] == 1
    assert run.load(path, steps_per_generation=8, gradient_accumulation_steps=4)["step"] == 1


def test_a_schedule_that_follows_max_steps_warns_of_another_number(run, caplog):
    path = run.save(1, config={**CONFIG, "lr_scheduler_type": "linear"})
    run.load(path, lr_scheduler_type="linear")
    assert not caplog.messages
    run.load(path, lr_scheduler_type="linear", max_steps=20)
    assert "'linear' follows max_steps" in caplog.text and "20 updates" in caplog.text


def test_a_folder_without_a_state_is_not_passed_over(run, tmp_path):
    run.save(1)
    (run.save(2) / "grpo_state.json").unlink()
    with pytest.raises(ValueError, match="must be there, got no such file; the one before is whole: .*checkpoint-1"):
        find_checkpoint("latest", str(tmp_path))


def test_a_fresh_run_puts_an_earlier_one_aside(run, tmp_path, capsys):
    run.save(1)
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    for mine in ("notes.txt", "holiday.png", "checkpoint-from-trl"):
        (tmp_path / mine).write_text("mine")
    start_run(tmp_path)
    kept = ["checkpoint-from-trl", "earlier-1", "holiday.png", "notes.txt", "run_id"]
    assert sorted(p.name for p in tmp_path.iterdir()) == kept
    assert steps(tmp_path / "earlier-1") == [1] and (tmp_path / "earlier-1" / "metrics.jsonl").exists()
    assert "is now in" in capsys.readouterr().out
    start_run(tmp_path)
    assert not (tmp_path / "earlier-2").exists()  # there was nothing of a run yet
    (tmp_path / "earlier-1").rename(tmp_path / "earlier-7")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    start_run(tmp_path)
    assert (tmp_path / "earlier-8" / "metrics.jsonl").exists()


# --- rotation


def test_the_newest_are_kept_by_step_whatever_the_clock_says(run, tmp_path):
    for number, step in enumerate((2, 4, 10, 12)):
        path = run.save(step, keep=3)
        os.utime(path, (1e9 - number, 1e9 - number))
    assert steps(tmp_path) == [4, 10, 12]
    assert find_checkpoint("latest", str(tmp_path)).name == "checkpoint-12"


def test_the_best_is_never_dropped_and_is_found_again(run, tmp_path):
    for step, best in ((1, None), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5), (7, 5)):
        run.save(step, keep=1, best=best)
        expected = tmp_path / f"checkpoint-{best}" if best else None
        assert best_checkpoint(tmp_path) == expected
        assert steps(tmp_path) == sorted({step, best or step})


def test_no_best_is_found_where_none_was_saved(run, tmp_path):
    assert best_checkpoint(tmp_path) is None
    run.save(4, best=3)
    assert best_checkpoint(tmp_path) is None


def test_a_run_resumed_from_an_older_checkpoint_keeps_what_it_writes(run, tmp_path):
    for step in (2, 4, 6):
        run.save(step, keep=2)
    run.save(5, keep=2)
    assert steps(tmp_path) == [4, 5, 6]
    run.save(7, keep=2)
    assert steps(tmp_path) == [6, 7]


def test_another_run_leaves_earlier_checkpoints_alone(run, tmp_path):
    run.save(8)
    other = Run(tmp_path)
    other.save(1, keep=1)
    other.save(2, keep=1)
    assert steps(tmp_path) == [2] and (tmp_path / "earlier-1" / "checkpoint-8").is_dir()


def test_saving_a_step_again_replaces_it(run, tmp_path):
    run.save(1, note="old")
    run.step()
    assert read_state(run.save(1, note="new"))["note"] == "new"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-1", "run_id"]


def test_leftovers_of_a_killed_run_go_with_the_next_checkpoint(run, tmp_path):
    for name in ("checkpoint-3.tmp", "checkpoint-1.old.tmp"):
        shutil.copytree(run.save(2), tmp_path / name)
    assert steps(tmp_path) == [2]
    run.save(4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-4", "run_id"]


# --- failure


def check_nothing_happened(run, before):
    folder = Path(run.folder)
    assert sorted(p.name for p in folder.iterdir()) == before
    run.load(folder / "checkpoint-1")
    run.save(3)
    assert steps(folder) == [1, 3]


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
@pytest.mark.parametrize("bytes_a_file", [0, 200, 900, 2000])
def test_a_full_disk_gives_one_message_and_leaves_older_checkpoints_alone(run, tmp_path, bytes_a_file):
    run.step()
    run.save(1)
    before = sorted(p.name for p in tmp_path.iterdir())
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_a_file, hard))
    try:
        with pytest.raises(OSError, match="output_dir must have room and be writable for checkpoint-2, got .*; free"):
            run.save(2, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    check_nothing_happened(run, before)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_folder_that_cannot_be_written_gives_the_same_message(run, tmp_path, monkeypatch, call):
    run.save(1)
    before = sorted(p.name for p in tmp_path.iterdir())

    def refuse(*args):
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.os, call, refuse)
        with pytest.raises(OSError, match="writable for checkpoint-2, got .*Read-only file system; free some space"):
            run.save(2, keep=1)
    check_nothing_happened(run, before)


def test_a_kill_at_any_moment_leaves_only_whole_checkpoints(tmp_path):
    """Moments: each call that makes a file durable, moves one or removes one."""
    seen = set()
    for moment in range(1, 40):
        folder = tmp_path / str(moment)
        if finishes(folder, moment):
            break
        names = tuple(path.name for path in list_checkpoints(folder))
        seen.add(names)
        later = Run(tmp_path / "other")
        for name in names:
            later.load(folder / name)
        again = Run(folder, run_id=(folder / "run_id").read_text())
        again.save(3, keep=1)
        assert sorted(p.name for p in folder.iterdir()) == ["checkpoint-3", "run_id"]
    assert moment > 10 and seen == {("checkpoint-1",), ("checkpoint-1", "checkpoint-2"), ("checkpoint-2",)}


def finishes(folder, moment):
    """Whether a process that dies at a moment lives to the end of its second checkpoint."""
    child = os.fork()
    if child == 0:
        try:
            run = Run(folder)
            run.save(1)
            die_at(moment)
            run.save(2, keep=1)
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 0


def die_at(moment):
    calls = []

    def counting(function):
        def call(*args, **kwargs):
            calls.append(args)
            if len(calls) == moment:
                os._exit(9)
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "replace", "unlink", "rmdir"):
        setattr(os, name, counting(getattr(os, name)))


# --- two processes


@pytest.mark.slow
def test_two_processes_agree_on_damage_and_on_failure(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__, str(tmp_path)]
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [(tmp_path / f"{rank}.done").read_text() for rank in "01"] == ["ok", "ok"]


def on_two_processes(folder):
    run = Run(folder, run_id="5" * 32)
    rank, save_state = run.accelerator.process_index, run.accelerator.save_state
    (folder / "run_id").write_text(run.run_id)
    random.seed(rank), np.random.seed(rank), torch.manual_seed(rank)
    path = run.save(1, num_processes=2)
    expected = draws()
    run.load(path)
    assert draws() == expected

    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    run.accelerator.save_state = refuse if rank else save_state
    with pytest.raises(OSError, match="checkpoint-2, got .*No space left"):
        run.save(2, num_processes=2)
    run.accelerator.wait_for_everyone()
    assert steps(folder) == [1] and not list(folder.glob("*.tmp"))

    if rank == 0:
        flip_a_bit(path / "random_states_1.pkl", 0.5)
    run.accelerator.wait_for_everyone()
    with pytest.raises(ValueError, match="random_states_1.pkl with another checksum; there is no whole one before"):
        run.load(path)
    (folder / f"{rank}.done").write_text("ok")
    run.accelerator.wait_for_everyone()
    os._exit(0)  # gloo may abort a process that goes through the end of Python


if __name__ == "__main__":
    on_two_processes(Path(sys.argv[1]))
