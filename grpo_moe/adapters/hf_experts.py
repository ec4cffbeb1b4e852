"""Registers our experts in transformers' ExpertsInterface, so that a model selects them by name."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from grpo_moe.ops import moe_experts


def run_experts(module, hidden_states, top_k_index, top_k_weights, *, name: str, impl: str) -> torch.Tensor:
    """The interface's function ``name`` for an ``impl`` of :func:`moe_experts`: hidden [N, H], index, weights [N, K].

    Raises:
        ValueError: an experts module without a silu gate, with biases, or in another layout; names it.
    """
    plain = module.has_gate and not module.has_bias and not module.is_transposed and module.is_concatenated
    if not plain or not _is_silu(module):
        raise ValueError(
            f'experts_implementation="{name}" must be used with bias-free [gate; up] silu experts, got '
            f'{type(module).__name__}; use transformers\' "grouped_mm" or "eager" for this model'
        )
    return moe_experts(hidden_states, module.gate_up_proj, module.down_proj, top_k_index, top_k_weights, impl=impl)


def _is_silu(module) -> bool:
    default_gate = type(module)._apply_gate.__name__ == "_default_apply_gate"
    act = getattr(module, "act_fn", None)
    return default_gate and (act is F.silu or type(act).__name__ in ("SiLU", "SiLUActivation"))


for name, impl in {"stacked": "stacked", "fused": "fused", "grpo_moe": "fused"}.items():
    ALL_EXPERTS_FUNCTIONS.register(name, partial(run_experts, name=name, impl=impl))
