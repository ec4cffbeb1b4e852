"""Calls a user's reward functions on a batch of completions, contains their faults, and adds them up by weight."""

from __future__ import annotations

import functools
import logging
import math
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_moe.checks import is_count, is_finite, require
from grpo_moe.text import printable

from .faults import LARGEST_REWARD, NOT_FINITE, TIMEOUT, Scores, joined
from .running import Call, run_calls

logger = logging.getLogger(__name__)

RewardFunction = Callable[..., Any]
"""f(prompts, completions, **columns) -> list[float | None] [N], plain or `async def`; None: cannot be scored."""

WEIGHTED_SUM = "weighted_sum"
"""Stands in `RewardOutput.faults` for a function where only the sum is not finite."""


@dataclass(frozen=True)
class RewardOutput:
    """The rewards of N completions."""

    rewards: list[float]
    """[N] weighted sums over the functions that scored the row; NaN where none did and where `skipped`."""
    values: list[list[float]]
    """[F][N] what each function said, unweighted, in the order of `RewardCaller.names`; NaN for None and faults."""
    skipped: list[bool]
    """[N] rows that a fault cost the score of a function with a weight, or their sum: their groups must not be trained
    on."""
    faults: dict[str, int]
    """Rows lost by "function/kind" (kinds: `faults.FAULTS`); empty without faults."""


class RewardCaller:
    """Scores completions with one or more reward functions.

    Functions are called by keyword with `prompts`, `completions` and every column, each a list of length N (TRL's
    convention). Every call gets lists of its own, which it may sort or fill; what is in them (chat messages, answers
    that are lists) is shared and must be left as it is. Plain functions run one after another in the calling thread;
    those made with `async def` run meanwhile, all at once, in a thread of their own.

    A fault is an exception, no answer in time, a return value that is not N numbers or None, a number that is not
    finite, or a weighted sum that is not. KeyboardInterrupt and SystemExit are not faults and always end the run.

    Args:
        reward_funcs: One function or several. A model: `ModelReward`.
        weights: One finite number a function; all 1 by default. A function of weight 0 is only logged.
        on_error: "raise" ends the run at a fault. "skip" gives up the rows it cost and counts them; each kind of fault
            is logged once a function. Exceptions and wrong return values cost single groups when `group_size` is given.
            A handler finds the fault in the record's `reward_error`, and in its `__cause__` what the function raised;
            `exc_info` is empty, since formatters would write its text as it is.
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
        fix = "skip gives up the groups that a fault costs"
        require(on_error in ("raise", "skip"), "on_error", "'raise' or 'skip'", on_error, fix)
        limited = timeout is None or (is_finite(timeout) and timeout > 0)
        require(limited, "timeout", "a positive number of seconds", timeout, "leave it out for no limit")
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
            ValueError: A function returned something else than N finite numbers or None, or the weighted sum of a row
                is not finite; arguments that do not fit.
            RuntimeError: A function raised; its exception is the cause.
            TimeoutError: A function took longer than `timeout`.
        """
        calls = self._calls(prompts, completions, columns)
        if group_size is not None and not (is_count(group_size, 1) and len(completions) % group_size == 0):
            raise ValueError(
                f"group_size must divide the {len(completions)} completions, got {group_size!r}; give num_generations"
            )
        scores = run_calls(calls, self.timeout)
        if self.on_error == "raise":
            _raise_first(scores)
        else:
            scores = [self._by_group(call, s, group_size) for call, s in zip(calls, scores, strict=True)]
        total = self._total(scores)
        if self.on_error == "raise":
            _raise_first([total])
        by_name = list(zip([*self.names, WEIGHTED_SUM], [*scores, total], strict=True))
        self._log(by_name)
        faults = Counter(f"{name}/{kind}" for name, s in by_name for kind in s.lost if kind is not None)
        skipped = self._skipped([*scores, total])
        rewards = [math.nan if lost else reward for reward, lost in zip(total.values, skipped, strict=True)]
        return RewardOutput(rewards, [s.values for s in scores], skipped, dict(faults))

    def check(self, prompts: Sequence[Any], columns: Mapping[str, Sequence[Any]]) -> None:
        """Score empty completions of the first two prompts, so that a faulty function fails before any training.

        Raises:
            ValueError: Any fault, whatever `on_error` is set to: the function does not fit the run.
        """
        empty_turn = [{"role": "assistant", "content": ""}]
        completions = ["" if isinstance(prompt, str) else empty_turn for prompt in prompts[:2]]
        calls = self._calls(prompts[:2], completions, {name: column[:2] for name, column in columns.items()})
        scores = run_calls(calls, self.timeout)
        try:
            _raise_first([*scores, self._total(scores)])
        except (RuntimeError, TimeoutError) as fault:
            raise ValueError(str(fault)) from fault

    def _calls(self, prompts, completions, columns):
        fix = "give {} without any"
        require(isinstance(columns, Mapping), "columns", "a dict of lists", columns, fix)
        arguments = {"prompts": prompts, "completions": completions, **columns}
        _check_arguments(arguments, columns)
        return [Call(name, function, arguments) for name, function in zip(self.names, self.functions, strict=True)]

    def _by_group(self, call: Call, scores: Scores, group_size: int | None) -> Scores:
        """The scores of another try in parts, where the whole failed and there are parts."""
        if not scores.whole_call or TIMEOUT in scores.errors or group_size is None or len(call) <= group_size:
            return scores
        parts = [call.part(start, start + group_size) for start in range(0, len(call), group_size)]
        return joined(run_calls(parts, self.timeout))

    def _log(self, by_name: Iterable[tuple[str, Scores]]) -> None:
        for name, scores in by_name:
            for kind, error in scores.errors.items():
                key = f"{name}/{kind}"
                if key not in self._logged:
                    self._logged.add(key)
                    logger.warning(
                        "%s. Groups with such a fault are skipped; from now on they are only counted, as %s%s",
                        error,
                        key,
                        _traceback(error.__cause__),
                        extra={"reward_error": error},
                    )

    def _skipped(self, scores: Sequence[Scores]) -> list[bool]:
        needed = [s.lost for s, weight in zip(scores, [*self.weights, 1.0], strict=True) if weight]
        return [any(kinds) for kinds in zip(*needed, strict=True)]

    def _total(self, scores: Sequence[Scores]) -> Scores:
        """The weighted sums as the scores of one more function; NaN where no function scored the row."""
        total = Scores([], [])
        for row, values in enumerate(zip(*(s.values for s in scores), strict=True)):
            terms = [weight * v for weight, v in zip(self.weights, values, strict=True) if not math.isnan(v)]
            reward = sum(terms) if terms else math.nan
            overflows = bool(terms) and not abs(reward) <= LARGEST_REWARD
            total.values.append(math.nan if overflows else reward)
            total.lost.append(NOT_FINITE if overflows else None)
            if overflows:
                total.errors.setdefault(NOT_FINITE, self._overflow(row, values, reward))
        return total

    def _overflow(self, row: int, values: Sequence[float], reward: float) -> ValueError:
        said = ", ".join(f"{name} {value}" for name, value in zip(self.names, values, strict=True))
        return ValueError(
            f"weighted sum of the reward functions must be finite and at most {LARGEST_REWARD:g} in size, got {reward} "
            f"for row {row} from {said}; "
            "return smaller numbers or lower reward_weights"
        )


