"""Up projection, activation and down projection of the experts in one Triton kernel, for few tokens an expert."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_launch import INTERPRET, launch
from .activation_kernels import Gate, activation_and_slopes
from .activations import gated_activation
from .fused_kernels import gate_up_bias, gate_up_operand, gate_up_product, split_gate_and_up
from .grouped_gemm import ExpertWeight, Tile, device_properties, multiply, source_rows, tma_fits, weight_tile
from .reference import first_order, stacked_gradients
from .routing import Routing, cdiv, next_power_of_2, route

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.compiler.disable(
    reason="experts by impl='single_pass' are no operator; compile with fullgraph=False, "
    "or use impl='fused' with the name of an activation"
)
def single_pass_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    layout: str,
    transposed: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """:func:`grpo_moe.ops.moe_experts`, which checks the shapes, with the activations kept on chip.

    A program takes some rows of an expert through some columns of I, up and down: weights and tokens are read once,
    and what goes through memory between the two kernels is an fp32 partial output [splits, N * K, H] instead of the
    activations. It pays with few tokens an expert, where reading the weights is all the time there is. Nothing waits
    for the host, and results repeat to the bit.

    The backward pass is the specification's: it runs the loop over the experts again and needs their activations in
    memory. Train with ``impl="fused"``.

    Args:
        hidden_states, gate_up_proj, down_proj, top_k_index, top_k_weights, gate_up_bias, down_bias: as in moe_experts.
        activation: "silu", "gelu_tanh" or "gpt_oss".
        layout, transposed, alpha, limit: as in moe_experts.

    Returns:
        [N, H] in the dtype of ``hidden_states``.

    Raises:
        ValueError: a dtype that the kernel does not know.
        RuntimeError: tensors on a CPU, unless TRITON_INTERPRET=1 was set when this module was imported.
    """
    tensors = [hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias]
    _check(tensors)
    act = gated_activation(activation, layout, alpha=alpha, limit=limit)
    gate = Gate(activation, layout == "interleaved", alpha, limit)
    return _SinglePass.apply(*tensors, top_k_index, gate, act, transposed)


def _check(tensors) -> None:
    hidden, up, down, _, up_bias, down_bias = tensors
    if hidden.dtype not in DTYPES:
        names = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f'hidden_states must be one of {names}, got {hidden.dtype}; cast it or use impl="stacked"')
    parameters = {"gate_up_proj": up, "down_proj": down, "gate_up_bias": up_bias, "down_bias": down_bias}
    for name, x in parameters.items():
        if x is not None and x.dtype != hidden.dtype:
            raise ValueError(f"{name} must be {hidden.dtype} as hidden_states, got {x.dtype}; cast it")
    if not (hidden.is_cuda or INTERPRET):
        raise RuntimeError(f'hidden_states must be on a CUDA GPU, got {hidden.device}; use impl="stacked"')


class _SinglePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, up, down, weights, up_bias, down_bias, top_k_index, gate, act, transposed):
        ctx.save_for_backward(hidden, up, down, weights, up_bias, down_bias, top_k_index)
        ctx.options = {"act": act, "transposed": transposed}
        hidden, weights, index = hidden.contiguous(), weights.contiguous(), top_k_index.contiguous()
        projections = [ExpertWeight(x.contiguous(), transposed) for x in (up, down)]
        tile = tile_for(index.numel(), *projections)
        routing = route(index, len(up), tile.block_m)
        parts = _parts(hidden, *projections, up_bias, gate, routing, tile)
        return _sum_parts(parts, routing, weights, down_bias, index, hidden.dtype)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        *tensors, top_k_index = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        return *stacked_gradients(grad, tensors, top_k_index, needed, **ctx.options), *(None,) * 4


def tile_for(num_rows: int, up: ExpertWeight, down: ExpertWeight) -> Tile:
    """Block sizes for N * K rows: block_n counts columns of I. Two programs fit a multiprocessor of an H200, and none
    of these spills registers there."""
    if INTERPRET:
        return Tile(16, 16, 16, 4, 1)
    experts, width = len(up.values), down.shape[1]
    # half as many again as an expert has on average: a second tile of a few rows would read the weights again
    rows = min(64, max(16, next_power_of_2(3 * num_rows // (2 * experts))))
    if up.values.dtype == torch.float32:
        return Tile(min(rows, 32), 32, 16, 4, 3)
    if not (tma_fits(up.values) and tma_fits(down.values)):
        return Tile(rows, 32, 32, 4, 3)
    tiles = min(experts, num_rows) * cdiv(num_rows, rows * experts)
    processors = device_properties(up.values.device).multi_processor_count
    if tiles * cdiv(width, 128) < processors:
        return Tile(rows, 64, 64, 4, 4)
    return Tile(rows, 128, 64, 4, 4 if rows < 64 else 2)


def _parts(
    hidden: torch.Tensor,
    up: ExpertWeight,
    down: ExpertWeight,
    up_bias: torch.Tensor | None,
    gate: Gate,
    routing: Routing,
    tile: Tile,
) -> torch.Tensor:
    """[splits, num_rows, H] fp32: what each split of I adds to the output; garbage after the last pair."""
    height, width = down.shape
    splits, block_d = cdiv(width, tile.block_n), min(64, tile.block_n)
    parts = hidden.new_empty(splits, routing.num_rows, height, dtype=torch.float32)
    if parts.numel() == 0:
        return parts
    up_operand, up_tma = gate_up_operand(up, gate, tile)
    down_operand, down_tma = down.operand(block_d, tile.block_n, tile.tma)
    expert, first_row, num_tiles = routing.tiles(tile.block_m)
    launch(
        _single_pass_kernel,
        (len(expert), splits, 1),
        hidden,
        up_operand,
        down_operand,
        hidden if up_bias is None else up_bias.contiguous(),
        parts,
        routing.pair_of_row,
        routing.expert_offsets,
        expert,
        first_row,
        num_tiles,
        height,
        width,
        routing.num_rows,
        routing.num_slots,
        gate.alpha,
        gate.limit,
        UP_TMA=up_tma,
        DOWN_TMA=down_tma,
        INNER_FIRST=up.inner_first,
        HAS_BIAS=up_bias is not None,
        **gate.options(),
        BLOCK_D=block_d,
        **tile.options,
    )
    return parts


def _sum_parts(
    parts: torch.Tensor,
    routing: Routing,
    weights: torch.Tensor,
    bias: torch.Tensor | None,
    top_k_index: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[N, H]: parts [splits, num_rows, H] summed in fp32 over splits, plus the bias [E, H] of the slot's
    expert, times weights [N, K], summed over slots; all in a fixed order."""
    splits, num_rows, width = parts.shape
    out = parts.new_empty(len(weights), width, dtype=dtype)
    block = 32 if INTERPRET else 128
    if out.numel():
        launch(
            _sum_parts_kernel,
            (len(out), cdiv(width, block), 1),
            parts,
            routing.row_of_pair,
            weights,
            parts if bias is None else bias.contiguous(),
            top_k_index,
            out,
            width,
            num_rows,
            splits,
            K=routing.num_slots,
            HAS_BIAS=bias is not None,
            BLOCK_S=min(next_power_of_2(max(1, splits)), 2 if INTERPRET else 32),
            BLOCK=block,
            num_warps=4,
        )
    return out


