"""In-process rollouts: the training parameters and kernels, one prefill a prompt, finished rows dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from grpo_moe.adapters.hf_head import head_of, layers_with_state
from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.models.gptoss_lite import GptOssLiteForCausalLM
from grpo_moe.ops import head_logits
from grpo_moe.types import Completion, Prompt, SamplingParams

from .base import as_prompts, context_length, rollout_mode, sequence_keys, stop_token_ids, uniforms
from .decoding import CacheDecoder, RingDecoder
from .routes import recording, routing_hooks, sequence_routes
from .sampling import draw, sampling_logps


class NativeEngine:
    """Generates from the model that is being trained, without a copy of its weights.

    The random numbers of a sequence depend on the seed and its prompt alone, whatever else is in the batch.

    Args:
        model: GPT-OSS-Lite (ring buffers), or any transformers causal LM whose layers cache keys and values alone.
        tokenizer: for the text of completions and its EOS id; optional.
        max_rows: sequences decoded at once; more are taken in turns.

    Raises:
        TypeError: no transformers model, or one with layers that carry another state, as linear attention.
    """

    def __init__(self, model: PreTrainedModel, tokenizer=None, *, max_rows: int = 1024):
        rule = "model must be a transformers causal LM that caches keys and values alone, got "
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"{rule}{type(model).__name__}; pass one")
        if states := layers_with_state(model.config.get_text_config()):
            kinds = ", ".join(states)
            raise TypeError(f"{rule}{type(model).__name__} with layers of type {kinds}; use HFEngine for other models")
        self.decoder = RingDecoder if isinstance(model, GptOssLiteForCausalLM) else CacheDecoder
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
        decoder, head = self.decoder(self.model, prompts, max(room)), head_of(self.model)
        rows = torch.arange(len(prompts), device=device).repeat_interleave(group)
        decoder.select(rows)
        hidden, uniform = decoder.hidden[rows], uniforms(keys.to(device), max(room))
        stop_ids = torch.tensor(self.stop_ids, device=device, dtype=torch.long)
        for step in range(max(room)):
            logps = sampling_logps(head_logits(hidden, **head), sampling)
            tokens = draw(logps, uniform[state.rows, step], sampling)
            state.append(step, tokens, logps.gather(1, tokens[:, None])[:, 0], torch.isin(tokens, stop_ids))
            if state.finished.all():
                break
            if (kept := state.compact()) is not None:
                decoder.select(kept)
                tokens = tokens[kept]
            state.decoded.append(state.rows)
            hidden = decoder.forward(tokens)
        if forwards:
            prefill, *steps = forwards
            routes = _routes(decoder.prompt_routes(prefill), steps, rows, lengths, state)
        else:
            routes = [None] * len(rows)
        return self._completions(state, group, routes)

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


def _routes(
    prefill: RoutingRecord, steps: list[RoutingRecord], rows: torch.Tensor, lengths: list[int], state: _Rows
) -> list[RoutingRecord]:
    """Routes of each sequence.

    Args:
        prefill: [P, T, L, K] of the prompts.
        steps: of each forward of one token a row.
        rows: prompt of each sequence.
        lengths: tokens of its prompt.
    """
    joined = prefill.to("cpu").rows(rows.cpu()).resize(prefill.indices.shape[1] + len(steps))
    starts = torch.tensor(lengths)
    for step, (record, decoded) in enumerate(zip(steps, state.decoded, strict=True)):
        places = decoded.cpu()
        joined.indices[places, starts[places] + step] = record.indices[:, 0].cpu()
    return [sequence_routes(joined, i, n) for i, n in enumerate((starts + state.counts.cpu()).tolist())]


def with_text(completions: list[Completion], tokenizer) -> list[Completion]:
    """The same completions with their text decoded, special tokens left out."""
    if tokenizer is None:
        return completions
    texts = tokenizer.batch_decode([c.token_ids for c in completions], skip_special_tokens=True)
    return [replace(c, text=text) for c, text in zip(completions, texts, strict=True)]
