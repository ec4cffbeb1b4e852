"""The Triton GEMM of the head: exp(logits - offset) of a chunk, and its row sums."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .row_kernels import INTERPRET, LOG2E, tanh_of

TILE = {"BLOCK_M": 256, "BLOCK_N": 128, "BLOCK_K": 64, "num_warps": 8, "num_stages": 4, "SUBTILES": 2, "FLATTEN": True}
"""Of the GEMM kernels: the fastest of six on an H200 with Triton 3.6.0, 613 to 640 TFLOP/s (cuBLAS: 655 to 678)."""
if INTERPRET:
    TILE |= {"BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 16}

ROWS, ROW_BLOCK = 16, 64  # of the reduction over tiles: rows a program, tiles a step
MAX_SUM = 2.0**90  # a larger row sum is computed again with the row's true maximum


def exp_logits(
    hidden, weight, bias, offset, exps, scale, softcap, *, only_if=None, maximum=False, with_entropy=False, out=None
):
    """One pass of the vocabulary over the rows: exp(logit - offset) into ``exps``, and its sums by column tile.

    Args:
        hidden, weight, bias, scale, softcap: as in :func:`~.row_kernels.target_offsets`.
        offset: [n] fp32, log2 units.
        exps: [n, V] bf16 with a row stride of a multiple of 8, overwritten; with a softcap times the cap's slope.
        only_if: int32 scalar on the device; where it is 0 nothing is computed.
        maximum: compute the largest logit (log2 units) by tile instead, and leave ``exps`` alone.
        with_entropy: also sum e * log2(e).
        out: what an earlier call returned, overwritten.

    Returns:
        fp32 [tiles, n] sums (or maxima), and the sums of e * log2(e) or None.
    """
    rows, width = hidden.shape
    vocab_size = len(weight)
    block_m, block_n, block_k = (TILE[f"BLOCK_{axis}"] for axis in "MNK")
    tiles_n = triton.cdiv(vocab_size, block_n)
    if out is None:
        sums = torch.empty(tiles_n, rows, device=hidden.device, dtype=torch.float32)
        out = sums, torch.empty_like(sums) if with_entropy else None
    sums, moments = out
    programs = _num_programs(hidden.device)  # a constant of the kernel: with fewer for few tiles each count is compiled
    _exp_logits_kernel[(programs,)](
        TensorDescriptor(hidden, [rows, width], [hidden.stride(0), 1], [block_m, block_k]),
        TensorDescriptor(weight, [vocab_size, width], [weight.stride(0), 1], [block_n, block_k]),
        TensorDescriptor(exps, [rows, vocab_size], [exps.stride(0), 1], [block_m, block_n // TILE["SUBTILES"]]),
        offset if bias is None else bias,
        offset,
        offset if only_if is None else only_if,
        sums,
        sums if moments is None else moments,
        rows,
        vocab_size,
        width,
        scale * 1.4426950408889634,
        softcap or 1.0,
        NUM_PROGRAMS=programs,
        HAS_BIAS=bias is not None,
        HAS_CAP=softcap is not None,
        CONDITIONAL=only_if is not None,
        MAXIMUM=maximum,
        ENTROPY=with_entropy,
        EVEN=vocab_size % block_n == 0,
        INTERPRET=INTERPRET,
        **TILE,
    )
    return out


def row_sums(sums, moments, *, only_if=None, out=None):
    """Totals over the tiles of :func:`exp_logits`.

    Returns:
        fp32 [n] sums; fp32 [n] moments or None; int32 scalar, 1 if a row's sum is not below 2**90.
    """
    tiles, rows = sums.shape
    if out is None:
        total = torch.empty(rows, device=sums.device, dtype=torch.float32)
        out = total, torch.empty_like(total), torch.zeros((), device=sums.device, dtype=torch.int32)
    total, moment, flag = out
    _row_sums_kernel[(triton.cdiv(rows, ROWS),)](
        sums,
        sums if moments is None else moments,
        total,
        moment,
        flag if only_if is None else only_if,
        flag,
        rows,
        tiles,
        MAX_SUM,
        ENTROPY=moments is not None,
        CONDITIONAL=only_if is not None,
        ROWS=ROWS,
        BLOCK=ROW_BLOCK,
    )
    return out


def raise_offsets(maxima, total, offset, only_if):
    """Where a row's sum is not below 2**90, its offset becomes its true maximum, in place."""
    tiles, rows = maxima.shape
    _raise_offsets_kernel[(triton.cdiv(rows, ROWS),)](
        maxima, total, offset, only_if, rows, tiles, MAX_SUM, ROWS=ROWS, BLOCK=ROW_BLOCK
    )


def _num_programs(device: torch.device) -> int:
    if INTERPRET:
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _too_large(total, max_sum):
    return (total >= max_sum) | (total != total)


@triton.jit
def _column_halves(x):
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def _final_logits(z, columns, bias_ptr, vocab_size, scale, softcap, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr):
    """Logits in units of log2 from raw products, and with a cap its tanh."""
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=columns < vocab_size, other=0.0)[None, :]
    tanh = z
    if HAS_CAP:
        tanh = tanh_of(z * (scale / LOG2E))
        z = softcap * LOG2E * tanh
    else:
        z = z * scale
    return z, tanh


