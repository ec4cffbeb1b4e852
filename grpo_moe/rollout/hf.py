"""Rollouts by transformers: generate or generate_batch, then log-probabilities by the training forward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from transformers import GenerationConfig
from transformers.generation import ContinuousBatchingConfig

from grpo_moe.adapters.hf_head import add_token_logps, completion_logps
from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.checks import check_int
from grpo_moe.types import Completion, Prompt, SamplingParams

from .base import (
    as_prompts,
    check_causal_lm,
    check_sampling,
    context_length,
    rollout_mode,
    sequence_keys,
    stop_token_ids,
    with_text,
)
from .routes import recording, routing_hooks, sequence_routes

SCORED_ROWS = 32  # a scoring forward holds the hidden states of all its tokens


class HFEngine:
    """Any transformers causal LM. Deterministic for one seed and one batch; unlike NativeEngine, other rows matter.

    ``sampling_logps`` are the full distribution's at the sampling temperature, from one training-style forward, so
    ``top_k`` and ``top_p`` are refused: their truncated distribution would differ from it. With ``return_routes`` that
    forward replays the experts of the generation.

    Args:
        model: a transformers causal LM.
        tokenizer: for text, pad and EOS ids.
        max_rows: sequences generated at once.
        continuous_batching: ``model.generate_batch`` instead of ``model.generate``, with a new manager for every batch:
            a kept one would serve keys and values of earlier weights. Without routes.
    """

    in_process = True

    def __init__(self, model, tokenizer, *, max_rows: int = 256, continuous_batching: bool = False):
        check_causal_lm(model)
        check_int("max_rows", max_rows, least=1, fix="256 is the default")
        self.model, self.tokenizer, self.max_rows = add_token_logps(model), tokenizer, max_rows
        self.continuous_batching = continuous_batching
        self.stop_ids = stop_token_ids(model, tokenizer)

    def generate(self, prompts: Sequence[Prompt | Sequence[int]], sampling: SamplingParams) -> list[list[Completion]]:
        """Completions [P][G].

        Raises:
            ValueError: an empty prompt, one that fills the context, truncated sampling, routes without experts or with
                continuous batching.
            RuntimeError: continuous batching failed for a sequence.
        """
        check_sampling(sampling)
        prompts = as_prompts(prompts, context_length(self.model), self.model.config.get_text_config().vocab_size)
        if sampling.is_truncated:
            raise ValueError(
                "top_k, top_p and min_p must be 0, 1 and 0 with HFEngine, got "
                f"{sampling.top_k}, {sampling.top_p} and {sampling.min_p}; "
                "its log-probabilities are those of the full distribution"
            )
        if sampling.return_routes and self.continuous_batching:
            raise ValueError(
                "return_routes must be False with continuous_batching, got True: its forwards mix sequences; use "
                "NativeEngine, or HFEngine without it"
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
        rows = [p for p in prompt_ids for _ in range(sampling.num_generations)]
        own = self.model.generation_config
        try:
            self.model.generation_config = config  # generate() fills what a given config leaves open from the model's
            with recording(routing) as forwards:
                if self.continuous_batching:
                    generated = self._continuous(rows, config)
                else:
                    made = self.model.generate(
                        ids,
                        attention_mask=mask,
                        generation_config=config,
                        synced_gpus=False,  # see in_process
                    )
                    generated = made[:, ids.shape[1] :].tolist()
        finally:
            self.model.generation_config = own
        completions = [_cut(row, self.stop_ids) for row in generated]
        routes = _routes(forwards, rows, completions) if forwards else [None] * len(rows)
        return self._scored(rows, completions, routes, sampling, routing)

    def _continuous(self, rows, config) -> list[list[int]]:
        """Tokens drawn for each prompt of ``rows`` by continuous batching."""
        single = GenerationConfig.from_dict({**config.to_dict(), "num_return_sequences": 1})
        made = self.model.generate_batch(
            [row.tolist() for row in rows],
            generation_config=single,
            continuous_batching_config=ContinuousBatchingConfig(
                allow_block_sharing=False, **self._memory(rows, config)
            ),
        )
        outputs = list(made.values())
        faults = [output.error or "no token" for output in outputs if output.error or not output.generated_tokens]
        if faults or len(outputs) != len(rows):  # it returns empty completions where its worker fails
            raise RuntimeError(
                f"generate_batch must complete all {len(rows)} sequences, got {len(outputs) - len(faults)}, "
                f"{faults[:1] or 'the others missing'}; use HFEngine without continuous_batching, or NativeEngine"
            )
        return [list(output.generated_tokens) for output in outputs]

    def _memory(self, rows, config) -> dict:
        """Half of a GPU; on a CPU no more than is needed, since it is zeroed."""
        if self.model.device.type != "cpu":
            return {"max_memory_percent": 0.5}
        longest = max(map(len, rows)) + config.max_new_tokens
        return {"block_size": 32, "num_blocks": len(rows) * (longest // 32 + 1), "max_batch_tokens": 512}

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
