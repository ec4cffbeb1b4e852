"""Calls a user's reward functions on a batch of completions, checks what comes back, and adds it up by weight."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import math
import reprlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

RewardFunction = Callable[..., Any]
"""f(prompts, completions, **columns) -> list[float | None] [N], plain or `async def`; None: cannot be scored."""


@dataclass(frozen=True)
class RewardOutput:
    """The rewards of N completions."""

    rewards: list[float]
    """[N] weighted sums over the functions that scored the row; NaN where none did."""
    values: list[list[float]]
    """[F][N] what each function said, unweighted, in the order of `RewardCaller.names`; NaN for None."""


class RewardCaller:
    """Scores completions with one or more reward functions.

    Functions are called by keyword with `prompts`, `completions` and every column, each a list of length N (TRL's
    convention). Plain functions run one after another in the calling thread, which signal-based time-outs need; those
    made with `async def` run meanwhile, all at once, in a thread of their own.

    Args:
        reward_funcs: One function or several.
        weights: One finite number a function; all 1 by default.

    Raises:
        ValueError: No function, something not callable, or weights that do not fit.
    """

    def __init__(self, reward_funcs: RewardFunction | Sequence[RewardFunction], weights: Sequence[float] | None = None):
        self.functions = [reward_funcs] if callable(reward_funcs) else list(reward_funcs or [])
        if not self.functions:
            raise ValueError("reward_funcs must hold at least one function, got none")
        for function in self.functions:
            if not callable(function):
                raise ValueError(f"reward_funcs must be functions, got {function!r}; pass the function itself")
        self.names = _unique_names(self.functions)
        self.weights = [1.0] * len(self.functions) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(self.functions):
            raise ValueError(
                f"weights must be one number for each reward function ({', '.join(self.names)}), got {self.weights}"
            )
        if not all(map(math.isfinite, self.weights)):
            raise ValueError(f"weights must be finite, got {self.weights}")

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], columns: Mapping[str, Sequence[Any]]
    ) -> RewardOutput:
        """Score N completions.

        Args:
            prompts: [N] as they stand in the dataset, text or chat messages.
            completions: [N] texts or chat messages.
            columns: Other keyword arguments of the functions, each [N].

        Raises:
            ValueError: A function returned something else than N finite numbers or None.
            RuntimeError: A function raised; its exception is the cause.
        """
        arguments = {"prompts": prompts, "completions": completions, **columns}
        _check_arguments(arguments, columns)
        started = [_start(name, function, arguments) for name, function in zip(self.names, self.functions, strict=True)]
        returned = [_finish(name, result, arguments) for name, result in zip(self.names, started, strict=True)]
        values = [_as_floats(name, items, len(completions)) for name, items in zip(self.names, returned, strict=True)]
        return RewardOutput([self._weighted_sum(row) for row in zip(*values, strict=True)], values)

    def check(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
        """Score empty completions of the first two prompts, so that a faulty function fails before any training.

        Raises:
            ValueError, RuntimeError: As in `__call__`.
        """
        empty_turn = [{"role": "assistant", "content": ""}]
        completions = ["" if isinstance(prompt, str) else empty_turn for prompt in prompts[:2]]
        self(prompts[:2], completions, {name: column[:2] for name, column in columns.items()})

    def _weighted_sum(self, row: Sequence[float]) -> float:
        scored = [weight * value for weight, value in zip(self.weights, row, strict=True) if not math.isnan(value)]
        return sum(scored) if scored else math.nan


def _start(name: str, function: RewardFunction, arguments: Mapping[str, Any]) -> Any:
    """What a plain function returns, or the future of an async one, which runs from here on."""
    with _blaming(name, arguments):
        result = function(**arguments)
        return asyncio.run_coroutine_threadsafe(result, _event_loop()) if inspect.iscoroutine(result) else result


def _finish(name: str, result: Any, arguments: Mapping[str, Any]) -> Any:
    with _blaming(name, arguments):
        return result.result() if isinstance(result, concurrent.futures.Future) else result


def _check_arguments(arguments: Mapping[str, Sequence[Any]], columns: Mapping[str, Any]) -> None:
    for reserved in ("prompts", "completions"):
        if reserved in columns:
            raise ValueError(
                f"columns must not be named 'prompts' or 'completions', got {reserved!r}; rename the column"
            )
    num_completions = len(arguments["completions"])
    for name, column in arguments.items():
        if len(column) != num_completions:
            raise ValueError(f"{name} must be as long as completions ({num_completions}), got {len(column)}")


@contextmanager
def _blaming(name: str, arguments: Mapping[str, Sequence[Any]]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise RuntimeError(
            f"reward function {name!r} raised {type(error).__name__}: {error}; "
            f"it was called with {len(arguments['completions'])} completions and the keywords {', '.join(arguments)}"
        ) from error


def _as_floats(name: str, returned: Any, num_completions: int) -> list[float]:
    """The [N] floats of what a function returned, NaN for None."""
    items = returned.tolist() if hasattr(returned, "tolist") else returned  # arrays and tensors
    if not isinstance(items, list | tuple):
        raise ValueError(
            f"reward function {name!r} must return a list of {num_completions} numbers, got {type(returned).__name__}; "
            "return one number, or None, for each completion"
        )
    if len(items) != num_completions:
        raise ValueError(
            f"reward function {name!r} must return a list of {num_completions} numbers, got {len(items)}; "
            "return one number, or None, for each completion"
        )
    return [math.nan if item is None else _as_float(name, item, row) for row, item in enumerate(items)]


def _as_float(name: str, item: Any, row: int) -> float:
    """Numbers, booleans (0 or 1) and scalars of NumPy and PyTorch as a float."""
    try:
        value = type(item).__float__(item)  # float() would also read text
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(
            f"reward function {name!r} must return finite numbers or None, "
            f"got {reprlib.repr(item)} ({type(item).__name__}) for row {row}"
        ) from None
    if not math.isfinite(value):
        raise ValueError(
            f"reward function {name!r} must return finite numbers or None, got {value} for row {row}; "
            "return None for a completion that it cannot score"
        )
    return value


def _unique_names(functions: Sequence[RewardFunction]) -> list[str]:
    """A readable name for each function, for metrics and messages; a repeated one gets _2, _3, ..."""
    names: list[str] = []
    for base in map(_name, functions):
        candidates = (base if i == 1 else f"{base}_{i}" for i in range(1, len(functions) + 1))
        names.append(next(name for name in candidates if name not in names))
    return names


def _name(function: RewardFunction) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__).strip("<>")  # <lambda>


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop in a thread of its own: works inside a notebook's loop, and keeps clients open from call to call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpo_moe-rewards", daemon=True).start()
    return loop
