"""Attention with learned sinks for transformers' models that have them (GPT-OSS), without a kernel from the hub."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import flex_attention_mask, sdpa_mask

from grpo_moe.ops.attention.flex import (
    MIN_QUERIES,
    SINK_ATTENTION,
    dense_mask,
    flex_sink_attention,
    room_for_graphs,
    supports_flex,
)
from grpo_moe.ops.attention.sdpa import sdpa_sink_attention


def sink_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BlockMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: FlexAttention under a block mask on a GPU, PyTorch's SDPA otherwise.

    SDPA also takes block masks where FlexAttention has no kernel: float64, dropout, fewer than 128 queries, D below 16.

    Args:
        module: the attention module, unused.
        query: [B, heads, T, D].
        key, value: [B, kv_heads, S, D].
        attention_mask: block mask, or [B or 1, 1 or heads, T, S or more], bool (True where a query sees a key) or added
            to the scores; None is causal, the last query at the last key.
        dropout, scaling: of the probabilities, of the scores (1/sqrt(D) by default).
        s_aux: [heads] sink logits, or None.

    Returns:
        [B, T, heads, D], and None for the weights.

    Source: gpt-oss model card (attention sinks).
    """
    if isinstance(attention_mask, BlockMask) and not dropout and supports_flex(query):
        out = flex_sink_attention(query, key, value, block_mask=attention_mask, sinks=s_aux, scale=scaling)
    else:
        mask = dense_mask(attention_mask) if isinstance(attention_mask, BlockMask) else attention_mask
        out = sdpa_sink_attention(query, key, value, mask=mask, sinks=s_aux, scale=scaling, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None


def sink_attention_mask(*, q_length: int, device: torch.device | str, **kwargs) -> torch.Tensor | BlockMask:
    """transformers' mask function for :func:`sink_attention_forward`; takes what its ``sdpa_mask`` takes.

    Returns:
        A block mask on a GPU, from 128 queries on, so that decoding needs none; otherwise bool [B, 1, T, S].
    """
    if torch.device(device).type == "cuda" and q_length >= MIN_QUERIES:
        with room_for_graphs(any_size=True):  # building the mask is compiled too, for each kind of mask
            return flex_attention_mask(q_length=q_length, device=device, **kwargs)
    # or None comes instead, which means the first query at the first key for a static cache, else the last at the last
    return sdpa_mask(q_length=q_length, device=device, **{**kwargs, "allow_is_causal_skip": False})


AttentionInterface.register(SINK_ATTENTION, sink_attention_forward)
AttentionMaskInterface.register(SINK_ATTENTION, sink_attention_mask)


@torch.no_grad()
def check_sinks(model: PreTrainedModel) -> None:
    """Compares a few logits with and without the model's sinks; models without sinks pass.

    Raises:
        ValueError: they are the same: the attention implementation leaves the sinks out.
    """
    sinks = [p for name, p in model.named_parameters() if name.endswith(".sinks")]
    if not sinks:
        return
    ids = torch.arange(3, 7, device=sinks[0].device)[None] % model.config.get_text_config().vocab_size
    was_training, kept = model.training, [x.detach().clone() for x in sinks]
    made = []
    try:
        model.eval()
        for logit in (20.0, -1e4):  # nearly all of the probability, and none
            for x in sinks:
                x.fill_(logit)
            made.append(model(input_ids=ids, use_cache=False).logits.float())
    finally:
        for x, before in zip(sinks, kept, strict=True):
            x.copy_(before)
        model.train(was_training)
    if torch.allclose(*made, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"attn_implementation must use the sinks of {type(model).__name__}, got "
            f'"{model.config._attn_implementation}", whose logits do not depend on them; load the model with '
            f'attn_implementation="{SINK_ATTENTION}" or "eager"'
        )
