"""The files of a run: those of steps that it never made are removed, and what stands in their way is found at once."""

import math

import pytest
import torch
from accelerate import Accelerator

from grpo_moe import GRPOConfig
from grpo_moe.rl.batch import Group
from grpo_moe.rl.metrics import read_metrics
from grpo_moe.rl.record import RunRecord, rollout_metrics
from grpo_moe.types import Completion, Prompt


def record(path, **options):
    args = GRPOConfig(output_dir=str(path), per_device_train_batch_size=4, num_generations=4, use_cpu=True,
                      show_progress=False, **options)  # fmt: skip
    return RunRecord(Accelerator(cpu=True), args, ["right"])


def group(rewards, **changes):
    made = [Completion((5,) * 3, (-1.0,) * 3, "stop", "text") for _ in rewards]
    rewards = torch.tensor(rewards, dtype=torch.float64)
    return Group(Prompt((1,), raw="p"), made, rewards, rewards, [rewards.tolist()], **changes)


def earlier_run(path):
    run = record(path)
    run.start("earlier", last_step=-1)
    for step in (2, 4, 6):
        run.log(step, {"reward": 1.0})
        run.completions(step, [group([0.0, 1.0, 0.0, 1.0])], torch.zeros(1, 4))
    (path / "capsules").mkdir()
    for name in ("update_000003_0.safetensors", "update_000006_1.safetensors", "nonfinite_000006_0.safetensors",
                 "mine.safetensors"):  # fmt: skip
        (path / "capsules" / name).touch()
    (path / "completions" / "notes_000006.parquet").touch()


def left(path):
    return sorted(p.name for folder in ("completions", "capsules") for p in (path / folder).iterdir())


def test_a_fresh_run_removes_what_an_earlier_one_left(tmp_path):
    earlier_run(tmp_path)
    record(tmp_path).start("fresh", last_step=-1)
    assert left(tmp_path) == ["mine.safetensors", "notes_000006.parquet"]
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_a_resumed_run_removes_what_stands_after_its_checkpoint(tmp_path):
    earlier_run(tmp_path)
    record(tmp_path).start("resumed", last_step=4)
    assert left(tmp_path) == [
        "completions_000002.parquet", "completions_000004.parquet", "mine.safetensors", "notes_000006.parquet",
        "update_000003_0.safetensors",
    ]  # fmt: skip
    assert [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl")] == [2, 4]


def test_a_first_run_has_nothing_to_remove(tmp_path):
    record(tmp_path / "new").start("first", last_step=-1)
    assert not (tmp_path / "new" / "completions").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "expert_load.jsonl", "summary.json", "curves.png"])
def test_a_folder_where_a_file_will_be_is_found_at_construction(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match=f"output_dir must have no folder where the run writes a file, got .*{name}; "):
        record(tmp_path)


@pytest.mark.parametrize("name", ["completions", "capsules"])
def test_a_file_where_a_folder_will_be_is_found_at_construction(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(ValueError, match=f"output_dir must have no file where the run writes a folder, got .*{name}; "):
        record(tmp_path)


def test_rollout_metrics_are_means_over_what_was_scored():
    groups = [group([0.0, 1.0, math.nan, 1.0], has_signal=True), group([2.0, 2.0, 2.0, 2.0])]
    made = rollout_metrics(groups, ["right"], threshold=1.0)
    weights = {name: weight for name, (_, weight) in made.items()}
    assert weights == {
        "reward": 7, "rewards/right": 7, "reward_std": 2, "frac_reward_zero_std": 2, "pass_rate": 8,
        "completions/mean_length": 8, "completions/clipped_ratio": 8,
    }  # fmt: skip
    means = {name: mean for name, (mean, _) in made.items()}
    assert means["reward"] == pytest.approx(10 / 7) and means["rewards/right"] == pytest.approx(10 / 7)
    assert means["reward_std"] == pytest.approx(math.sqrt(1 / 3) / 2) and means["frac_reward_zero_std"] == 0.5
    assert means["pass_rate"] == 6 / 8 and means["completions/mean_length"] == 3
    assert rollout_metrics([], ["right"], threshold=1.0) == {}
