"""Writes what a run leaves for people: completions as parquet, the summary as JSON, the curves as a picture."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from grpo_moe.rl.files import atomic_path, strict_json, to_plain
from grpo_moe.text import clean, encodable

METRICS_FILE = "metrics.jsonl"
"""Of a run folder: one line a rollout and one an evaluation."""
LOAD_FILE = "expert_load.jsonl"
"""Of a run folder: "load" by layer and expert, in tokens of a rollout's updates."""

_COMPLETION_TYPES = {"step": "int64", "prompt": "string", "completion": "string"}
_PACKAGES = ("torch", "triton", "transformers", "accelerate", "grpo_moe")


def write_completions(path: str | os.PathLike, rows: list[dict[str, Any]]) -> None:
    """Writes one parquet row for each completion, atomically.

    The columns are step, prompt, completion and whatever else any row has (rewards, advantage, ...), null where a row
    has no such entry. Chat messages are stored as JSON text, and text that is not valid Unicode with its bad
    characters escaped.
    """
    import pyarrow  # with datasets; slow to import, and only the main process comes here
    import pyarrow.parquet

    names = dict.fromkeys([*_COMPLETION_TYPES, *(name for row in rows for name in row)])
    columns = {
        name: pyarrow.array([_cell(row.get(name)) for row in rows], type=_COMPLETION_TYPES.get(name)) for name in names
    }
    with atomic_path(path) as temporary:
        pyarrow.parquet.write_table(pyarrow.table(columns), temporary)


