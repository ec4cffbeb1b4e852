"""Attention whose softmax denominator holds one learned sink logit per head: the exact form in plain PyTorch."""

from __future__ import annotations

import torch


def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Grouped-query attention; each sink takes probability from its head and contributes no value.

    Args:
        query: [B, heads, T, D].
        key, value: [B, kv_heads, S, D] and [B, kv_heads, S, DV]; head h reads kv head ``h // (heads // kv_heads)``.
        mask: bool, broadcastable to [B, T, S], True where the query may see the key. A query that sees no key gives
            zeros with a sink and an average of the values without; neither is NaN.
        sinks: [heads] logits, or None.
        scale: multiplies the scores; 1/sqrt(D) by default.
        softcap: bounds them: softcap * tanh(score / softcap); None leaves them.

    Returns:
        [B, heads, T, DV] in the query's dtype; the softmax runs in fp32 or wider.

    Source: gpt-oss model card (attention sinks), arXiv 2309.17453.
    """
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    group = heads // kv_heads
    grouped = query.reshape(batch, kv_heads, group * queries, dim) * (dim**-0.5 if scale is None else scale)
    scores = (grouped @ key.transpose(-1, -2)).view(batch, kv_heads, group, queries, keys)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~mask[:, None, None], torch.finfo(scores.dtype).min)
    if sinks is None:
        weights = scores.softmax(-1)
    else:
        columns = sinks.to(scores.dtype).view(1, kv_heads, group, 1, 1).expand(batch, -1, -1, queries, 1)
        weights = torch.cat([scores, columns], dim=-1).softmax(-1)[..., :-1]
    weights = weights.to(value.dtype).reshape(batch, kv_heads, group * queries, keys)
    return (weights @ value).view(batch, heads, queries, value.shape[-1])
