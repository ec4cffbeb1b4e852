"""Triton passes over the rows of a chunk around the GEMMs of the head: offsets before, gradient factors after."""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
LOG2E = tl.constexpr(1.4426950408889634)
PROBES = 1024  # vocabulary columns whose maximum estimates that of the row
BIAS_NATS = 45.0  # lifts the offset above the estimate: the true maximum may lie 107 nats above it


def target_offsets(hidden, weight, bias, target_ids, probe_logits, scale, softcap):
    """Fixed offsets of the rows, in units of log2.

    Args:
        hidden: [n, H] bf16.
        weight: [V, H] bf16.
        bias: [V] fp32 or None.
        target_ids: [n] int64.
        probe_logits: [n, P] fp32, final logits (nats) of some columns.
        scale, softcap: of the logits, see :class:`TritonHead`.

    Returns:
        fp32 [n] each: the target's logit times log2(e), and the offset: the larger of it and the probes', plus 45 nats.
    """
    rows, width = hidden.shape
    target, offset = (torch.empty(rows, device=hidden.device, dtype=torch.float32) for _ in range(2))
    _target_offsets_kernel[(rows,)](
        hidden,
        weight,
        weight if bias is None else bias,
        target_ids,
        probe_logits,
        target,
        offset,
        hidden.stride(0),
        weight.stride(0),
        probe_logits.stride(0),
        width,
        probe_logits.shape[1],
        scale,
        softcap or 1.0,
        BIAS_NATS,
        len(weight),
        HAS_BIAS=bias is not None,
        HAS_CAP=softcap is not None,
        BLOCK_H=triton.next_power_of_2(width),
        BLOCK_P=triton.next_power_of_2(probe_logits.shape[1]),
        num_warps=4,
    )
    return target, offset


def finish_rows(exps, hidden, target_ids, target, offset, total, grad_logps, scale, softcap):
    """Prepares the gradient GEMMs: puts each row's target into ``exps`` and scales the hidden states.

    With u = -grad * slope / sum, the gradient by the raw product is u * (e - sum * onehot). The row's factor u goes to
    the hidden states for the weight's gradient, and is returned for the rows of the hidden states' gradient. A row
    without upstream gradient, or whose sum is not finite, becomes 0.

    Returns:
        fp32 [n] u; bf16 [n, H] u * hidden.
    """
    rows, width = hidden.shape
    factor = torch.empty(rows, device=hidden.device, dtype=torch.float32)
    scaled = torch.empty_like(hidden)
    _finish_rows_kernel[(rows,)](
        exps,
        hidden,
        target_ids,
        target,
        offset,
        total,
        grad_logps,
        factor,
        scaled,
        exps.stride(0),
        hidden.stride(0),
        scaled.stride(0),
        exps.shape[1],
        width,
        scale,
        softcap or 1.0,
        HAS_CAP=softcap is not None,
        BLOCK_H=triton.next_power_of_2(width),
        BLOCK_V=16 if INTERPRET else 4096,
        num_warps=4,
    )
    return factor, scaled


def scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As :meth:`TorchHead.scaled`, at the speed of the memory bus where torch.mul reaches half of it."""
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype)
    block = 1024 if INTERPRET else 8192
    if x.numel():
        with torch.cuda.device_of(x):
            _scaled_kernel[(triton.cdiv(x.numel(), block),)](x, scale, out, x.numel(), BLOCK=block, num_warps=8)
    return out


@triton.jit
def tanh_of(x):
    """tanh by the sigmoid, which the interpreter has too."""
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit
def _target_offsets_kernel(
    hidden_ptr,
    weight_ptr,
    bias_ptr,
    target_ids_ptr,
    probe_ptr,
    target_ptr,
    offset_ptr,
    stride_h,
    stride_w,
    stride_p,
    width,
    num_probes,
    scale,
    softcap,
    bias_nats,
    vocab_size,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target_id = tl.load(target_ids_ptr + row).to(tl.int64)
    token = tl.minimum(tl.maximum(target_id, 0), vocab_size - 1)
    columns = tl.arange(0, BLOCK_H)
    hidden = tl.load(hidden_ptr + row * stride_h + columns, mask=columns < width, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + token * stride_w + columns, mask=columns < width, other=0.0).to(tl.float32)
    logit = tl.sum(hidden * weight, 0)
    if HAS_BIAS:
        logit += tl.load(bias_ptr + token)
    if HAS_CAP:
        logit = softcap * tanh_of(logit * scale)
    else:
        logit *= scale
    probes = tl.arange(0, BLOCK_P)
    seen = tl.load(probe_ptr + row * stride_p + probes, mask=probes < num_probes, other=float("-inf"))
    estimate = tl.maximum(tl.max(seen, 0), logit)
    tl.store(target_ptr + row, tl.where(target_id == token, logit * LOG2E, float("nan")))
    tl.store(offset_ptr + row, (estimate + bias_nats) * LOG2E)


@triton.jit
def _finish_rows_kernel(
    exps_ptr,
    hidden_ptr,
    target_ids_ptr,
    target_ptr,
    offset_ptr,
    total_ptr,
    grad_ptr,
    factor_ptr,
    scaled_ptr,
    stride_e,
    stride_h,
    stride_s,
    vocab_size,
    width,
    scale,
    softcap,
    HAS_CAP: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    total, grad = tl.load(total_ptr + row), tl.load(grad_ptr + row)
    target, offset = tl.load(target_ptr + row), tl.load(offset_ptr + row)
    finite = (total > 0) & (total < float("inf"))
    factor = tl.where(finite & (grad != 0), -grad * scale / tl.where(finite, total, 1.0), 0.0)
    tl.store(factor_ptr + row, factor)
    entry = tl.exp2(target - offset) - total
    if HAS_CAP:
        tanh = target / (softcap * LOG2E)
        entry *= 1 - tanh * tanh
    exps_row = exps_ptr + row * stride_e
    token = tl.minimum(tl.maximum(tl.load(target_ids_ptr + row), 0), vocab_size - 1)  # out of range: grad is 0
    tl.store(exps_row + token, entry.to(tl.bfloat16), mask=factor != 0)
    for first in range(0, tl.where(finite, 0, vocab_size), BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        tl.store(exps_row + columns, tl.zeros((BLOCK_V,), tl.bfloat16), mask=columns < vocab_size)
    columns = tl.arange(0, BLOCK_H)
    live_width = tl.where(factor != 0, width, 0)
    hidden = tl.load(hidden_ptr + row * stride_h + columns, mask=columns < live_width, other=0.0).to(tl.float32)
    tl.store(scaled_ptr + row * stride_s + columns, (factor * hidden).to(tl.bfloat16), mask=columns < width)


@triton.jit
def _scaled_kernel(x_ptr, scale_ptr, out_ptr, size, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + index, (x * tl.load(scale_ptr)).to(out_ptr.dtype.element_ty), mask=index < size)
