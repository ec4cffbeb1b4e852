"""What every rollout engine promises the trainer, and the checks, stop tokens and random streams that engines share."""

from __future__ import annotations

import hashlib
import numbers
import reprlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import torch
from transformers import PreTrainedModel

from grpo_moe.checks import is_int, require
from grpo_moe.text import clean
from grpo_moe.types import Completion, Prompt, SamplingParams


class RolloutEngine(Protocol):
    """Draws completions from the policy. Every engine passes tests/rollout/contract.py."""

    in_process: bool
    """Whether it reads the policy's own parameters, which must then be whole in this process; absent means True."""

    def generate(self, prompts: Sequence[Prompt | Sequence[int]], sampling: SamplingParams) -> list[list[Completion]]:
        """Completions [P][G] in the order of the prompts, with routes when ``sampling.return_routes``."""
        ...

    def sync_weights(self, model: torch.nn.Module) -> None:
        """Makes the next generate use the model's current weights."""
        ...


def as_prompts(prompts: Sequence[Prompt | Sequence[int]], context_length: int, vocab_size: int) -> list[Prompt]:
    """The prompts, those given as plain token ids (a sequence, an array or a tensor of integers) wrapped.

    Raises:
        ValueError: something else than token ids, an empty prompt, one of ``context_length`` tokens or more (no room
            for a completion), or an id outside of the vocabulary.
    """
    if isinstance(prompts, str | Prompt) or not isinstance(prompts, Iterable):
        raise ValueError(f"prompts must be a list of prompts, got {reprlib.repr(prompts)}; put it into a list")
    prompts = [_as_prompt(number, given) for number, given in enumerate(prompts)]
    for number, prompt in enumerate(prompts):
        length = len(prompt.input_ids)
        if not 1 <= length < context_length:
            raise ValueError(
                f"prompt {number} must have 1 to {context_length - 1} tokens (the context has {context_length}), "
                f"got {length}; shorten it or leave it out"
            )
        if not 0 <= min(prompt.input_ids) <= max(prompt.input_ids) < vocab_size:
            raise ValueError(
                f"prompt {number} must have token ids in 0..{vocab_size - 1}, got {min(prompt.input_ids)} to "
                f"{max(prompt.input_ids)}; use the model's tokenizer"
            )
    return prompts


def _as_prompt(number: int, given: Prompt | Sequence[int]) -> Prompt:
    ids = given.input_ids if isinstance(given, Prompt) else given
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    listed = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
    kinds = set(map(type, ids)) if listed else {type(ids)}
    if not (listed and all(issubclass(kind, numbers.Integral) and kind is not bool for kind in kinds)):
        raise ValueError(
            f"prompt {number} must be a Prompt or a sequence of token ids, got {reprlib.repr(given)}; text goes "
            "through the tokenizer first"
        )
    return given if isinstance(given, Prompt) else Prompt(tuple(int(token) for token in ids))


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ValueError for anything else than SamplingParams, whose values are checked already."""
    if not isinstance(sampling, SamplingParams):
        raise ValueError(f"sampling must be SamplingParams, got {sampling!r}; for example SamplingParams(64)")


def check_completions(
    made: object, num_prompts: int, sampling: SamplingParams, engine: object, vocab_size: int | None = None
) -> None:
    """Refuses what an engine must not return: others would be learned from.

    Args:
        made: what ``generate`` returned.
        num_prompts, sampling: what it was asked for.
        engine: named in the message.
        vocab_size: token ids lie below it; None where nobody knows.

    Raises:
        ValueError: another number of groups or completions, or one that breaks the rules of :class:`Completion`.
    """
    name = f"{type(engine).__name__}.generate"
    if not isinstance(made, list | tuple) or len(made) != num_prompts:
        got = len(made) if isinstance(made, list | tuple) else type(made).__name__
        raise ValueError(f"{name} must return a list of {num_prompts} groups, got {got}; make one for each prompt")
    for number, group in enumerate(made):
        if not isinstance(group, list | tuple) or len(group) != sampling.num_generations:
            got = len(group) if isinstance(group, list | tuple) else type(group).__name__
            raise ValueError(
                f"{name} must return {sampling.num_generations} completions a prompt, got {got} for prompt {number}; "
                "sampling.num_generations says how many"
            )
        for completion in group:
            if fault := _fault_of(completion, sampling.max_new_tokens, vocab_size):
                raise ValueError(f"{name} must return {fault} for prompt {number}; see grpo_moe.types.Completion")


def _fault_of(completion: object, max_new_tokens: int, vocab_size: int | None) -> str | None:
    """The rule that a completion breaks, and how; None for a good one."""
    if not isinstance(completion, Completion):
        return f"Completion objects, got {type(completion).__name__}"
    ids, scored = completion.token_ids, [x for x in completion.sampling_logps if x is not None]
    if len(ids) > max_new_tokens:
        return f"at most max_new_tokens = {max_new_tokens} tokens, got {len(ids)}"
    if ids and not (min(ids) >= 0 and (vocab_size is None or max(ids) < vocab_size)):
        return f"token ids from 0 to {'V' if vocab_size is None else vocab_size} - 1, got {min(ids)} to {max(ids)}"
    if scored and max(scored) > 0.01:  # rounding apart
        return f"log-probabilities of at most 0, got {max(scored)}"
    if completion.finish_reason not in ("stop", "length"):
        return f'finish_reason "stop" or "length", got {completion.finish_reason!r}'
    return None


def check_causal_lm(model: object) -> None:
    """Raises ValueError for what is no transformers model."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"model must be a transformers causal LM, got {type(model).__name__}; pass the model itself: of PEFT's "
            "wrapper get_base_model(), of a compiled one what was compiled"
        )


