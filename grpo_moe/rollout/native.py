"""In-process rollouts: the training parameters and kernels, one prefill a prompt, a batch that stays full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from grpo_moe.adapters.hf_decode import Decoder
from grpo_moe.adapters.hf_experts import experts_in
from grpo_moe.adapters.hf_head import add_token_logps, check_head, head_of
from grpo_moe.adapters.hf_lora import folded_lora
from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.checks import check_int
from grpo_moe.ops import head_logits
from grpo_moe.ops.attention.kv_cache import KVCache, bytes_per_row
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
from .graphs import StepGraphs, bucket
from .routes import recording, routing_hooks
from .rows import Rows, Where
from .sampling import draw

STEPS_BETWEEN_LOOKS = 8
"""Steps of a GPU before the host looks which rows have finished: a look waits for the device."""
PREFILL_TOKENS = 2**16
"""Tokens, padding included, of prompts that run at once."""
ROUND_LENGTHS_TO = 64
"""So that a call with slightly longer prompts finds the buffers of the one before."""
SHARE_OF_FREE_MEMORY = 0.8


class NativeEngine:
    """Generates from the model that is being trained, without a copy of its weights.

    Keys and values stand in buffers of fixed size, rings as long as the window in windowed layers. On a GPU a decode
    step (forward, head, sampling, routes) is one CUDA graph. Rows of finished sequences take the next ones; each
    prompt is prefilled once for the completions that start together. The random numbers of a sequence depend on the
    seed and its prompt alone, whatever else is in the batch. LoRA on experts is folded into a second copy of these for
    the length of a call.

    Args:
        model: a transformers causal LM whose layers cache keys and values alone.
        tokenizer: for the text of completions and its EOS id; optional.
        max_rows: sequences decoded at once; fewer where the GPU's memory ends.
        keep_graphs: keep buffers and graphs from call to call, for calls of few tokens. After a change of anything but
            values (adapters merged or switched, another implementation of experts) call :meth:`release`. Under autocast
            they never outlive a call, as its low-precision weights do not.

    One engine is for one thread.

    Raises:
        TypeError: a model with layers that carry another state, as linear attention; HFEngine runs it.
        ValueError: no transformers model, or one whose head, or whose steps on a cache, are not its own.
    """

    in_process = True

    def __init__(self, model: PreTrainedModel, tokenizer=None, *, max_rows: int = 1024, keep_graphs: bool = False):
        check_causal_lm(model)
        check_int("max_rows", max_rows, least=1, fix="1024 is the default")
        self.model, self.tokenizer, self.max_rows, self.keep_graphs = model, tokenizer, max_rows, keep_graphs
        self.stop_ids = stop_token_ids(model, tokenizer)
        is_new = not getattr(model, "_has_token_logps", False)  # a trainer has checked it before it wrapped its forward
        add_token_logps(model)
        with rollout_mode(model):
            if is_new:
                check_head(model)
            self._decoder = Decoder(model)
        self._batch: _Batch | None = None

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values held now."""
        return 0 if self._batch is None else self._batch.cache.nbytes

    def generate(self, prompts: Sequence[Prompt | Sequence[int]], sampling: SamplingParams) -> list[list[Completion]]:
        """Completions [P][G]; ``sampling_logps`` are those of the sampled distribution in fp32.

        Raises:
            ValueError: an empty prompt or one that fills the context.
            RuntimeError: the keys and values of one sequence do not fit the GPU's free memory.
        """
        check_sampling(sampling)
        prompts = as_prompts(prompts, context_length(self.model), self.model.config.get_text_config().vocab_size)
        sequences = self._sequences(prompts, sampling)
        if not sequences:
            return []
        kept = False
        try:
            with rollout_mode(self.model), folded_lora(self.model), _compute_dtype(self.model):
                with routing_hooks(self.model, sampling) as routing:
                    batch = self._batch_for(sequences, sampling, routing)
                    made = self._run(batch, sequences)
            kept = self.keep_graphs and not torch.is_autocast_enabled(self.model.device.type)
        finally:
            if not kept:
                self.release()
        group = sampling.num_generations
        return [with_text(made[i : i + group], self.tokenizer) for i in range(0, len(made), group)]

    def sync_weights(self, model: torch.nn.Module) -> None:
        """Nothing to do: the parameters are shared, and no key or value outlives its sequence."""

    def release(self) -> None:
        """Frees buffers and graphs, at once: no reference cycle keeps them until Python's collector comes by."""
        if self._batch is not None:
            self._batch.graphs = None  # which holds a method of its batch
        self._batch = None

    def _sequences(self, prompts: list[Prompt], sampling: SamplingParams) -> list[_Sequence]:
        keys = sequence_keys(prompts, sampling).view(len(prompts), sampling.num_generations).tolist()
        limit = context_length(self.model)
        return [
            _Sequence(number, prompt.input_ids, key, min(sampling.max_new_tokens, limit - len(prompt.input_ids)))
            for number, prompt in enumerate(prompts)
            for key in keys[number]
        ]

    def _batch_for(self, sequences: list[_Sequence], sampling: SamplingParams, routing) -> _Batch:
        """The kept batch where it serves, or a new one."""
        length = max(len(s.prompt) + s.room for s in sequences)
        length = min(-(-length // ROUND_LENGTHS_TO) * ROUND_LENGTHS_TO, max(length, context_length(self.model)))
        wanted = min(self.max_rows, len(sequences))
        wanted = min(bucket(wanted), self.max_rows) if self.model.device.type == "cuda" else wanted
        form = replace(sampling, seed=0, num_generations=1), tuple(p.data_ptr() for p in self.model.parameters())
        old = self._batch
        if old is not None and old.form == form and old.cache.max_length >= length and old.rows_wanted >= wanted:
            old.routing, old.prompt_routes = routing, {}
            return old
        self.release()
        self._batch = _Batch(self._decoder, sampling, routing, self.stop_ids, form, rows=wanted, max_length=length)
        return self._batch

    def _run(self, batch: _Batch, sequences: list[_Sequence]) -> list[Completion]:
        made: dict[int, Completion] = {}
        waiting, running = list(range(len(sequences)))[::-1], {}  # sequence by row
        rows = batch.num_rows
        while waiting or running:
            free = [row for row in range(rows) if row not in running]
            if waiting and len(free) >= min(len(waiting), max(1, rows // 8)):
                starting = [waiting.pop() for _ in range(min(len(free), len(waiting)))]
                running |= dict(zip(free, starting, strict=False))
                batch.start(free[: len(starting)], [sequences[i] for i in starting])
            if not waiting and (fewer := batch.fewer(len(running), rows)):
                order = sorted(running)
                batch.keep(order, fewer)
                running = {place: running[row] for place, row in enumerate(order)}
                rows = fewer
            batch.steps(rows)
            for row, completion in batch.collect(running).items():
                made[running.pop(row)] = completion
        return [made[i] for i in range(len(sequences))]


@dataclass(frozen=True)
class _Sequence:
    """One completion to draw."""

    number: int
    """Of its prompt."""
    prompt: tuple[int, ...]
    key: int
    """Of its random numbers."""
    room: int
    """Tokens that it may draw."""


class _Batch:
    """Buffers of a rollout, and the step over them, which serve calls of one ``form``."""

    def __init__(self, decoder: Decoder, sampling: SamplingParams, routing, stop_ids, form, *, rows, max_length):
        self.decoder, self.sampling, self.routing, self.form = decoder, sampling, routing, form
        model = decoder.model
        device = model.device
        self.on_gpu = device.type == "cuda"
        dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
        self.rows_wanted = rows
        self.num_rows = _rows_that_fit(rows, max_length, decoder, dtype) if self.on_gpu else rows
        self.cache = KVCache(decoder.layers, self.num_rows, max_length, device=device, dtype=dtype)
        self.rows = Rows(self.num_rows, sampling.max_new_tokens, stop_ids, device)
        self.head = head_of(model)
        if torch.is_autocast_enabled(device.type):
            self.head["weight"] = self.head["weight"].to(dtype)  # once, not at every step
        captures = self.on_gpu and decoder.waits_for_host() is None
        self.graphs = StepGraphs(self._step, enabled=captures)
        self.longest, self.left = torch.zeros(2, self.num_rows, dtype=torch.long)
        """On the host, as if no row ever stopped: tokens that each row holds, and that it may still draw."""
        self.prompt_routes: dict[int, RoutingRecord] = {}
        """Of the prompt in each row."""

    def start(self, rows: list[int], sequences: list[_Sequence]) -> None:
        """Prefills the prompts of the sequences, puts these into rows, and draws their first tokens."""
        prompts = {s.number: s.prompt for s in sequences}
        numbers = sorted(prompts, key=lambda number: len(prompts[number]))
        first = 0
        while first < len(numbers):
            last = first + 1
            while last < len(numbers) and (last + 1 - first) * len(prompts[numbers[last]]) <= PREFILL_TOKENS:
                last += 1
            part = {number: place for place, number in enumerate(numbers[first:last])}
            chosen = [i for i, s in enumerate(sequences) if s.number in part]
            self._prefill([prompts[n] for n in part], part, [rows[i] for i in chosen], [sequences[i] for i in chosen])
            first = last

    def _prefill(self, prompts, place_of, rows, sequences) -> None:
        device = self.cache.lengths.device
        lengths = torch.tensor([len(p) for p in prompts], device=device)
        ids = pad_sequence([torch.tensor(p) for p in prompts], batch_first=True).to(device)
        to = {"rows": torch.tensor(rows, device=device), "lengths": lengths}
        to["sources"] = sources = torch.tensor([place_of[s.number] for s in sequences], device=device)
        with recording(self.routing) as forwards:
            hidden = self.decoder.prefill(ids, lengths, lambda layer, *pair: self.cache.load(layer, *pair, **to))
        for record in forwards:
            self._take_routes(record.to("cpu"), rows, [place_of[s.number] for s in sequences], list(map(len, prompts)))
        keys = torch.tensor([s.key for s in sequences], device=device)
        self.rows.start(to["rows"], keys, torch.tensor([s.room for s in sequences], device=device))
        self.cache.lengths[to["rows"]] = lengths[sources]
        self.longest[rows] = torch.tensor([len(s.prompt) for s in sequences])
        self.left[rows] = torch.tensor([s.room - 1 for s in sequences])
        self._draw(to["rows"], hidden[sources, lengths[sources] - 1])

    def _take_routes(self, record: RoutingRecord, rows: list[int], places: list[int], lengths: list[int]) -> None:
        if self.rows.routes is None:
            _, _, layers, slots = record.indices.shape
            shape = (*self.rows.tokens.shape, layers, slots)
            self.rows.routes = torch.full(shape, -1, dtype=record.indices.dtype, device=self.rows.tokens.device)
        for row, place in zip(rows, places, strict=True):
            self.prompt_routes[row] = record.rows(slice(place, place + 1)).resize(lengths[place])

    def steps(self, rows: int) -> None:
        """Some steps over the first rows; running ones get as many tokens."""
        for _ in range(min(STEPS_BETWEEN_LOOKS if self.on_gpu else 1, int(self.left[:rows].max()))):
            self.longest[:rows] += 1
            self.left[:rows] -= 1
            self.cache.longest = int(self.longest[:rows].max())
            self.graphs.run(rows)

    def _step(self, rows: int) -> None:
        where = slice(0, rows)
        with recording(self.routing) as forwards:
            hidden = self.decoder.forward(self.rows.token[where], self.cache)
        for record in forwards:
            self.rows.append_routes(where, record.indices[:, 0])
        self.cache.lengths[where] += self.rows.live[where]
        self._draw(where, hidden)

    def _draw(self, where: Where, hidden: torch.Tensor) -> None:
        tokens, logps = draw(head_logits(hidden, **self.head), self.rows.uniform(where), self.sampling)
        self.rows.append(where, tokens, logps)

    def collect(self, running: Iterable[int]) -> dict[int, Completion]:
        """Completions of the running rows that have finished, by row."""
        live = self.rows.live.tolist()
        done = [row for row in running if not live[row]]
        if not done:
            return {}
        places = torch.tensor(done, device=self.rows.live.device)
        stores = (self.rows.tokens, self.rows.logps, self.rows.counts, self.rows.stopped)
        tokens, logps, counts, stopped = (store[places].tolist() for store in stores)
        routes = None if self.rows.routes is None else self.rows.routes[places].cpu()
        made = {}
        for i, row in enumerate(done):
            n, reason = counts[i], "stop" if stopped[i] else "length"
            own = None if routes is None else self._routes(row, routes[i, : n - 1])
            made[row] = Completion(tuple(tokens[i][:n]), tuple(logps[i][:n]), reason, routes=own)
        self.longest[done] = self.left[done] = 0
        return made

    def _routes(self, row: int, drawn: torch.Tensor) -> RoutingRecord:
        """Of prompt and completion, -1 for the last token, which was never forwarded."""
        prompt = self.prompt_routes.pop(row)
        both = replace(prompt, indices=torch.cat([prompt.indices, drawn[None]], 1))
        return both.resize(both.indices.shape[1] + 1)

    def fewer(self, running: int, rows: int) -> int | None:
        """Rows to go on with when so many of ``rows`` are running and none is waiting; None to leave them."""
        wanted = bucket(running) if self.on_gpu else running
        return wanted if running and wanted <= (rows // 2 if self.on_gpu else 3 * rows // 4) else None

    def keep(self, order: list[int], rows: int) -> None:
        """Moves these rows to the front; the rest of the first ``rows`` stays finished."""
        places = torch.tensor(order, device=self.rows.live.device)
        self.cache.keep(places)
        self.rows.keep(places)
        self.prompt_routes = {place: self.prompt_routes[row] for place, row in enumerate(order) if self.prompt_routes}
        for count in (self.longest, self.left):
            count[: len(order)] = count[order]
            count[len(order) :] = 0


def _rows_that_fit(rows: int, max_length: int, decoder: Decoder, dtype: torch.dtype) -> int:
    """Rows whose keys, values and logits fit the free memory of the GPU."""
    device = decoder.model.device
    logits_bytes = 3 * 4 * decoder.model.config.get_text_config().vocab_size
    per_row = bytes_per_row(decoder.layers.values(), max_length, dtype) + logits_bytes
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = SHARE_OF_FREE_MEMORY * (torch.cuda.mem_get_info(device)[0] + unused)
    fit = int(free // per_row)
    if fit < 1:
        raise RuntimeError(
            f"keys and values of a sequence of {max_length} tokens must fit the GPU, got {per_row / 2**30:.2f} GiB for "
            f"{free / 2**30:.2f} GiB free; lower max_new_tokens, or free memory before the rollout"
        )
    return min(rows, fit)


def _compute_dtype(model: PreTrainedModel) -> AbstractContextManager:
    """Under autocast the experts' weights are rounded once for the whole rollout."""
    device = model.device.type
    autocast = torch.is_autocast_enabled(device)
    return experts_in(model, torch.get_autocast_dtype(device)) if autocast else nullcontext()
