"""Attention with learned sinks for transformers' models that have them (GPT-OSS), without a kernel from the hub."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

SINK_ATTENTION = "grpo_moe_sinks"
"""For ``attn_implementation``; transformers dispatches on parts of names, so it must hold no name of another."""


def sink_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function by PyTorch's SDPA: a sink is one more key, of value zero and score ``s_aux``.

    Exact, gradients of the sinks included. Its float mask has [B, heads, T, S + 1] elements.

    Args:
        module: the attention module, unused.
        query: [B, heads, T, D].
        key, value: [B, kv_heads, S, D].
        attention_mask: [B or 1, 1 or heads, T, S or more], bool (True where a query sees a key) or added to the scores;
            None is causal.
        dropout, scaling: of the probabilities, of the scores (1/sqrt(D) by default).
        s_aux: [heads] sink logits, or None.

    Returns:
        [B, T, heads, D], and None for the weights.

    Source: gpt-oss model card (attention sinks).
    """
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    group = heads // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    if attention_mask is None:
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        attention_mask = attention_mask[None, None]
    if attention_mask.dtype == torch.bool:
        lowest = torch.finfo(query.dtype).min
        attention_mask = query.new_zeros(attention_mask.shape).masked_fill(~attention_mask, lowest)
    scores = attention_mask[..., :keys].expand(batch, heads, queries, keys)
    if s_aux is not None:
        key, value = (F.pad(x, (0, 0, 0, 1)) for x in (key, value))
        columns = s_aux.to(query.dtype).view(1, heads, 1, 1).expand(batch, -1, queries, 1)
        scores = torch.cat([scores, columns], dim=-1)
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=scores, dropout_p=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(SINK_ATTENTION, sink_attention_forward)
AttentionMaskInterface.register(SINK_ATTENTION, sdpa_mask)


def packed_attention_masks(sequence_ids: torch.Tensor, window: int | None) -> dict[str, torch.Tensor]:
    """Masks under which the sequences of a packed row do not see each other, for a model that takes a dictionary.

    transformers' GPT-OSS lets packed sequences see each other if it is given ``position_ids`` alone.

    Args:
        sequence_ids: [B, T] integers, equal for the tokens of one sequence.
        window: tokens that a "sliding_attention" layer sees, the query included; None leaves that mask out.

    Returns:
        "full_attention" and, with a window, "sliding_attention": bool [B, 1, T, T], True where a query sees a key.
    """
    place = torch.arange(sequence_ids.shape[1], device=sequence_ids.device)
    behind = place[:, None] - place[None, :]
    same = sequence_ids[:, :, None] == sequence_ids[:, None, :]
    masks = {"full_attention": (same & (behind >= 0))[:, None]}
    if window is not None:
        masks["sliding_attention"] = (same & (behind >= 0) & (behind < window))[:, None]
    return masks


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
