"""Measures a run: values reduced exactly over micro-batches and processes, seconds by phase, and the JSON-lines log."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from .files import atomic_path, json_lines, strict_json, writing

if TYPE_CHECKING:
    from accelerate import Accelerator

Scalar = float | torch.Tensor


class Metrics:
    """Collects scalars until `reduce`.

    Tensors stay on their device, without graph, so that adding one never waits for the GPU. A value that is not finite
    is kept out of its metric and counted in `nonfinite/<name>`; a metric of such values alone is NaN. One of no weight,
    as a mean over tokens where there were none, is absent.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entries] = {}

    def add(self, name: str, value: Scalar, weight: Scalar = 1.0) -> None:
        """Adds to a mean weighted by `weight` >= 0; an entry of weight 0 is ignored, whatever its value.

        Raises:
            ValueError: value or weight is not a scalar, or `name` was added before in another way.
        """
        self._append("mean", name, value, weight)

    def add_max(self, name: str, value: Scalar) -> None:
        """Adds to a maximum. Raises as `add`."""
        self._append("max", name, value, 1.0)

    def add_sum(self, name: str, value: Scalar) -> None:
        """Adds to a sum. Raises as `add`."""
        self._append("sum", name, value, 1.0)

    def add_stats(self, stats: dict[str, torch.Tensor], prefix: str = "") -> None:
        """Adds the statistics of a loss call over `stats["num_tokens"]` loss tokens.

        Names that end in `_max` combine by maximum, names that start with `num_` by sum, and all others by the mean
        weighted with `num_tokens`. A call without loss tokens adds nothing to means and maxima.

        Raises:
            ValueError: `num_tokens` is missing; else as `add`.
        """
        if "num_tokens" not in stats:
            raise ValueError(f"stats must have num_tokens, the weight of its means, got {sorted(stats)}")
        for name, value in stats.items():
            if name.startswith("num_"):
                self.add_sum(prefix + name, value)
            else:
                kind = "max" if name.endswith("_max") else "mean"
                self._append(kind, prefix + name, value, stats["num_tokens"])

    def reduce(self, accelerator: Accelerator | None = None) -> dict[str, float]:
        """Returns every metric as a float and clears.

        With an accelerator, over the entries of all processes: every process must call it, all get the same result,
        and a name need not be known to all of them.
        """
        partials = {name: entries.partial() for name, entries in self._entries.items()}
        self._entries = {}
        if accelerator is not None:
            partials = _merge(gather_object([partials]))
        result = {name: p.value() for name, p in partials.items() if p.weight or p.num_nonfinite}
        counts = {f"nonfinite/{name}": float(p.num_nonfinite) for name, p in partials.items() if p.num_nonfinite}
        return result | counts

    def _append(self, kind: str, name: str, value: Scalar, weight: Scalar) -> None:
        value, weight = _snapshot(name, value), _snapshot(name, weight)
        entries = self._entries.setdefault(name, _Entries(kind, [], []))
        if entries.kind != kind:
            raise ValueError(f"{name} must be added in one way, got {kind} after {entries.kind}; rename one of them")
        entries.values.append(value)
        entries.weights.append(weight)


@dataclass
class _Entries:
    """What one process has added under one name."""

    kind: str
    values: list[Scalar]
    weights: list[Scalar]

    def partial(self) -> _Partial:
        partial = _Partial(self.kind)
        floats = _to_floats(self.values + self.weights)
        for value, weight in zip(floats[: len(self.values)], floats[len(self.values) :], strict=True):
            if weight == 0:
                continue
            if math.isfinite(value) and math.isfinite(weight):
                partial.merge(_Partial(self.kind, value * weight, weight, value))
            else:
                partial.num_nonfinite += 1
        return partial


