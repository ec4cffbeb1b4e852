"""In-process rollouts for GPT-OSS-Lite: the training parameters, a ring-buffer cache, one prefill a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.models.gptoss_lite import GptOssLiteForCausalLM, RingCache
from grpo_moe.ops import head_logits
from grpo_moe.types import Completion, Prompt, SamplingParams

from .base import as_prompts, context_length, rollout_mode, sequence_keys, stop_token_ids, uniforms
from .routes import recording, routing_hooks, sequence_routes
from .sampling import draw, sampling_logps


class NativeEngine:
    """Generates from the model that is being trained, without a copy of its weights.

    Args:
        model: a GptOssLiteForCausalLM.
        tokenizer: for the text of completions and its EOS id; optional.
        max_rows: sequences decoded at once; more are taken in turns. Results do not depend on it.

    Raises:
        TypeError: another model class.
    """

    def __init__(self, model: GptOssLiteForCausalLM, tokenizer=None, *, max_rows: int = 1024):
        if not isinstance(model, GptOssLiteForCausalLM):
            raise TypeError(
                f"model must be a GptOssLiteForCausalLM, got {type(model).__name__}; use HFEngine for other models"
            )
        self.model, self.tokenizer, self.max_rows = model, tokenizer, max_rows
        self.stop_ids = stop_token_ids(model, tokenizer)

    def generate(self, prompts: Sequence[Prompt | Sequence[int]], sampling: SamplingParams) -> list[list[Completion]]:
        """Completions [P][G]; ``sampling_logps`` are those of the sampled distribution in fp32.

        Raises:
            ValueError: an empty prompt or one that fills the context.
        """
        prompts = as_prompts(prompts, context_length(self.model))
        per_turn = max(1, self.max_rows // sampling.num_generations)
        completions = []
        keys = sequence_keys(prompts, sampling).view(-1, sampling.num_generations)
        with rollout_mode(self.model), routing_hooks(self.model, sampling) as routing:
            for first in range(0, len(prompts), per_turn):
                turn = slice(first, first + per_turn)
                with recording(routing) as forwards:
                    completions += self._generate_turn(prompts[turn], keys[turn].reshape(-1), sampling, forwards)
        return completions

    def sync_weights(self, model: torch.nn.Module) -> None:
        """Nothing to do: the parameters are shared, and no cache outlives a call."""

    def _generate_turn(self, prompts, keys, sampling, forwards):
        group, device = sampling.num_generations, self.model.device
        lengths = [len(p.input_ids) for p in prompts for _ in range(group)]
        room = [min(sampling.max_new_tokens, context_length(self.model) - length) for length in lengths]
        state = _Rows(room, device)
        cache, hidden = self._prefill(prompts, max(room))
        rows = torch.arange(len(prompts), device=device).repeat_interleave(group)
        cache.select(rows)
        hidden, uniform = hidden[rows], uniforms(keys.to(device), max(room))
        stop_ids = torch.tensor(self.stop_ids, device=device, dtype=torch.long)
        for step in range(max(room)):
            logps = sampling_logps(head_logits(hidden, self.model.lm_head.weight), sampling)
            tokens = draw(logps, uniform[state.rows, step], sampling)
            state.append(step, tokens, logps.gather(1, tokens[:, None])[:, 0], torch.isin(tokens, stop_ids))
            if state.finished.all():
                break
            if (kept := state.compact()) is not None:
                cache.select(kept)
                tokens = tokens[kept]
            state.decoded.append(state.rows)
            hidden = self.model.model(input_ids=tokens[:, None], cache=cache).last_hidden_state[:, -1]
            cache.commit()
        routes = _routes(forwards, rows, lengths, state) if forwards else [None] * len(rows)
        return self._completions(state, group, routes)

    def _prefill(self, prompts, max_new_tokens):
        """The cache after the prompts, and the hidden state [P, H] that predicts each one's next token."""
        device = self.model.device
        lengths = torch.tensor([len(p.input_ids) for p in prompts], device=device)
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(p.input_ids) for p in prompts], batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        autocast = torch.is_autocast_enabled(device.type)
        cache = RingCache(
            self.model.config,
            len(prompts),
            ids.shape[1] + max_new_tokens,
            device=device,
            dtype=torch.get_autocast_dtype(device.type) if autocast else self.model.dtype,
        )
        hidden = self.model.model(input_ids=ids, attention_mask=mask, cache=cache).last_hidden_state
        cache.commit()
        return cache, hidden[torch.arange(len(prompts), device=device), lengths - 1]

    def _completions(self, state, group, routes):
        tokens, logps, counts, stopped = (x.tolist() for x in (state.tokens, state.logps, state.counts, state.stopped))
        made = [
            Completion(tuple(tokens[i][:n]), tuple(logps[i][:n]), "stop" if stopped[i] else "length", routes=routes[i])
            for i, n in enumerate(counts)
        ]
        return [with_text(made[i : i + group], self.tokenizer) for i in range(0, len(made), group)]


class _Rows:
    """Tokens drawn so far for all sequences, and which of them are still running."""

    def __init__(self, room: list[int], device):
        size = (len(room), max(room))
        self.room = torch.tensor(room, device=device)
        self.tokens = torch.zeros(size, dtype=torch.long, device=device)
        self.logps = torch.zeros(size, device=device)
        self.counts = torch.zeros_like(self.room)
        self.stopped = torch.zeros_like(self.room, dtype=torch.bool)
        self.rows = torch.arange(len(room), device=device)  # of the sequences in the running batch
        self.finished = self.stopped.clone()  # of the running batch
        self.decoded: list[torch.Tensor] = []  # the sequences in each forward after the prefill

    def append(self, step, tokens, logps, is_stop):
        """Adds one token to every running sequence that has not finished."""
        live = ~self.finished
        rows = self.rows[live]
        self.tokens[rows, step], self.logps[rows, step] = tokens[live], logps[live]
        self.counts[rows] = step + 1
        self.stopped[rows] = is_stop[live]
        self.finished = self.finished | is_stop | (step + 1 >= self.room[self.rows])

    def compact(self):
        """Drops finished sequences from the batch once they are a quarter of it; returns the places that stay."""
        if 4 * int(self.finished.sum()) < len(self.finished):
            return None
        kept = (~self.finished).nonzero()[:, 0]
        self.rows, self.finished = self.rows[kept], self.finished[kept]
        return kept


def _routes(forwards: list[RoutingRecord], rows: torch.Tensor, lengths: list[int], state: _Rows) -> list[RoutingRecord]:
    """Routes of each sequence, from the records of the prefill [P, T, L, K] and of each forward of one token a row.

    Args:
        rows: prompt of each sequence.
        lengths: tokens of its prompt.
    """
    prefill, *steps = (record.to("cpu") for record in forwards)
    joined = prefill.rows(rows.cpu()).resize(prefill.indices.shape[1] + len(steps))
    starts = torch.tensor(lengths)
    for step, (record, decoded) in enumerate(zip(steps, state.decoded, strict=True)):
        places = decoded.cpu()
        joined.indices[places, starts[places] + step] = record.indices[:, 0]
    return [sequence_routes(joined, i, n) for i, n in enumerate((starts + state.counts.cpu()).tolist())]


def with_text(completions: list[Completion], tokenizer) -> list[Completion]:
    """The same completions with their text decoded, special tokens left out."""
    if tokenizer is None:
        return completions
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    return [replace(c, text=text) for c, text in zip(completions, texts, strict=True)]
