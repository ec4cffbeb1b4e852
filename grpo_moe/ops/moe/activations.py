"""Gated activations of MoE experts, from the joint gate/up projection to the input of the down projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from grpo_moe.checks import is_finite, is_number

ACTIVATIONS = ("silu", "gelu_tanh", "gpt_oss")
GATED_LAYOUTS = ("concatenated", "interleaved")
LAYOUTS = (*GATED_LAYOUTS, "joint")


def silu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SwiGLU: silu(gate) * up. Source: arXiv 2002.05202."""
    return F.silu(gate) * up


def gelu_tanh(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GEGLU with the tanh approximation. Source: arXiv 2002.05202."""
    return F.gelu(gate, approximate="tanh") * up


def gpt_oss(gate: torch.Tensor, up: torch.Tensor, *, alpha: float, limit: float) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(alpha * gate), gate clamped above, up on both sides. Source: gpt-oss reference code."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def check_clamp(alpha: float, limit: float) -> tuple[float, float]:
    """Both as Python's floats; raises ValueError unless alpha is finite and limit above 0, or inf for no clamp."""
    if not is_finite(alpha):
        raise ValueError(f"alpha must be a finite number, got {alpha!r}; 1.702 is GPT-OSS's")
    if not (is_number(limit) and limit > 0):
        raise ValueError(f"limit must be a number above 0, got {limit!r}; 7.0 is GPT-OSS's, inf does not clamp")
    return float(alpha), float(limit)


def check_output(output: torch.Tensor, expected: tuple[int, int]) -> None:
    """Raises ValueError unless a function given as activation returned that shape [M, I]."""
    if not isinstance(output, torch.Tensor) or output.shape != expected:
        got = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        raise ValueError(f"activation must return shape {expected}, got {got}; see layout in moe_experts")


def gated_activation(
    activation: str | Callable, layout: str, *, alpha: float = 1.702, limit: float = 7.0
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns the function from gate_up [M, 2I] to [M, I] that the two names stand for.

    Raises:
        ValueError: an activation or layout that is not known, or "joint" with the name of an activation.
    """
    known = {"silu": silu, "gelu_tanh": gelu_tanh, "gpt_oss": partial(gpt_oss, alpha=alpha, limit=limit)}
    if not callable(activation) and not (isinstance(activation, str) and activation in known):
        raise ValueError(
            f"activation must be one of {', '.join(known)} or a function, got {activation!r}; see moe_experts"
        )
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}; see moe_experts")
    if layout == "joint" and not callable(activation):
        raise ValueError(f"activation must be a function with layout 'joint', got {activation!r}; see moe_experts")
    function = activation if callable(activation) else known[activation]
    if layout == "joint":
        return function
    if layout == "concatenated":
        return lambda gate_up: function(*gate_up.chunk(2, dim=-1))
    return lambda gate_up: function(gate_up[..., ::2], gate_up[..., 1::2])
