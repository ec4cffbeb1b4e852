"""Routing metadata on the device: which token-expert pair stands in which row, sorted by expert, and the row tiles."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from ..triton_launch import INTERPRET, launch

PAIRS, PART = (64, 16) if INTERPRET else (1024, 64)
"""Pairs a program places, and how many of them at a time."""
FEW_PAIRS, AHEAD = (16, 32) if INTERPRET else (32, 256)
"""Pairs a program places, and compares them with at a time, in the one launch for few pairs."""
ONE_LAUNCH = 64 if INTERPRET else 4096
"""Pairs up to which every program compares its own with all others: a second launch costs more than that."""
TILES = 16 if INTERPRET else 32
"""Tiles a program finds at a time."""
VARYING = ["pairs", "most", "block_m", "blocks"]
"""Arguments that change with the number of tokens: no kernel of its own for each."""


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
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the first four fields hold."""
        return self.pair_of_row, self.row_of_pair, self.expert_of_row, self.expert_offsets

    @property
    def rows_an_expert(self) -> float:
        """On average, if no slot is skipped."""
        return self.num_rows / self.num_experts

    def tiles(self, block_m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Expert and first row of every tile of ``block_m`` rows, int32 [most] each, and int32 [1] how many there are.

        An expert's tiles stand together and never cross into the next expert. ``most`` depends on shapes alone.
        """
        if block_m not in self._tiles:
            most = _most_tiles(self.num_rows, self.num_experts, block_m)
            tiles = _empty((most, most, 1), self.expert_offsets.device)
            if most:
                launch(
                    _tiles_kernel,
                    (cdiv(most, TILES), 1, 1),
                    self.expert_offsets,
                    *tiles,
                    most,
                    block_m,
                    E=self.num_experts,
                    BLOCK_E=next_power_of_2(self.num_experts),
                    TILES=TILES,
                )
            self._tiles[block_m] = tiles
        return self._tiles[block_m]


def route(top_k_index: torch.Tensor, num_experts: int, block_m: int) -> Routing:
    """Sorts the pairs of top_k_index [N, K] by expert, stable in the pair's number; -1 and E or beyond are skipped.

    The tiles of height ``block_m`` come with it.
    """
    (tokens, slots), device = top_k_index.shape, top_k_index.device
    pairs, most = tokens * slots, _most_tiles(tokens * slots, num_experts, block_m)
    blocks = 0 if pairs <= ONE_LAUNCH else cdiv(pairs, PAIRS)
    sizes = (pairs, pairs, pairs, num_experts + 1, most, most, 1, blocks * num_experts, blocks * num_experts)
    *made, counts, firsts = _empty(sizes, device)
    shape = {"E": num_experts, "BLOCK_E": next_power_of_2(num_experts + 1), "TILES": TILES}
    if blocks == 0:
        grid = (1 + cdiv(pairs, FEW_PAIRS), 1, 1)
        launch(_route_kernel, grid, top_k_index, *made, pairs, most, block_m, **shape, PAIRS=FEW_PAIRS, AHEAD=AHEAD)
    else:
        launch(
            _count_kernel,
            (blocks, 1, 1),
            top_k_index,
            counts,
            pairs,
            E=num_experts,
            BLOCK_E=shape["BLOCK_E"],
            PAIRS=PAIRS,
        )
        launch(
            _place_kernel,
            (blocks, 1, 1),
            top_k_index,
            counts,
            firsts,
            *made,
            pairs,
            most,
            block_m,
            blocks,
            **shape,
            PAIRS=PAIRS,
            PART=PART,
            num_warps=8,
        )
    pair_of_row, row_of_pair, expert_of_row, offsets, *tiles = made
    return Routing(pair_of_row, row_of_pair, expert_of_row, offsets, slots, num_experts, {block_m: tuple(tiles)})


def _empty(sizes: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, ...]:
    """int32 tensors in one allocation, which takes the host microseconds; each begins at a multiple of 16 bytes."""
    padded = [(size + 3) // 4 * 4 for size in sizes]
    parts = torch.empty(sum(padded), dtype=torch.int32, device=device).split(padded)
    return tuple([x if x.shape[0] == size else x[:size] for x, size in zip(parts, sizes, strict=True)])


def _most_tiles(pairs: int, experts: int, block_m: int) -> int:
    return pairs // block_m + min(experts, pairs)


@triton.jit
def _experts_of(index_ptr, pair, pairs, E: tl.constexpr):
    """Experts of pairs; E where a slot is skipped or the pair does not exist."""
    expert = tl.load(index_ptr + pair, mask=pair < pairs, other=-1)
    return tl.where((expert >= 0) & (expert < E), expert, E).to(tl.int32)


@triton.jit
def _store_rows(pair, expert, row, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr, E: tl.constexpr):
    routed = expert < E
    tl.store(row_of_pair_ptr + pair, tl.where(routed, row, -1), mask=pair < pairs)
    tl.store(pair_of_row_ptr + row, pair, mask=routed)
    tl.store(expert_of_row_ptr + row, expert, mask=routed)


@triton.jit
def _store_tiles(
    program,
    programs,
    start,
    rows,
    most,
    block_m,
    expert_ptr,
    first_row_ptr,
    num_tiles_ptr,
    BLOCK_E: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program's share of the tiles, from every expert's first row and number of rows; and how many there are."""
    columns = tl.arange(0, BLOCK_E)
    tiles = (rows + block_m - 1) // block_m
    ends = tl.cumsum(tiles, 0)
    before = ends - tiles
    tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    for first in range(program * TILES, most, programs * TILES):
        tile = first + tl.arange(0, TILES)
        mine = (tile[:, None] < ends[None, :]) & (tile[:, None] >= before[None, :])
        expert = tl.sum(tl.where(mine, columns[None, :], 0), 1)
        row = tl.sum(tl.where(mine, start[None, :] + (tile[:, None] - before[None, :]) * block_m, 0), 1)
        tl.store(expert_ptr + tile, expert, mask=tile < most)
        tl.store(first_row_ptr + tile, row, mask=tile < most)


@triton.jit(do_not_specialize=VARYING)
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
    TILES: tl.constexpr,
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
        _store_tiles(0, 1, first, count, most, block_m, tile_expert_ptr, tile_row_ptr, num_tiles_ptr, BLOCK_E, TILES)
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


@triton.jit(do_not_specialize=VARYING)
def _count_kernel(index_ptr, counts_ptr, pairs, E: tl.constexpr, BLOCK_E: tl.constexpr, PAIRS: tl.constexpr):
    block, columns = tl.program_id(0), tl.arange(0, BLOCK_E)
    count = tl.histogram(_experts_of(index_ptr, block * PAIRS + tl.arange(0, PAIRS), pairs, E), BLOCK_E)
    tl.store(counts_ptr + block.to(tl.int64) * E + columns, count, mask=columns < E)


@triton.jit(do_not_specialize=VARYING)
def _place_kernel(
    index_ptr,
    counts_ptr,
    firsts_ptr,
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
    blocks,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILES: tl.constexpr,
    PAIRS: tl.constexpr,
    PART: tl.constexpr,
):
    block, columns = tl.program_id(0), tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), tl.int32)
    before = tl.zeros((BLOCK_E,), tl.int32)
    for start in range(0, blocks, 32):
        other = (start + tl.arange(0, 32))[:, None]
        place = counts_ptr + other.to(tl.int64) * E + columns[None, :]
        count = tl.load(place, mask=(other < blocks) & (columns[None, :] < E), other=0)
        total += tl.sum(count, 0)
        before += tl.sum(tl.where(other < block, count, 0), 0)
    offset = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(offsets_ptr + columns, offset, mask=columns <= E)
    _store_tiles(
        block, blocks, offset, total, most, block_m, tile_expert_ptr, tile_row_ptr, num_tiles_ptr, BLOCK_E, TILES
    )
    firsts_ptr += block.to(tl.int64) * E
    tl.store(firsts_ptr + columns, offset + before, mask=columns < E)
    tl.debug_barrier()  # the block's own first rows are read back from memory, where a pair finds its expert's
    number = tl.arange(0, PART)
    for part in range(0, PAIRS, PART):
        pair = block * PAIRS + part + number
        expert = _experts_of(index_ptr, pair, pairs, E)
        row = tl.load(firsts_ptr + expert, mask=expert < E, other=0)
        for earlier in range(0, part + PART, PART):
            other = block * PAIRS + earlier + number
            others = _experts_of(index_ptr, other, pairs, E)
            is_before = (others[None, :] == expert[:, None]) & (other[None, :] < pair[:, None])
            row += tl.sum(is_before.to(tl.int32), 1)
        _store_rows(pair, expert, row, pairs, pair_of_row_ptr, row_of_pair_ptr, expert_of_row_ptr, E)


@triton.jit(do_not_specialize=VARYING)
def _tiles_kernel(
    offsets_ptr,
    expert_ptr,
    first_row_ptr,
    num_tiles_ptr,
    most,
    block_m,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    TILES: tl.constexpr,
):
    columns = tl.arange(0, BLOCK_E)
    start = tl.load(offsets_ptr + columns, mask=columns < E, other=0)
    rows = tl.load(offsets_ptr + 1 + columns, mask=columns < E, other=0) - start
    program, programs = tl.program_id(0), tl.num_programs(0)
    _store_tiles(
        program, programs, start, rows, most, block_m, expert_ptr, first_row_ptr, num_tiles_ptr, BLOCK_E, TILES
    )
