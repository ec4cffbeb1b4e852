"""A step of fixed shapes, captured as a CUDA graph for each number of rows; eager where there is no GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch


class StepGraphs:
    """Runs a step: once eagerly for a new number of rows, so that everything is compiled, from then on as a graph.

    Args:
        step: f(rows), of tensors whose addresses stay.
        enabled: whether to capture.
    """

    def __init__(self, step: Callable[[int], None], *, enabled: bool):
        self._step, self._enabled = step, enabled
        self._pool = None
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}

    def run(self, rows: int) -> None:
        """The step for this many rows."""
        if not self._enabled or rows not in self._graphs:
            self._step(rows)
            self._graphs[rows] = None
            return
        if self._graphs[rows] is None:
            graph = torch.cuda.CUDAGraph()
            # other threads, as of a data loader, may call CUDA meanwhile
            with _no_collection(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self._step(rows)
            self._pool, self._graphs[rows] = graph.pool(), graph
        self._graphs[rows].replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without Python's garbage collector: if it comes upon an old graph and frees it, a capture is spoilt."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def bucket(rows: int) -> int:
    """Rows to run for so many: a power of two or the middle between two of them, so that graphs are few."""
    power = 1 << max(rows - 1, 0).bit_length()
    middle = 3 * power // 4
    return middle if rows <= middle and power >= 4 else power
