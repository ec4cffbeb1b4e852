"""Mixture-of-experts layer of GPT-OSS-Lite: softmax router, routed SwiGLU experts, shared experts, balance loss."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from transformers.integrations.moe import use_experts_implementation

from grpo_moe.ops import moe_experts


class GptOssLiteRouter(nn.Module):
    """Linear router; softmax over all experts in fp32, top-k, weights renormalised to sum to 1."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, hidden_states: torch.Tensor, top_k_index: torch.Tensor | None = None):
        """hidden_states [N, H] -> router_logits [N, E] (fp32 or wider), top_k_weights [N, K], top_k_index [N, K].

        A given ``top_k_index`` is used as it is, with weights from the live scores: nothing is routed twice.
        """
        dtype = torch.promote_types(hidden_states.dtype, torch.float32)
        with torch.autocast(hidden_states.device.type, enabled=False):
            router_logits = F.linear(hidden_states.to(dtype), self.weight.to(dtype))
        scores = router_logits.softmax(-1)
        if top_k_index is None:
            top_k_index = scores.detach().topk(self.top_k, dim=-1).indices  # saves nothing that a recompute would miss
        weights = scores.gather(1, top_k_index)
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-6)
        return router_logits, weights.to(hidden_states.dtype), top_k_index


@use_experts_implementation
class GptOssLiteExperts(nn.Module):
    """Routed SwiGLU experts, dispatched through transformers' experts interface."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = config.num_experts
        width, hidden = config.intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(config.num_experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(config.num_experts, hidden, width))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """hidden_states [N, H] -> [N, H]; the "eager" implementation of the interface."""
        return moe_experts(hidden_states, self.gate_up_proj, self.down_proj, top_k_index, top_k_weights, impl="stacked")


class GptOssLiteSharedExperts(nn.Module):
    """The shared experts as one SwiGLU of their joint width: every token visits it, unweighted."""

    def __init__(self, config):
        super().__init__()
        width = config.num_shared_experts * config.intermediate_size
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(self, hidden_states):
        """hidden_states [N, H] -> [N, H]."""
        return self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class GptOssLiteMoE(nn.Module):
    """Routed and shared experts of one layer."""

    def __init__(self, config):
        super().__init__()
        self.gate = GptOssLiteRouter(config)
        self.experts = GptOssLiteExperts(config)
        self.shared_experts = GptOssLiteSharedExperts(config) if config.num_shared_experts else None

    def forward(self, hidden_states, token_mask=None, top_k_index=None):
        """hidden_states [B, T, H] -> output [B, T, H], router_logits [N, E], top_k_index [N, K].

        N counts the tokens where ``token_mask`` [B, T] is True (all without a mask): padding reaches no expert.
        """
        tokens = hidden_states.flatten(0, 1) if token_mask is None else hidden_states[token_mask]
        router_logits, top_k_weights, top_k_index = self.gate(tokens, top_k_index)
        out = self.experts(tokens, top_k_index, top_k_weights)
        if self.shared_experts is not None:
            out = out + self.shared_experts(tokens)
        if token_mask is None:
            return out.view_as(hidden_states), router_logits, top_k_index
        return torch.zeros_like(hidden_states).masked_scatter(token_mask[..., None], out), router_logits, top_k_index


def load_balancing_loss(router_logits: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
    """E * sum_e f_e P_e of one layer: 1 when balanced, E when one expert takes all; 0 without tokens.

    Args:
        router_logits: [N, E] of the valid tokens.
        top_k_index: [N, K]; f_e is each expert's share of the N * K assignments, P_e its mean probability.

    Source: Switch Transformers, arXiv 2101.03961, section 2.2.
    """
    tokens, experts = router_logits.shape
    flat, ones = top_k_index.flatten(), router_logits.new_ones(top_k_index.numel())
    share = router_logits.new_zeros(experts).index_add(0, flat, ones) / max(flat.numel(), 1)
    mean_probability = router_logits.softmax(-1).sum(0) / max(tokens, 1)
    return experts * (share * mean_probability).sum()
