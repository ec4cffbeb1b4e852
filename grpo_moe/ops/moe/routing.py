"""Routing metadata on the device: which token-expert pair stands in which row, sorted by expert, and the row tiles."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
PAIRS = 16 if INTERPRET else 128
"""Pairs a program places."""
FEW_PAIRS, AHEAD = (16, 32) if INTERPRET else (32, 256)
"""Pairs a program places, and compares them with at a time, in the one launch for few pairs."""
ONE_LAUNCH = 64 if INTERPRET else 4096
"""Pairs up to which every program compares its own with all others: a launch costs more than that."""


def cdiv(a: int, b: int) -> int:
    """a / b rounded up; Triton's own takes microseconds, as long as a launch in all."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


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
        return self.pair_of_row.shape[0]

    @property
    def rows_an_expert(self) -> float:
        """On average, if no slot is skipped."""
        return self.num_rows / self.num_experts

    def tiles(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Expert and first row of every tile of ``block_m`` rows, int32 [most] each, and int32 how many there are.

        An expert's tiles stand together and never cross into the next expert. ``most`` depends on shapes alone.
        """
        if block_m not in self._tiles:
            self._tiles[block_m] = self._make_tiles(block_m)
        return self._tiles[block_m]

    def _make_tiles(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tiles = _empty_tiles(self.num_rows, self.num_experts, block_m, self.expert_offsets.device)
        most, block = tiles[0].shape[0], 16 if INTERPRET else 128
        if most:
            _tiles_kernel[(cdiv(most, block),)](
                self.expert_offsets,
                *tiles,
                most,
                block_m,
                E=self.num_experts,
                BLOCK_E=next_power_of_2(self.num_experts),
                BLOCK=block,
            )
        return tiles


def route(top_k_index: torch.Tensor, num_experts: int, block_m: int | None = None) -> Routing:
    """Sorts the pairs of top_k_index [N, K] by expert, stable in the pair's number; -1 and E or beyond are skipped.

    ``block_m`` says for which tile height :meth:`Routing.tiles` will be asked: for few pairs they come with the rest.
    """
    pairs, device = top_k_index.numel(), top_k_index.device
    flat = top_k_index.reshape(-1)
    rows = [torch.empty(pairs, dtype=torch.int32, device=device) for _ in range(3)]
    offsets = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    routing = Routing(*rows, offsets, top_k_index.shape[1], num_experts)
    shape = {"E": num_experts, "BLOCK_E": next_power_of_2(num_experts + 1)}
    if pairs <= ONE_LAUNCH:
        tiles = (rows[0],) * 3 if block_m is None else _empty_tiles(pairs, num_experts, block_m, device)
        most = 0 if block_m is None else tiles[0].shape[0]
        _route_kernel[(1 + cdiv(pairs, FEW_PAIRS),)](
            flat, *rows, offsets, *tiles, pairs, most, block_m or 1, **shape, PAIRS=FEW_PAIRS, AHEAD=AHEAD
        )
        if block_m is not None:
            routing._tiles[block_m] = tiles
        return routing
    blocks = cdiv(pairs, PAIRS)
    counts = torch.empty(blocks, num_experts, dtype=torch.int32, device=device)
    _count_kernel[(blocks,)](flat, counts, pairs, **shape, PAIRS=PAIRS)
    _scan_kernel[(num_experts,)](counts, offsets, blocks, E=num_experts, BLOCK=64 if INTERPRET else 1024)
    _offsets_kernel[(1,)](offsets, E=num_experts, BLOCK_E=shape["BLOCK_E"])
    _place_kernel[(blocks,)](flat, counts, offsets, *rows, pairs, E=num_experts, PAIRS=PAIRS)
    return routing


def _empty_tiles(pairs: int, experts: int, block_m: int, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    most = pairs // block_m + min(experts, pairs)
    expert, first_row = torch.empty(2, most, dtype=torch.int32, device=device).unbind()
    return expert, first_row, torch.empty((), dtype=torch.int32, device=device)


@triton.jit
def _experts_of(index_ptr, pair, pairs, E: tl.constexpr):
    """Experts of pairs; E where a slot is skipped or the pair does not exist."""
    expert = tl.load(index_ptr + pair, mask=pair < pairs, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < E), expert, E)


@triton.jit
def _store_rows(pair, expert, row, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr, E: tl.constexpr):
    routed = expert < E
    tl.store(row_of_pair_ptr + pair, tl.where(routed, row, -1), mask=pair < pairs)
    tl.store(pair_of_row_ptr + row, pair, mask=routed)
    tl.store(expert_of_row_ptr + row, expert, mask=routed)


@triton.jit
def _store_tiles(tile, columns, start, rows, most, block_m, expert_ptr, first_row_ptr, num_tiles_ptr):
    """Expert and first row of some tiles from all experts' first row and rows; and how many tiles there are."""
    tiles = (rows + block_m - 1) // block_m
    ends = tl.cumsum(tiles, 0)
    tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    before = ends - tiles
    mine = (tile[:, None] < ends[None, :]) & (tile[:, None] >= before[None, :])
    expert = tl.sum(tl.where(mine, columns[None, :], 0), 1)
    row = tl.sum(tl.where(mine, start[None, :] + (tile[:, None] - before[None, :]) * block_m, 0), 1)
    tl.store(expert_ptr + tile, expert, mask=tile < most)
    tl.store(first_row_ptr + tile, row, mask=tile < most)


@triton.jit
def _route_kernel(
    index_ptr,
    pair_of_row_ptr,
    row_of_pair_ptr,
    expert_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    pairs,
    most,
    block_m,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAIRS: tl.constexpr,
    AHEAD: tl.constexpr,
):
    if tl.program_id(0) == 0:  # offsets and tiles
        columns = tl.arange(0, BLOCK_E)
        count = tl.zeros((BLOCK_E,), tl.int32)
        for start in range(0, pairs, AHEAD):
            count += tl.histogram(_experts_of(index_ptr, start + tl.arange(0, AHEAD), pairs, E), BLOCK_E)
        count = tl.where(columns < E, count, 0)
        first = tl.cumsum(count, 0) - count
        tl.store(offsets_ptr + columns, first, mask=columns <= E)
        for start in range(0, most, PAIRS):
            tile = start + tl.arange(0, PAIRS)
            _store_tiles(tile, columns, first, count, most, block_m, tile_expert_ptr, tile_row_ptr, num_tiles_ptr)
    else:  # a pair's row is the number of pairs that sort before it
        pair = (tl.program_id(0) - 1) * PAIRS + tl.arange(0, PAIRS)
        expert = _experts_of(index_ptr, pair, pairs, E)
        row = tl.zeros((PAIRS,), tl.int32)
        for start in range(0, pairs, AHEAD):
            other = start + tl.arange(0, AHEAD)
            others = _experts_of(index_ptr, other, pairs, E)
            is_before = (others[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
            row += tl.sum(((others[None, :] < expert[:, None]) | is_before).to(tl.int32), 1)
        _store_rows(pair, expert, row, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr, E)


@triton.jit
def _count_kernel(index_ptr, counts_ptr, pairs, E: tl.constexpr, BLOCK_E: tl.constexpr, PAIRS: tl.constexpr):
    block, columns = tl.program_id(0), tl.arange(0, BLOCK_E)
    count = tl.histogram(_experts_of(index_ptr, block * PAIRS + tl.arange(0, PAIRS), pairs, E), BLOCK_E)
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
    tl.store(offsets_ptr + expert, before)


@triton.jit
def _offsets_kernel(offsets_ptr, E: tl.constexpr, BLOCK_E: tl.constexpr):
    columns = tl.arange(0, BLOCK_E)
    count = tl.load(offsets_ptr + columns, mask=columns < E, other=0)
    tl.store(offsets_ptr + columns, tl.cumsum(count, 0) - count, mask=columns <= E)


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
    PAIRS: tl.constexpr,
):
    block, number = tl.program_id(0), tl.arange(0, PAIRS)
    pair = block * PAIRS + number
    expert = _experts_of(index_ptr, pair, pairs, E)
    is_before = (expert[None, :] == expert[:, None]) & (number[None, :] < number[:, None])
    row = tl.load(offsets_ptr + expert, mask=expert < E, other=0) + tl.sum(is_before.to(tl.int32), 1)
    row += tl.load(before_ptr + block.to(tl.int64) * E + expert, mask=expert < E, other=0)
    _store_rows(pair, expert, row, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr, E)


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
    tile, columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + columns, mask=columns < E, other=0)
    rows = tl.load(offsets_ptr + 1 + columns, mask=columns < E, other=0) - start
    _store_tiles(tile, columns, start, rows, most, block_m, expert_ptr, first_row_ptr, num_tiles_ptr)
