"""Metrics reduce exactly over micro-batches and processes, and the log survives crashes and odd numbers."""

import json
import math
import os
import socket
import time

import numpy as np
import pytest
import torch

from grpo_moe.rl.files import atomic_path, strict_json
from grpo_moe.rl.metrics import Metrics, MetricsWriter, PhaseTimer, read_metrics


def test_mean_is_weighted():
    metrics = Metrics()
    metrics.add("loss", 1.0, weight=1)
    metrics.add("loss", torch.tensor(3.0), weight=torch.tensor(99))
    assert metrics.reduce() == {"loss": 2.98}


def test_max_and_sum():
    metrics = Metrics()
    for value in (-5.0, torch.tensor(-2), -3.0):
        metrics.add_max("largest", value)
        metrics.add_sum("total", value)
    assert metrics.reduce() == {"largest": -2.0, "total": -10.0}


def test_reduce_clears():
    metrics = Metrics()
    metrics.add("loss", 1.0)
    metrics.reduce()
    assert metrics.reduce() == {}
    metrics.add_sum("loss", 2.0)
    assert metrics.reduce() == {"loss": 2.0}


def test_add_stats_combines_by_name():
    metrics = Metrics()
    for tokens, entropy, largest in ((1, 1.0, 7.0), (99, 3.0, 2.0)):
        stats = {"num_tokens": tokens, "entropy": entropy, "ratio_max": largest}
        metrics.add_stats({name: torch.tensor(value) for name, value in stats.items()}, prefix="policy/")
    assert metrics.reduce() == {"policy/num_tokens": 100.0, "policy/entropy": 2.98, "policy/ratio_max": 7.0}


def test_add_stats_ignores_a_call_without_tokens():
    metrics = Metrics()
    empty = {"num_tokens": torch.tensor(0), "entropy": torch.tensor(math.nan), "ratio_max": torch.tensor(-math.inf)}
    metrics.add_stats(empty)
    metrics.add_stats({"num_tokens": torch.tensor(4), "entropy": torch.tensor(1.5), "ratio_max": torch.tensor(1.25)})
    assert metrics.reduce() == {"num_tokens": 4.0, "entropy": 1.5, "ratio_max": 1.25}


def test_add_stats_without_num_tokens_raises():
    with pytest.raises(ValueError, match="num_tokens"):
        Metrics().add_stats({"entropy": torch.tensor(1.0)})


