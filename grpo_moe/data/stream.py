"""Prompts of an iterable dataset."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase

from grpo_moe.checks import check_int
from grpo_moe.types import Prompt

from .identity import check_identity, columns_fingerprint, prompts_fingerprint
from .rows import check_prompt, check_row, check_same_columns
from .tokens import check_lengths, check_options, tokenize

_MOST_ROWS = 100_000  # of a stream that is read as a whole


class PromptStream:
    """The prompts of an iterable dataset, tokenised and checked as they are taken.

    For `datasets.IterableDataset` (streamed, or made by `from_generator`) and anything else that can be iterated over
    again and again. Ids are those of `PromptSource`. The order is the stream's own: shuffle it by its
    `shuffle(seed, buffer_size)`. Where it ends a new epoch begins, for which its `set_epoch`, if it has one, is called:
    datasets then takes its shards, and what it shuffles, in another order.

    Every process of a run reads the whole stream and sees the same prompts: do not split it by process.

    A stream goes on from its own saved state if it has one that is exact, otherwise by reading again, without
    tokenising, the rows of the epoch that were taken: the content of a shuffle buffer is in no state (datasets 5.2).

    Args:
        dataset: Gives dicts with a column `prompt` of text or chat messages, all with the same columns. Leave its
            iteration to this object.
        tokenizer: A transformers tokenizer.
        max_prompt_tokens: Longest prompt allowed; None for any.
        chat_template_kwargs: Further arguments of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: A dataset of another kind, an empty one, or faulty first rows; later, where `take` comes upon a
            prompt that is empty, of another type, impossible to tokenise or too long. Messages name the row, counted
            from 0 in each epoch.
    """

    def __init__(
        self,
        dataset: Iterable[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_prompt_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        if not is_stream(dataset):
            raise ValueError(
                f"dataset must be an iterable that can start again, got {type(dataset).__name__}; wrap an iterator in "
                "datasets.IterableDataset.from_generator, and give map-style datasets to PromptSource"
            )
        check_options(tokenizer, max_prompt_tokens, chat_template_kwargs)
        self.position = 0
        """Prompts taken so far."""
        self._dataset, self._tokenizer = dataset, tokenizer
        self._max_prompt_tokens, self._chat_template_kwargs = max_prompt_tokens, chat_template_kwargs or {}
        self._saves_state = hasattr(dataset, "_ex_iterable") and not holds_shuffle(dataset._ex_iterable)
        self._first: Mapping[str, Any] | None = None  # the first row, whose kind and columns the others share
        self._go_to({"epoch": 0, "row": 0, "dataset": None})
        first = self.first(2)
        self._fingerprint = prompts_fingerprint([prompt.raw for prompt in first])
        self._columns = columns_fingerprint([prompt.columns for prompt in first])

    @property
    def epochs(self) -> float:
        """Whole passes over the stream so far; a pass is whole when the next one begins."""
        return float(self._place["epoch"])

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; a new epoch begins where one ends, within a call too.

        `Prompt.index` counts on over all epochs, so that a prompt draws other completions in each.
        """
        check_int("n", n, least=0, fix="give a number of prompts")
        prompts = self._prompts([self._next_row() for _ in range(n)], first_index=self.position)
        self.position += n
        if n and self._saves_state:
            self._place["dataset"] = self._dataset.state_dict()
        return prompts

    def first(self, n: int) -> list[Prompt]:
        """The prompts of the first n rows, or of all if there are fewer; the position stays."""
        check_int("n", n, least=0, fix="give a number of prompts")
        return self._from_start(n)

    def longest(self) -> int:
        """Tokens of the longest of the first 100 prompts."""
        return max(len(prompt.input_ids) for prompt in self.first(100))

    def all(self) -> list[Prompt]:
        """Every prompt of the first epoch, for evaluation.

        Raises:
            ValueError: The stream goes on and on.
        """
        return self._from_start(_MOST_ROWS + 1, most=_MOST_ROWS)

    def state_dict(self) -> dict[str, Any]:
        """The position as JSON values, and the first prompts of what it is a position in."""
        return {"position": self.position, **self._place, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken.

        Raises:
            ValueError: The state is of another dataset, or the stream is now too short.
        """
        check_identity(state, self._identity())
        self.position = state["position"]
        self._go_to({name: state[name] for name in self._place})

    def _identity(self) -> dict[str, Any]:
        return {"num_rows": None, "fingerprint": self._fingerprint, "columns": self._columns}

    def _from_start(self, n: int, most: int | None = None) -> list[Prompt]:
        place = self._place
        self._go_to({"epoch": 0, "row": 0, "dataset": None})
        rows = list(enumerate(islice(self._rows, n)))
        self._go_to(place)
        if not rows and n != 0:
            raise ValueError("dataset must hold at least one row, got an empty one; check its filter")
        if most is not None and len(rows) > most:
            raise ValueError(
                f"dataset must end within {most} rows where all are needed, got a stream that goes on; bound it by "
                "dataset.take(n)"
            )
        return self._prompts(rows, first_index=0)

    def _go_to(self, place: dict[str, Any]) -> None:
        """Starts the iteration of an epoch so that the next row is number `place["row"]`."""
        self._place = dict(place)
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(place["epoch"])
        if self._saves_state:
            self._dataset.load_state_dict(place["dataset"] or {})
        self._rows: Iterator[Mapping[str, Any]] = iter(self._dataset)
        if not (self._saves_state and place["dataset"]):
            skipped = sum(1 for _ in islice(self._rows, place["row"]))
            if skipped < place["row"]:
                raise ValueError(
                    f"dataset must have the {place['row']} rows of the checkpoint's epoch, got {skipped}; resume with "
                    "the same dataset, or start a new run"
                )

    def _next_row(self) -> tuple[int, Mapping[str, Any]]:
        for columns in self._rows:
            self._place["row"] += 1
            return self._place["row"] - 1, columns
        if not self._place["row"]:
            raise ValueError(
                f"dataset must give rows in every epoch, got none in epoch {self._place['epoch']}; a generator "
                "function must start anew each time it is called"
            )
        self._go_to({"epoch": self._place["epoch"] + 1, "row": 0, "dataset": None})
        return self._next_row()

    def _prompts(self, rows: Sequence[tuple[int, Mapping[str, Any]]], first_index: int) -> list[Prompt]:
        for row, columns in rows:
            check_row(row, columns)
            self._first = self._first or columns
            check_same_columns(row, columns, self._first)
            check_prompt(row, columns["prompt"], self._first["prompt"])
        numbers, prompts = [row for row, _ in rows], [columns["prompt"] for _, columns in rows]
        input_ids = tokenize(prompts, numbers, self._tokenizer, self._chat_template_kwargs)
        check_lengths(input_ids, numbers, self._max_prompt_tokens)
        others = [{name: value for name, value in columns.items() if name != "prompt"} for _, columns in rows]
        return [
            Prompt(tuple(ids.tolist()), raw=raw, index=index, columns=columns)
            for index, (ids, raw, columns) in enumerate(zip(input_ids, prompts, others, strict=True), first_index)
        ]


def is_stream(dataset: Any) -> bool:
    """Whether it can only be iterated over, but again and again."""
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    map_style = map_style and not isinstance(dataset, IterableDataset)  # whose base has a __getitem__ that only raises
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__") and not map_style


def holds_shuffle(iterable: Any) -> bool:
    """Whether a part of a `datasets.IterableDataset` shuffles; neither its API nor its state tells (datasets 5.2)."""
    parts = [*getattr(iterable, "ex_iterables", ()), getattr(iterable, "ex_iterable", None)]
    return "Shuffle" in type(iterable).__name__ or any(holds_shuffle(part) for part in parts if part is not None)
