"""Reports can be read back, are written whole or not at all, and draw whatever the log holds."""

import json
import math
import os

import numpy as np
import pyarrow.parquet
import pytest
from matplotlib.axes import Axes

from grpo_moe.rl import report
from grpo_moe.rl.report import describe_phases, plot_curves, versions, write_completions, write_summary

TRAIN = {
    "step": 2,
    "reward": 0.5,
    "pass_rate": 0.25,
    "completions/mean_length": 12.0,
    "completions/clipped_ratio": 0.1,
    "entropy": 1.0,
    "clip_ratio": 0.01,
    "grad_norm": 0.5,
    "learning_rate": 1e-4,
    "seconds/rollout": 1.0,
    "seconds/update": 2.0,
    "seconds/total": 3.5,
}
EVAL = {"step": 0, "eval_pass_rate": 0.3, "eval_greedy_pass_rate": 0.4, "eval_reward": 0.2}


def test_completions_round_trip(tmp_path):
    path = tmp_path / "completions.parquet"
    rows = [
        {"step": 1, "prompt": "8 8 2=18?", "completion": "é\ud800", "rewards/exact": 1.0, "advantage": np.float32(0.5)},
        {"step": 1, "prompt": [{"role": "user", "content": "hi"}], "completion": "", "advantage": -1, "late": math.nan},
    ]
    write_completions(path, rows)
    assert pyarrow.parquet.read_table(path).to_pylist() == [
        {
            "step": 1,
            "prompt": "8 8 2=18?",
            "completion": r"é\ud800",
            "rewards/exact": 1.0,
            "advantage": 0.5,
            "late": None,
        },
        {
            "step": 1,
            "prompt": '[{"role": "user", "content": "hi"}]',
            "completion": "",
            "rewards/exact": None,
            "advantage": -1.0,
            "late": None,
        },
    ]
    assert os.listdir(tmp_path) == ["completions.parquet"]


def test_no_completions_still_have_columns(tmp_path):
    write_completions(tmp_path / "empty.parquet", [])
    table = pyarrow.parquet.read_table(tmp_path / "empty.parquet")
    assert table.num_rows == 0 and table.column_names == ["step", "prompt", "completion"]


def test_summary_is_strict_json(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"eval_before": {"pass_rate": 0.25}, "loss": math.nan, "versions": versions()})
    summary = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert summary["eval_before"] == {"pass_rate": 0.25} and summary["loss"] is None


def test_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"a": 1})
    with pytest.raises(TypeError):
        write_summary(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_versions_name_what_is_there_and_what_is_not(monkeypatch):
    monkeypatch.setattr(report, "_PACKAGES", ("torch", "no-such-package"))
    found = versions()
    assert found["torch"][0].isdigit() and found["no-such-package"] is None
    assert found["cpu_count"] >= 1 and {"python", "platform", "gpu"} <= set(found)


def test_describe_phases_orders_and_shares():
    seconds = {"rollout": 1.0, "update": 2.0, "total": 4.0}
    assert describe_phases(seconds) == "total 4.00 s: update 2.00 s (50%), rollout 1.00 s (25%)"
    assert describe_phases({"rollout": 1.0}) == "total 1.00 s: rollout 1.00 s (100%)"
    assert describe_phases({"rollout": 0.0}) == "total 0.00 s: rollout 0.00 s (0%)"
    assert describe_phases({}) == "total 0.00 s"


@pytest.mark.parametrize(
    "metrics",
    [
        [],
        [{"reward": 1.0}],
        [TRAIN],
        [EVAL],
        [EVAL, TRAIN, {"step": 4, "reward": None, "seconds/rollout": math.nan}, {"step": 3, "clip_ratio": 0.1}],
    ],
    ids=["nothing", "no step", "one point", "evaluation only", "gaps"],
)
def test_curves_are_a_png_whatever_is_missing(tmp_path, metrics):
    path = tmp_path / "curves.png"
    plot_curves(metrics, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) > 5_000
    assert os.listdir(tmp_path) == ["curves.png"]


def test_curves_draw_the_logged_values(tmp_path, monkeypatch):
    drawn, stacked = {}, []
    monkeypatch.setattr(Axes, "plot", lambda ax, x, y, *a, **k: drawn.update({k["label"]: (list(x), list(y))}))
    monkeypatch.setattr(Axes, "stackplot", lambda ax, x, y, labels, **k: stacked.append((list(x), y.tolist(), labels)))
    later = {"step": 4, "reward": 0.75, "pass_rate": math.nan, "seconds/update": 5.0}
    plot_curves([EVAL, later, TRAIN], tmp_path / "curves.png")
    assert drawn["reward"] == ([2.0, 4.0], [0.5, 0.75])
    assert drawn["pass rate"] == ([2.0], [0.25])
    assert drawn["held-out, sampled"] == ([0.0], [0.3])
    assert drawn["truncated"] == ([2.0], [0.1])
    assert stacked == [([2.0, 4.0], [[2.0, 5.0], [1.0, 0.0]], ["update", "rollout"])]


def test_curves_of_one_step_have_an_area_of_phases(tmp_path, monkeypatch):
    stacked = []
    monkeypatch.setattr(Axes, "stackplot", lambda ax, x, y, **k: stacked.append((list(x), y.tolist())))
    plot_curves([TRAIN], tmp_path / "curves.png")
    assert stacked == [([1.5, 2.5], [[1.0, 1.0], [2.0, 2.0]])]
