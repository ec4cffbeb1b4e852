"""A reward for completions that keep to a layout of tags, such as <think>...</think> <answer>...</answer>."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from grpo_moe.checks import require

from .text import completion_text


def format_reward(
    tags: Sequence[str] = ("think", "answer"), *, prefill: str = "", text_after: bool = False
) -> Callable[..., list[float]]:
    """A reward function: 1.0 where a completion is the tagged parts in order and nothing else, else 0.0.

    Every opening and closing tag must stand exactly once; a part may be empty, and space around parts is ignored.
    Completions are scanned for the tags, not matched against a regular expression: time is linear in their length.

    Args:
        tags: names without angle brackets.
        prefill: what the chat template already wrote of the completion, e.g. "<think>", read in front of it.
        text_after: untagged text may follow the last part, as in ``<think>...</think> the answer``.

    Raises:
        ValueError: tags is empty, repeats a name or holds something that is no name.

    Source:
        DeepSeek-R1 (2501.12948), section 2.2.2.
    """
    listed = isinstance(tags, Sequence) and not isinstance(tags, str) and len(tags) > 0
    named = listed and all(isinstance(tag, str) and tag.isidentifier() for tag in tags)
    fix = "write them as in ('think', 'answer')"
    require(named and len(set(tags)) == len(tags), "tags", "different names", tags, fix)
    require(isinstance(prefill, str), "prefill", "text", prefill, "'' is none")
    markers = [marker for tag in tags for marker in (f"<{tag}>", f"</{tag}>")]

    def format_reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        return [float(_in_layout(prefill + completion_text(c), markers, text_after)) for c in completions]

    return format_reward


def _in_layout(text: str, markers: Sequence[str], text_after: bool) -> bool:
    if any(text.count(marker) != 1 for marker in markers):
        return False
    rest = text
    for number, marker in enumerate(markers):
        before, found, rest = rest.partition(marker)
        if not found or (number % 2 == 0 and before.strip()):  # before an opening tag stands nothing
            return False
    return text_after or not rest.strip()
