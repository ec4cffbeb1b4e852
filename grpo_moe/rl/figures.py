"""Draws what the page of a run shows beside its curves: the waterfall of tokens, KLs, routing and expert load."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .files import atomic_path
from .report import Panel, as_label, draw_panel, finish, series

WATERFALL = {
    "groups": "generated",
    "skipped": "of groups that a reward function failed on",
    "zero_spread": "of groups without a spread of rewards",
    "unused": "of groups beyond those needed",
    "truncated": "of truncated completions",
    "unscored": "of completions without a reward",
    "no_advantage": "of completions neither better nor worse than their group",
    "not_finite": "without a finite log-probability",
    "sampler_masked": "masked by the sampler correction",
    "off_policy_masked": "masked as off-policy",
    "entropy_masked": "masked by their entropy",
    "clipped": "clipped, without gradient",
    "tokens_with_gradient": "with gradient",
}
"""Names under ``waterfall/`` in order, in completion tokens of a rollout, and what they are to a reader. The first
is the sum of all others: a token counts under the first that holds."""

_KL = Panel(
    "KL (nats)",
    left={"approx_kl": "policy to its rollout", "kl": "policy to the reference", "sampling_kl": "engine to trainer"},
    right={},
    points={},
)
_BALANCE = Panel(
    "Expert load",
    left={"routing/max_violation": "max load / mean - 1"},
    right={"routing/dead_experts": "experts without a token"},
    points={},
)
_BY_LAYER = re.compile(r"routing/(.+)_layer_([0-9]{1,6})")


def draw_signal(metrics: list[dict], out: Path) -> bool:
    """signal.png: the shares of the waterfall over the run, and every KL. Returns whether there was anything."""
    curves = waterfall(metrics)
    total = curves.pop("groups", np.empty(0))

    def draw(left, right) -> bool:
        drawn = draw_panel(right, _KL, metrics)
        finish(right, _KL.title, drawn=drawn)
        shares = total.size > 0 and bool(curves)
        for number, (name, values) in enumerate(curves.items() if shares else ()):
            steps, _ = series(metrics, f"waterfall/{name}")
            count = min(len(values), len(total))
            share = values[:count] / np.maximum(total[:count], 1)
            left.plot(
                steps[:count],
                share,
                label=as_label(WATERFALL.get(name, name)),
                color=f"C{number}",
                marker="." * (count < 2),
            )
        finish(left, "Share of the generated tokens", drawn=shares)
        return drawn or shares

    return _draw_pair(out.with_name("signal.png"), draw)


def draw_experts(metrics: list[dict], out: Path) -> bool:
    """experts.png: balance over the run, and a heat map of layers by step of what was logged by layer."""
    keys = dict.fromkeys(key for row in metrics for key in row)
    by_layer = sorted((m[1], int(m[2]), key) for key in keys if (m := _BY_LAYER.fullmatch(key)))
    family = by_layer[-1][0] if by_layer else ""
    curves = {layer: series(metrics, key) for name, layer, key in by_layer if name == family}
    curves = {layer: curve for layer, curve in curves.items() if curve[0].size}

    def draw(left, right) -> bool:
        drawn = draw_panel(left, _BALANCE, metrics)
        finish(left, _BALANCE.title, drawn=drawn)
        if curves:
            steps = np.unique(np.concatenate([own for own, _ in curves.values()]))
            heat = np.full((len(curves), len(steps)), np.nan)
            for row, (own, values) in zip(heat, curves.values(), strict=True):
                row[np.searchsorted(steps, own)] = values
            _draw_heat(right, heat, list(curves), steps)
            right.set(title=f"{as_label(family.replace('_', ' '))} by layer", xlabel="optimiser step")
        else:
            finish(right, "By layer", drawn=False)
        return drawn or bool(curves)

    return _draw_pair(out.with_name("experts.png"), draw)


def draw_load(lines: list[dict], out: Path) -> bool:
    """expert_load.png: tokens of each expert over the layer's mean, in the first and the last tenth of the run."""
    tenth = math.ceil(len(lines) / 10)
    layers = list(lines[-1]["load"]) if lines else []

    def draw(*axes) -> bool:
        for ax, part, name in zip(axes, (lines[:tenth], lines[-tenth:]), ("first", "last"), strict=True):
            if not layers:
                return False
            load = np.array([[line["load"][layer] for layer in layers] for line in part], dtype=float).sum(0)  # [L, E]
            relative = load / np.maximum(load.mean(1, keepdims=True), 1)
            _draw_heat(ax, relative, layers, np.arange(load.shape[1]))
            ax.set(title=f"Tokens of an expert / mean, {name} rollouts", xlabel="expert")
        return True

    return _draw_pair(out.with_name("expert_load.png"), draw)


def waterfall(metrics: list[dict]) -> dict[str, np.ndarray]:
    """Tokens of each rollout by the names of WATERFALL that were logged, and of any other ``waterfall/`` after them."""
    logged = dict.fromkeys(key.removeprefix("waterfall/") for row in metrics for key in row if "waterfall/" in key)
    names = [*(name for name in WATERFALL if name in logged), *(name for name in logged if name not in WATERFALL)]
    curves = {name: series(metrics, f"waterfall/{name}")[1] for name in names}
    return {name: values for name, values in curves.items() if values.size}


def _draw_heat(ax, heat: np.ndarray, layers: Sequence[Any], columns: np.ndarray) -> None:
    """A map [layers, columns] with a colour scale from 0."""
    top = max(float(np.nanmax(heat)), 0.01)
    image = ax.imshow(heat, aspect="auto", cmap="viridis", interpolation="nearest", vmin=0, vmax=top)
    ax.figure.colorbar(image, ax=ax)
    ax.set_yticks(range(len(layers)), [as_label(layer) for layer in layers])
    ax.set_ylabel("layer")
    shown = np.unique(np.linspace(0, len(columns) - 1, min(6, len(columns))).round().astype(int))
    ax.set_xticks(shown, [f"{columns[place]:g}" for place in shown])


def _draw_pair(path: Path, draw) -> bool:
    """Writes a picture of two axes unless ``draw(left, right)`` says that there is nothing in it."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(15, 4), layout="constrained")
    if not draw(*figure.subplots(1, 2)):
        return False
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    return True
