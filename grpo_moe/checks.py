"""What options must be: each breach is a ValueError that names the option, its rule, the value and how to mend it."""

from __future__ import annotations

import math
import numbers
import reprlib
from collections.abc import Callable


def require(holds: bool, name: str, rule: str, value: object, fix: str) -> None:
    """Raises ValueError unless the rule holds."""
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {reprlib.repr(value)}; {fix}")


def check_int(name: str, value: object, *, least: int | None, fix: str) -> None:
    """Raises ValueError unless :func:`is_int`, of at least ``least``."""
    require(is_int(value), name, "an integer" if least is None else f"an integer of at least {least}", value, fix)
    require(least is None or value >= least, name, f"at least {least}", value, fix)


def check_number(name: str, value: object, holds: Callable[[float], bool], rule: str, *, fix: str) -> None:
    """Raises ValueError unless :func:`is_finite`, and ``holds``."""
    require(is_finite(value), name, f"a finite number, {rule}", value, fix)
    require(holds(value), name, rule, value, fix)


def check_flag(name: str, value: object) -> None:
    """Raises ValueError unless the value is True or False."""
    require(isinstance(value, bool), name, "True or False", value, "text and numbers are not read as such")


def plain(value: object) -> object:
    """Python's own number for one of NumPy or another kind; all else as it is."""
    if not is_number(value) or isinstance(value, int) or type(value) is float:
        return value
    return int(value) if is_int(value) else float(value)


def keep_plain(options: object) -> None:
    """Makes the numbers of a frozen dataclass :func:`plain`."""
    for name, value in vars(options).items():
        object.__setattr__(options, name, plain(value))


def is_int(value: object) -> bool:
    """Whether it is an integer, Python's, NumPy's or of another kind, but no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_count(value: object, least: float) -> bool:
    """Whether it :func:`is_int`, of at least ``least``."""
    return is_int(value) and value >= least


def is_number(value: object) -> bool:
    """Whether it is a real number, Python's, NumPy's or of another kind, but no bool; NaN and infinities are."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether it :func:`is_number` that a float can hold, neither NaN nor infinite."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False
