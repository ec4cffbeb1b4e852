"""Routing metadata on the device: which token-expert pair stands in which row, sorted by expert, and the row tiles."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
PAIRS = 32 if INTERPRET else 128  # pairs a program
ONE_PROGRAM = 64 if INTERPRET else 1024  # pairs up to which one program does it all: a launch costs more than its work


@dataclass(frozen=True)
class Routing:
    """Pairs (token n, slot k), numbered n * K + k, in rows sorted by expert; skipped slots have no row.

    Everything is on the device and of a size that depends on shapes alone, so a CUDA graph replays any routing.
    """

    pair_of_row: torch.Tensor
    """[N * K] int32; garbage in the rows after the last pair."""
    row_of_pair: torch.Tensor
    """[N * K] int32; -1 for a skipped slot."""
    expert_of_row: torch.Tensor
    """[N * K] int32; garbage in the rows after the last pair."""
    expert_offsets: torch.Tensor
    """[E + 1] int32: expert e has the rows expert_offsets[e] to expert_offsets[e + 1]."""
    num_slots: int
    """K."""
    num_experts: int
    """E."""
    _tiles: dict = field(default_factory=dict, compare=False, repr=False)

    @property
    def num_rows(self) -> int:
        """N * K, the most rows there can be."""
        return len(self.pair_of_row)

    def tiles(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Expert and first row of every tile of ``block_m`` rows, int32 [most] each, and int32 how many there are.

        An expert's tiles stand together and never cross into the next expert. ``most`` depends on shapes alone.
        """
        if block_m not in self._tiles:
            self._tiles[block_m] = self._make_tiles(block_m)
        return self._tiles[block_m]

    def _make_tiles(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        most = self.num_rows // block_m + min(self.num_experts, self.num_rows)
        device = self.expert_offsets.device
        expert, first_row = torch.empty(2, most, dtype=torch.int32, device=device).unbind()
        num_tiles = torch.empty((), dtype=torch.int32, device=device)
        block = 16 if INTERPRET else 128
        if most:
            _tiles_kernel[(triton.cdiv(most, block),)](
                self.expert_offsets,
                expert,
                first_row,
                num_tiles,
                most,
                block_m,
                E=self.num_experts,
                BLOCK_E=triton.next_power_of_2(self.num_experts),
                BLOCK=block,
            )
        return expert, first_row, num_tiles


def route(top_k_index: torch.Tensor, num_experts: int) -> Routing:
    """Sorts the pairs of top_k_index [N, K] by expert, stable in the pair's number; -1 and E or beyond are skipped."""
    pairs, device = top_k_index.numel(), top_k_index.device
    flat = top_k_index.reshape(-1)
    rows = [torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(3)]
    shape = {"E": num_experts, "BLOCK_E": triton.next_power_of_2(num_experts), "PAIRS": PAIRS}
    if pairs <= ONE_PROGRAM:
        offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
        _route_kernel[(1,)](flat, *rows, offsets, pairs, **shape, num_warps=8)
        return Routing(*rows, offsets, top_k_index.shape[1], num_experts)
    blocks = triton.cdiv(pairs, PAIRS)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=device)
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](flat, counts, pairs, **shape, num_warps=8)
    _scan_kernel[(num_experts,)](counts, offsets, blocks, E=num_experts, BLOCK=64 if INTERPRET else 1024)
    _offsets_kernel[(1,)](offsets, E=num_experts, BLOCK_E=shape["BLOCK_E"])
    _place_kernel[(blocks,)](flat, counts, offsets, *rows, pairs, **shape, num_warps=8)
    return Routing(*rows, offsets, top_k_index.shape[1], num_experts)


@triton.jit
def _one_hot(expert, E: tl.constexpr, BLOCK_E: tl.constexpr):
    columns = tl.arange(0, BLOCK_E)
    return ((expert[:, None] == columns[None, :]) & (columns[None, :] < E)).to(tl.int32)


