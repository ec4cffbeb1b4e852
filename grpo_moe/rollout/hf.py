"""Rollouts for any transformers causal language model: generate, then log-probabilities by the training forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from transformers import GenerationConfig

from grpo_moe.adapters.hf_head import completion_logps
from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.types import Completion, Prompt, SamplingParams

from .base import as_prompts, context_length, rollout_mode, sequence_keys, stop_token_ids
from .native import with_text
from .routes import recording, routing_hooks, sequence_routes

SCORED_ROWS = 32  # a scoring forward holds the hidden states of all its tokens


class HFEngine:
    """Wraps ``model.generate``. Deterministic for one seed and one batch; unlike NativeEngine, the other rows matter.

    ``sampling_logps`` are the full distribution's at the sampling temperature, from one training-style forward, so
    ``top_k`` and ``top_p`` are refused: their truncated distribution would differ from it. With ``return_routes`` that
    forward replays the experts of the generation.

    Args:
        model: a transformers causal LM prepared by :func:`grpo_moe.adapters.hf_head.add_token_logps`.
        tokenizer: for text, pad and EOS ids.
        max_rows: sequences generated at once.
    """

    def __init__(self, model, tokenizer, *, max_rows: int = 256):
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        self.stop_ids = stop_token_ids(model, tokenizer)

    def generate(self, prompts: Sequence[Prompt | Sequence[int]], sampling: SamplingParams) -> list[list[Completion]]:
        """Completions [P][G].

        Raises:
            ValueError: an empty prompt, one that fills the context, truncated sampling, or routes without experts.
        """
        prompts = as_prompts(prompts, context_length(self.model))
        if sampling.is_truncated:
            raise ValueError(
                "top_k, top_p and min_p must be 0, 1 and 0 with HFEngine, got "
                f"{sampling.top_k}, {sampling.top_p} and {sampling.min_p}; "
                "its log-probabilities are those of the full distribution"
            )
        group = sampling.num_generations
        per_turn = max(1, self.max_rows // group)
        completions = []
        keys = sequence_keys(prompts, sampling)
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        hooks = routing_hooks(self.model, sampling)
        with rollout_mode(self.model), torch.random.fork_rng(devices=devices), hooks as routing:
            for first in range(0, len(prompts), per_turn):
                torch.manual_seed(int(keys[first * group]) % 2**63)  # other prompts, other numbers
                made = self._generate_turn(prompts[first : first + per_turn], sampling, routing)
                completions += [with_text(made[i : i + group], self.tokenizer) for i in range(0, len(made), group)]
        return completions

    def sync_weights(self, model: torch.nn.Module) -> None:
        """Nothing to do: the parameters are shared, and every call makes a new cache."""

    def _generate_turn(self, prompts, sampling, routing):
        prompt_ids = [torch.tensor(p.input_ids) for p in prompts]
        pad_id = self.stop_ids[0] if self.stop_ids else 0  # masked, so any id of the vocabulary serves
        ids = _pad(prompt_ids, pad_id, side="left").to(self.model.device)
        mask = _pad([torch.ones_like(x) for x in prompt_ids], 0, side="left").to(self.model.device)
        # A config of our own: the model's may hold min_p, repetition_penalty, ... that the log-probabilities ignore.
        config = GenerationConfig(
            max_new_tokens=min(sampling.max_new_tokens, context_length(self.model) - ids.shape[1]),
            num_return_sequences=sampling.num_generations,
            eos_token_id=list(self.stop_ids) or None,
            pad_token_id=pad_id,
            do_sample=sampling.temperature > 0,
            **({"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampling.temperature else {}),
        )
        own = self.model.generation_config
        try:
            self.model.generation_config = config  # generate() fills what a given config leaves open from the model's
            with recording(routing) as forwards:
                generated = self.model.generate(ids, attention_mask=mask, generation_config=config)
        finally:
            self.model.generation_config = own
        completions = [_cut(row, self.stop_ids) for row in generated[:, ids.shape[1] :].tolist()]
        rows = [p for p in prompt_ids for _ in range(sampling.num_generations)]
        routes = _routes(forwards, rows, completions) if forwards else [None] * len(rows)
        return self._scored(rows, completions, routes, sampling, routing)

    def _scored(self, prompt_rows, completions, routes, sampling, routing):
        made = []
        for first in range(0, len(completions), SCORED_ROWS):
            rows = slice(first, first + SCORED_ROWS)
            replay = nullcontext()
            if routing is not None:
                replay = routing.replay(RoutingRecord.concat_rows(routes[rows]).to(self.model.device))
            with replay:
                scored = self._score(prompt_rows[rows], completions[rows], sampling)
            made += [replace(c, routes=r) for c, r in zip(scored, routes[rows], strict=True)]
        return made

    def _score(self, prompt_rows, completions, sampling):
        device = self.model.device
        tokens = [torch.tensor(c) for c in completions]
        sequences = [torch.cat(pair) for pair in zip(prompt_rows, tokens, strict=True)]
        scores = completion_logps(
            self.model,
            input_ids=_pad(sequences, 0, side="right").to(device),
            attention_mask=_pad([torch.ones_like(s, dtype=torch.bool) for s in sequences], 0, side="right").to(device),
            prompt_lengths=torch.tensor([len(p) for p in prompt_rows], device=device),
            completion_ids=_pad(tokens, 0, side="right").to(device),
            completion_mask=_pad([torch.ones_like(t, dtype=torch.bool) for t in tokens], 0, side="right").to(device),
            temperature=sampling.temperature or 1.0,
        )
        reasons = ["stop" if c[-1] in self.stop_ids else "length" for c in completions]
        return [
            Completion(tuple(c), tuple(row[: len(c)]), reason)
            for c, row, reason in zip(completions, scores.logps.tolist(), reasons, strict=True)
        ]


def _routes(
    forwards: list[RoutingRecord], prompts: list[torch.Tensor], completions: list[list[int]]
) -> list[RoutingRecord]:
    """Routes of each row, from the records of the prefill [B, T, L, K], padded on the left, and of each later step."""
    joined = RoutingRecord.concat_steps([record.to("cpu") for record in forwards])
    made, columns = [], torch.arange(joined.indices.shape[1])
    width = forwards[0].indices.shape[1]
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        own = joined.rows(slice(row, row + 1)).pack(columns[None] >= width - len(prompt))
        made.append(sequence_routes(own, 0, len(prompt) + len(completion)))
    return made


def _pad(rows: list[torch.Tensor], value: int, side: str) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value, padding_side=side)


def _cut(tokens: list[int], stop_ids: Sequence[int]) -> list[int]:
    """The tokens up to and including the first stop id."""
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[:end]
