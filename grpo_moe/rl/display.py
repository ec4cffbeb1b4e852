"""Shows a run to the person at the terminal: a live board, plain lines where there is no terminal, or nothing."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from grpo_moe.rl.report import describe_phases
from grpo_moe.text import LenientFile, clean, say

Sample = tuple[Any, Any, float]  # prompt, completion (text or chat messages), reward

_MAX_SAMPLES = 4
_MESSAGE_LIMIT = 2000
_LABELS = {
    "reward": "reward",
    "pass_rate": "pass",
    "eval_pass_rate": "eval pass",
    "eval_greedy_pass_rate": "eval greedy",
    "completions/mean_length": "length",
    "completions/clipped_ratio": "truncated",
    "loss": "loss",
    "grad_norm": "grad",
    "entropy": "entropy",
    "clip_ratio": "clip",
    "approx_kl": "kl",
}


def make_display(is_main: bool, total_steps: int | None, title: str, enabled: bool = True) -> Display:
    """The display for this process: none off the main process or when not enabled, live on a terminal, else plain."""
    if not (is_main and enabled):
        return NullDisplay()
    return LiveDisplay(total_steps, title) if _on_terminal() else PlainDisplay(total_steps, title)


def _on_terminal() -> bool:
    try:
        return sys.stdout.isatty() and Console().is_interactive
    except (AttributeError, ValueError):  # None, or closed
        return False


class Display:
    """What the trainer calls, as a context manager from start to stop. Texts may hold anything; they are made safe."""

    def start(self) -> None:
        """Called once before the first step."""

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        """Takes one line of metrics.jsonl, of training or of an evaluation, at `step` optimiser updates."""

    def show_completions(self, samples: Sequence[Sample]) -> None:
        """Takes a few (prompt, completion, reward)."""

    def message(self, text: str) -> None:
        """Says one thing that stays on the screen."""

    def stop(self) -> None:
        """Gives the terminal back; may be called more than once."""

    def __enter__(self) -> Display:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()


class NullDisplay(Display):
    """Shows nothing."""


class PlainDisplay(Display):
    """One compact line for each logged step, for log files and pipes."""

    def __init__(self, total_steps: int | None, title: str) -> None:
        self._title, self._pace = title, _Pace(total_steps)

    def start(self) -> None:
        self.message(self._title)

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        self._pace.advance(step)
        say(f"step {step}/{self._pace.total_steps or '?'}  {_headline(metrics)}  eta {self._pace.eta()}")

    def show_completions(self, samples: Sequence[Sample]) -> None:
        for prompt, completion, reward in samples[:_MAX_SAMPLES]:
            say(f"  reward {_number(reward)}  {_said(prompt)} -> {_said(completion)}")

    def message(self, text: str) -> None:
        say(clean(text, _MESSAGE_LIMIT))


class LiveDisplay(Display):
    """A board that redraws in place: progress, metrics, learning curves, seconds by phase, sample completions."""

    def __init__(self, total_steps: int | None, title: str) -> None:
        self._console = Console(file=LenientFile(sys.stdout))
        self._ascii = self._console.options.ascii_only
        self._pace = _Pace(total_steps)
        self._latest: dict[str, Any] = {}
        self._history: dict[str, list[float]] = {"reward": [], "pass_rate": []}
        self._samples: Sequence[Sample] = ()
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("eta {task.fields[eta]}", markup=False),
            console=self._console,
        )
        self._task = self._progress.add_task(clean(title), total=total_steps, eta=self._pace.eta())
        self._live = Live(self._board(), console=self._console, refresh_per_second=2)

    def start(self) -> None:
        self._live.start()

    def update(self, step: int, metrics: dict[str, Any]) -> None:
        self._pace.advance(step)
        self._progress.update(self._task, completed=step, eta=self._pace.eta())
        self._latest.update(metrics)
        for key, values in self._history.items():
            if _is_finite(metrics.get(key)):
                values.append(float(metrics[key]))
        self._live.update(self._board())

    def show_completions(self, samples: Sequence[Sample]) -> None:
        self._samples = samples[:_MAX_SAMPLES]
        self._live.update(self._board())

    def message(self, text: str) -> None:
        self._console.print(Text(clean(text, _MESSAGE_LIMIT)))

    def stop(self) -> None:
        self._live.stop()

    def _board(self) -> Group:
        # Built here and handed over whole, because rich draws it from a thread of its own.
        lines = [_headline(self._latest)]
        lines += [
            f"{key:9} {sparkline(values, ascii_only=self._ascii)}  {_number(values[0])} -> {_number(values[-1])}"
            for key, values in self._history.items()
            if values
        ]
        seconds = {
            k.removeprefix("seconds/"): v for k, v in self._latest.items() if k.startswith("seconds/") and _is_finite(v)
        }
        lines += [describe_phases(seconds)] if seconds else []
        parts = [self._progress, *(Text(clean(line, _MESSAGE_LIMIT)) for line in lines)]
        return Group(*parts, self._sample_table()) if self._samples else Group(*parts)

    def _sample_table(self) -> Table:
        table = Table("reward", "prompt", "completion")
        for prompt, completion, reward in self._samples:
            table.add_row(_number(reward), *(Text(_said(x), overflow="fold") for x in (prompt, completion)))
        return table


def _said(text: Any) -> str:
    """A text, or what the last of chat messages says."""
    is_chat = isinstance(text, list) and bool(text) and isinstance(text[-1], dict)
    return clean(text[-1].get("content") if is_chat else text)


class _Pace:
    """Time left, from the mean pace since the first step this process has seen."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._first: tuple[int, float] | None = None
        self._last: tuple[int, float] | None = None

    def advance(self, step: int) -> None:
        now = (step, time.monotonic())
        self._first = self._first or now
        self._last = now if self._last is None or step > self._last[0] else self._last

    def eta(self) -> str:
        if self.total_steps is None or self._first is None or self._last[0] == self._first[0]:
            return "?"
        pace = (self._last[1] - self._first[1]) / (self._last[0] - self._first[0])
        return _duration(pace * max(0, self.total_steps - self._last[0]))


def sparkline(values: Sequence[float], width: int = 40, ascii_only: bool = False) -> str:
    """The finite `values` as at most `width` characters, each the mean of its share, between their own extremes."""
    levels = ".:-=+*#@" if ascii_only else "▁▂▃▄▅▆▇█"
    values = [value for value in values if math.isfinite(value)]
    count = min(width, len(values))
    bounds = [len(values) * i // count for i in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in zip(bounds, bounds[1:], strict=False)]
    low = min(means, default=0.0)
    span = max(means, default=0.0) - low
    return "".join(levels[round((mean - low) / span * 7) if span > 0 else 0] for mean in means)


def _headline(metrics: dict[str, Any]) -> str:
    return "  ".join(f"{label} {_number(metrics[key])}" for key, label in _LABELS.items() if key in metrics)


def _number(value: float | None) -> str:
    return f"{float(value):.3g}" if _is_finite(value) else "-"


def _is_finite(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
