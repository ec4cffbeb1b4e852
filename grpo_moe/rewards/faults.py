"""What a reward function's call gave: a number for each completion, or the fault that cost it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

EXCEPTION, TIMEOUT, WRONG_TYPE, WRONG_LENGTH, NOT_FINITE = FAULTS = (
    "exception",
    "timeout",
    "wrong_type",
    "wrong_length",
    "not_finite",
)

LARGEST_REWARD = 1e36
"""In size. Its square and a sum of such stay within float64, and differences of rewards within float32."""


@dataclass(frozen=True)
class Scores:
    """The scores of N completions by one function."""

    values: list[float]
    """[N]; NaN for None and where a fault cost the score."""
    lost: list[str | None]
    """[N] the kind of fault, one of FAULTS, that cost the score."""
    errors: dict[str, Exception] = field(default_factory=dict)
    """The first error of each kind, ready to be raised."""
    whole_call: bool = False
    """A fault of the call as a whole, which cost every score."""


def all_lost(kind: str, error: Exception, num_completions: int) -> Scores:
    """The scores of a call that failed as a whole."""
    return Scores([math.nan] * num_completions, [kind] * num_completions, {kind: error}, whole_call=True)


def joined(parts: list[Scores]) -> Scores:
    """The scores of consecutive parts of a batch as one."""
    return Scores(
        [value for part in parts for value in part.values],
        [kind for part in parts for kind in part.lost],
        {kind: error for part in reversed(parts) for kind, error in part.errors.items()},
    )
