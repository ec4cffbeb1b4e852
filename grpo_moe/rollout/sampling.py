"""The distribution that tokens are drawn from: temperature, then top-k, top-p and min-p."""

from __future__ import annotations

import torch

from grpo_moe.ops.sampling import sample_tokens
from grpo_moe.types import SamplingParams


def draw(logits: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """A token a row, and its log-probability under the distribution that it was drawn from.

    Greedy (temperature 0) reports the untruncated distribution at temperature 1.

    Args:
        logits: [B, V].
        uniform: [B] float64 in [0, 1).

    Returns:
        [B] int64 and [B] float32.
    """
    if sampling.is_truncated:
        return sample_tokens(truncate(logits.float() / sampling.temperature, sampling), uniform, 1.0)
    return sample_tokens(logits, uniform, sampling.temperature)


def truncate(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Logits [B, V] with -inf for the tokens that top-k, then top-p, then min-p drop, as transformers drops them."""
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        dropped = probabilities.cumsum(-1) - probabilities >= sampling.top_p
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        logits = logits.masked_fill(probabilities < sampling.min_p * probabilities.amax(-1, keepdim=True), -torch.inf)
    return logits
