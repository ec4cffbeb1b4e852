"""Turns a dataset with a prompt column into tokenised prompts, in an order that is reproducible and can be resumed."""

from __future__ import annotations

import hashlib
import json
import reprlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_moe.types import Prompt

_BATCH_ROWS = 1000  # tokenised at a time


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
        if seed < 0:
            raise ValueError(f"seed must be 0 or positive, got {seed}")
        prompts = _prompt_column(dataset)
        for row, prompt in enumerate(prompts):
            _check_prompt(row, prompt, prompts[0])
        self.position = 0
        """Prompts taken so far."""
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(prompts)
        self._input_ids = _tokenize(prompts, tokenizer, chat_template_kwargs or {})  # [num_rows] int32 arrays
        self._order: tuple[int, np.ndarray] | None = None  # an epoch and its permutation
        _check_lengths(self._input_ids, max_prompt_tokens)

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
        if n < 0:
            raise ValueError(f"n must be 0 or positive, got {n}")
        positions = range(self.position, self.position + n)
        self.position += n
        return [self._prompt(self._row(position), index=position) for position in positions]

    def all(self) -> list[Prompt]:
        """Every prompt once, in the order of the dataset, for evaluation."""
        return [self[row] for row in range(len(self))]

    def state_dict(self) -> dict[str, Any]:
        """The position, and what it is a position in."""
        return {"position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken, at no cost whatever the position.

        Raises:
            ValueError: The state is of another dataset, seed or order.
        """
        for name, value in self._identity().items():
            if state[name] != value:
                raise ValueError(
                    f"{name} must be that of the checkpoint, {state[name]}, got {value}; "
                    "resume with the same dataset and seed, or start a new run"
                )
        self.position = state["position"]

    def _identity(self) -> dict[str, Any]:
        return {
            "num_rows": len(self),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "fingerprint": self._fingerprint,
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


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character: ids 0 to 2 are <pad>, <bos> and <eos>, then the alphabet in order.

    Encoding puts <bos> first; decoding gives the text back exactly. A character outside the alphabet raises: it would
    be lost silently under an unknown token. Saved files load with plain transformers.

    Raises:
        ValueError: The alphabet is empty or repeats a character.
    """
    if not alphabet or len(set(alphabet)) != len(alphabet):
        raise ValueError(f"alphabet must be one or more different characters, got {alphabet!r}")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<bos>", "<eos>", *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding joins tokens by spaces
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _prompt_column(dataset: Any) -> list[Any]:
    if isinstance(dataset, Mapping):
        raise ValueError(f"dataset must be a single split, got a dict of {', '.join(dataset)}; pick dataset['train']")
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"dataset must be a map-style dataset or a sequence of dicts, got {type(dataset).__name__}; "
            "a stream has no order to resume: collect it first, for example with datasets.Dataset.from_generator"
        )
    if len(dataset) == 0:
        raise ValueError("dataset must hold at least one row, got an empty one")
    if hasattr(dataset, "column_names"):  # datasets.Dataset: reads one column, not whole rows
        _check_columns(0, dataset.column_names)
        return list(dataset["prompt"])
    prompts = []
    for row in range(len(dataset)):
        columns = dataset[row]
        if not isinstance(columns, Mapping):
            raise ValueError(
                f"dataset must hold dicts with a column 'prompt', got {type(columns).__name__} in row {row}"
            )
        _check_columns(row, columns)
        prompts.append(columns["prompt"])
    return prompts


def _check_columns(row: int, names: Collection[str]) -> None:
    if "prompt" not in names:
        raise ValueError(
            f"dataset must have a column 'prompt', got {', '.join(names)} in row {row}; rename the column that holds it"
        )


def _check_prompt(row: int, prompt: Any, first: Any) -> None:
    is_text = isinstance(prompt, str)
    is_chat = isinstance(prompt, list) and all(isinstance(message, Mapping) for message in prompt)
    if not (is_text or is_chat) or not prompt:
        raise ValueError(
            f"prompt must be text or a list of chat messages and not empty, got {reprlib.repr(prompt)} in row {row}"
        )
    if is_text != isinstance(first, str):
        raise ValueError(f"prompt must be text in every row or chat messages in every row, got both (rows 0 and {row})")


def _tokenize(
    prompts: Sequence[Any], tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> list[np.ndarray]:
    """[num_rows] int32 arrays, tokenised by batches."""
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
    batches = [range(len(prompts))[start : start + _BATCH_ROWS] for start in range(0, len(prompts), _BATCH_ROWS)]
    return [
        np.array(_with_one_bos(ids, bos, adds_bos), dtype=np.int32)
        for rows in batches
        for ids in _encode_rows(prompts, rows, tokenizer, chat_template_kwargs)
    ]


def _encode_rows(
    prompts: Sequence[Any], rows: range, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: Mapping[str, Any]
) -> list[list[int]]:
    """Token ids of some rows, without what the tokenizer adds around plain text."""
    batch = [prompts[row] for row in rows]
    try:
        if isinstance(batch[0], str):
            return tokenizer(batch, add_special_tokens=False)["input_ids"]
        return tokenizer.apply_chat_template(
            batch, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
        )["input_ids"]
    except Exception as error:
        if len(rows) > 1:  # one by one, to name the row
            return [
                _encode_rows(prompts, rows[i : i + 1], tokenizer, chat_template_kwargs)[0] for i in range(len(rows))
            ]
        raise ValueError(
            "prompt must be text that the tokenizer can encode or a conversation that its chat template accepts, "
            f"got {reprlib.repr(batch[0])} in row {rows[0]} ({type(error).__name__}: {error})"
        ) from error


def _with_one_bos(ids: list[int], bos: int | None, adds_bos: bool) -> list[int]:
    """A chat template or the text itself may write BOS, once or twice, or leave it to the tokenizer."""
    num_bos = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos] * (adds_bos or num_bos > 0) + ids[num_bos:]


def _check_lengths(input_ids: Sequence[np.ndarray], max_prompt_tokens: int | None) -> None:
    lengths = np.array([len(ids) for ids in input_ids])
    if not lengths.all():
        raise ValueError(f"prompt must give at least one token, got none in row {lengths.argmin()}")
    too_long = np.flatnonzero(lengths > (np.inf if max_prompt_tokens is None else max_prompt_tokens))
    if too_long.size:
        raise ValueError(
            f"prompt must be at most max_prompt_tokens ({max_prompt_tokens}) tokens, got {lengths[too_long[0]]} in row "
            f"{too_long[0]} ({too_long.size} rows are too long); filter the dataset or raise the limit"
        )


def _fingerprint(prompts: Sequence[Any]) -> str:
    """Of the prompts, not their ids: a chat template may write today's date."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]
