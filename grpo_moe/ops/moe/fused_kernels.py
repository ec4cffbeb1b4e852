"""Triton GEMMs with the gated activation in their epilogue: forward, and backward through the down projection."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .activation_kernels import Gate, _activate, store_gate_and_up, through_activation
from .grouped_gemm import ExpertWeight, Rows, Tile, multiply, num_programs, row_tile, source_rows, weight_tile
from .routing import INTERPRET, Routing


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
    a, a_tma = rows.operand(tile.block_m, tile.block_k)
    b, b_tma = weight.operand(tile.block_n * (2 if gate.interleaved else 1), tile.block_k)
    expert, first_row, num_tiles = routing.tiles(tile.block_m)
    programs = num_programs(post.device, len(expert) * triton.cdiv(width, tile.block_n), tile)
    _gate_up_kernel[(programs,)](
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
        BY_TOKEN=rows.by_token,
        A_TMA=a_tma,
        B_TMA=b_tma,
        INNER_FIRST=weight.inner_first,
        HAS_BIAS=bias is not None,
        KEEP=keep,
        NUM_PROGRAMS=programs,
        **gate.options(),
        **tile.options(),
    )
    return post, pre


def down_backward(
    grad: Rows,
    weight: ExpertWeight,
    pre: torch.Tensor,
    weights: torch.Tensor,
    gate: Gate,
    routing: Routing,
    tile: Tile,
    *,
    need_weighted: bool,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Through the down projection and the activation: from the output's gradient to that of the pre-activations.

    Args:
        grad: [.., H] gradient of the output of each token.
        weight: the down projection seen backwards: rows [.., H] to [.., I].
        pre: [num_rows, 2I] pre-activations.
        weights: [N * K] routing weights by pair.
        gate: activation and layout.
        routing, tile: as in :func:`gate_up`.
        need_weighted: also return the weighted activations, for the gradient of the down projection.
        out: where the gradient of ``pre`` goes; may be ``pre`` itself.

    Returns:
        [num_rows, 2I] gradient of ``pre``; fp32 [column tiles, num_rows] parts of the routing weights' gradient, to be
        summed over the tiles; [num_rows, I] weight * activation or None.
    """
    width, k = weight.shape
    grad_pre = torch.empty_like(pre) if out is None else out
    weighted = pre.new_empty(routing.num_rows, width) if need_weighted else None
    tiles_n = triton.cdiv(width, tile.block_n)
    parts = torch.empty(tiles_n, routing.num_rows, dtype=torch.float32, device=pre.device)
    if pre.numel() == 0:
        return grad_pre, parts, weighted
    a, a_tma = grad.operand(tile.block_m, tile.block_k)
    b, b_tma = weight.operand(tile.block_n, tile.block_k)
    expert, first_row, num_tiles = routing.tiles(tile.block_m)
    programs = num_programs(pre.device, len(expert) * tiles_n, tile)
    _down_backward_kernel[(programs,)](
        a,
        b,
        pre,
        weights,
        grad_pre,
        grad_pre if weighted is None else weighted,
        parts,
        routing.pair_of_row,
        routing.expert_offsets,
        expert,
        first_row,
        num_tiles,
        width,
        k,
        routing.num_rows,
        grad.values.stride(0),
        routing.num_slots,
        BY_TOKEN=grad.by_token,
        A_TMA=a_tma,
        B_TMA=b_tma,
        INNER_FIRST=weight.inner_first,
        NEED_WEIGHTED=need_weighted,
        NUM_PROGRAMS=programs,
        SUBTILES=1 if INTERPRET else max(1, tile.block_n // 32),
        **gate.options(),
        **tile.options(),
    )
    return grad_pre, parts, weighted


@triton.jit
def _halves(x):
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _quarters(x):
    a, b = _halves(x)
    return _halves(a) + _halves(b)


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
    INTERPRET: tl.constexpr,
):
    tiles_n = tl.cdiv(WIDTH, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * tiles_n, NUM_PROGRAMS):
        expert = tl.load(tile_expert_ptr + tile // tiles_n)
        row0, n0 = tl.load(tile_row_ptr + tile // tiles_n), (tile % tiles_n) * BLOCK_N
        end = tl.load(offsets_ptr + expert + 1)
        row, n = row0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        source = source_rows(row, end, pair_of_row_ptr, num_slots, BY_TOKEN)
        if INTERLEAVED:
            both = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
            for k0 in tl.range(0, K, BLOCK_K):
                x = row_tile(a, source, row0, k0, K, stride_a, A_TMA, BLOCK_K)
                w = weight_tile(b, expert, 2 * n0, k0, 2 * WIDTH, K, B_TMA, INNER_FIRST, 2 * BLOCK_N, BLOCK_K)
                both = multiply(x, w, both, INTERPRET)
            g, u = both.reshape(BLOCK_M, BLOCK_N, 2).split()
            gate_column, up_column = 2 * n, 2 * n + 1
        else:
            g = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            u = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for k0 in tl.range(0, K, BLOCK_K):
                x = row_tile(a, source, row0, k0, K, stride_a, A_TMA, BLOCK_K)
                w = weight_tile(b, expert, n0, k0, 2 * WIDTH, K, B_TMA, INNER_FIRST, BLOCK_N, BLOCK_K)
                v = weight_tile(b, expert, WIDTH + n0, k0, 2 * WIDTH, K, B_TMA, INNER_FIRST, BLOCK_N, BLOCK_K)
                g = multiply(x, w, g, INTERPRET)
                u = multiply(x, v, u, INTERPRET)
            gate_column, up_column = n, WIDTH + n
        if HAS_BIAS:
            base = bias_ptr + expert.to(tl.int64) * 2 * WIDTH
            g += tl.load(base + gate_column, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
            u += tl.load(base + up_column, mask=n < WIDTH, other=0.0).to(tl.float32)[None, :]
        live, line = row[:, None] < end, row[:, None].to(tl.int64)
        dtype: tl.constexpr = post_ptr.dtype.element_ty
        if KEEP:
            # what is kept is what is activated, so that the backward pass meets the same numbers
            g, u = g.to(dtype), u.to(dtype)
            store_gate_and_up(pre_ptr + line * 2 * WIDTH, g, u, n0, live, WIDTH, INTERLEAVED, BLOCK_N)
        out, _, _ = _activate(g.to(tl.float32), u.to(tl.float32), alpha, limit, ACTIVATION)
        tl.store(post_ptr + line * WIDTH + n[None, :], out.to(dtype), mask=live & (n[None, :] < WIDTH))


@triton.jit
def _down_backward_kernel(
    a,
    b,
    pre_ptr,
    weights_ptr,
    grad_pre_ptr,
    weighted_ptr,
    parts_ptr,
    pair_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    WIDTH,
    K,
    num_rows,
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
    NEED_WEIGHTED: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    SUBTILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    tiles_n = tl.cdiv(WIDTH, BLOCK_N)
    PART: tl.constexpr = BLOCK_N // SUBTILES
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * tiles_n, NUM_PROGRAMS):
        expert = tl.load(tile_expert_ptr + tile // tiles_n)
        row0, n0 = tl.load(tile_row_ptr + tile // tiles_n), (tile % tiles_n) * BLOCK_N
        end = tl.load(offsets_ptr + expert + 1)
        row = row0 + tl.arange(0, BLOCK_M)
        source = source_rows(row, end, pair_of_row_ptr, num_slots, BY_TOKEN)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in tl.range(0, K, BLOCK_K):
            x = row_tile(a, source, row0, k0, K, stride_a, A_TMA, BLOCK_K)
            w = weight_tile(b, expert, n0, k0, WIDTH, K, B_TMA, INNER_FIRST, BLOCK_N, BLOCK_K)
            acc = multiply(x, w, acc, INTERPRET)
        live = row < end
        pair = tl.load(pair_of_row_ptr + row, mask=live, other=0)
        weight = tl.load(weights_ptr + pair, mask=live, other=0.0).to(tl.float32)
        # in column parts: the whole epilogue at once spills registers
        if SUBTILES == 4:
            parts = _quarters(acc)
        elif SUBTILES == 2:
            parts = _halves(acc)
        else:
            parts = (acc,)
        total = tl.zeros((BLOCK_M,), tl.float32)
        line = row[:, None].to(tl.int64)
        for i in tl.static_range(SUBTILES):
            total += through_activation(
                parts[i],
                weight,
                line,
                n0 + i * PART,
                live[:, None],
                WIDTH,
                pre_ptr,
                pre_ptr,
                grad_pre_ptr,
                weighted_ptr,
                alpha,
                limit,
                ACTIVATION,
                INTERLEAVED,
                False,
                NEED_WEIGHTED,
                PART,
            )
        tl.store(parts_ptr + (tile % tiles_n).to(tl.int64) * num_rows + row, total, mask=live)
