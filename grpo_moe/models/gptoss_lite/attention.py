"""Attention of GPT-OSS-Lite: grouped queries, rotary positions, learned sinks, alternating windows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_moe.ops import sink_attention
from grpo_moe.ops.attention.flex import block_mask

from .rope import apply_rotary

SINK_RANGE = (-10.0, 15.0)


class AttentionMasks:
    """Which query sees which key, for both kinds of layer, from token positions alone; each mask is built once."""

    def __init__(
        self,
        query_positions: torch.Tensor,
        key_positions: Callable[[str, int], torch.Tensor],
        window: int,
        segments: torch.Tensor | None = None,
        *,
        blocks: bool = False,
    ):
        """
        Args:
            query_positions: [B, T] position of each query, -1 for padding.
            key_positions: function of (kind, S) to the positions [B, S] of the keys, -1 where there is none.
            window: positions that a "sliding_attention" query sees, itself included.
            segments: [B, T] sequence number of each token in a packed row (keys are then the same tokens), or None.
            blocks: make block masks for FlexAttention.
        """
        self.query_positions, self.key_positions = query_positions, key_positions
        self.window, self.segments, self.blocks = window, segments, blocks
        self._built: dict[tuple[str, int], torch.Tensor | BlockMask] = {}

    def __call__(self, kind: str, num_keys: int) -> torch.Tensor | BlockMask:
        """Bool mask [B, 1, T, S], True where the query may see the key, or the block mask that says the same."""
        if (kind, num_keys) not in self._built:
            visible = self._visible(kind, num_keys)
            batch, width = self.query_positions.shape
            device = self.query_positions.device
            if self.blocks:
                self._built[kind, num_keys] = block_mask(visible, batch, width, num_keys, device)
            else:
                rows, queries, keys = (torch.arange(n, device=device) for n in (batch, width, num_keys))
                mask = visible(rows[:, None, None], None, queries[:, None], keys)
                self._built[kind, num_keys] = mask[:, None]
        return self._built[kind, num_keys]

    def _visible(self, kind, num_keys):
        """f(row, head, query, key) of their numbers."""
        queries, keys, segments = self.query_positions, self.key_positions(kind, num_keys), self.segments
        window = self.window if kind == "sliding_attention" else None

        def visible(b, h, q, k):
            query, key = queries[b, q], keys[b, k]
            seen = (key >= 0) & (key <= query)
            if window is not None:
                seen = seen & (query - key < window)
            return seen if segments is None else seen & (segments[b, q] == segments[b, k])

        return visible


class GptOssLiteAttention(nn.Module):
    """Multi-head attention of one layer; even layers see a window, odd layers everything before."""

    def __init__(self, config, layer: int):
        super().__init__()
        self.config, self.layer_idx, self.kind = config, layer, config.layer_types[layer]
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.kv_proj = nn.Linear(config.hidden_size, 2 * self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.sinks = nn.Parameter(torch.zeros(self.heads)) if config.attention_sinks else None

    def forward(self, hidden_states, rotary, masks: AttentionMasks | None, cache=None, kv_cache=None):
        """hidden_states [B, T, hidden] -> [B, T, hidden]; no masks with ``kv_cache``, which has one token a row."""
        batch, width, _ = hidden_states.shape
        query = self.q_proj(hidden_states).view(batch, width, self.heads, self.head_dim).transpose(1, 2)
        key_value = self.kv_proj(hidden_states).view(batch, width, 2, self.kv_heads, self.head_dim)
        key, value = key_value.transpose(1, 3).unbind(2)  # each [B, kv_heads, T, D]
        query, key = apply_rotary(query, *rotary[self.kind]), apply_rotary(key, *rotary[self.kind])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        sinks = None if self.sinks is None else self.sinks.clamp(*SINK_RANGE)
        mask = None if masks is None else masks(self.kind, key.shape[2])
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        out, _ = attend(self, query, key, value, mask, s_aux=sinks, kv_cache=kv_cache)
        return self.o_proj(out.reshape(batch, width, -1))


def eager_attention_forward(module, query, key, value, attention_mask, s_aux=None, **kwargs):
    """transformers' attention function "eager": query [B, heads, T, D], bool mask [B, 1, T, S] -> [B, T, heads, D]."""
    return sink_attention(query, key, value, mask=attention_mask[:, 0], sinks=s_aux).transpose(1, 2), None
