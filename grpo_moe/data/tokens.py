"""Token ids of prompts, with one BOS at most, and a tokenizer of characters."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_moe.checks import check_int, require
from grpo_moe.text import clean

_BATCH_ROWS = 1000  # tokenised at a time
_OWN_ARGUMENTS = {
    "add_generation_prompt", "continue_final_message", "conversation", "max_length", "padding", "return_dict",
    "return_assistant_tokens_mask", "return_tensors", "tokenize", "tokenizer_kwargs", "truncation",
}  # fmt: skip
"""Of ``apply_chat_template`` that decide what becomes of the text, and are not for the template."""


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


def check_options(tokenizer: Any, max_prompt_tokens: Any, chat_template_kwargs: Any) -> None:
    """Raises ValueError for options of a source that are of another type, or not the template's own."""
    fits = isinstance(tokenizer, PreTrainedTokenizerBase)
    require(fits, "tokenizer", "a tokenizer of transformers", tokenizer, "as AutoTokenizer.from_pretrained(folder)")
    if max_prompt_tokens is not None:
        check_int("max_prompt_tokens", max_prompt_tokens, least=1, fix="None allows any length")
    given = {} if chat_template_kwargs is None else chat_template_kwargs
    fits = isinstance(given, Mapping) and all(isinstance(name, str) for name in given)
    require(fits, "chat_template_kwargs", "a dict of arguments by name", given, "as {'enable_thinking': False}")
    own = sorted(_OWN_ARGUMENTS & set(given))
    require(not own, "chat_template_kwargs", "arguments of the template itself", own, "leave those out, they are set")


def tokenize(
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


def check_lengths(input_ids: Sequence[np.ndarray], rows: Sequence[int], max_prompt_tokens: int | None) -> None:
    """Raises ValueError for a prompt without tokens, or of more than ``max_prompt_tokens``."""
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
