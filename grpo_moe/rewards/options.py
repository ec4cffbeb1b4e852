"""What rewards ask of their options; each breach is a ValueError that names option, rule, value and fix."""

from __future__ import annotations

import math
import numbers
import reprlib


def require(holds: bool, name: str, rule: str, value: object, fix: str) -> None:
    """Raises ValueError unless the rule holds."""
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {reprlib.repr(value)}; {fix}")


def is_count(value: object, least: int) -> bool:
    """Whether it is an integer, Python's or NumPy's but no bool, of at least ``least``."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and value >= least


def is_finite(value: object) -> bool:
    """Whether it is a finite number, Python's or NumPy's but no bool."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
