"""Mixture-of-experts feed-forward: one public function, its implementations behind a name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .activations import gated_activation
from .reference import stacked_experts

IMPLEMENTATIONS = {"stacked": stacked_experts}

__all__ = ["IMPLEMENTATIONS", "moe_experts"]


def moe_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "silu",
    layout: str = "concatenated",
    transposed: bool = False,
    impl: str = "stacked",
    alpha: float = 1.702,
    limit: float = 7.0,
) -> torch.Tensor:
    """Sends every token through its top-k gated experts and sums their outputs by the routing weights.

    Args:
        hidden_states: [N, H].
        gate_up_proj: [E, 2I, H], or [E, H, 2I] when ``transposed``.
        down_proj: [E, H, I], or [E, I, H] when ``transposed``.
        top_k_index: [N, K] integer expert of each slot; -1 or E (the expert-parallel sentinel) skips the slot.
        top_k_weights: [N, K].
        gate_up_bias, down_bias: [E, 2I] and [E, H], or None. The down bias is weighted like the rest of the output.
        activation: "silu" (SwiGLU), "gelu_tanh", "gpt_oss" (clamped SwiGLU with ``alpha`` and ``limit``), or a
            function of (gate [M, I], up [M, I]) giving [M, I].
        layout: "concatenated" ([gate; up]) or "interleaved" (gate, up, gate, up, ...) along 2I.
        transposed: weights stand as [E, in, out].
        impl: "stacked", a PyTorch loop over the experts that hold tokens: the specification.

    Returns:
        [N, H] in the dtype of ``hidden_states``.

    Raises:
        ValueError: a shape, name or index that breaks the rules above.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {sorted(IMPLEMENTATIONS)}, got {impl!r}")
    _check_shapes(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, transposed)
    act = gated_activation(activation, layout, alpha=alpha, limit=limit)
    return IMPLEMENTATIONS[impl](
        hidden_states,
        gate_up_proj,
        down_proj,
        top_k_index,
        top_k_weights,
        gate_up_bias=gate_up_bias,
        down_bias=down_bias,
        act=act,
        transposed=transposed,
    )


def _check_shapes(hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, transposed) -> None:
    tokens, hidden = hidden_states.shape
    experts, intermediate = down_proj.shape[0], down_proj.shape[1 if transposed else 2]
    wide, tall = (2 * intermediate, hidden), (hidden, intermediate)
    expected = {
        "gate_up_proj": (gate_up_proj, (experts, *(wide[::-1] if transposed else wide))),
        "down_proj": (down_proj, (experts, *(tall[::-1] if transposed else tall))),
        "top_k_index": (top_k_index, (tokens, top_k_index.shape[-1])),
        "top_k_weights": (top_k_weights, tuple(top_k_index.shape)),
    }
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be of shape {shape}, got {tuple(tensor.shape)}; see layout and transposed")
