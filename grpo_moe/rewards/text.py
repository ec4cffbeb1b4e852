"""The text of a completion, whatever form its prompt gave it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def completion_text(completion: str | Sequence[dict[str, Any]]) -> str:
    """A text as it is, or the content of the last chat message; empty where that has none."""
    if isinstance(completion, str):
        return completion
    return str(completion[-1].get("content") or "") if completion else ""
