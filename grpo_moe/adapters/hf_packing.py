"""Sequences of a padded batch as one row without padding, in a way that keeps them from seeing each other."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask


def packed_inputs(
    model: PreTrainedModel, input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> dict[str, torch.Tensor | dict | None]:
    """Arguments for the base model: the N tokens under the mask, row after row, as one sequence.

    transformers tells packed sequences apart by positions that start again, if neither a mask nor a cache is given.
    GPT-OSS does not hand its positions to the masks, so it gets the masks themselves. Whether it works for a model is
    found out by :func:`grpo_moe.adapters.hf_head.check_padding_free`.

    Args:
        model: the causal LM.
        input_ids, attention_mask: [B, S].

    Returns:
        ``input_ids`` and ``position_ids`` [1, N], ``attention_mask``; pass ``use_cache=False`` beside them.
    """
    mask = attention_mask.bool()
    position_ids = (mask.cumsum(1) - 1)[mask][None]  # [1, N]
    masks = None
    if model.config.model_type == "gpt_oss":
        embeds = torch.empty(*position_ids.shape, 0, dtype=model.dtype, device=position_ids.device)
        masks = {
            "full_attention": create_causal_mask(model.config, embeds, None, None, position_ids),
            "sliding_attention": create_sliding_window_causal_mask(model.config, embeds, None, None, position_ids),
        }
    return {"input_ids": input_ids[mask][None], "position_ids": position_ids, "attention_mask": masks}
