"""A token from logits, and its log-probability: temperature, then inversion of the cumulative distribution."""

from __future__ import annotations

import torch


def sample_tokens(logits: torch.Tensor, uniform: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token a row: the first whose cumulative probability exceeds ``uniform``.

    On a GPU by Triton, in two passes over float32 logits, without a tensor of probabilities.

    Args:
        logits: [B, V].
        uniform: [B] float64 in [0, 1). One number a token makes a draw independent of the rest of the batch.
        temperature: divides the logits; 0 takes the most likely token, whose log-probability is that at 1.

    Returns:
        [B] int64 ids and [B] float32 log-probabilities of the distribution that was drawn from.
    """
    if logits.is_cuda and logits.dtype == torch.float32:
        from .sampling_kernels import sample

        return sample(logits, uniform, temperature)
    logps = (logits.float() / (temperature or 1.0)).log_softmax(-1)
    tokens = logps.argmax(-1) if temperature == 0 else invert(logps, uniform)
    return tokens, logps.gather(1, tokens[:, None])[:, 0]


def invert(logps: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [B]: the first whose cumulative probability, of logps [B, V], exceeds ``uniform`` [B]."""
    cumulative = logps.double().exp().cumsum(-1)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logps.shape[-1] - 1)
