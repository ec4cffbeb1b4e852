"""Triton passes between tokens and sorted rows: gather, and the sums over slots and experts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_launch import INTERPRET, launch
from .grouped_gemm import Rows, source_rows
from .routing import Routing, cdiv, next_power_of_2


def gather_rows(values: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[num_rows, D]: the row of ``values`` [N, D] of each sorted row's token; garbage after the last pair."""
    tokens, width = values.shape
    out = values.new_empty(routing.num_rows, width)
    block = min(next_power_of_2(width), 32 if INTERPRET else 2048)
    if out.numel():
        launch(
            _gather_rows_kernel,
            (tokens, cdiv(width, block), 1),
            values,
            routing.row_of_pair,
            out,
            width,
            values.stride(0),
            K=routing.num_slots,
            BLOCK=block,
            num_warps=4,
        )
    return out


def sum_over_slots(
    values: torch.Tensor,
    routing: Routing,
    num_tokens: int,
    weights: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    top_k_index: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, H]: each token's rows of ``values`` [num_rows, H], plus the bias [E, H] of the slot's expert and times
    ``weights`` [N * K] if given, summed in fp32 in the order of the slots."""
    width = values.shape[1]
    out = torch.empty(num_tokens, width, dtype=dtype, device=values.device)
    block = min(next_power_of_2(width), 64 if INTERPRET else 2048)
    if out.numel():
        launch(
            _sum_over_slots_kernel,
            (num_tokens, cdiv(width, block), 1),
            values,
            routing.row_of_pair,
            values if weights is None else weights,
            values if bias is None else bias,
            routing.row_of_pair if bias is None else top_k_index,
            out,
            width,
            K=routing.num_slots,
            WEIGHTED=weights is not None,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            num_warps=4,
        )
    return out


def sum_by_expert(
    rows: Rows, routing: Routing, dtype: torch.dtype, *, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """[E, D]: sums of the rows of each expert, times ``weights`` [N * K] if given, in fp32 and in a fixed order."""
    width = rows.values.shape[1]
    out = torch.empty(routing.num_experts, width, dtype=dtype, device=rows.values.device)
    block = 16 if INTERPRET else 32
    if out.numel():
        launch(
            _sum_by_expert_kernel,
            (routing.num_experts, cdiv(width, block), 1),
            rows.values,
            routing.pair_of_row,
            rows.values if weights is None else weights,
            routing.expert_offsets,
            out,
            width,
            rows.values.stride(0),
            routing.num_slots,
            BY_TOKEN=rows.by_token,
            WEIGHTED=weights is not None,
            ROWS=16 if INTERPRET else 128,
            BLOCK=block,
        )
    return out


@triton.jit
def _gather_rows_kernel(values_ptr, row_of_pair_ptr, out_ptr, width, stride, K: tl.constexpr, BLOCK: tl.constexpr):
    """Token by token, so that each is read once."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(values_ptr + token * stride + column, mask=column < width, other=0.0)
    for slot in tl.static_range(K):
        row = tl.load(row_of_pair_ptr + token * K + slot).to(tl.int64)
        tl.store(out_ptr + row * width + column, value, mask=column < tl.where(row >= 0, width, 0))


@triton.jit
def _sum_over_slots_kernel(
    values_ptr,
    row_of_pair_ptr,
    weights_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    width,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(row_of_pair_ptr + token * K + slot).to(tl.int64)
        last = tl.where(row >= 0, width, 0)
        value = tl.load(values_ptr + row * width + column, mask=column < last, other=0.0).to(tl.float32)
        if HAS_BIAS:
            expert = tl.load(index_ptr + token * K + slot).to(tl.int64)
            value += tl.load(bias_ptr + expert * width + column, mask=column < last, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights_ptr + token * K + slot).to(tl.float32)
        total += tl.where(column < last, value, 0.0)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)


@triton.jit
def _sum_by_expert_kernel(
    values_ptr,
    pair_of_row_ptr,
    weights_ptr,
    offsets_ptr,
    out_ptr,
    width,
    stride,
    num_slots,
    BY_TOKEN: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        source = source_rows(row, end, pair_of_row_ptr, num_slots, BY_TOKEN)
        mask = (row[:, None] < end) & (column[None, :] < width)
        value = tl.load(values_ptr + source[:, None] * stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            pair = tl.load(pair_of_row_ptr + row, mask=row < end, other=0)
            value *= tl.load(weights_ptr + pair, mask=row < end, other=0.0).to(tl.float32)[:, None]
        total += value
    place = expert.to(tl.int64) * width + column
    tl.store(out_ptr + place, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=column < width)
