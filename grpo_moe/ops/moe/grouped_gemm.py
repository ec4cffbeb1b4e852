"""Triton GEMM of rows sorted by expert times the expert's weight; tiles and operands of all grouped GEMMs."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..triton_launch import INTERPRET, launch
from .routing import Routing


@dataclass(frozen=True)
class Tile:
    """Block sizes of a GEMM and how it is compiled."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int = 1
    """Persistent programs a multiprocessor: more hide the latency of tiles that hardly compute."""
    flatten: bool = False
    """Whether the next tile's loads begin before this one's results are stored."""
    tma: bool = True
    """Whether to load by TMA what it can load; without it the host launches faster."""

    @functools.cached_property
    def options(self) -> dict:
        """Keyword arguments of a launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "FLATTEN": self.flatten,
            "INTERPRET": INTERPRET,
        }


@dataclass(frozen=True)
class Rows:
    """A matrix whose row r belongs to sorted row r, or to its token."""

    values: torch.Tensor
    """[num_rows or N, D], last stride 1."""
    by_token: bool

    def operand(self, block_m: int, block_k: int, tma: bool):
        """What a kernel loads tiles from, and whether it does so by TMA: rows by token cannot."""
        if self.by_token or not (tma and tma_fits(self.values)):
            return self.values, False
        return TensorDescriptor(
            self.values, list(self.values.shape), [self.values.stride(0), 1], [block_m, block_k]
        ), True


@dataclass(frozen=True)
class ExpertWeight:
    """A weight [E, N, K], or [E, K, N] if ``inner_first``, that rows [.., K] are multiplied by to give [.., N]."""

    values: torch.Tensor
    inner_first: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        n, k = self.values.shape[1:]
        return (k, n) if self.inner_first else (n, k)

    def operand(self, block_n: int, block_k: int, tma: bool):
        """As :meth:`Rows.operand`."""
        if not (tma and tma_fits(self.values)):
            return self.values, False
        block = [1, block_k, block_n] if self.inner_first else [1, block_n, block_k]
        return TensorDescriptor(self.values, list(self.values.shape), list(self.values.stride()), block), True

    def split_operand(self, block_n: int, block_k: int, tma: bool):
        """As :meth:`operand` of a weight whose N is [gate; up]: a tile is ``block_n`` gates and their ups."""
        values = self.values.unflatten(2 if self.inner_first else 1, (2, -1))  # [E, 2, I, K] or [E, K, 2, I]
        if not (tma and tma_fits(values)):
            return self.values, False
        block = [1, block_k, 2, block_n] if self.inner_first else [1, 2, block_n, block_k]
        return TensorDescriptor(values, list(values.shape), list(values.stride()), block), True


def tma_fits(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can load tiles of x: rows that start at multiples of 16 bytes."""
    aligned = x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in x.stride()[:-1])
    return aligned and x.stride(-1) == 1 and x.numel() > 0 and (INTERPRET or device_properties(x.device).major >= 9)


def grouped_gemm(rows: Rows, weight: ExpertWeight, routing: Routing, tile: Tile) -> torch.Tensor:
    """[num_rows, N]: every row times the weight of its expert, summed in fp32; garbage after the last pair."""
    n, k = weight.shape
    out = rows.values.new_empty(routing.num_rows, n)
    if out.numel() == 0:
        return out
    a, a_tma = rows.operand(tile.block_m, tile.block_k, tile.tma)
    b, b_tma = weight.operand(tile.block_n, tile.block_k, tile.tma)
    expert, first_row, num_tiles = routing.tiles(tile.block_m)
    programs = num_programs(out.device, tile)
    launch(
        _grouped_gemm_kernel,
        (programs, 1, 1),
        a,
        b,
        out,
        routing.pair_of_row,
        routing.expert_offsets,
        expert,
        first_row,
        num_tiles,
        n,
        k,
        rows.values.stride(0),
        routing.num_slots,
        BY_TOKEN=rows.by_token,
        A_TMA=a_tma,
        B_TMA=b_tma,
        INNER_FIRST=weight.inner_first,
        NUM_PROGRAMS=programs,
        **tile.options,
    )
    return out


