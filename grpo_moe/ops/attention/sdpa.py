"""Attention with learned sinks by PyTorch's SDPA under any mask: exact everywhere, but needs a whole float mask."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def sdpa_sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """:func:`~grpo_moe.ops.sink_attention`: a sink is one more key, of value zero and score ``sinks``.

    Its float mask has [B, heads, T, S + 1] elements.

    Args:
        query: [B, heads, T, D].
        key, value: [B, kv_heads, S, D]; head h reads kv head ``h // (heads // kv_heads)``.
        mask: [B or 1, 1 or heads, T, S or more], bool (True where a query sees a key) or added to the scores; None is
            causal, the last query at the last key.
        sinks: [heads] logits, or None.
        scale: multiplies the scores; 1/sqrt(D) by default.
        dropout: probability at which a probability is dropped.

    Returns:
        [B, heads, T, D].

    Source: gpt-oss model card (attention sinks).
    """
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    group = heads // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    if mask is None:
        mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)[None, None]
    if mask.dtype == torch.bool:
        mask = query.new_zeros(mask.shape).masked_fill(~mask, torch.finfo(query.dtype).min)
    scores = mask[..., :keys].expand(batch, heads, queries, keys)
    if sinks is not None:
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        columns = sinks.to(query.dtype).view(1, heads, 1, 1).expand(batch, -1, queries, 1)
        scores = torch.cat([scores, columns], dim=-1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=scores, dropout_p=dropout, scale=scale)