@triton.jit
def _single_pass_kernel(
    x_ptr,
    up,
    down,
    bias_ptr,
    parts_ptr,
    pair_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    H,
    WIDTH,
    num_rows,
    num_slots,
    alpha,
    limit,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UP_TMA: tl.constexpr,
    DOWN_TMA: tl.constexpr,
    INNER_FIRST: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    tile, split = tl.program_id(0), tl.program_id(1)
    if tile < tl.load(num_tiles_ptr):
        expert, i0 = tl.load(tile_expert_ptr + tile), split * BLOCK_N
        row = tl.load(tile_row_ptr + tile) + tl.arange(0, BLOCK_M)
        end = tl.load(offsets_ptr + expert + 1)
        source = source_rows(row, end, pair_of_row_ptr, num_slots, True)
        both = gate_up_product(
            x_ptr,
            up,
            source,
            expert,
            0,
            i0,
            WIDTH,
            H,
            H,
            INTERLEAVED,
            False,
            UP_TMA,
            INNER_FIRST,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            INTERPRET,
        )
        if HAS_BIAS:
            both += gate_up_bias(bias_ptr, expert, i0, WIDTH, INTERLEAVED, BLOCK_N)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        g, u = split_gate_and_up(both.to(dtype).to(tl.float32), INTERLEAVED, BLOCK_M, BLOCK_N)
        out, _, _ = activation_and_slopes(g, u, alpha, limit, ACTIVATION)
        out = out.to(dtype)  # columns after the last meet zeros of the down projection
        line = parts_ptr + (split.to(tl.int64) * num_rows + row[:, None]) * H
        for d0 in tl.range(0, H, BLOCK_D):
            d = d0 + tl.arange(0, BLOCK_D)
            w = weight_tile(down, expert, d0, i0, d, d < H, H, WIDTH, DOWN_TMA, INNER_FIRST, BLOCK_D, BLOCK_N)
            y = multiply(out, w, tl.zeros((BLOCK_M, BLOCK_D), tl.float32), INTERPRET)
            tl.store(line + d[None, :], y, mask=(row[:, None] < end) & (d[None, :] < H))


@triton.jit
def _sum_parts_kernel(
    parts_ptr,
    row_of_pair_ptr,
    weights_ptr,
    bias_ptr,
    index_ptr,
    out_ptr,
    width,
    num_rows,
    splits,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(K):
        row = tl.load(row_of_pair_ptr + token * K + slot)
        live = column < tl.where(row >= 0, width, 0)
        value = tl.zeros((BLOCK,), tl.float32)
        for first in range(0, splits, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            place = (split[:, None].to(tl.int64) * num_rows + row) * width + column[None, :]
            value += tl.sum(tl.load(parts_ptr + place, mask=(split[:, None] < splits) & live[None, :], other=0.0), 0)
        if HAS_BIAS:
            expert = tl.load(index_ptr + token * K + slot).to(tl.int64)
            value += tl.load(bias_ptr + expert * width + column, mask=live, other=0.0).to(tl.float32)
        value *= tl.load(weights_ptr + token * K + slot).to(tl.float32)
        total += tl.where(live, value, 0.0)
    tl.store(out_ptr + token * width + column, total.to(out_ptr.dtype.element_ty), mask=column < width)
