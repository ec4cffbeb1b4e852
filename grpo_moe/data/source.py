"""Prompts of a map-style dataset, and the choice between that and a stream."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from grpo_moe.checks import check_flag, check_int
from grpo_moe.types import Prompt

from .identity import check_identity, columns_fingerprint, prompts_fingerprint
from .rows import check_prompt, prompt_column
from .stream import PromptStream, holds_shuffle, is_stream
from .tokens import check_lengths, check_options, tokenize

_SAMPLED_ROWS = 50  # whose columns a checkpoint remembers


def prompt_source(
    dataset: Any,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    shuffle: bool = True,
    max_prompt_tokens: int | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> PromptSource | PromptStream:
    """A `PromptSource` of a map-style dataset, a `PromptStream` of an iterable one; both are used in the same way.

    `seed` and `shuffle` are of no use to a stream, which only its own `shuffle(seed, buffer_size)` can put into another
    order; a warning says so where it was not called.

    Raises:
        ValueError: As those two say.
    """
    check_flag("shuffle", shuffle)
    shared = {"max_prompt_tokens": max_prompt_tokens, "chat_template_kwargs": chat_template_kwargs}
    if not is_stream(dataset):
        return PromptSource(dataset, tokenizer, seed=seed, shuffle=shuffle, **shared)
    if shuffle and not holds_shuffle(getattr(dataset, "_ex_iterable", None)):
        warnings.warn(
            "shuffle works on map-style datasets only: the prompts of this stream come in its own order; shuffle it "
            "with dataset.shuffle(seed, buffer_size), or turn shuffle off",
            stacklevel=2,
        )
    return PromptStream(dataset, tokenizer, **shared)


class PromptSource:
    """The prompts of a dataset, tokenised once and checked at construction.

    A text prompt is tokenised as it stands; a conversation goes through the tokenizer's chat template with a generation
    prompt. Either way the ids start with exactly one BOS token if the tokenizer starts plain text with one, or if the
    prompt itself brings one; a tokenizer that never adds BOS gets none.

    The order is a fresh permutation for each epoch, a function of the seed and the epoch alone. Every process of a run
    that builds the same source sees the same prompts.

    Args:
        dataset: A map-style `datasets.Dataset` or a sequence of dicts, with a column `prompt` of text or chat messages.
        tokenizer: A transformers tokenizer.
        seed: Of the permutations, 0 or positive.
        shuffle: False keeps the order of the dataset.
        max_prompt_tokens: Longest prompt allowed; None for any.
        chat_template_kwargs: Further arguments of the chat template, such as `enable_thinking`.

    Raises:
        ValueError: A dataset of another kind, an empty one, one without prompts, or a prompt that is empty, of another
            type, impossible to tokenise or too long; messages name the row.
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, Any]],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        shuffle: bool = True,
        max_prompt_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        check_int("seed", seed, least=0, fix="0 is as good as any")
        check_flag("shuffle", shuffle)
        check_options(tokenizer, max_prompt_tokens, chat_template_kwargs)
        prompts = prompt_column(dataset)
        for row, prompt in enumerate(prompts):
            check_prompt(row, prompt, prompts[0])
        rows = range(len(prompts))
        self.position = 0
        """Prompts taken so far."""
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = prompts_fingerprint(prompts)
        sampled = sorted({number * len(prompts) // _SAMPLED_ROWS for number in range(_SAMPLED_ROWS)})
        self._columns = columns_fingerprint([dataset[row] for row in sampled])
        self._input_ids = tokenize(prompts, rows, tokenizer, chat_template_kwargs or {})  # [num_rows] int32 arrays
        self._order: tuple[int, np.ndarray] | None = None  # an epoch and its permutation
        check_lengths(self._input_ids, rows, max_prompt_tokens)

    @property
    def epochs(self) -> float:
        """Passes over the dataset so far."""
        return self.position / len(self)

    def __len__(self) -> int:
        """Rows of the dataset."""
        return len(self._input_ids)

    def __getitem__(self, row: int) -> Prompt:
        """The prompt of a row of the dataset; `Prompt.index` is the row."""
        return self._prompt(row, index=row)

    def take(self, n: int) -> list[Prompt]:
        """The next n prompts; a new epoch begins where one ends, within a call too.

        `Prompt.index` counts on over the whole stream, so that a prompt draws other completions in each epoch.
        """
        check_int("n", n, least=0, fix="give a number of prompts")
        positions = range(self.position, self.position + n)
        self.position += n
        return [self._prompt(self._row(position), index=position) for position in positions]

    def first(self, n: int) -> list[Prompt]:
        """The prompts of the first n rows, or of all if there are fewer; the position stays."""
        check_int("n", n, least=0, fix="give a number of prompts")
        return [self[row] for row in range(min(n, len(self)))]

    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(ids) for ids in self._input_ids)

    def all(self) -> list[Prompt]:
        """Every prompt once, in the order of the dataset, for evaluation."""
        return self.first(len(self))

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, at no cost whatever the position.

        Other columns of the same prompts, as corrected answers, are warned of.

        Raises:
            ValueError: The state is of another dataset, seed or order.
        """
        check_identity(state, self._identity())
        self.position = state["position"]

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": len(self),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
            "columns": self._columns,
        }

    def _row(self, position: int) -> int:
        epoch, offset = divmod(position, len(self))
        if not self._shuffle:
            return offset
        if self._order is None or self._order[0] != epoch:
            self._order = epoch, np.random.default_rng([self._seed, epoch]).permutation(len(self))
        return int(self._order[1][offset])

    def _prompt(self, row: int, index: int) -> Prompt:
        columns = dict(self._dataset[row])
        raw = columns.pop("prompt")
        return Prompt(tuple(self._input_ids[row].tolist()), raw=raw, index=index, columns=columns)
