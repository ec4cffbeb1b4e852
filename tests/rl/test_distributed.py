"""Two gloo processes: equal parameters, the update of one process, and no hang when one has nothing to learn."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch

SCRIPT = Path(__file__).with_name("distributed_run.py")


def run(folder, processes, **options):
    folder.mkdir()
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = [sys.executable, *torchrun, str(SCRIPT), str(folder), json.dumps(options)]
    paths = [str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(processes)]


def test_two_processes_agree_with_each_other_and_with_one(tmp_path):
    """Four windows a rollout: the rows of both processes are shuffled as one list."""
    options = {"max_steps": 8, "gradient_accumulation_steps": 1}
    (alone,) = run(tmp_path / "one", 1, per_device_train_batch_size=8, steps_per_generation=4, **options)
    first, second = run(tmp_path / "two", 2, per_device_train_batch_size=4, steps_per_generation=4, **options)
    assert alone["skipped"] == first["skipped"] == 0
    for name, value in alone["parameters"].items():
        assert torch.equal(first["parameters"][name], second["parameters"][name]), name
        torch.testing.assert_close(first["parameters"][name], value, rtol=1e-3, atol=2e-5, msg=name)


def test_a_process_without_groups_keeps_in_step(tmp_path):
    first, second = run(
        tmp_path / "two", 2, per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=8,
        max_steps=4, dynamic_sampling=True, nothing_on_the_last_rank=True,
    )  # fmt: skip
    assert first["skipped"] == 0
    assert all(torch.equal(value, second["parameters"][name]) for name, value in first["parameters"].items())
