"""Runs of recipes/pretrain_then_dapo.py side by side: a JSON line each, and their curves as one picture.

    python benchmark/reasoning.py --out results.jsonl --png reasoning.png runs/dapo runs/dapo_R3 runs/gspo ...

Each argument is the folder of a finished run. A line has the objective, routing replay, pass rates on held-out
problems before and after RL (sampled and greedy) and at every evaluation between (--eval_steps of the recipe), seconds
by phase, updates, rollouts and the run's own versions; --at_once says how many runs shared the GPU, which only the
seconds depend on. The picture has the pass rate of the rollouts (of all sampled groups, mean of 10 rollouts) and that
on the held-out problems, by update.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import harness
import numpy as np
from matplotlib.figure import Figure

SMOOTH = 10  # rollouts


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """Summary and metrics of a run."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    return summary, harness.read_lines(folder / "metrics.jsonl")


def curve(lines: list[dict], name: str) -> tuple[list[int], list[float]]:
    """Updates and values of a metric, where it was measured."""
    found = [(line["step"], line[name]) for line in lines if name in line]
    return [step for step, _ in found], [value for _, value in found]


def objective(config: dict) -> str:
    """The name of the recipe's --objective that gives such a configuration."""
    return "gspo" if config["importance_sampling_level"] == "sequence" else config["loss_type"]


def line_of(folder: Path, summary: dict, lines: list[dict], at_once: int) -> dict:
    config, versions = summary["config"], summary["versions"]
    rates = {
        f"{name}_{when}": summary[f"eval_{when}"][name]
        for when in ("before", "after")
        for name in ("pass_rate", "greedy_pass_rate", "mean_length")
    }
    return {
        "op": "pretrain_then_dapo", "impl": "ours", "run": folder.name, "objective": objective(config),
        "routing_replay": config["routing_replay"], **rates, "held_out": curve(lines, "eval_pass_rate"),
        "updates": summary["steps"], "runs_at_once": at_once,
        "rollouts": summary["rollouts"], **{f"seconds_{name}": round(x, 1) for name, x in summary["seconds"].items()},
        "parameters": summary["num_parameters"], "gpu": versions["gpu"], "seed": config["seed"],
        **{name: versions[name] for name in ("torch", "triton", "transformers", "accelerate")},
        "commit": harness.commit(),
    }  # fmt: skip


def smooth(values: list[float]) -> np.ndarray:
    """Mean of the last ``SMOOTH`` values at each place."""
    total = np.cumsum([0.0, *values])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - SMOOTH, 0)
    return (total[ends] - total[starts]) / (ends - starts)


def draw(runs: dict[str, list[dict]], path: Path) -> None:
    """Pass rates by update: of the rollouts and on the held-out problems."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for name, lines in runs.items():
        style = "--" if "R" in name else "-"
        steps, rates = curve(lines, "pass_rate")
        left.plot(steps, smooth(rates), style, label=name)
        right.plot(*curve(lines, "eval_pass_rate"), style, marker="o", markersize=4, label=name)
    left.set(title=f"Pass rate of rollouts (mean of {SMOOTH})", xlabel="update", ylim=(0, 1))
    right.set(title="Pass rate on held-out problems, sampled", xlabel="update")
    for ax in (left, right):
        ax.grid(alpha=0.3)
    left.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    parser.add_argument("--png", type=Path, required=True, help="the picture")
    parser.add_argument("--at_once", type=int, default=1, help="runs that shared the GPU")
    options = parser.parse_args(argv)
    out, curves = harness.JsonLines(options.out, {}), {}
    for folder in options.runs:
        summary, curves[folder.name] = read_run(folder)
        out.write(line_of(folder, summary, curves[folder.name], options.at_once))
    draw(curves, options.png)


if __name__ == "__main__":
    main()
