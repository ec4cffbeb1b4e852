"""Calls a user's reward functions on a batch of completions, contains their faults, and adds them up by weight."""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .faults import TIMEOUT, Scores, joined
from .running import Call, run_calls

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""f(prompts, completions, **columns) -> list[float | None] [N], plain or `async def`; None: cannot be scored."""


@dataclass(frozen=True)
class RewardOutput:
    """The rewards of N completions."""

    rewards: list[float]
    """[N] weighted sums over the functions that scored the row; NaN where none did and where `skipped`."""
    values: list[list[float]]
    """[F][N] what each function said, unweighted, in the order of `RewardCaller.names`; NaN for None and faults."""
    skipped: list[bool]
    """[N] rows that a fault cost the score of a function with a weight: their groups must not be trained on."""
    faults: dict[str, int]
    """Rows lost by "function/kind" (kinds: `faults.FAULTS`); empty without faults."""


class RewardCaller:
    """Scores completions with one or more reward functions.

    Functions are called by keyword with `prompts`, `completions` and every column, each a list of length N (TRL's
    convention). Plain functions run one after another in the calling thread; those made with `async def` run
    meanwhile, all at once, in a thread of their own.

    A fault is an exception, no answer in time, a return value that is not N numbers or None, or a number that is not
    finite. KeyboardInterrupt and SystemExit are not faults and always end the run.

    Args:
        reward_funcs: One function or several. A model: `ModelReward`.
        weights: One finite number a function; all 1 by default. A function of weight 0 is only logged.
        on_error: "raise" ends the run at a fault. "skip" gives up the rows it cost and counts them; each kind of fault
            is logged once a function. Exceptions and wrong return values cost single groups when `group_size` is given.
        timeout: Seconds for one call of one function; None for no limit. With a limit plain functions too run in
            threads of their own, where time-outs by signals do not work and the current CUDA device is 0. Python
            cannot stop a thread: a late plain function goes on in the background, though not beyond the exit of
            Python, and one that holds the GIL in C code stops the run all the same.

    Raises:
        ValueError: No function, something not callable, a bare model, weights that do not fit, or an unknown policy.
    """

    def __init__(
        self,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        weights: Sequence[float] | None = None,
        *,
        on_error: str = "raise",
        timeout: float | None = None,
    ):
        self.functions = _functions(reward_funcs)
        self.names = _unique_names(self.functions)
        self.weights = _weights(weights, self.names)
        if on_error not in ("raise", "skip"):
            raise ValueError(f"on_error must be 'raise' or 'skip', got {on_error!r}")
        if timeout is not None and not 0 < timeout < math.inf:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}; leave it out for no limit")
        self.on_error, self.timeout = on_error, timeout
        self._logged: set[str] = set()

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        columns: Mapping[str, Sequence[Any]],
        *,
        group_size: int | None = None,
    ) -> RewardOutput:
        """Score N completions.

        Args:
            prompts: [N] as they stand in the dataset, text or chat messages.
            completions: [N] texts or chat messages.
            columns: Other keyword arguments of the functions, each [N].
            group_size: Completions that follow each other for one prompt. With on_error="skip" a function whose call
                fails as a whole (but for lack of time) is called again group by group, so that one odd completion
                costs its group and not the batch.

        Raises:
            ValueError: A function returned something else than N finite numbers or None; arguments that do not fit.
            RuntimeError: A function raised; its exception is the cause.
            TimeoutError: A function took longer than `timeout`.
        """
        calls = self._calls(prompts, completions, columns)
        if group_size is not None and (group_size < 1 or len(completions) % group_size):
            raise ValueError(f"group_size must divide the {len(completions)} completions, got {group_size}")
        scores = run_calls(calls, self.timeout)
        if self.on_error == "raise":
            _raise_first(scores)
        else:
            scores = [self._by_group(call, s, group_size) for call, s in zip(calls, scores, strict=True)]
            self._log(scores)
        return self._output(scores)

    def check(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
        """Score empty completions of the first two prompts, so that a faulty function fails before any training.

        Raises:
            ValueError, RuntimeError, TimeoutError: As in `__call__` with on_error="raise", whatever it is set to.
        """
        empty_turn = [{"role": "assistant", "content": ""}]
        completions = ["" if isinstance(prompt, str) else empty_turn for prompt in prompts[:2]]
        calls = self._calls(prompts[:2], completions, {name: column[:2] for name, column in columns.items()})
        _raise_first(run_calls(calls, self.timeout))

    def _calls(self, prompts, completions, columns):
        arguments = {"prompts": prompts, "completions": completions, **columns}
        _check_arguments(arguments, columns)
        return [Call(name, function, arguments) for name, function in zip(self.names, self.functions, strict=True)]

    def _by_group(self, call: Call, scores: Scores, group_size: int | None) -> Scores:
        """The scores of another try in parts, where the whole failed and there are parts."""
        if not scores.whole_call or TIMEOUT in scores.errors or group_size is None or len(call) <= group_size:
            return scores
        parts = [call.part(start, start + group_size) for start in range(0, len(call), group_size)]
        return joined(run_calls(parts, self.timeout))

    def _log(self, scores: Sequence[Scores]) -> None:
        for name, function_scores in zip(self.names, scores, strict=True):
            for kind, error in function_scores.errors.items():
                key = f"{name}/{kind}"
                if key not in self._logged:
                    self._logged.add(key)
                    logger.warning(
                        "%s. Groups with such a fault are skipped; from now on they are only counted, as %s",
                        error,
                        key,
                        exc_info=error.__cause__,
                    )

    def _output(self, scores: Sequence[Scores]) -> RewardOutput:
        values = [s.values for s in scores]
        needed = [s.lost for s, weight in zip(scores, self.weights, strict=True) if weight]
        skipped = [any(kinds) for kinds in zip(*needed, strict=True)] or [False] * len(values[0])
        rewards = [
            math.nan if lost else self._weighted_sum(row)
            for row, lost in zip(zip(*values, strict=True), skipped, strict=True)
        ]
        faults = Counter(
            f"{name}/{kind}" for name, s in zip(self.names, scores, strict=True) for kind in s.lost if kind is not None
        )
        return RewardOutput(rewards, values, skipped, dict(faults))

    def _weighted_sum(self, row: Sequence[float]) -> float:
        scored = [weight * value for weight, value in zip(self.weights, row, strict=True) if not math.isnan(value)]
        return sum(scored) if scored else math.nan


def _raise_first(scores: Sequence[Scores]) -> None:
    for function_scores in scores:
        for error in function_scores.errors.values():
            raise error


def _functions(reward_funcs: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    one = callable(reward_funcs) or isinstance(reward_funcs, str)
    functions = [reward_funcs] if one else list(reward_funcs or [])
    if not functions:
        raise ValueError("reward_funcs must hold at least one function, got none")
    for function in functions:
        if isinstance(function, str):
            raise ValueError(
                f"reward_funcs must be functions, got the text {function!r}; wrap a model's path: ModelReward(path)"
            )
        if hasattr(function, "forward") and hasattr(function, "parameters"):
            raise ValueError(
                f"reward_funcs must be functions, got the model {type(function).__name__}; "
                "wrap it: ModelReward(model, tokenizer)"
            )
        if not callable(function):
            raise ValueError(f"reward_funcs must be functions, got {function!r}; pass the function itself")
    return functions


def _weights(weights: Sequence[float] | None, names: Sequence[str]) -> list[float]:
    checked = [1.0] * len(names) if weights is None else [float(weight) for weight in weights]
    if len(checked) != len(names):
        raise ValueError(f"weights must be one number for each reward function ({', '.join(names)}), got {checked}")
    if not all(map(math.isfinite, checked)):
        raise ValueError(f"weights must be finite, got {checked}")
    return checked


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