@dataclass
class _Partial:
    """The state of one metric, enough to be merged with that of other processes."""

    kind: str
    total: float = 0.0
    weight: float = 0.0
    largest: float = -math.inf
    num_nonfinite: int = 0

    def merge(self, other: _Partial) -> None:
        assert self.kind == other.kind, f"processes add one metric as {self.kind} and as {other.kind}"
        self.total += other.total
        self.weight += other.weight
        self.largest = max(self.largest, other.largest)
        self.num_nonfinite += other.num_nonfinite

    def value(self) -> float:
        if self.weight == 0:
            return math.nan
        return {"mean": self.total / self.weight, "sum": self.total, "max": self.largest}[self.kind]


def _merge(by_process: list[dict[str, _Partial]]) -> dict[str, _Partial]:
    merged: dict[str, _Partial] = {}
    for partials in by_process:
        for name, partial in partials.items():
            merged.setdefault(name, _Partial(partial.kind)).merge(partial)
    return merged


def _snapshot(name: str, value: Scalar) -> Scalar:
    if not isinstance(value, torch.Tensor):
        return float(value)
    if value.ndim:
        raise ValueError(f"{name} must be a number or a 0-dim tensor, got shape {tuple(value.shape)}; reduce it first")
    return value.detach().clone()  # a copy: the owner may overwrite it in place (running sums, CUDA graphs)


def _to_floats(scalars: list[Scalar]) -> list[float]:
    """Python floats, by one transfer for each device and dtype."""
    floats = [0.0 if isinstance(scalar, torch.Tensor) else scalar for scalar in scalars]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, scalar in enumerate(scalars):
        if isinstance(scalar, torch.Tensor):
            groups.setdefault((scalar.device, scalar.dtype), []).append(index)
    for indices in groups.values():
        for index, value in zip(indices, torch.stack([scalars[i] for i in indices]).tolist(), strict=True):
            floats[index] = float(value)
    return floats


class PhaseTimer:
    """Wall seconds by phase: `with timer("rollout"): ...`. Phases may nest; each counts its whole duration."""

    def __init__(self, synchronize_cuda: bool = False) -> None:
        """With `synchronize_cuda`, a phase waits for its kernels; without, it may pay for those of an earlier one."""
        self.totals: dict[str, float] = {}
        """Seconds by phase since the construction; a resumed run may put earlier ones in."""
        self._step: dict[str, float] = {}
        self._synchronize = torch.cuda.synchronize if synchronize_cuda and torch.cuda.is_available() else lambda: None

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._synchronize()
        start = time.perf_counter()
        try:
            yield
            self._synchronize()
        finally:
            seconds = time.perf_counter() - start
            for record in (self._step, self.totals):
                record[phase] = record.get(phase, 0.0) + seconds

    def step_seconds(self) -> dict[str, float]:
        """Returns the seconds by phase since the last call, and starts the next step."""
        step, self._step = self._step, {}
        return step


class MetricsWriter:
    """Appends to a JSON-lines file, one object a line, flushed line by line."""

    def __init__(self, path: str | os.PathLike) -> None:
        """Continues the file at `path` if there is one, less a last line torn by a crash.

        Raises:
            ValueError: as :func:`read_metrics`.
        """
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.truncate_after(math.inf)

    def write(self, metrics: dict[str, Any]) -> None:
        """Appends one line; NaN and infinities become null.

        Raises:
            OSError: as :func:`writing`.
        """
        with writing(self.path), open(self.path, "a", encoding="utf-8") as file:
            file.write(strict_json(metrics) + "\n")

    def truncate_after(self, step: float) -> None:
        """Drops the lines whose "step" is greater, for a run that goes on from `step`. -1 drops all that have one.

        Raises:
            ValueError: as :func:`read_metrics`.
        """
        if not self.path.exists():
            return
        with atomic_path(self.path) as temporary, open(temporary, "w", encoding="utf-8") as file:
            for line in json_lines(self.path):  # never the whole file in memory: it may be of months
                if line.get("step") is None or line["step"] <= step:
                    file.write(strict_json(line) + "\n")


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads a JSON-lines file without a last line torn by a crash; [] where there is no file.

    Raises:
        ValueError: as :func:`json_lines`.
    """
    return list(json_lines(path)) if os.path.exists(path) else []
