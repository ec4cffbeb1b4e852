"""Hidden states of sequences that grow by a token: on the ring buffers of GPT-OSS-Lite, or on transformers' caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.models.gptoss_lite import GptOssLiteForCausalLM, RingCache
from grpo_moe.models.gptoss_lite.modeling import CACHE_FIELD
from grpo_moe.types import Prompt


class RingDecoder:
    """GPT-OSS-Lite: prompts padded on the right, windowed layers in buffers as long as their window.

    Args:
        model: the policy.
        prompts: P of them, run at once.
        max_new_tokens: that any sequence may grow by.
    """

    def __init__(self, model: GptOssLiteForCausalLM, prompts: Sequence[Prompt], max_new_tokens: int):
        self.model, device = model, model.device
        lengths = torch.tensor([len(p.input_ids) for p in prompts], device=device)
        ids = pad_sequence([torch.tensor(p.input_ids) for p in prompts], batch_first=True).to(device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        autocast = torch.is_autocast_enabled(device.type)
        self.cache = RingCache(
            model.config,
            len(prompts),
            ids.shape[1] + max_new_tokens,
            device=device,
            dtype=torch.get_autocast_dtype(device.type) if autocast else model.dtype,
        )
        hidden = model.model(input_ids=ids, attention_mask=mask, cache=self.cache).last_hidden_state
        self.cache.commit()
        self.hidden = hidden[torch.arange(len(prompts), device=device), lengths - 1]
        """[P, H] states that predict the first token of each prompt's completions."""

    def select(self, rows: torch.Tensor) -> None:
        """Goes on with these rows [N] of the batch, which may repeat."""
        self.cache.select(rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Adds a token to each row [N]; the states [N, H] that predict the next."""
        hidden = self.model.model(input_ids=tokens[:, None], cache=self.cache).last_hidden_state[:, -1]
        self.cache.commit()
        return hidden

    def prompt_routes(self, record: RoutingRecord) -> RoutingRecord:
        """The record of the first forward with the prompts' tokens at the left."""
        return record


class CacheDecoder:
    """Any transformers model whose layers cache keys and values alone: prompts padded on the left.

    Padding on the left leaves no holes between a prompt and its completion, which a sliding window would count.
    Arguments, attributes and methods as :class:`RingDecoder`.
    """

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Prompt], max_new_tokens: int):
        self.model, self.cache = model, DynamicCache(config=model.config)
        rows = [torch.tensor(p.input_ids) for p in prompts]
        ids = pad_sequence(rows, batch_first=True, padding_side="left").to(model.device)
        ones = [torch.ones_like(row) for row in rows]
        self.mask = pad_sequence(ones, batch_first=True, padding_side="left").to(model.device)
        self.prompt_mask = self.mask.bool()
        self.hidden = self._run(ids, (self.mask.cumsum(1) - 1).clamp(min=0))

    def select(self, rows: torch.Tensor) -> None:
        self.cache.batch_select_indices(rows)
        self.mask = self.mask[rows]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.mask = torch.cat([self.mask, torch.ones_like(self.mask[:, :1])], dim=1)
        return self._run(tokens[:, None], self.mask.sum(1, keepdim=True) - 1)

    def prompt_routes(self, record: RoutingRecord) -> RoutingRecord:
        return record.pack(self.prompt_mask).unpack(self.prompt_mask.flip(1))

    def _run(self, ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        inputs = {"input_ids": ids, "attention_mask": self.mask, "position_ids": position_ids, CACHE_FIELD: self.cache}
        return self.model.base_model(**inputs, use_cache=True).last_hidden_state[:, -1]