def test_token_counts_beyond_float32_are_exact():
    metrics = Metrics()
    for tokens, entropy in ((2**24 + 1, 1.0), (1, 0.0)):
        metrics.add_stats({"num_tokens": torch.tensor(tokens), "entropy": torch.tensor(entropy)})
    assert metrics.reduce() == {"num_tokens": 2**24 + 2, "entropy": (2**24 + 1) / (2**24 + 2)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_is_left_out_and_counted(bad):
    metrics = Metrics()
    for add in (metrics.add, metrics.add_max, metrics.add_sum):
        for value in (1.0, bad, torch.tensor(bad)):
            add(add.__name__, value)
    metrics.add("all_bad", bad)
    result = metrics.reduce()
    assert [result[name] for name in ("add", "add_max", "add_sum")] == [1.0, 1.0, 1.0]
    assert result["nonfinite/add"] == result["nonfinite/add_max"] == result["nonfinite/add_sum"] == 2.0
    assert math.isnan(result["all_bad"]) and result["nonfinite/all_bad"] == 1.0


def test_values_are_copied_without_graph():
    metrics, value = Metrics(), torch.tensor(2.0, requires_grad=True)
    product = value * 3
    metrics.add("product", product)
    with torch.no_grad():
        product.zero_()
    (entry,) = metrics._entries["product"].values
    assert not entry.requires_grad
    assert metrics.reduce() == {"product": 6.0}


def test_wrong_use_raises_and_changes_nothing():
    metrics = Metrics()
    metrics.add("loss", 1.0)
    with pytest.raises(ValueError, match="loss must be added in one way, got max after mean"):
        metrics.add_max("loss", 9.0)
    with pytest.raises(ValueError, match="0-dim"):
        metrics.add("loss", 9.0, weight=torch.ones(2))
    assert metrics.reduce() == {"loss": 1.0}


def _reduce_in_process(rank: int, port: int, folder: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
    from accelerate import Accelerator

    metrics = Metrics()
    metrics.add("loss", 1.0 if rank == 0 else 3.0, weight=1 if rank == 0 else 99)
    metrics.add_max("largest", float(rank))
    metrics.add_sum("rows", 1.0)
    metrics.add_max("only/0", 5.0) if rank == 0 else metrics.add("only/1", math.nan)
    result = metrics.reduce(Accelerator(cpu=True))
    with open(f"{folder}/{rank}.json", "w") as file:
        file.write(strict_json(result))
    torch.distributed.destroy_process_group()


def test_reduce_over_processes_with_different_names(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    workers = torch.multiprocessing.spawn(_reduce_in_process, (port, str(tmp_path)), nprocs=2, join=False)
    deadline = time.monotonic() + 120
    try:
        while not workers.join(timeout=max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, "reduce hangs"
    finally:
        for process in workers.processes:
            process.kill()
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    expected = {"loss": 2.98, "largest": 1.0, "rows": 2.0, "only/0": 5.0, "only/1": None, "nonfinite/only/1": 1.0}
    assert results == [expected, expected]


def test_write_and_read_round_trip(tmp_path):
    writer = MetricsWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write({"step": 1, "reward": 0.5, "note": "\ud800é\n"})
    writer.write({"step": np.int64(2), "reward": np.float32(0.25), "loss": torch.tensor(2.0)})
    assert read_metrics(writer.path) == [
        {"step": 1, "reward": 0.5, "note": "\ud800é\n"},
        {"step": 2, "reward": 0.25, "loss": 2.0},
    ]


def test_non_finite_is_written_as_null(tmp_path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write({"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": torch.tensor(math.nan)})
    assert writer.path.read_text() == '{"a": null, "b": [null, {"c": null}], "d": null}\n'


def test_torn_last_line_is_ignored_and_repaired(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "rew')
    assert read_metrics(path) == [{"step": 1}]
    MetricsWriter(path).write({"step": 3})
    assert path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_broken_line_in_the_middle_raises(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("123", "must hold JSON objects, got b'123' in line 2"),
        ("[]", "must hold JSON objects"),
        ("null", "must hold JSON objects"),
        ('{"step": "2"}', r"must hold numbers for step, got b'{\"step\": \"2\"}' in line 2; mend or remove"),
        ('{"step": [2]}', "must hold numbers for step"),
        ('{"step": NaN}', "must hold numbers for step"),
    ],
)
@pytest.mark.parametrize("end", ["", '{"step": 3}\n'])
def test_lines_of_another_kind_are_named(tmp_path, line, message, end):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{end}')
    with pytest.raises(ValueError, match=f"{path} {message}"):
        read_metrics(path)
    with pytest.raises(ValueError, match=message):
        MetricsWriter(path)


def test_a_folder_in_place_of_the_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path} must be a file that can be read, got Is a directory"):
        read_metrics(tmp_path)


def test_lines_without_a_step_stay(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": null, "run": "x"}\n{"step": 2}\n')
    MetricsWriter(path).truncate_after(1)
    assert read_metrics(path) == [{"step": None, "run": "x"}]


def test_truncate_after_drops_later_steps(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"run": "x"}\n{"step": 2, "eval_reward": 1.0}\n{"step": 3}\n{"step": 2}\n{"step": 4')
    writer = MetricsWriter(path)
    writer.truncate_after(2)
    writer.write({"step": 3, "reward": 1.0})
    assert read_metrics(path) == [
        {"step": 1},
        {"run": "x"},
        {"step": 2, "eval_reward": 1.0},
        {"step": 2},
        {"step": 3, "reward": 1.0},
    ]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_atomic_path_leaves_the_old_file_when_the_block_raises(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as temporary:
        temporary.write_text("half of the n")
        raise RuntimeError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_no_file_reads_as_no_lines(tmp_path):
    MetricsWriter(tmp_path / "metrics.jsonl").truncate_after(5)
    assert read_metrics(tmp_path / "absent.jsonl") == read_metrics(tmp_path / "metrics.jsonl") == []


def test_phase_timer_accumulates_by_step_and_in_total(monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 11.0, 20.0, 24.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = PhaseTimer()
    with timer("rollout"):
        pass
    with pytest.raises(RuntimeError), timer("rollout"):
        raise RuntimeError
    assert timer.step_seconds() == {"rollout": 3.0}
    with timer("update"):
        pass
    assert timer.step_seconds() == {"update": 4.0}
    assert timer.totals == {"rollout": 3.0, "update": 4.0}


def test_a_mean_over_nothing_is_absent():
    """As a step whose rows are all masked: no 0/0, in no line of the log."""
    metrics = Metrics()
    metrics.add_stats({"num_tokens": torch.tensor(0), "entropy": torch.tensor(0.0), "ratio_max": torch.tensor(0.0)})
    metrics.add("reward", math.nan, weight=0)
    metrics.add_sum("loss", 0.0)
    assert metrics.reduce() == {"num_tokens": 0.0, "loss": 0.0}
