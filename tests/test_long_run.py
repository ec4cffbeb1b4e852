"""A run of any length: memory, threads and descriptors stay flat, and what grows in its folder is known and bounded."""

import gc
import json
import math
import os
import statistics
import threading
import tracemalloc
from pathlib import Path

import pytest
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer
from transformers import TrainerCallback

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl import callbacks
from grpo_moe.rl.callbacks import Callbacks
from grpo_moe.rl.capsule import load_capsule
from grpo_moe.rl.metrics import MetricsWriter, read_metrics
from grpo_moe.rl.run_folder import list_checkpoints

STEPS, WARM_UP = 500, 100
MIB = 2**20


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).touch())


async def also_async(prompts, completions, **columns):
    return [0.0] * len(completions)


def trainer(path, callbacks=None, **changes):
    """One update a rollout; every file a run can write is written, and rewards run in threads."""
    values = dict(
        output_dir=str(path), per_device_train_batch_size=4, num_generations=4, max_completion_length=6, use_cpu=True,
        learning_rate=1e-3, eval_steps=50, save_steps=25, capsule_steps=5, log_total_limit=3, reward_timeout=60.0,
        eval_on_start=False,
    )  # fmt: skip
    return GRPOTrainer(
        tiny_model(num_hidden_layers=2), [share_of_letter, also_async], GRPOConfig(**{**values, **changes}),
        prompt_rows(5), eval_dataset=prompt_rows(2), processing_class=tokenizer(), callbacks=callbacks,
    )  # fmt: skip


class Watch(TrainerCallback):
    """What the process holds after every update."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **given):
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.seen.append(
            {
                "rss": pages * os.sysconf("SC_PAGE_SIZE"),
                "descriptors": len(os.listdir("/proc/self/fd")),
                "threads": len(os.listdir("/proc/self/task")),
                "python_threads": threading.active_count(),
            }
        )


def files_in(folder):
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_500_updates_hold_no_more_than_100(tmp_path, capsys):
    watch = Watch()
    trainer(tmp_path, [watch], max_steps=STEPS).train()
    assert len(watch.seen) == STEPS
    early, late = watch.seen[WARM_UP : WARM_UP + 50], watch.seen[-50:]
    found = {name: [statistics.median(step[name] for step in part) for part in (early, late)] for name in watch.seen[0]}
    sizes = files_in(tmp_path)
    with capsys.disabled():
        growth = (found["rss"][1] - found["rss"][0]) / MIB
        print(f"\n{growth:+.2f} MiB from update {WARM_UP} to {STEPS} at {found['rss'][1] / MIB:.0f} MiB; {found}")
        print({name: size for name, size in sizes.items() if name.endswith("jsonl")}, len(sizes), sum(sizes.values()))
    assert growth < 12  # the callbacks' history of 400 lines is 4
    for name in ("descriptors", "threads", "python_threads"):
        assert found[name][1] <= found[name][0]
    assert sizes["metrics.jsonl"] < 6000 * STEPS and sizes["expert_load.jsonl"] < 100 * STEPS
    assert len(list((tmp_path / "completions").iterdir())) == len(list((tmp_path / "capsules").iterdir())) == 3
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-475", "checkpoint-500"]
    assert len(sizes) < 50


def test_a_run_keeps_the_newest_files_of_what_it_is_told_to(tmp_path):
    every = {"capsule_steps": 1, "eval_steps": None, "save_steps": 3}
    trainer(tmp_path, max_steps=6, log_total_limit=2, **every).train()
    assert kept_in(tmp_path) == [
        *(f"completions_{step:06d}.parquet" for step in (5, 6)),
        *(f"update_{step:06d}_0.safetensors" for step in (5, 6)),
    ]
    trainer(tmp_path, max_steps=8, log_total_limit=1, **every).train(resume_from_checkpoint="latest")
    assert kept_in(tmp_path) == ["completions_000008.parquet", "update_000008_0.safetensors"]


def test_capsules_of_a_gradient_that_is_not_finite_stay_whatever_the_limit(tmp_path):
    run = trainer(tmp_path, max_steps=5, log_total_limit=1, capsule_steps=1, eval_steps=None, log_completions=False)
    clip, calls = run.accelerator.clip_grad_norm_, iter(range(1, 100))
    run.accelerator.clip_grad_norm_ = lambda *given: clip(*given) * (math.nan if next(calls) in (2, 3) else 1)
    run.train()
    names = [f"{kind}_{step:06d}_0.safetensors" for kind, step in (("nonfinite", 2), ("nonfinite", 3), ("update", 5))]
    assert sorted(path.name for path in (tmp_path / "capsules").iterdir()) == names
    assert load_capsule(tmp_path / "capsules" / names[0]).reason == "grad_norm of the parameters is nan"


def kept_in(run):
    return sorted(path.name for name in ("completions", "capsules") for path in (run / name).iterdir())


def test_a_run_keeps_all_files_unless_it_is_told_otherwise(tmp_path):
    trainer(tmp_path, max_steps=4, capsule_steps=2, eval_steps=None, log_total_limit=None).train()
    assert len(list((tmp_path / "completions").iterdir())) == 4 and len(list((tmp_path / "capsules").iterdir())) == 2


def test_a_limit_of_files_below_one_is_refused():
    with pytest.raises(ValueError, match="log_total_limit must be at least 1, got 0"):
        GRPOConfig(log_total_limit=0)


def test_the_history_of_callbacks_is_bounded(monkeypatch):
    monkeypatch.setattr(callbacks, "MAX_HISTORY", 5)
    heard = Callbacks([], GRPOConfig())
    state = type("State", (), {"step": 0, "best": {}})()
    for state.step in range(20):
        heard("log", state, logs={"reward": 0.0})
    assert [line["step"] for line in heard._state.log_history] == list(range(15, 20))


def test_a_log_of_months_is_cut_without_being_held(tmp_path):
    """As objects, 100 experts of 5 layers over 40 rollouts take 0.7 MiB, five times the peak allowed."""
    path = tmp_path / "expert_load.jsonl"
    line = json.dumps({"load": {str(layer): [1000 + i for i in range(100)] for layer in range(5)}})
    path.write_text("".join(f'{{"step": {step}, {line[1:]}\n' for step in range(40)) + '{"step": 40, "lo')
    gc.collect()
    tracemalloc.start()
    MetricsWriter(path).truncate_after(39)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 150_000, peak
    assert [row["step"] for row in read_metrics(path)] == list(range(40))


def test_what_a_step_adds_to_the_folder_is_its_lines_alone(tmp_path):
    """The sizes that the README states: of every file that grows, a line of so many bytes."""
    off = {"log_completions": False, "eval_steps": None, "capsule_steps": None, "save_steps": None}
    for steps in (4, 8):
        trainer(tmp_path / str(steps), max_steps=steps, **off).train()
    short, long = files_in(tmp_path / "4"), files_in(tmp_path / "8")
    assert short.keys() == long.keys()
    grown = {name: (long[name] - short[name]) / 4 for name in short if long[name] > short[name] + 100}
    assert grown.keys() == {"metrics.jsonl", "expert_load.jsonl"} and max(grown.values()) < 6000
