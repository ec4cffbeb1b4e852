"""Triton kernels of attention for one new query a row, over keys and values in buffers of fixed size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..triton_launch import INTERPRET, launch

BLOCK_N = 16 if INTERPRET else 64
"""Slots a program reads at a time."""
PROGRAMS = 512
"""Programs that keep a GPU's memory busy; rows of few sequences are split among them."""
MIN_SLOTS = 4 * BLOCK_N
"""Slots a split has at least."""


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_buffer: torch.Tensor,
    value_buffer: torch.Tensor,
    lengths: torch.Tensor,
    *,
    sinks: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Puts the new key and value in slot ``lengths % slots`` and attends to them and what the buffers hold.

    Args:
        query: [B, heads, D].
        key, value: [B, kv_heads, D] and [B, kv_heads, DV] of the new tokens.
        key_buffer, value_buffer: [B, kv_heads, slots, D] and [B, kv_heads, slots, DV], contiguous.
        lengths: [B] tokens before the new one; the last ``slots - 1`` of them are seen.
        sinks: [heads] logits, or None.
        scale, softcap: of the scores.

    Returns:
        [B, heads, DV] in the dtype of the buffers.
    """
    batch, heads, dim = query.shape
    kv_heads, slots, value_dim = value_buffer.shape[1:]
    group = heads // kv_heads
    wanted = max(1, min(PROGRAMS // (batch * kv_heads), slots // MIN_SLOTS))
    splits = 1 << (wanted.bit_length() - 1)
    query, key, value = (x.to(key_buffer.dtype).contiguous() for x in (query, key, value))
    out = torch.empty(batch, heads, value_dim, dtype=value_buffer.dtype, device=query.device)
    parts = out  # unused for one split
    if splits > 1:
        parts = torch.empty(batch, heads, splits, value_dim + 2, dtype=torch.float32, device=query.device)
    launch(
        _decode_kernel,
        (batch * kv_heads, splits, 1),
        query,
        key,
        value,
        key_buffer,
        value_buffer,
        lengths,
        out if sinks is None else sinks,
        out,
        parts,
        slots,
        float(scale),
        float(softcap or 0),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=dim,
        DV=value_dim,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_DV=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_N=BLOCK_N,
        SPLITS=splits,
        SINKS=sinks is not None,
        SOFTCAP=softcap is not None,
        CAST=INTERPRET,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        launch(
            _combine_kernel,
            (batch * heads, 1, 1),
            parts,
            out if sinks is None else sinks,
            out,
            HEADS=heads,
            DV=value_dim,
            BLOCK_DV=triton.next_power_of_2(value_dim),
            SPLITS=splits,
            SINKS=sinks is not None,
            num_warps=1,
        )
    return out


@triton.jit
def _decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_buffer_ptr,
    value_buffer_ptr,
    lengths_ptr,
    sinks_ptr,
    out_ptr,
    parts_ptr,
    slots,
    scale,
    softcap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAST: tl.constexpr,
):
    """A program: one kv head of a row and, of its slots, one part of SPLITS; the first part has the new token too."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row_head = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = row_head // KV_HEADS
    length = tl.load(lengths_ptr + row).to(tl.int32)
    slot = length % slots
    filled = tl.minimum(length, slots)
    part = tl.cdiv(tl.cdiv(filled, SPLITS), BLOCK_N) * BLOCK_N
    end = tl.minimum(filled, (split + 1) * part)

    members, dims, value_dims = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    heads = row_head * GROUP + members  # of the row and its head together
    query = tl.load(
        query_ptr + heads[:, None] * D + dims[None], mask=(members < GROUP)[:, None] & (dims < D)[None], other=0.0
    )
    if CAST:
        query = query.to(tl.float32)
    top = tl.full([BLOCK_G], -1.0e30, tl.float32)  # finite: a part without a slot must not give NaN
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_DV], tl.float32)
    if split == 0:
        key = tl.load(key_ptr + row_head * D + dims, mask=dims < D, other=0.0)
        value = tl.load(value_ptr + row_head * DV + value_dims, mask=value_dims < DV, other=0.0)
        place = row_head * slots + slot
        tl.store(key_buffer_ptr + place * D + dims, key, mask=dims < D)
        tl.store(value_buffer_ptr + place * DV + value_dims, value, mask=value_dims < DV)
        top = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None], 1) * scale
        if SOFTCAP:
            top = softcap * (2 * tl.sigmoid(2 * top / softcap) - 1)
        top *= LOG2E
        total += 1.0
        acc += value.to(tl.float32)[None]

    for start in range(split * part, end, BLOCK_N):
        places = start + tl.arange(0, BLOCK_N)
        seen = (places < end) & (places != slot)  # the new token is about to take that slot
        rows = (row_head * slots + places)[:, None]
        keys = tl.load(key_buffer_ptr + rows * D + dims[None], mask=seen[:, None] & (dims < D)[None], other=0.0)
        values = tl.load(
            value_buffer_ptr + rows * DV + value_dims[None],
            mask=seen[:, None] & (value_dims < DV)[None],
            other=0.0,
        )
        if CAST:
            keys, values = keys.to(tl.float32), values.to(tl.float32)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(seen[None], scores * LOG2E, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        top = new_top

    live = (members < GROUP)[:, None] & (value_dims < DV)[None]
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks_ptr + heads % (KV_HEADS * GROUP), mask=members < GROUP, other=0.0)
            total += tl.exp2(sink.to(tl.float32) * LOG2E - top)
        out = acc / total[:, None]
        tl.store(out_ptr + heads[:, None] * DV + value_dims[None], out.to(out_ptr.dtype.element_ty), mask=live)
    else:
        base = parts_ptr + (heads * SPLITS + split) * (DV + 2)
        tl.store(base[:, None] + value_dims[None], acc, mask=live)
        tl.store(base + DV, top, mask=members < GROUP)
        tl.store(base + DV + 1, total, mask=members < GROUP)


@triton.jit
def _combine_kernel(
    parts_ptr,
    sinks_ptr,
    out_ptr,
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    SPLITS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """A program: the parts of one head of a row."""
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0).to(tl.int64)
    splits, value_dims = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    base = parts_ptr + (head * SPLITS + splits) * (DV + 2)
    tops, totals = tl.load(base + DV), tl.load(base + DV + 1)
    top = tl.max(tops, 0)
    fades = tl.exp2(tops - top)
    total = tl.sum(totals * fades, 0)
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + head % HEADS).to(tl.float32) * LOG2E - top)
    acc = tl.load(base[:, None] + value_dims[None], mask=(value_dims < DV)[None], other=0.0)
    out = tl.sum(acc * fades[:, None], 0) / total
    tl.store(out_ptr + head * DV + value_dims, out.to(out_ptr.dtype.element_ty), mask=value_dims < DV)
