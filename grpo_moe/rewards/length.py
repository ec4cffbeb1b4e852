"""A reward that prefers short right answers and long wrong ones."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

from grpo_moe.checks import is_count, is_finite, require


def cosine_length_reward(
    scorer: Callable[..., Sequence[float | None]],
    max_completion_length: int,
    *,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
) -> Callable[..., list[float | None]]:
    """A reward function that falls or rises with a completion's length along half a cosine.

    A right completion gets ``right[0]`` at length 0 and ``right[1]`` at the maximum, a wrong one ``wrong[0]`` and
    ``wrong[1]``. It takes the place of `scorer` in reward_funcs; a pass is then worth ``right[1]``, so set
    ``pass_threshold`` to that.

    Args:
        scorer: a plain reward function; a completion is right where it says more than 0. Its None stays None.
        max_completion_length: in tokens; a longer completion counts as this long.
        right: reward of a right completion, at length 0 and at the maximum.
        wrong: likewise of a wrong one.

    Raises:
        ValueError: max_completion_length is not positive, a reward is not finite, or scorer is no plain function.

    Source:
        Demystifying Long Chain-of-Thought Reasoning (2502.03373), section 4.2; the values are those of TRL.
    """
    if not callable(scorer) or inspect.iscoroutinefunction(scorer):
        raise ValueError(f"scorer must be a plain reward function, got {scorer!r}; wrap or await it in your own")
    fix = "give that of the options"
    at_least_1 = is_count(max_completion_length, 1)
    require(at_least_1, "max_completion_length", "at least 1 token", max_completion_length, fix)
    for name, ends in (("right", right), ("wrong", wrong)):
        two = isinstance(ends, tuple | list) and len(ends) == 2 and all(map(is_finite, ends))
        require(two, name, "two finite numbers", ends, "at length 0 and at the maximum, as (1.0, 0.5)")

    def cosine_length_reward(
        prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **columns: Any
    ) -> list[float | None]:
        scores = scorer(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        return [
            None if score is None else _along_cosine(len(ids) / max_completion_length, right if score > 0 else wrong)
            for score, ids in zip(scores, completion_ids, strict=True)
        ]

    return cosine_length_reward


def _along_cosine(progress: float, ends: tuple[float, float]) -> float:
    start, end = ends
    return end + (start - end) * (1 + math.cos(math.pi * min(progress, 1.0))) / 2
