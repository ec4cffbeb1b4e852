"""Scores the final answer of a completion against the dataset's ``answer`` column."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from .text import completion_text

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")  # no infinity, NaN or 1_000
_MAX_CHARACTERS = 100_000  # of a completion's end that is looked at


def answer_reward(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[float]:
    """1.0 where the final answer equals the row's ``answer``, as text or as a number, else 0.0.

    Args:
        prompts: [N], not used.
        completions: [N] texts or chat messages.
        answer: [N] the right answers.
    """
    return [float(same_answer(final_answer(c), str(a))) for c, a in zip(completions, answer, strict=True)]


def final_answer(completion: str | Sequence[dict[str, Any]]) -> str:
    """The answer that is marked, else the last line that is not empty."""
    text = completion_text(completion)[-_MAX_CHARACTERS:]
    marked = marked_answer(text)
    if marked is not None:
        return marked
    return next((line.strip() for line in reversed(text.split("\n")) if line.strip()), "")


def marked_answer(text: str) -> str | None:
    """What stands in the last ``<answer>...</answer>``, and in there or else anywhere in the last ``\\\\boxed{...}``.

    None without either. Braces inside the box are balanced; time is linear in the text.
    """
    text = text[-_MAX_CHARACTERS:]
    tagged = _tagged(text)
    boxed = _boxed(text if tagged is None else tagged)
    return tagged if boxed is None else boxed


def same_answer(given: str, right: str) -> bool:
    """Equal as text without surrounding space, or as numbers (thousands separated by commas or not)."""
    given, right = given.strip(), right.strip()
    return given == right or (_number(given) is not None and _number(given) == _number(right))


def _tagged(text: str) -> str | None:
    start = text.rfind("<answer>")
    end = text.find("</answer>", start)
    return text[start + len("<answer>") : end].strip() if 0 <= start < end else None


def _boxed(text: str) -> str | None:
    opening = "\\boxed{"
    start = text.rfind(opening)
    if start < 0:
        return None
    depth, position = 1, start + len(opening)
    while position < len(text):
        character = text[position]
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[start + len(opening) : position].strip()
        position += 2 if character == "\\" else 1  # \{ and \} are no braces
    return None


def _number(text: str) -> Decimal | None:
    """Exact: as floats, long integers that differ would be equal."""
    plain = text.replace(",", "")
    return Decimal(plain) if len(text) < 100 and _NUMBER.fullmatch(plain) else None
