"""Turns a dataset or a stream with a prompt column into tokenised prompts, in an order that can be resumed."""

from __future__ import annotations

import hashlib
import json
import reprlib
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch.utils.data import IterableDataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_moe.checks import check_flag, check_int, require
from grpo_moe.text import clean
from grpo_moe.types import Prompt

_BATCH_ROWS = 1000  # tokenised at a time
_MOST_ROWS = 100_000  # of a stream that is read as a whole
_SAMPLED_ROWS = 50  # whose columns a checkpoint remembers
_OWN_ARGUMENTS = {
    "add_generation_prompt", "continue_final_message", "conversation", "max_length", "padding", "return_dict",
    "return_assistant_tokens_mask", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
}  # fmt: skip
"""Of ``apply_chat_template`` that decide what becomes of the text, and are not for the template."""


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
    if not _is_stream(dataset):
        return PromptSource(dataset, tokenizer, seed=seed, shuffle=shuffle, **shared)
    if shuffle and not _holds_shuffle(getattr(dataset, "_ex_iterable", None)):
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
        _check_options(tokenizer, max_prompt_tokens, chat_template_kwargs)
        prompts = _prompt_column(dataset)
        for row, prompt in enumerate(prompts):
            _check_prompt(row, prompt, prompts[0])
        rows = range(len(prompts))
        self.position = 0
        """Prompts taken so far."""
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = _fingerprint(prompts)
        sampled = sorted({number * len(prompts) // _SAMPLED_ROWS for number in range(_SAMPLED_ROWS)})
        self._columns = _columns_fingerprint([dataset[row] for row in sampled])
        self._input_ids = _tokenize(prompts, rows, tokenizer, chat_template_kwargs or {})  # [num_rows] int32 arrays
        self._order: tuple[int, np.ndarray] | None = None  # an epoch and its permutation
        _check_lengths(self._input_ids, rows, max_prompt_tokens)

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
        _check_identity(state, self._identity())
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
        if not _is_stream(dataset):
            raise ValueError(
                f"dataset must be an iterable that can start again, got {type(dataset).__name__}; wrap an iterator in "
                "datasets.IterableDataset.from_generator, and give map-style datasets to PromptSource"
            )
        _check_options(tokenizer, max_prompt_tokens, chat_template_kwargs)
        self.position = 0
        """Prompts taken so far."""
        self._dataset, self._tokenizer = dataset, tokenizer
        self._max_prompt_tokens, self._chat_template_kwargs = max_prompt_tokens, chat_template_kwargs or {}
        self._saves_state = hasattr(dataset, "_ex_iterable") and not _holds_shuffle(dataset._ex_iterable)
        self._first: Mapping[str, Any] | None = None  # the first row, whose kind and columns the others share
        self._go_to({"epoch": 0, "row": 0, "dataset": None})
        first = self.first(2)
        self._fingerprint = _fingerprint([prompt.raw for prompt in first])
        self._columns = _columns_fingerprint([prompt.columns for prompt in first])

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
        _check_identity(state, self._identity())
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
            _check_row(row, columns)
            self._first = self._first or columns
            _check_same_columns(row, columns, self._first)
            _check_prompt(row, columns["prompt"], self._first["prompt"])
        numbers, prompts = [row for row, _ in rows], [columns["prompt"] for _, columns in rows]
        input_ids = _tokenize(prompts, numbers, self._tokenizer, self._chat_template_kwargs)
        _check_lengths(input_ids, numbers, self._max_prompt_tokens)
        others = [{name: value for name, value in columns.items() if name != "prompt"} for _, columns in rows]
        return [
            Prompt(tuple(ids.tolist()), raw=raw, index=index, columns=columns)
            for index, (ids, raw, columns) in enumerate(zip(input_ids, prompts, others, strict=True), first_index)
        ]


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each character: ids 0 to 2 are <pad>, <bos> and <eos>, then the alphabet in order.

    Encoding puts <bos> first; decoding gives the text back exactly. A character outside the alphabet raises: it would
    be lost silently under an unknown token. Saved files load with plain transformers.

    Raises:
        ValueError: The alphabet is empty or repeats a character.
    """
    fits = isinstance(alphabet, str) and alphabet and len(set(alphabet)) == len(alphabet)
    require(bool(fits), "alphabet", "one or more different characters", alphabet, "give a text without repeats")
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
        _check_row(row, columns)
        names = names or list(columns)
        _check_same_columns(row, columns, names)
        prompts.append(columns["prompt"])
    return prompts


def _is_stream(dataset: Any) -> bool:
    """Whether it can only be iterated over, but again and again."""
    map_style = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    map_style = map_style and not isinstance(dataset, IterableDataset)  # whose base has a __getitem__ that only raises
    return hasattr(dataset, "__iter__") and not hasattr(dataset, "__next__") and not map_style


def _holds_shuffle(iterable: Any) -> bool:
    """Whether a part of a `datasets.IterableDataset` shuffles; neither its API nor its state tells (datasets 5.2)."""
    parts = [*getattr(iterable, "ex_iterables", ()), getattr(iterable, "ex_iterable", None)]
    return "Shuffle" in type(iterable).__name__ or any(_holds_shuffle(part) for part in parts if part is not None)


def _check_options(tokenizer: Any, max_prompt_tokens: Any, chat_template_kwargs: Any) -> None:
    fits = isinstance(tokenizer, PreTrainedTokenizerBase)
    require(fits, "tokenizer", "a tokenizer of transformers", tokenizer, "as AutoTokenizer.from_pretrained(folder)")
    if max_prompt_tokens is not None:
        check_int("max_prompt_tokens", max_prompt_tokens, least=1, fix="None allows any length")
    given = {} if chat_template_kwargs is None else chat_template_kwargs
    fits = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    require(fits, "chat_template_kwargs", "a dict of arguments by name", given, "as {'enable_thinking': False}")
    own = sorted(_OWN_ARGUMENTS & set(given))
    require(not own, "chat_template_kwargs", "arguments of the template itself", own, "leave those out, they are set")


def _check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    fits = isinstance(state, Mapping)
    require(fits, "state", "what state_dict() gave", state, "resume from a checkpoint of this trainer")
    if state.get("columns", identity["columns"]) != identity["columns"]:
        warnings.warn(
            "The columns beside the prompts are not those of the checkpoint's dataset: reward functions get other "
            "values from here on. Start a new run unless that is meant.",
            stacklevel=3,
        )
    for name, value in identity.items():
        if name != "columns" and state.get(name) != value:
            raise ValueError(
                f"{name} must be that of the checkpoint, {state.get(name)}, got {value}; "
                "resume with the same dataset and seed, or start a new run"
            )
    check_int("position", state.get("position"), least=0, fix="the checkpoint is damaged: resume from another one")


def _check_row(row: int, columns: Any) -> None:
    if not isinstance(columns, Mapping):
        raise ValueError(
            f"dataset must hold dicts with a column 'prompt', got {type(columns).__name__} in row {row}; "
            "make each row a dict"
        )
    _check_columns(row, columns)


def _check_same_columns(row: int, columns: Collection[str], first: Collection[str]) -> None:
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


def _check_prompt(row: int, prompt: Any, first: Any) -> None:
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


def _tokenize(
    prompts: Sequence[Any],
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any],
) -> list[np.ndarray]:
    """[num_rows] int32 arrays, tokenised by batches; `rows` are the numbers that errors name."""
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("")["input_ids"][:1] == [bos]
    batches = [slice(start, start + _BATCH_ROWS) for start in range(0, len(prompts), _BATCH_ROWS)]
    return [
        np.array(_with_one_bos(ids, bos, adds_bos), dtype=np.int32)
        for batch in batches
        for ids in _encode(prompts[batch], rows[batch], tokenizer, chat_template_kwargs)
    ]


def _encode(
    prompts: Sequence[Any],
    rows: Sequence[int],
    tokenizer: PreTrainedTokenizerBase,
    chat_template_kwargs: Mapping[str, Any],
) -> list[list[int]]:
    """Token ids of some rows, without what the tokenizer adds around plain text."""
    try:
        if isinstance(prompts[0], str):
            return tokenizer(prompts, add_special_tokens=False)["input_ids"]
        return tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, tokenize=True, return_dict=True, **chat_template_kwargs
        )["input_ids"]
    except Exception as error:
        if len(rows) > 1:  # one by one, to name the row
            pairs = zip(prompts, rows, strict=True)
            return [_encode([prompt], [row], tokenizer, chat_template_kwargs)[0] for prompt, row in pairs]
        raise ValueError(
            "prompt must be text that the tokenizer can encode or a conversation that its chat template accepts, "
            f"got {reprlib.repr(prompts[0])} in row {rows[0]} ({type(error).__name__}: {clean(error, 500)}); "
            "mend the row, or give another tokenizer or chat template"
        ) from error


def _with_one_bos(ids: list[int], bos: int | None, adds_bos: bool) -> list[int]:
    """A chat template or the text itself may write BOS, once or twice, or leave it to the tokenizer."""
    num_bos = next((i for i, token in enumerate(ids) if token != bos), len(ids))
    return [bos] * (adds_bos or num_bos > 0) + ids[num_bos:] if num_bos < len(ids) else []


def _check_lengths(input_ids: Sequence[np.ndarray], rows: Sequence[int], max_prompt_tokens: int | None) -> None:
    lengths = np.array([len(ids) for ids in input_ids])
    if not lengths.all():
        raise ValueError(
            f"prompt must give at least one token, got none in row {rows[lengths.argmin()]}; "
            "filter the row out, or look at the chat template"
        )
    too_long = np.flatnonzero(lengths > (np.inf if max_prompt_tokens is None else max_prompt_tokens))
    if too_long.size:
        raise ValueError(
            f"prompt must be at most max_prompt_tokens ({max_prompt_tokens}) tokens, got {lengths[too_long[0]]} in row "
            f"{rows[too_long[0]]} ({too_long.size} rows are too long); filter the dataset or raise the limit"
        )


def _fingerprint(prompts: Sequence[Any]) -> str:
    """Of the prompts, not their ids: a chat template may write today's date."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


def _columns_fingerprint(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of what stands beside the prompts of some rows."""
    columns = [sorted((name, value) for name, value in row.items() if name != "prompt") for row in rows]
    try:
        text = json.dumps(columns, default=_plainly, skipkeys=True)
    except Exception:  # values may be anything, as a list that holds itself
        text = json.dumps([[name for name, _ in row] for row in columns])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plainly(value: Any) -> Any:
    """What JSON has no form for, the same in every process: of an image or another object, its type."""
    if hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else type(value).__name__
