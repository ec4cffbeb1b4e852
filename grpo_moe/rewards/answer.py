"""Scores the final answer of a completion against the dataset's ``answer`` column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
    """What stands in the last ``<answer>...</answer>`` or ``\\\\boxed{...}``, else the last line that is not empty."""
    text = completion if isinstance(completion, str) else str(completion[-1].get("content") or "")
    text = text[-_MAX_CHARACTERS:]
    for opening, closing in (("<answer>", "</answer>"), ("\\boxed{", "}")):
        start = text.rfind(opening)
        end = text.find(closing, start)
        if 0 <= start < end:
            return text[start + len(opening) : end].strip()
    lines = text.split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def same_answer(given: str, right: str) -> bool:
    """Equal as text without surrounding space, or as numbers (thousands separated by commas or not)."""
    given, right = given.strip(), right.strip()
    return given == right or (_number(given) is not None and _number(given) == _number(right))


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", "")) if len(text) < 100 else None
    except ValueError:
        return None