def stop_token_ids(model, tokenizer=None) -> tuple[int, ...]:
    """Every EOS id of the generation config, the model config and the tokenizer, in that order, without repeats.

    Raises:
        ValueError: one that is no token id of the model.
    """
    ids: dict[int, None] = {}
    size = model.config.get_text_config().vocab_size
    sources = {"model.generation_config": getattr(model, "generation_config", None), "model.config": model.config}
    for name, source in {**sources, "tokenizer": tokenizer}.items():
        eos = getattr(source, "eos_token_id", None)
        listed = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
        fits = all(is_int(token) and 0 <= token < size for token in listed)
        require(fits, f"{name}.eos_token_id", f"token ids in 0..{size - 1}", eos, "set it to tokenizer.eos_token_id")
        ids.update(dict.fromkeys(listed))
    return tuple(ids)


def context_length(model) -> int:
    """Longest sequence in tokens that the model's positions reach."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**31


def sequence_keys(prompts: Sequence[Prompt], sampling: SamplingParams) -> torch.Tensor:
    """One int64 key [P * G] a sequence: a hash of the seed, the prompt and the number of the completion.

    A prompt is named by its index, or by its ids and how often they came before in the call, so the same prompt under
    the same seed draws the same completions in any batch.
    """
    seen: Counter = Counter()
    keys = []
    for prompt in prompts:
        name = f"index {prompt.index}"
        if prompt.index is None:
            name = f"ids {prompt.input_ids} {seen[prompt.input_ids]}"
            seen[prompt.input_ids] += 1
        for generation in range(sampling.num_generations):
            digest = hashlib.blake2b(f"{sampling.seed} {generation} {name}".encode(), digest_size=8).digest()
            keys.append(int.from_bytes(digest, "little", signed=True))
    return torch.tensor(keys, dtype=torch.long)


def uniforms(keys: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, a pure function of each int64 key and step (SplitMix64); both broadcast.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    golden, mix1, mix2 = (_signed(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
    z = keys + (steps + 1) * golden
    z = (z ^ _shift_right(z, 30)) * mix1
    z = (z ^ _shift_right(z, 27)) * mix2
    z = z ^ _shift_right(z, 31)
    return _shift_right(z, 11).double() * 2.0**-53


def with_text(completions: list[Completion], tokenizer) -> list[Completion]:
    """The same completions with their text decoded, special tokens left out.

    Raises:
        ValueError: the tokenizer fails on tokens of its own.
    """
    if tokenizer is None:
        return completions
    ids = [c.token_ids for c in completions]
    try:
        texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    except Exception:  # a slow one, for which embeddings beyond its tokens are no text but an error
        texts = _decoded(tokenizer, [[token for token in row if token < len(tokenizer)] for row in ids])
    return [replace(c, text=text) for c, text in zip(completions, texts, strict=True)]


def _decoded(tokenizer, ids: list[list[int]]) -> list[str]:
    try:
        return tokenizer.batch_decode(ids, skip_special_tokens=True)
    except Exception as error:  # its code is anybody's
        raise ValueError(
            f"tokenizer must decode each of its {len(tokenizer)} tokens, got {type(error).__name__} "
            f"({clean(error)}) of {type(tokenizer).__name__}; mend it, or use a fast one"
        ) from error


@contextmanager
def rollout_mode(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients and checkpointing; every module's own flags come back afterwards."""
    training = {module: module.training for module in model.modules()}
    checkpointing = checkpointed_modules(model)
    model.eval()
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in training.items():
            module.training = flag
        for module in checkpointing:
            module.gradient_checkpointing = True


def checkpointed_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Modules whose layers recompute in the backward pass, as transformers marks them."""
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False) is True]


def _shift_right(z: torch.Tensor, bits: int) -> torch.Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # torch's >> keeps the sign


def _signed(constant: int) -> int:
    return constant - (1 << 64) if constant >> 63 else constant
