"""Triton kernels that draw a token a row: sums of exponentials by block, then the block and the token in it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .triton_launch import INTERPRET, launch

BLOCK = 32 if INTERPRET else 2048
"""Logits a program sums."""


def sample(logits: torch.Tensor, uniform: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`grpo_moe.ops.sampling.sample_tokens` for contiguous float32 logits."""
    logits = logits.contiguous()
    (rows, vocabulary), device = logits.shape, logits.device
    blocks = triton.cdiv(vocabulary, BLOCK)
    tops, sums = torch.empty(2, rows, blocks, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    logps = torch.empty(rows, dtype=torch.float32, device=device)
    scale = 1.0 / (temperature or 1.0)
    launch(
        _sum_kernel,
        (rows, blocks, 1),
        logits,
        tops,
        sums,
        scale,
        V=vocabulary,
        BLOCKS=blocks,
        BLOCK=BLOCK,
        num_warps=4,
    )
    launch(
        _pick_kernel,
        (rows, 1, 1),
        logits,
        tops,
        sums,
        uniform,
        tokens,
        logps,
        scale,
        V=vocabulary,
        BLOCKS=blocks,
        MOST=triton.next_power_of_2(blocks),
        BLOCK=BLOCK,
        GREEDY=temperature == 0,
        num_warps=4,
    )
    return tokens, logps


@triton.jit
def _sum_kernel(logits_ptr, tops_ptr, sums_ptr, scale, V: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """A program: the largest logit of a block of a row, and the sum of exponentials relative to it."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=float("-inf")) * scale
    top = tl.max(x, 0)
    total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - top)), 0)
    tl.store(tops_ptr + row * BLOCKS + block, top)
    tl.store(sums_ptr + row * BLOCKS + block, total)


@triton.jit
def _pick_kernel(
    logits_ptr,
    tops_ptr,
    sums_ptr,
    uniform_ptr,
    tokens_ptr,
    logps_ptr,
    scale,
    V: tl.constexpr,
    BLOCKS: tl.constexpr,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
    GREEDY: tl.constexpr,
):
    """A program: the token of a row."""
    row = tl.program_id(0).to(tl.int64)
    blocks = tl.arange(0, MOST)
    there = blocks < BLOCKS
    tops = tl.load(tops_ptr + row * BLOCKS + blocks, mask=there, other=float("-inf"))
    sums = tl.load(sums_ptr + row * BLOCKS + blocks, mask=there, other=0.0)
    top = tl.max(tops, 0)
    weights = tl.where(sums > 0, sums * tl.exp(tops - top), 0.0)
    total = tl.sum(weights, 0)
    rest = 0.0
    if GREEDY:
        block = tl.min(tl.where(tops == top, blocks, BLOCKS - 1), 0)
    else:
        cumulative = tl.cumsum(weights, 0)
        target = tl.load(uniform_ptr + row).to(tl.float32) * total
        last = tl.max(tl.where(weights > 0, blocks, 0), 0)  # rounding may leave the target above all sums
        block = tl.minimum(tl.sum((there & (cumulative <= target)).to(tl.int32), 0), last)
        rest = target - tl.sum(tl.where(blocks < block, weights, 0.0), 0)
    places = tl.arange(0, BLOCK)
    columns = block * BLOCK + places
    x = tl.load(logits_ptr + row * V + columns, mask=columns < V, other=float("-inf")) * scale
    if GREEDY:
        place = tl.min(tl.where(x == top, places, BLOCK - 1), 0)
    else:
        probabilities = tl.where(x == float("-inf"), 0.0, tl.exp(x - top))
        inner = tl.cumsum(probabilities, 0)
        last = tl.max(tl.where(probabilities > 0, places, 0), 0)
        place = tl.minimum(tl.sum((inner <= rest).to(tl.int32), 0), last)
    chosen = tl.sum(tl.where(places == place, x, 0.0), 0)
    tl.store(tokens_ptr + row, tl.minimum(block * BLOCK + place, V - 1).to(tl.int64))
    tl.store(logps_ptr + row, chosen - top - tl.log(total))
