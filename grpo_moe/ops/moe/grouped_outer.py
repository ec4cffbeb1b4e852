"""Gradients of the experts' weights: outer products summed over the rows of each expert, in Triton or by torch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_launch import launch
from .grouped_gemm import Rows, Tile, multiply, num_programs, row_tile, source_rows
from .routing import Routing, cdiv


def grouped_outer(left: Rows, right: Rows, routing: Routing, tile: Tile, out: torch.Tensor) -> torch.Tensor:
    """out [E, M, N]: sum over the expert's rows of left [M] times right [N]; zeros for an expert without rows."""
    experts, m, n = out.shape
    if out.numel() == 0:
        return out
    tiles = experts * cdiv(m, tile.block_m) * cdiv(n, tile.block_n)
    a, a_tma = left.operand(tile.block_k, tile.block_m, tile.tma)
    b, b_tma = right.operand(tile.block_k, tile.block_n, tile.tma)
    programs = num_programs(out.device, tile)
    launch(
        _grouped_outer_kernel,
        (programs, 1, 1),
        a,
        b,
        left.values,
        right.values,
        out,
        routing.pair_of_row,
        routing.expert_offsets,
        m,
        n,
        left.values.stride(0),
        right.values.stride(0),
        tiles,
        routing.num_slots,
        PARTS=16 if out.dtype == torch.float32 else 0,
        A_BY_TOKEN=left.by_token,
        B_BY_TOKEN=right.by_token,
        A_TMA=a_tma,
        B_TMA=b_tma,
        NUM_PROGRAMS=programs,
        **tile.options,
    )
    return out


def torch_grouped_outer(left: torch.Tensor, right: torch.Tensor, routing: Routing) -> torch.Tensor:
    """As :func:`grouped_outer` of sorted rows left [num_rows, M] and right [num_rows, N] by torch's grouped_mm."""
    return torch._grouped_mm(left.T, right, offs=routing.expert_offsets[1:])


@triton.jit
def _outer_tail(a_ptr, source, live, m0, M, stride, BLOCK_M: tl.constexpr):
    """[BLOCK_K, BLOCK_M] of the last rows of an expert, zeros after them."""
    m = m0 + tl.arange(0, BLOCK_M)
    return tl.load(a_ptr + source[:, None] * stride + m[None, :], mask=live[:, None] & (m[None, :] < M), other=0.0)


@triton.jit
def _outer_rows(
    a,
    b,
    acc,
    first,
    last,
    end,
    m0,
    n0,
    pair_of_row_ptr,
    M,
    N,
    stride_a,
    stride_b,
    num_slots,
    A_BY_TOKEN: tl.constexpr,
    B_BY_TOKEN: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """acc plus the outer products of rows first to last, whole blocks of them."""
    for row0 in tl.range(first, last, BLOCK_K):
        row = row0 + tl.arange(0, BLOCK_K)
        left = source_rows(row, end, pair_of_row_ptr, num_slots, A_BY_TOKEN)
        right = source_rows(row, end, pair_of_row_ptr, num_slots, B_BY_TOKEN)
        x = row_tile(a, left, row0, m0, M, stride_a, A_TMA, BLOCK_M)
        y = row_tile(b, right, row0, n0, N, stride_b, B_TMA, BLOCK_N)
        acc = multiply(x.T, y, acc, INTERPRET)
    return acc


@triton.jit
def _grouped_outer_kernel(
    a,
    b,
    a_ptr,
    b_ptr,
    out_ptr,
    pair_of_row_ptr,
    offsets_ptr,
    M,
    N,
    stride_a,
    stride_b,
    tiles,
    num_slots,
    A_BY_TOKEN: tl.constexpr,
    B_BY_TOKEN: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    PARTS: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, NUM_PROGRAMS, flatten=FLATTEN):
        expert = tile // (tiles_m * tiles_n)
        inner = tile % (tiles_m * tiles_n)
        m0, n0 = (inner // tiles_n) * BLOCK_M, (inner % tiles_n) * BLOCK_N
        start, end = tl.load(offsets_ptr + expert), tl.load(offsets_ptr + expert + 1)
        full_end = start + (end - start) // BLOCK_K * BLOCK_K
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        if PARTS:  # long sums in float32 by parts, as their own rounding is all the error there is
            for first in tl.range(start, full_end, PARTS * BLOCK_K):
                last = tl.minimum(first + PARTS * BLOCK_K, full_end)
                zero = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
                acc += _outer_rows(
                    a,
                    b,
                    zero,
                    first,
                    last,
                    end,
                    m0,
                    n0,
                    pair_of_row_ptr,
                    M,
                    N,
                    stride_a,
                    stride_b,
                    num_slots,
                    A_BY_TOKEN,
                    B_BY_TOKEN,
                    A_TMA,
                    B_TMA,
                    BLOCK_M,
                    BLOCK_N,
                    BLOCK_K,
                    INTERPRET,
                )
        else:
            acc = _outer_rows(
                a,
                b,
                acc,
                start,
                full_end,
                end,
                m0,
                n0,
                pair_of_row_ptr,
                M,
                N,
                stride_a,
                stride_b,
                num_slots,
                A_BY_TOKEN,
                B_BY_TOKEN,
                A_TMA,
                B_TMA,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                INTERPRET,
            )
        if full_end < end:
            row = full_end + tl.arange(0, BLOCK_K)
            left = source_rows(row, end, pair_of_row_ptr, num_slots, A_BY_TOKEN)
            right = source_rows(row, end, pair_of_row_ptr, num_slots, B_BY_TOKEN)
            x = _outer_tail(a_ptr, left, row < end, m0, M, stride_a, BLOCK_M)
            y = _outer_tail(b_ptr, right, row < end, n0, N, stride_b, BLOCK_N)
            acc = multiply(x.T, y, acc, INTERPRET)
        m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        place = expert.to(tl.int64) * M * N + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