@triton.jit
def _exp_logits_kernel(
    hidden_desc,
    weight_desc,
    exps_desc,
    bias_ptr,
    offset_ptr,
    only_if_ptr,
    sums_ptr,
    moments_ptr,
    rows,
    vocab_size,
    width,
    scale,
    softcap,
    NUM_PROGRAMS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    CONDITIONAL: tl.constexpr,
    MAXIMUM: tl.constexpr,
    ENTROPY: tl.constexpr,
    EVEN: tl.constexpr,
    INTERPRET: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SUBTILES: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    tiles_m = tl.cdiv(rows, BLOCK_M)
    tiles = tiles_m * tl.cdiv(vocab_size, BLOCK_N)
    if CONDITIONAL:
        tiles *= tl.load(only_if_ptr)
    WIDTH: tl.constexpr = BLOCK_N // SUBTILES
    # rows vary fastest: the chunk's hidden states stay in L2 while the weight streams through once
    for tile in tl.range(tl.program_id(0), tiles, NUM_PROGRAMS, flatten=FLATTEN):
        row0, column0 = (tile % tiles_m) * BLOCK_M, (tile // tiles_m) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in tl.range(0, tl.cdiv(width, BLOCK_K)):
            a = hidden_desc.load([row0, k * BLOCK_K])
            b = weight_desc.load([column0, k * BLOCK_K])
            if INTERPRET:  # its bf16 dot is silently wrong
                a, b = a.to(tl.float32), b.to(tl.float32)
            acc = tl.dot(a, b.T, acc)
        index = row0 + tl.arange(0, BLOCK_M)
        offset = tl.load(offset_ptr + index, mask=index < rows, other=0.0)[:, None]
        parts = _column_halves(acc) if SUBTILES == 2 else (acc,)
        total = tl.full((BLOCK_M,), float("-inf") if MAXIMUM else 0.0, tl.float32)
        moment = tl.zeros((BLOCK_M,), tl.float32)
        for part in tl.static_range(SUBTILES):
            first = column0 + part * WIDTH
            columns = first + tl.arange(0, WIDTH)
            z, tanh = _final_logits(parts[part], columns, bias_ptr, vocab_size, scale, softcap, HAS_BIAS, HAS_CAP)
            if MAXIMUM:
                total = tl.maximum(total, tl.max(tl.where(columns[None, :] < vocab_size, z, float("-inf")), 1))
            else:
                x = z - offset
                e = tl.exp2(x)
                if not EVEN:
                    e = tl.where(columns[None, :] < vocab_size, e, 0.0)
                total += tl.sum(e, 1)
                if ENTROPY:
                    moment += tl.sum(tl.where(e > 0, e * x, 0.0), 1)
                if HAS_CAP:
                    e *= 1 - tanh * tanh
                exps_desc.store([row0, first], e.to(tl.bfloat16))
        place = (tile // tiles_m).to(tl.int64) * rows + index
        tl.store(sums_ptr + place, total, mask=index < rows)
        if ENTROPY:
            tl.store(moments_ptr + place, moment, mask=index < rows)


@triton.jit
def _row_sums_kernel(
    sums_ptr,
    moments_ptr,
    total_ptr,
    moment_ptr,
    only_if_ptr,
    flag_ptr,
    rows,
    tiles,
    max_sum,
    ENTROPY: tl.constexpr,
    CONDITIONAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total, moment = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS,), tl.float32)
    if CONDITIONAL:
        tiles = tiles * tl.load(only_if_ptr)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        place = tile[:, None].to(tl.int64) * rows + index[None, :]
        mask = (tile[:, None] < tiles) & (index[None, :] < rows)
        total += tl.sum(tl.load(sums_ptr + place, mask=mask, other=0.0), 0)
        if ENTROPY:
            moment += tl.sum(tl.load(moments_ptr + place, mask=mask, other=0.0), 0)
    if CONDITIONAL:
        mask = index < tl.where(tiles > 0, rows, 0)
    else:
        mask = index < rows
        tl.atomic_max(flag_ptr, tl.max((mask & _too_large(total, max_sum)).to(tl.int32), 0))
    tl.store(total_ptr + index, total, mask=mask)
    if ENTROPY:
        tl.store(moment_ptr + index, moment, mask=mask)


@triton.jit
def _raise_offsets_kernel(
    maxima_ptr, total_ptr, offset_ptr, only_if_ptr, rows, tiles, max_sum, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    tiles *= tl.load(only_if_ptr)
    for first in range(0, tiles, BLOCK):
        tile = first + tl.arange(0, BLOCK)
        place = tile[:, None].to(tl.int64) * rows + index[None, :]
        mask = (tile[:, None] < tiles) & (index[None, :] < rows)
        largest = tl.maximum(largest, tl.max(tl.load(maxima_ptr + place, mask=mask, other=float("-inf")), 0))
    total = tl.load(total_ptr + index, mask=index < rows, other=0.0)
    tl.store(offset_ptr + index, largest, mask=(index < tl.where(tiles > 0, rows, 0)) & _too_large(total, max_sum))
