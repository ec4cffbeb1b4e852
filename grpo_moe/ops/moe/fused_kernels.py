"""Triton GEMM of gate and up with the gated activation in its epilogue."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_launch import launch
from .activation_kernels import Gate, activation_and_slopes, store_gate_and_up
from .grouped_gemm import ExpertWeight, Rows, Tile, multiply, num_programs, row_tile, source_rows, weight_tile
from .routing import Routing


def gate_up(
    rows: Rows,
    weight: ExpertWeight,
    bias: torch.Tensor | None,
    gate: Gate,
    routing: Routing,
    tile: Tile,
    *,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both projections and the activation in one GEMM.

    Args:
        rows: [.., H].
        weight: [E, 2I, H] or [E, H, 2I].
        bias: [E, 2I] or None.
        gate: activation and layout.
        routing: of the rows.
        tile: block_n counts columns of the result.
        keep: also return the pre-activations.

    Returns:
        [num_rows, I] activations, and [num_rows, 2I] pre-activations or None.
    """
    twice, k = weight.shape
    width = twice // 2
    post = rows.values.new_empty(routing.num_rows, width)
    pre = rows.values.new_empty(routing.num_rows, twice) if keep else None
    if post.numel() == 0:
        return post, pre
    a, a_tma = rows.operand(tile.block_m, tile.block_k, tile.tma)
    b, b_tma = gate_up_operand(weight, gate, tile)
    expert, first_row, num_tiles = routing.tiles(tile.block_m)
    programs = num_programs(post.device, tile)
    launch(
        _gate_up_kernel,
        (programs, 1, 1),
        a,
        b,
        post if bias is None else bias,
        post,
        post if pre is None else pre,
        routing.pair_of_row,
        routing.expert_offsets,
        expert,
        first_row,
        num_tiles,
        width,
        k,
        rows.values.stride(0),
        routing.num_slots,
        gate.alpha,
        gate.limit,
        BY_TOKEN=rows.by_token,
        A_TMA=a_tma,
        B_TMA=b_tma,
        INNER_FIRST=weight.inner_first,
        HAS_BIAS=bias is not None,
        KEEP=keep,
        NUM_PROGRAMS=programs,
        **gate.options(),
        **tile.options,
    )
    return post, pre


def gate_up_operand(weight: ExpertWeight, gate: Gate, tile: Tile):
    """The weight as :func:`gate_up_product` loads it, and whether by TMA."""
    if gate.interleaved:
        return weight.operand(2 * tile.block_n, tile.block_k, tile.tma)
    return weight.split_operand(tile.block_n, tile.block_k, tile.tma)


@triton.jit
def _gate_up_kernel(
    a,
    b,
    bias_ptr,
    post_ptr,
    pre_ptr,
    pair_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    WIDTH,
    K,
    stride_a,
    num_slots,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    INNER_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEEP: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    tiles_n = tl.cdiv(WIDTH, BLOCK_N)
    dtype: tl.constexpr = post_ptr.dtype.element_ty
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * tiles_n, NUM_PROGRAMS, flatten=FLATTEN):
        expert = tl.load(tile_expert_ptr + tile // tiles_n)
        row0, n0 = tl.load(tile_row_ptr + tile // tiles_n), (tile % tiles_n) * BLOCK_N
        end = tl.load(offsets_ptr + expert + 1)
        row = row0 + tl.arange(0, BLOCK_M)
        source = source_rows(row, end, pair_of_row_ptr, num_slots, BY_TOKEN)
        both = gate_up_product(
            a,
            b,
            source,
            expert,
            row0,
            n0,
            WIDTH,
            K,
            stride_a,
            INTERLEAVED,
            A_TMA,
            B_TMA,
            INNER_FIRST,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            INTERPRET,
        )
        if HAS_BIAS:
            both += gate_up_bias(bias_ptr, expert, n0, WIDTH, INTERLEAVED, BLOCK_N)
        # what is kept is what is activated, so that the backward pass meets the same numbers
        g, u = split_gate_and_up(both.to(dtype), INTERLEAVED, BLOCK_M, BLOCK_N)
        live, line = row[:, None] < end, row[:, None].to(tl.int64)
        if KEEP:
            store_gate_and_up(pre_ptr + line * 2 * WIDTH, g, u, n0, live, WIDTH, INTERLEAVED, BLOCK_N)
        out, _, _ = activation_and_slopes(g.to(tl.float32), u.to(tl.float32), alpha, limit, ACTIVATION)
        n = n0 + tl.arange(0, BLOCK_N)
        tl.store(post_ptr + line * WIDTH + n[None, :], out.to(dtype), mask=live & (n[None, :] < WIDTH))


@triton.jit
def gate_up_product(
    a,
    b,
    source,
    expert,
    row0,
    n0,
    WIDTH,
    K,
    stride_a,
    INTERLEAVED: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    INNER_FIRST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """[BLOCK_M, 2 * BLOCK_N] fp32: gate and up of BLOCK_N columns in one product twice as wide."""
    both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
    column, inside = _columns(n0, WIDTH, INTERLEAVED, BLOCK_N)
    for k0 in tl.range(0, K, BLOCK_K):
        x = row_tile(a, source, row0, k0, K, stride_a, A_TMA, BLOCK_K)
        if INTERLEAVED or not B_TMA:
            n, N = 2 * n0, 2 * WIDTH
            w = weight_tile(b, expert, n, k0, column, inside, N, K, B_TMA, INNER_FIRST, 2 * BLOCK_N, BLOCK_K)
        elif INNER_FIRST:
            w = b.load([expert, k0, 0, n0]).reshape(BLOCK_K, 2 * BLOCK_N)
        else:
            w = b.load([expert, 0, n0, k0]).reshape(2 * BLOCK_N, BLOCK_K).T
        both = multiply(x, w, both, INTERPRET)
    return both


@triton.jit
def gate_up_bias(bias_ptr, expert, n0, WIDTH, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """[1, 2 * BLOCK_N] fp32: the bias of the columns of :func:`gate_up_product`."""
    column, inside = _columns(n0, WIDTH, INTERLEAVED, BLOCK_N)
    bias = tl.load(bias_ptr + expert.to(tl.int64) * 2 * WIDTH + column, mask=inside, other=0.0)
    return bias.to(tl.float32)[None, :]


@triton.jit
def split_gate_and_up(both, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Gate and up, [BLOCK_M, BLOCK_N] each, of :func:`gate_up_product`."""
    if INTERLEAVED:
        return both.reshape(BLOCK_M, BLOCK_N, 2).split()
    else:
        return both.reshape(BLOCK_M, 2, BLOCK_N).permute(0, 2, 1).split()


@triton.jit
def _columns(n0, WIDTH, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """[2 * BLOCK_N]: where the accumulator's columns stand in gate_up, and whether they exist."""
    number = tl.arange(0, 2 * BLOCK_N)
    if INTERLEAVED:
        column = 2 * n0 + number
        return column, column < 2 * WIDTH
    else:
        n = n0 + number % BLOCK_N
        return number // BLOCK_N * WIDTH + n, n < WIDTH
