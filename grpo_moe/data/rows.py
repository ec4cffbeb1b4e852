"""What the rows of a dataset must be."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from grpo_moe.text import clean


def prompt_column(dataset: Any) -> list[Any]:
    """The prompts of a map-style dataset.

    Raises:
        ValueError: a dataset of another kind, an empty one, or columns that are missing, reserved or not the same.
    """
    if isinstance(dataset, Mapping):
        raise ValueError(f"dataset must be a single split, got a dict of {_listed(dataset)}; pick dataset['train']")
    if hasattr(dataset, "iloc"):  # its [0] would be a column
        raise ValueError(
            f"dataset must be a map-style dataset or a sequence of dicts, got pandas' {type(dataset).__name__}; give "
            "datasets.Dataset.from_pandas(...) of it"
        )
    if isinstance(dataset, type) or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"dataset must be a map-style dataset or a sequence of dicts, got {type(dataset).__name__}; an iterator "
            "runs only once: wrap it, for example in datasets.IterableDataset.from_generator, for prompt_source"
        )
    if len(dataset) == 0:
        raise ValueError("dataset must hold at least one row, got an empty one; check its filter")
    if hasattr(dataset, "column_names"):  # datasets.Dataset: reads one column, not whole rows
        _check_columns(0, dataset.column_names)
        return list(dataset["prompt"])
    prompts, names = [], []
    for row in range(len(dataset)):
        columns = dataset[row]
        check_row(row, columns)
        names = names or list(columns)
        check_same_columns(row, columns, names)
        prompts.append(columns["prompt"])
    return prompts


def check_row(row: int, columns: Any) -> None:
    """Raises ValueError for a row that is no dict with a prompt, or has a column of a reserved name."""
    if not isinstance(columns, Mapping):
        raise ValueError(
            f"dataset must hold dicts with a column 'prompt', got {type(columns).__name__} in row {row}; "
            "make each row a dict"
        )
    _check_columns(row, columns)


def check_same_columns(row: int, columns: Collection[str], first: Collection[str]) -> None:
    """Raises ValueError for a row with other columns than the first."""
    if set(columns) != set(first):
        raise ValueError(
            f"dataset must have the same columns in every row, got {_listed(columns)} in row {row} and "
            f"{_listed(first)} in row 0; fill in None"
        )


def _check_columns(row: int, names: Collection[str]) -> None:
    if "prompt" not in names:
        raise ValueError(
            f"dataset must have a column 'prompt', got {_listed(names)} in row {row}; rename the column that holds it"
        )
    for name in names:
        if not isinstance(name, str) or name in ("prompts", "completions", "completion_ids"):
            raise ValueError(
                "names of columns must be text, and not 'prompts', 'completions' or 'completion_ids', got "
                f"{name!r} in row {row}; rename it: reward functions get columns by keyword, beside those three"
            )


def _listed(names: Iterable[Any]) -> str:
    return clean(", ".join(map(str, names)), 500)


def check_prompt(row: int, prompt: Any, first: Any) -> None:
    """Raises ValueError for a prompt that is empty, no text or messages, or of another kind than ``first``."""
    is_text = isinstance(prompt, str)
    is_chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    if not (is_text or is_chat) or not prompt:
        raise ValueError(
            f"prompt must be text or a list of chat messages and not empty, got {reprlib.repr(prompt)} in row {row}; "
            "fill it in or filter the row out"
        )
    if is_chat:
        _check_messages(row, prompt)
    if is_text != isinstance(first, str):
        raise ValueError(
            f"prompt must be text in every row or chat messages in every row, got both (rows 0 and {row}); "
            "make one kind of them"
        )


def _check_messages(row: int, messages: Sequence[Mapping[str, Any]]) -> None:
    """Chat templates write an absent role or content as nothing, without a word.

    What else a message may hold (tool_calls, thinking, ...), and of what type, is the template's to know.
    """
    for number, message in enumerate(messages):
        role = message.get("role")
        says = message.get("content") is not None or any(x for name, x in message.items() if name != "role")
        if not (isinstance(role, str) and role and says):
            raise ValueError(
                "prompt must be messages with a role and a content of text (or parts, or tool_calls), got "
                f"{reprlib.repr(message)} as message {number} in row {row}; fill them in"
            )
