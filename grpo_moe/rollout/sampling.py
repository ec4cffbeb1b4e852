"""From logits to a token: temperature, top-k and top-p, then inversion of the cumulative distribution."""

from __future__ import annotations

import torch

from grpo_moe.types import SamplingParams


def sampling_logps(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Log-probabilities [B, V] in fp32 of the distribution that tokens are drawn from.

    Temperature first, then top-k, then top-p, as transformers does; the kept tokens are renormalised and the others
    are -inf. Greedy (temperature 0) reports the untruncated distribution at temperature 1.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.log_softmax(-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        kth = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        dropped = (before >= sampling.top_p).scatter(-1, order, before >= sampling.top_p)
        logits = logits.masked_fill(dropped, -torch.inf)
    return logits.log_softmax(-1)


def draw(logps: torch.Tensor, uniform: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Token ids [B]: the most likely one when greedy, else the first whose cumulative probability exceeds ``uniform``.

    Args:
        logps: [B, V] from :func:`sampling_logps`.
        uniform: [B] float64 in [0, 1). One number a token makes a draw independent of the rest of the batch.
    """
    if sampling.temperature == 0:
        return logps.argmax(-1)
    cumulative = logps.double().exp().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logps.shape[-1] - 1)
