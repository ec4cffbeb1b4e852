"""Reads what a reward function returned, whatever that is, as one float for each completion."""

from __future__ import annotations

import math
import reprlib
from typing import Any

from .faults import LARGEST_REWARD, NOT_FINITE, WRONG_LENGTH, WRONG_TYPE, Scores, all_lost


def read_returned(name: str, returned: Any, num_completions: int) -> Scores:
    """The scores in a list, tuple, array or tensor of N finite numbers or None; never raises an Exception.

    Numbers beyond ``LARGEST_REWARD`` count as not finite: the squares of their deviations would not be.
    """
    items = _items(returned)
    if items is None or len(items) != num_completions:
        got, kind = (type(returned).__name__, WRONG_TYPE) if items is None else (len(items), WRONG_LENGTH)
        error = ValueError(
            f"reward function {name!r} must return a list of {num_completions} numbers, got {got}; "
            "return one number, or None, for each completion"
        )
        return all_lost(kind, error, num_completions)
    scores = Scores([math.nan] * num_completions, [None] * num_completions)
    for row, item in enumerate(items):
        if item is not None:
            value, kind, got = _read(item)
            scores.values[row], scores.lost[row] = value, kind
            if kind is not None:
                scores.errors.setdefault(kind, _faulty_row(name, kind, got, row))
    return scores


def _items(returned: Any) -> list[Any] | None:
    try:
        items = returned.tolist() if hasattr(returned, "tolist") else returned  # arrays and tensors
        return list(items) if isinstance(items, list | tuple) else None
    except Exception:  # any object may come back, and its methods may do anything
        return None


def _read(item: Any) -> tuple[float, str | None, str]:
    """A number, boolean (0 or 1) or scalar of NumPy or PyTorch as a float; else NaN, the fault and what it is."""
    try:
        # float() would also read text; NumPy's scalars of text and complex numbers read themselves
        if isinstance(item, str | bytes | complex) or getattr(getattr(item, "dtype", None), "kind", "") == "c":
            raise TypeError
        value = float.__float__(type(item).__float__(item))
    except Exception:
        return math.nan, WRONG_TYPE, f"{_shown(item)} ({type(item).__name__})"
    if abs(value) <= LARGEST_REWARD:
        return value, None, ""
    how = f", of more than {LARGEST_REWARD:g} in size," if math.isfinite(value) else ""
    return math.nan, NOT_FINITE, f"{value}{how}"


def _shown(item: Any) -> str:
    try:
        return reprlib.repr(item)
    except Exception:  # e.g. an integer of more than 4300 digits
        return "a value without repr"


def _faulty_row(name: str, kind: str, got: str, row: int) -> ValueError:
    fix = "None for a completion that it cannot score" if kind == NOT_FINITE else "one number for each completion"
    return ValueError(
        f"reward function {name!r} must return finite numbers or None, got {got} for row {row}; return {fix}"
    )
