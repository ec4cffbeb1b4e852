"""The gated activation in Triton: formulas, layouts, and the pass through it backwards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..triton_launch import INTERPRET, launch
from .routing import Routing, cdiv, next_power_of_2


@dataclass(frozen=True)
class Gate:
    """A gated activation that the kernels know, and the layout of its gate and up columns."""

    activation: str
    interleaved: bool
    alpha: float
    limit: float

    def options(self) -> dict:
        """Keyword arguments of a launch."""
        return {
            "ACTIVATION": self.activation,
            "INTERLEAVED": self.interleaved,
        }


def activate_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    weights: torch.Tensor,
    gate: Gate,
    routing: Routing,
    *,
    need_weighted: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Through the routing weights and the activation, from the down projection's input to the pre-activations.

    Args:
        grad: [num_rows, I] gradient of the activations, before the routing weights; overwritten.
        pre: [num_rows, 2I] pre-activations.
        weights: [N * K] routing weights by pair.
        gate: activation and layout.
        routing: of the rows.
        need_weighted: also return the weighted activations, for the gradient of the down projection.
        out: where the gradient of ``pre`` goes; may be ``pre`` itself.

    Returns:
        [num_rows, 2I] gradient of ``pre``; fp32 [N * K] gradient of ``weights``, 0 for a skipped slot; [num_rows, I]
        weight * activation, in the memory of ``grad``, or None. Rows after the last pair are garbage.
    """
    grad_weights = torch.zeros(routing.num_rows, dtype=torch.float32, device=pre.device)
    width = grad.shape[1]
    rows, columns = (16, 32) if INTERPRET else (4 if gate.interleaved else 8, 128)
    block = min(next_power_of_2(width), columns)
    # with fewer elements than threads some are read twice, and not before all threads have written
    in_place = INTERPRET or rows * block >= 128
    grad_pre = out if out is not None and in_place else torch.empty_like(pre)
    weighted = (grad if in_place else torch.empty_like(grad)) if need_weighted else None
    if grad.numel():
        launch(
            _activate_backward_kernel,
            (cdiv(routing.num_rows, rows), 1, 1),
            grad,
            pre,
            weights,
            routing.pair_of_row,
            routing.expert_offsets,
            grad_pre,
            grad if weighted is None else weighted,
            grad_weights,
            width,
            gate.alpha,
            gate.limit,
            E=routing.num_experts,
            ROWS=rows,
            BLOCK=block,
            NEED_WEIGHTED=need_weighted,
            **gate.options(),
        )
    return grad_pre, grad_weights, weighted


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def activation_and_slopes(g, u, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation, and its derivatives by gate and up."""
    if ACTIVATION == "gpt_oss":
        inside_g, inside_u = g <= limit, (u <= limit) & (u >= -limit)
        g = tl.where(g > limit, limit, g)  # a minimum would hide NaN
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        s = _sigmoid(alpha * g)
        out = (u + 1) * g * s
        by_g = tl.where(inside_g, (u + 1) * s * (1 + alpha * g * (1 - s)), 0.0)
        by_u = tl.where(inside_u, g * s, 0.0)
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        t = 2 * _sigmoid(2 * inner) - 1
        half = 0.5 * (1 + t)
        out = half * g * u
        slope = half + 0.5 * g * (1 - t * t) * 0.7978845608028654 * (1 + 3 * 0.044715 * g * g)
        by_g, by_u = slope * u, half * g
    else:
        s = _sigmoid(g)
        out = g * s * u
        by_g, by_u = u * s * (1 + g * (1 - s)), g * s
    return out, by_g, by_u


@triton.jit
def _load_gate_and_up(base, first, live, width, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """[R, BLOCK] gates and ups in fp32 from column ``first`` on; ``base`` [R, 1] points to rows of 2 * width."""
    if INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.load(base + column[None, :], mask=live & (column[None, :] < 2 * width), other=0.0).to(tl.float32)
        g, u = both.reshape(both.shape[0], BLOCK, 2).split()
    else:
        column = first + tl.arange(0, BLOCK)
        mask = live & (column[None, :] < width)
        g = tl.load(base + column[None, :], mask=mask, other=0.0).to(tl.float32)
        u = tl.load(base + width + column[None, :], mask=mask, other=0.0).to(tl.float32)
    return g, u


@triton.jit
def store_gate_and_up(base, g, u, first, live, width, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr):
    """The other way round, in the dtype of ``base``."""
    dtype: tl.constexpr = base.dtype.element_ty
    if INTERLEAVED:
        column = 2 * first + tl.arange(0, 2 * BLOCK)
        both = tl.join(g.to(dtype), u.to(dtype)).reshape(g.shape[0], 2 * BLOCK)
        tl.store(base + column[None, :], both, mask=live & (column[None, :] < 2 * width))
    else:
        column = first + tl.arange(0, BLOCK)
        mask = live & (column[None, :] < width)
        tl.store(base + column[None, :], g.to(dtype), mask=mask)
        tl.store(base + width + column[None, :], u.to(dtype), mask=mask)


@triton.jit
def _activate_backward_kernel(
    grad_ptr,
    pre_ptr,
    weights_ptr,
    pair_of_row_ptr,
    offsets_ptr,
    grad_pre_ptr,
    weighted_ptr,
    grad_weights_ptr,
    width,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NEED_WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < tl.load(offsets_ptr + E)
    pair = tl.load(pair_of_row_ptr + row, mask=live, other=0)
    weight = tl.load(weights_ptr + pair, mask=live, other=0.0).to(tl.float32)[:, None]
    line, inside = row[:, None].to(tl.int64), live[:, None]
    dtype: tl.constexpr = grad_pre_ptr.dtype.element_ty
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, width, BLOCK):
        n = first + tl.arange(0, BLOCK)
        place, mask = line * width + n[None, :], inside & (n[None, :] < width)
        grad = tl.load(grad_ptr + place, mask=mask, other=0.0).to(tl.float32)
        g, u = _load_gate_and_up(pre_ptr + line * 2 * width, first, inside, width, INTERLEAVED, BLOCK)
        out, by_g, by_u = activation_and_slopes(g, u, alpha, limit, ACTIVATION)
        out = out.to(dtype).to(tl.float32)  # as the forward pass multiplied it
        total += tl.sum(grad * out, 1)
        grad *= weight
        base = grad_pre_ptr + line * 2 * width
        store_gate_and_up(base, grad * by_g, grad * by_u, first, inside, width, INTERLEAVED, BLOCK)
        if NEED_WEIGHTED:
            tl.store(weighted_ptr + place, (out * weight).to(dtype), mask=mask)
    tl.store(grad_weights_ptr + pair, total, mask=live)