def write_summary(path: str | os.PathLike, summary: dict[str, Any]) -> None:
    """Writes indented strict JSON, atomically; NaN and infinities become null.

    Raises:
        TypeError: a value is not a number, a text, None, a dict or a list of these.
    """
    with atomic_path(path) as temporary:
        temporary.write_text(strict_json(summary, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str | int | None]:
    """What a number depends on: Python, packages (None where not installed), platform, CPUs and GPU (None without)."""
    return {
        "python": platform.python_version(),
        **{package: _version(package) for package in _PACKAGES},
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def describe_phases(seconds: dict[str, float]) -> str:
    """Seconds by phase in a line, longest first, with shares of "total" (of their sum where there is no "total")."""
    phases = {name: value for name, value in seconds.items() if name != "total"}
    total = seconds.get("total", sum(phases.values()))
    longest_first = sorted(phases, key=phases.__getitem__, reverse=True)
    parts = [f"{name} {phases[name]:.2f} s ({phases[name] / max(total, 1e-9):.0%})" for name in longest_first]
    return f"total {total:.2f} s: {', '.join(parts)}" if parts else f"total {total:.2f} s"


def plot_curves(metrics: list[dict[str, Any]], path: str | os.PathLike) -> None:
    """Draws the lines of metrics.jsonl over "step" as a PNG; what is missing, None or NaN leaves a gap."""
    from matplotlib.figure import Figure  # slow to import; not pyplot, whose state belongs to the user

    figure = Figure(figsize=(15, 7.5), layout="constrained")
    axes = figure.subplots(2, 3).flat
    for ax, panel in zip(axes, _PANELS, strict=False):
        finish(ax, panel.title, drawn=draw_panel(ax, panel, metrics))
    finish(axes[len(_PANELS)], "Seconds by phase", drawn=_draw_phases(axes[len(_PANELS)], metrics))
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)


def as_label(name: Any) -> str:
    """A name out of a file as matplotlib draws it: a ``$`` would start a formula, a lone surrogate fails."""
    return clean(name, 40).replace("$", r"\$")


@dataclass(frozen=True)
class Panel:
    """One set of axes: lines on the left scale, lines on the right scale and single points, as {key: label}."""

    title: str
    left: dict[str, str]
    right: dict[str, str]
    points: dict[str, str]


_PANELS = (
    Panel(
        "Reward and pass rate",
        left={"reward": "reward", "pass_rate": "pass rate"},
        right={},
        points={"eval_pass_rate": "held-out, sampled", "eval_greedy_pass_rate": "held-out, greedy"},
    ),
    Panel("Completion length", {"completions/mean_length": "tokens"}, {"completions/clipped_ratio": "truncated"}, {}),
    Panel("Exploration", {"entropy": "entropy (nats)"}, {"clip_ratio": "clipped share of tokens"}, {}),
    Panel("Gradient", {"grad_norm": "gradient norm"}, {"learning_rate": "learning rate"}, {}),
    Panel("Groups", {"frac_reward_zero_std": "groups without spread"}, {"sampling/rounds": "sampling rounds"}, {}),
)
_COLORS = ("#1f77b4", "#e07b39", "#2a9d5c", "#8e5bb5")
_PHASE_COLORS = ("#4c78a8", "#72b7b2", "#eeca3b", "#e45756", "#b279a2", "#9d755d")


def draw_panel(ax, panel: Panel, metrics: list[dict[str, Any]]) -> bool:
    """Returns whether there was anything to draw."""
    curves = [(label, *series(metrics, key)) for key, label in (panel.left | panel.points | panel.right).items()]
    for (label, steps, values), color in zip(curves, _COLORS, strict=False):
        if not steps.size:
            continue
        if label in panel.points.values():
            ax.plot(steps, values, "o--", label=label, color=color, linewidth=1, markeredgecolor="white")
        elif label in panel.right.values():
            right = ax.twinx()
            _draw_line(right, steps, values, label, color)
            right.set_ylabel(label, color=color)
            right.set_ylim(bottom=min(0.0, values.min()))
            right.spines["top"].set_visible(False)
        else:
            _draw_line(ax, steps, values, label, color)
            ax.set_ylabel("" if len(panel.left) > 1 else label, color=color)
    return any(steps.size for _, steps, _ in curves)


def _draw_line(ax, steps: np.ndarray, values: np.ndarray, label: str, color: str) -> None:
    """The values, pale, under their running mean over about a twentieth of the run."""
    half = len(values) // 40
    smooth = [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]
    if half:
        ax.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    ax.plot(steps, smooth, color=color, label=label, linewidth=1.8, marker="o" if len(values) == 1 else None)


def _draw_phases(ax, metrics: list[dict[str, Any]]) -> bool:
    """Returns whether there was anything to draw."""
    names = dict.fromkeys(key for row in metrics for key in row if key.startswith("seconds/"))
    curves = {name.removeprefix("seconds/"): series(metrics, name) for name in names if name != "seconds/total"}
    steps = np.unique(np.concatenate([np.empty(0), *(own_steps for own_steps, _ in curves.values())]))
    if not steps.size:
        return False
    layers = np.array([_on_steps(steps, *curve) for curve in curves.values()])  # [phases, steps]
    if len(steps) == 1:  # an area needs two
        steps, layers = np.array([steps[0] - 0.5, steps[0] + 0.5]), layers.repeat(2, axis=1)
    ax.stackplot(steps, layers, labels=list(map(as_label, curves)), colors=_PHASE_COLORS)
    ax.set_ylim(0, max(1.4 * np.quantile(layers.sum(axis=0), 0.98), 1e-9))  # one slow step must not flatten the rest
    return True


def _on_steps(steps: np.ndarray, own_steps: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`values` laid on `steps`, 0 where there is none."""
    result = np.zeros(len(steps))
    result[np.searchsorted(steps, own_steps)] = values
    return result


def finish(ax, title: str, *, drawn: bool) -> None:
    """Title, frame and legend of a panel; one in which nothing was drawn says so."""
    ax.set_title(title)
    ax.spines["top"].set_visible(False)
    if not drawn:
        ax.text(0.5, 0.5, "no data", transform=ax.transAxes, ha="center", va="center", color="grey")
        ax.set(xticks=[], yticks=[])
        return
    ax.set_xlabel("optimiser step")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.grid(alpha=0.25)
    if len(ax.get_legend_handles_labels()[0]) > 1:
        ax.legend(frameon=False, fontsize="small", ncols=2)


def series(metrics: list[dict[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    """The steps and values [n], [n] of the lines where `key` is a finite number, in order of the step."""
    pairs = [(row["step"], row[key]) for row in metrics if row.get(key) is not None and row.get("step") is not None]
    table = np.array(sorted(pairs), dtype=float).reshape(-1, 2)
    table = table[np.isfinite(table).all(axis=1)]
    return table[:, 0], table[:, 1]


def _cell(value: Any) -> Any:
    value = to_plain(value)
    if isinstance(value, dict | list):
        value = strict_json(value)
    return encodable(value) if isinstance(value, str) else value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