@triton.jit
def _route_kernel(
    index_ptr,
    pair_of_row_ptr,
    row_of_pair_ptr,
    expert_of_row_ptr,
    offsets_ptr,
    pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_E)
    count = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        expert = tl.load(index_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
        count += tl.sum(_one_hot(expert, E, BLOCK_E), 0)
    ends = tl.cumsum(count, 0)
    tl.store(offsets_ptr + columns, ends - count, mask=columns < E)
    tl.store(offsets_ptr + E, tl.sum(count, 0))
    first = ends - count
    for start in range(0, pairs, PAIRS):
        pair = start + tl.arange(0, PAIRS)
        expert = tl.load(index_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
        one_hot = _one_hot(expert, E, BLOCK_E)
        _place(pair, expert, one_hot, first, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr)
        first += tl.sum(one_hot, 0)


@triton.jit
def _place(pair, expert, one_hot, first, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr):
    """Gives each pair the next row of its expert; ``first`` is the first free row of each."""
    row = tl.sum(one_hot * (first[None, :] + tl.cumsum(one_hot, 0) - 1), 1)
    routed = tl.sum(one_hot, 1) > 0
    tl.store(row_of_pair_ptr + pair, tl.where(routed, row, -1), mask=pair < pairs)
    tl.store(pair_of_row_ptr + row, pair, mask=(pair < pairs) & routed)
    tl.store(expert_of_row_ptr + row, expert, mask=(pair < pairs) & routed)


@triton.jit
def _count_kernel(index_ptr, counts_ptr, pairs, E: tl.constexpr, BLOCK_E: tl.constexpr, PAIRS: tl.constexpr):
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(index_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    columns = tl.arange(0, BLOCK_E)
    count = tl.sum(_one_hot(expert, E, BLOCK_E), 0)
    tl.store(counts_ptr + block.to(tl.int64) * E + columns, count, mask=columns < E)


@triton.jit
def _scan_kernel(counts_ptr, offsets_ptr, blocks, E: tl.constexpr, BLOCK: tl.constexpr):
    """Counts of one expert become the numbers of its pairs in earlier blocks; their total goes to its offset."""
    expert = tl.program_id(0)
    before = 0
    for first in range(0, blocks, BLOCK):
        block = first + tl.arange(0, BLOCK)
        place = block.to(tl.int64) * E + expert
        count = tl.load(counts_ptr + place, mask=block < blocks, other=0)
        tl.store(counts_ptr + place, before + tl.cumsum(count, 0) - count, mask=block < blocks)
        before += tl.sum(count, 0)
    tl.store(offsets_ptr + 1 + expert, before)


@triton.jit
def _offsets_kernel(offsets_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    columns = tl.arange(0, BLOCK_E)
    count = tl.load(offsets_ptr + 1 + columns, mask=columns < E, other=0)
    tl.store(offsets_ptr + 1 + columns, tl.cumsum(count, 0), mask=columns < E)


@triton.jit
def _place_kernel(
    index_ptr,
    before_ptr,
    offsets_ptr,
    pair_of_row_ptr,
    row_of_pair_ptr,
    expert_of_row_ptr,
    pairs,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
):
    block = tl.program_id(0)
    pair = block * PAIRS + tl.arange(0, PAIRS)
    expert = tl.load(index_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    one_hot = _one_hot(expert, E, BLOCK_E)
    columns = tl.arange(0, BLOCK_E)
    first = tl.load(offsets_ptr + columns, mask=columns < E, other=0)
    first += tl.load(before_ptr + block.to(tl.int64) * E + columns, mask=columns < E, other=0)
    _place(pair, expert, one_hot, first, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr)


@triton.jit
def _tiles_kernel(
    offsets_ptr,
    expert_ptr,
    first_row_ptr,
    num_tiles_ptr,
    most,
    block_m,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + columns, mask=columns < E, other=0)
    rows = tl.load(offsets_ptr + 1 + columns, mask=columns < E, other=0) - start
    tiles = tl.where(columns < E, (rows + block_m - 1) // block_m, 0)
    ends = tl.cumsum(tiles, 0)
    tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    mine = (tile[:, None] < ends[None, :]) & (tile[:, None] >= (ends - tiles)[None, :])
    expert = tl.sum(tl.where(mine, columns[None, :], 0), 1)
    row = tl.sum(tl.where(mine, start[None, :] + (tile[:, None] - (ends - tiles)[None, :]) * block_m, 0), 1)
    tl.store(expert_ptr + tile, expert, mask=tile < most)
    tl.store(first_row_ptr + tile, row, mask=tile < most)
