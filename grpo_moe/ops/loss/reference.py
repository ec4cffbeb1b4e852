"""Log-probabilities of the target tokens from the full logits [N, V]: the specification of `token_logps`, for tests."""

from __future__ import annotations

import torch


def token_logps_reference(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """As `grpo_moe.ops.loss.token_logps`, by plain autograd on logits held whole in fp32 (fp64 for fp64 input)."""
    dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    logits = hidden_states.to(dtype) @ lm_head_weight.to(dtype).T  # [N, V]
    if bias is not None:
        logits = logits + bias.to(dtype)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    all_logps = torch.log_softmax(logits / temperature, dim=-1)
    logps = all_logps.gather(-1, target_ids.long()[:, None]).squeeze(-1)
    if not return_entropy:
        return logps
    surprise = all_logps.masked_fill(all_logps == -torch.inf, 0)  # a token of probability 0 adds nothing
    return logps, -(all_logps.exp() * surprise).sum(-1)