def num_programs(device: torch.device, tile: Tile) -> int:
    """Programs of a persistent kernel, however few its tiles are: each number is a kernel of its own to compile."""
    return 4 if INTERPRET else tile.programs * device_properties(device).multi_processor_count


device_properties = functools.cache(torch.cuda.get_device_properties)


def has_large_tiles(device: torch.device) -> bool:
    """Whether a multiprocessor has the shared memory of a Hopper H100: 227 KiB a program."""
    return device_properties(device).shared_memory_per_block_optin >= 232_448


@triton.jit
def source_rows(row, end, pair_of_row_ptr, num_slots, BY_TOKEN: tl.constexpr):
    """Rows to read, int64; those after the expert's last are read from its last, and never stored."""
    source = tl.minimum(row, end - 1)
    if BY_TOKEN:
        source = tl.load(pair_of_row_ptr + source) // num_slots
    return source.to(tl.int64)


@triton.jit
def row_tile(a, source, row0, k0, K, stride, TMA: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_M, BLOCK_K] of a matrix of rows, zeros beyond its last column."""
    if TMA:
        return a.load([row0, k0])
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        return tl.load(a + source[:, None] * stride + k[None, :], mask=k[None, :] < K, other=0.0)


@triton.jit
def weight_tile(
    b,
    expert,
    n0,
    k0,
    n,
    inside,
    N,
    K,
    TMA: tl.constexpr,
    INNER_FIRST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_K, BLOCK_N] of an expert's weight, zeros beyond its last row and column.

    By TMA from column ``n0`` on; else the columns ``n`` that are ``inside``.
    """
    if TMA:
        if INNER_FIRST:
            return b.load([expert, k0, n0]).reshape(BLOCK_K, BLOCK_N)
        else:
            return b.load([expert, n0, k0]).reshape(BLOCK_N, BLOCK_K).T
    else:
        k = k0 + tl.arange(0, BLOCK_K)
        base = b + expert.to(tl.int64) * N * K
        mask = (k[:, None] < K) & inside[None, :]
        if INNER_FIRST:
            return tl.load(base + k[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0.0)
        else:
            return tl.load(base + n[None, :].to(tl.int64) * K + k[:, None], mask=mask, other=0.0)


@triton.jit
def multiply(a, b, acc, INTERPRET: tl.constexpr):
    """acc + a @ b in fp32."""
    if INTERPRET:  # its bf16 dot is silently wrong
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _grouped_gemm_kernel(
    a,
    b,
    out_ptr,
    pair_of_row_ptr,
    offsets_ptr,
    tile_expert_ptr,
    tile_row_ptr,
    num_tiles_ptr,
    N,
    K,
    stride_a,
    num_slots,
    BY_TOKEN: tl.constexpr,
    A_TMA: tl.constexpr,
    B_TMA: tl.constexpr,
    INNER_FIRST: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FLATTEN: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    tiles_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.load(num_tiles_ptr) * tiles_n, NUM_PROGRAMS, flatten=FLATTEN):
        expert = tl.load(tile_expert_ptr + tile // tiles_n)
        row0, n0 = tl.load(tile_row_ptr + tile // tiles_n), (tile % tiles_n) * BLOCK_N
        end = tl.load(offsets_ptr + expert + 1)
        row, n = row0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
        source = source_rows(row, end, pair_of_row_ptr, num_slots, BY_TOKEN)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k0 in tl.range(0, K, BLOCK_K):
            x = row_tile(a, source, row0, k0, K, stride_a, A_TMA, BLOCK_K)
            w = weight_tile(b, expert, n0, k0, n, n < N, N, K, B_TMA, INNER_FIRST, BLOCK_N, BLOCK_K)
            acc = multiply(x, w, acc, INTERPRET)
        place = row[:, None].to(tl.int64) * N + n[None, :]
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=(row[:, None] < end) & (n[None, :] < N))