def _traceback(error: BaseException | None) -> str:
    """Where it was raised, fit for a log: as exc_info the text of the error would stand there as it is."""
    return "" if error is None else "\n" + printable("".join(traceback.format_exception(error))).rstrip()


def _raise_first(scores: Sequence[Scores]) -> None:
    for function_scores in scores:
        for error in function_scores.errors.values():
            raise error


def _functions(reward_funcs: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    one = callable(reward_funcs) or isinstance(reward_funcs, str)
    if not (one or reward_funcs is None or isinstance(reward_funcs, Iterable)):
        raise ValueError(f"reward_funcs must be a function or a list of them, got {reward_funcs!r}; pass the function")
    functions = [reward_funcs] if one else list(reward_funcs or [])
    if not functions:
        raise ValueError("reward_funcs must hold at least one function, got none; pass one")
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
    rule = f"reward_weights must be one number for each reward function ({', '.join(names)})"
    given = [1.0] * len(names) if weights is None else weights
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ValueError(f"{rule}, got {weights!r}; give a list")
    given = list(given)
    try:
        all_finite = all(map(math.isfinite, given))  # unlike float(), it reads no text
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{rule}, got {given}; give numbers ({error})") from error
    checked = [float(weight) for weight in given]
    if len(checked) != len(names):
        raise ValueError(f"{rule}, got {checked}; give {len(names)}")
    if not all_finite:
        raise ValueError(f"reward_weights must be finite, got {checked}; 0 only logs a function")
    return checked


def _check_arguments(arguments: Mapping[str, Sequence[Any]], columns: Mapping[str, Any]) -> None:
    for reserved in ("prompts", "completions"):
        if reserved in columns:
            raise ValueError(
                f"columns must not be named 'prompts' or 'completions', got {reserved!r}; rename the column"
            )
    for name, column in arguments.items():
        fix = "give a list with one entry a completion"
        require(isinstance(name, str), "names of columns", "text", name, "rename it: columns are passed by keyword")
        require(hasattr(column, "__len__") and hasattr(column, "__getitem__"), name, "a sequence", column, fix)
    num_completions = len(arguments["completions"])
    for name, column in arguments.items():
        if len(column) != num_completions:
            raise ValueError(
                f"{name} must be as long as completions ({num_completions}), got {len(column)}; give one entry each"
            )


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
    return str(getattr(function, "__name__", type(function).__name__)).strip("<>")  # <lambda>
