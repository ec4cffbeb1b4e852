"""Triton kernels of the gated activation: the formulas, and passes of their own beside torch's grouped_mm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .routing import INTERPRET, Routing

ROWS = 8  # of a program of the passes


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
            "alpha": self.alpha,
            "limit": self.limit,
            "ACTIVATION": self.activation,
            "INTERLEAVED": self.interleaved,
        }


def activate(pre: torch.Tensor, bias: torch.Tensor | None, gate: Gate, routing: Routing) -> torch.Tensor:
    """[num_rows, I]: the activation of pre-activations [num_rows, 2I] plus the expert's bias [E, 2I]."""
    post = pre.new_empty(routing.num_rows, pre.shape[1] // 2)
    _activation_launch(_activate_kernel, (pre, post), bias, gate, routing, post.shape[1])
    return post


def activate_backward(
    grad: torch.Tensor,
    pre: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    gate: Gate,
    routing: Routing,
    *,
    need_weighted: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As :func:`down_backward` after its GEMM: ``grad`` [num_rows, I] is the output's gradient times the weight, and
    ``bias`` has not been added to ``pre`` yet."""
    grad_pre = torch.empty_like(pre) if out is None else out
    weighted = torch.empty_like(grad) if need_weighted else None
    parts = torch.empty(1, routing.num_rows, dtype=torch.float32, device=pre.device)
    tensors = (grad, pre, weights, routing.pair_of_row, grad_pre, grad if weighted is None else weighted, parts)
    options = {"NEED_WEIGHTED": need_weighted}
    _activation_launch(_activate_backward_kernel, tensors, bias, gate, routing, grad.shape[1], **options)
    return grad_pre, parts, weighted


def _activation_launch(kernel, tensors, bias, gate: Gate, routing: Routing, width: int, **options) -> None:
    if routing.num_rows and width:
        kernel[(triton.cdiv(routing.num_rows, ROWS),)](
            *tensors,
            tensors[0] if bias is None else bias,
            routing.expert_of_row,
            routing.expert_offsets,
            width,
            HAS_BIAS=bias is not None,
            E=routing.num_experts,
            ROWS=ROWS,
            BLOCK=min(triton.next_power_of_2(width), 32 if INTERPRET else 256),
            num_warps=4,
            **gate.options(),
            **options,
        )


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _activate(g, u, alpha, limit, ACTIVATION: tl.constexpr):
    """The activation, and its derivatives by gate and up."""
    if ACTIVATION == "gpt_oss":
        low = u < -limit
        inside_g, inside_u = g <= limit, (u <= limit) & (u >= -limit)
        g, u = tl.minimum(g, limit), tl.where(low, -limit, tl.minimum(u, limit))
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
def _activate_kernel(
    pre_ptr,
    post_ptr,
    bias_ptr,
    expert_of_row_ptr,
    offsets_ptr,
    width,
    alpha,
    limit,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = (row < tl.load(offsets_ptr + E))[:, None]
    line = row[:, None].to(tl.int64)
    if HAS_BIAS:
        bias = bias_ptr + tl.load(expert_of_row_ptr + row[:, None], mask=live, other=0).to(tl.int64) * 2 * width
    for first in range(0, width, BLOCK):
        g, u = _load_gate_and_up(pre_ptr + line * 2 * width, first, live, width, INTERLEAVED, BLOCK)
        if HAS_BIAS:
            gate_bias, up_bias = _load_gate_and_up(bias, first, live, width, INTERLEAVED, BLOCK)
            g += gate_bias
            u += up_bias
        out, _, _ = _activate(g, u, alpha, limit, ACTIVATION)
        n = first + tl.arange(0, BLOCK)
        mask = live & (n[None, :] < width)
        tl.store(post_ptr + line * width + n[None, :], out.to(post_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _activate_backward_kernel(
    grad_ptr,
    pre_ptr,
    weights_ptr,
    pair_of_row_ptr,
    grad_pre_ptr,
    weighted_ptr,
    parts_ptr,
    bias_ptr,
    expert_of_row_ptr,
    offsets_ptr,
    width,
    alpha,
    limit,
    HAS_BIAS: tl.constexpr,
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
    weight = tl.load(weights_ptr + pair, mask=live, other=0.0).to(tl.float32)
    line = row[:, None].to(tl.int64)
    bias = bias_ptr
    if HAS_BIAS:
        expert = tl.load(expert_of_row_ptr + row, mask=live, other=0)
        bias = bias_ptr + expert[:, None].to(tl.int64) * 2 * width
    total = tl.zeros((ROWS,), tl.float32)
    for first in range(0, width, BLOCK):
        n = first + tl.arange(0, BLOCK)
        mask = live[:, None] & (n[None, :] < width)
        grad = tl.load(grad_ptr + line * width + n[None, :], mask=mask, other=0.0).to(tl.float32)
        total += through_activation(
            grad,
            weight,
            line,
            first,
            live[:, None],
            width,
            pre_ptr,
            bias,
            grad_pre_ptr,
            weighted_ptr,
            alpha,
            limit,
            ACTIVATION,
            INTERLEAVED,
            HAS_BIAS,
            NEED_WEIGHTED,
            BLOCK,
        )
    tl.store(parts_ptr + row, total, mask=live)


@triton.jit
def through_activation(
    grad,
    weight,
    line,
    first,
    live,
    width,
    pre_ptr,
    bias,
    grad_pre_ptr,
    weighted_ptr,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NEED_WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Stores the gradients of gate and up and the weighted activation; returns the rows' sums of grad * activation.

    ``grad`` [R, BLOCK] is that of the unweighted activation from column ``first`` on, ``line`` and ``live`` [R, 1] say
    which rows, ``bias`` [R, 1] points to the expert's bias if that is not in the pre-activations yet.
    """
    g, u = _load_gate_and_up(pre_ptr + line * 2 * width, first, live, width, INTERLEAVED, BLOCK)
    if HAS_BIAS:
        gate_bias, up_bias = _load_gate_and_up(bias, first, live, width, INTERLEAVED, BLOCK)
        g += gate_bias
        u += up_bias
    out, by_g, by_u = _activate(g, u, alpha, limit, ACTIVATION)
    weighted_grad = grad * weight[:, None]
    base = grad_pre_ptr + line * 2 * width
    store_gate_and_up(base, weighted_grad * by_g, weighted_grad * by_u, first, live, width, INTERLEAVED, BLOCK)
    dtype: tl.constexpr = grad_pre_ptr.dtype.element_ty
    out = out.to(dtype).to(tl.float32)
    if NEED_WEIGHTED:
        n = first + tl.arange(0, BLOCK)
        place = weighted_ptr + line * width + n[None, :]
        tl.store(place, (out * weight[:, None]).to(dtype), mask=live & (n[None, :] < width))
    return tl.sum(grad * out, 1)
