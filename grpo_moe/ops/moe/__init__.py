"""Mixture-of-experts feed-forward: one public function, its implementations behind a name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from .activations import gated_activation
from .reference import check_index, stacked_experts

IMPLEMENTATIONS = ("fused", "stacked")

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
    impl: str = "fused",
    memory_efficient: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    check: bool = False,
) -> torch.Tensor:
    """Sends every token through its top-k gated experts and sums their outputs by the routing weights.

    Sums over slots and inside the products are float32 or wider and in a fixed order: results repeat to the bit.
    Under autocast the floating inputs are rounded to its dtype.

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
        impl: "fused", Triton kernels on a CUDA GPU that never wait for the host: a CUDA graph replays any routing. On
            a CPU, for float64 and for an activation of your own it is "stacked", a PyTorch loop over the experts that
            hold tokens: the specification.
        memory_efficient: with the kernels, the backward pass overwrites the pre-activations: a second one through the
            same graph raises RuntimeError.
        alpha, limit: of "gpt_oss".
        check: look at the indices on a GPU too, which waits for the device; on a CPU they are always checked. An index
            outside of -1..E is otherwise skipped there.

    Returns:
        [N, H] in the dtype of ``hidden_states``.

    Raises:
        ValueError: a shape, name or index that breaks the rules above.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}; check the spelling")
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias)
    _check_inputs(*tensors, top_k_index, transposed)
    act = gated_activation(activation, layout, alpha=alpha, limit=limit)
    if check:
        check_index(top_k_index, len(gate_up_proj))
    if impl == "stacked" or callable(activation) or not _triton_fits(hidden_states):
        hidden, up, down, weights, up_bias, down_bias = tensors
        biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
        return stacked_experts(hidden, up, down, top_k_index, weights, act=act, transposed=transposed, **biases)
    from .fused import fused_experts  # triton exists on Linux only

    options = {"activation": activation, "layout": layout, "alpha": alpha, "limit": limit}
    hidden, up, down, weights, up_bias, down_bias = _autocast(tensors)
    out = fused_experts(
        hidden,
        up,
        down,
        top_k_index,
        weights,
        gate_up_bias=up_bias,
        down_bias=down_bias,
        transposed=transposed,
        memory_efficient=memory_efficient,
        **options,
    )
    return out.to(hidden_states.dtype)


def _triton_fits(hidden_states: torch.Tensor) -> bool:
    if hidden_states.dtype == torch.float64 or importlib.util.find_spec("triton") is None:
        return False
    return hidden_states.is_cuda


def _autocast(tensors):
    """The floating inputs in one dtype: autocast's, or that of the hidden states."""
    hidden_states = tensors[0]
    device, dtype = hidden_states.device.type, hidden_states.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return [None if x is None else x.to(dtype) for x in tensors]


def _check_inputs(hidden, gate_up_proj, down_proj, top_k_weights, up_bias, down_bias, top_k_index, transposed):
    for name, x, dims in (
        ("hidden_states", hidden, "[N, H]"),
        ("gate_up_proj", gate_up_proj, "[E, 2I, H] or [E, H, 2I]"),
        ("down_proj", down_proj, "[E, H, I] or [E, I, H]"),
        ("top_k_index", top_k_index, "[N, K]"),
        ("top_k_weights", top_k_weights, "[N, K]"),
    ):
        if x.ndim != dims.split(" or ")[0].count(",") + 1:
            raise ValueError(f"{name} must be {dims}, got shape {tuple(x.shape)}; flatten or unflatten it")
    if top_k_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"top_k_index must be int32 or int64, got {top_k_index.dtype}; cast it")
    (tokens, width), slots = hidden.shape, top_k_index.shape[1]
    experts, intermediate = down_proj.shape[0], down_proj.shape[1 if transposed else 2]
    wide, tall = (2 * intermediate, width), (width, intermediate)
    expected = {
        "gate_up_proj": (gate_up_proj, (experts, *(wide[::-1] if transposed else wide))),
        "down_proj": (down_proj, (experts, *(tall[::-1] if transposed else tall))),
        "top_k_index": (top_k_index, (tokens, slots)),
        "top_k_weights": (top_k_weights, (tokens, slots)),
        "gate_up_bias": (up_bias, (experts, 2 * intermediate)),
        "down_bias": (down_bias, (experts, width)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be of shape {shape}, got {tuple(tensor.shape)}; see layout and transposed")
    if not torch.is_autocast_enabled(hidden.device.type):
        for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
            x = expected[name][0]
            if x is not None and x.dtype != hidden.dtype:
                raise ValueError(f"{name} must be {hidden.dtype} as hidden_states, got {x.dtype}; cast it or autocast")
