"""Which experts the routers of a model chose for a batch of sequences, and how balanced and how stable that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from grpo_moe.checks import check_int, require


@dataclass(frozen=True)
class RoutingRecord:
    """Experts of every token and router of a batch of sequences. Methods return new records."""

    indices: torch.Tensor
    """[B, T, L, K] int16 or int32, in the router's order. K times -1: no record, route that token naturally."""
    layers: tuple[int, ...]
    """[L] number of the decoder layer of each router, increasing; dense layers have no entry."""
    num_experts: int
    """E of each router."""

    def __post_init__(self):
        fits = isinstance(self.indices, torch.Tensor)
        require(fits, "indices", "a tensor", self.indices, "torch.tensor makes one")
        fits = isinstance(self.layers, tuple | list) and all(type(n) is int and n >= 0 for n in self.layers)
        require(fits, "layers", "numbers of decoder layers", self.layers, "count from 0")
        check_int("num_experts", self.num_experts, least=1, fix="give E of each router")
        shape, dtype = tuple(self.indices.shape), self.indices.dtype
        if len(shape) != 4 or shape[2] != len(self.layers) or dtype not in (torch.int16, torch.int32):
            raise ValueError(
                f"indices must be [B, T, {len(self.layers)} layers, K] int16 or int32, got {shape} {dtype}; cast them"
            )
        if list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"layers must be increasing layer numbers, got {self.layers}; sort indices with them")

    def to(self, device: torch.device | str) -> RoutingRecord:
        """The record on another device; replay is fastest on the model's."""
        return replace(self, indices=self.indices.to(device))

    def rows(self, rows: torch.Tensor | slice) -> RoutingRecord:
        """The given sequences, in that order: a micro-batch."""
        return replace(self, indices=self.indices[rows])

    def resize(self, width: int) -> RoutingRecord:
        """Cut, or padded with -1 on the right, to ``width`` tokens."""
        missing = max(width - self.indices.shape[1], 0)
        return replace(self, indices=F.pad(self.indices[:, :width], (0, 0, 0, 0, 0, missing), value=-1))

    def pack(self, token_mask: torch.Tensor) -> RoutingRecord:
        """The N tokens where ``token_mask`` [B, T] is True, row after row, as one sequence [1, N, L, K]."""
        return replace(self, indices=self.indices[token_mask.bool()][None])

    def unpack(self, token_mask: torch.Tensor) -> RoutingRecord:
        """The inverse of :meth:`pack`, -1 elsewhere; with another mask, the same tokens padded in another way."""
        shape, tokens = tuple(self.indices.shape), int(token_mask.sum())
        if shape[:2] != (1, tokens):
            raise ValueError(f"token_mask must hold the N tokens of this packed {shape}, got {tokens}; use such a mask")
        return replace(self, indices=scatter_tokens(self.indices[0], token_mask.bool()))

    @staticmethod
    def concat_rows(records: Sequence[RoutingRecord]) -> RoutingRecord:
        """Records of micro-batches as one batch, padded with -1 to the longest."""
        width = max(record.indices.shape[1] for record in records)
        return _concat([record.resize(width) for record in records], dim=0)

    @staticmethod
    def concat_steps(records: Sequence[RoutingRecord]) -> RoutingRecord:
        """Records of the forwards of one generation, prefill first, joined along T.

        The last sampled token was never forwarded: T is one less than the sequence's; :meth:`resize` adds its -1.
        """
        return _concat(records, dim=1)

    def check_entries(self) -> None:
        """Raises ValueError unless each entry is K different experts of 0..E-1, or K times -1."""
        entries = self.indices.sort(-1).values
        low, high = entries[..., 0], entries[..., -1]
        repeated = (entries[..., 1:] == entries[..., :-1]).any(-1)
        wrong = ((low < 0) | (high >= self.num_experts) | repeated) & ((low != -1) | (high != -1))
        if wrong.any():
            row, token, layer = wrong.nonzero()[0].tolist()
            raise ValueError(
                f"the entry of layer {self.layers[layer]} must be {self.indices.shape[-1]} different experts of "
                f"0..{self.num_experts - 1} or all -1, got {self.indices[row, token, layer].tolist()} at row {row}, "
                f"token {token}; record it again, or set it to -1"
            )

    def flip_rate(self, other: RoutingRecord, token_mask: torch.Tensor | None = None):
        """Share of tokens whose set of experts differs in a layer [L], and share that differ in any layer [], fp32.

        Over tokens under ``token_mask`` [B, T] that both records have; NaN when there is none.

        Source: R3, arXiv 2510.11370 (differences by router and by token).
        """
        _check_alike([self, other])
        if self.indices.shape != other.indices.shape:
            shapes = tuple(self.indices.shape), tuple(other.indices.shape)
            raise ValueError(f"other must have shape {shapes[0]}, got {shapes[1]}; cut it with rows() and resize()")
        compared = (self.indices[..., 0] >= 0) & (other.indices[..., 0] >= 0)  # [B, T, L]
        if token_mask is not None:
            compared &= token_mask.bool()[..., None]
        flipped = (self.indices.sort(-1).values != other.indices.sort(-1).values).any(-1) & compared
        by_layer = flipped.sum((0, 1)) / compared.sum((0, 1))
        return by_layer, flipped.any(-1).sum() / compared.any(-1).sum()

    def expert_load(self, token_mask: torch.Tensor | None = None) -> torch.Tensor:
        """Tokens [L, E] int64 of each expert, over those under ``token_mask`` [B, T]; -1 counts nowhere.

        Loads of micro-batches and processes add up: pass their sum to :func:`dead_experts` and :func:`max_violation`.
        """
        bins, known = len(self.layers) * self.num_experts, self.indices >= 0
        if token_mask is not None:
            known &= token_mask.bool()[..., None, None]
        first = torch.arange(len(self.layers), device=self.indices.device)[:, None] * self.num_experts
        assigned = torch.where(known, self.indices.long() + first, bins).flatten()  # bincount would wait for the device
        counts = assigned.new_zeros(bins + 1).scatter_add_(0, assigned, assigned.new_ones(1).expand_as(assigned))
        return counts[:-1].view(len(self.layers), self.num_experts)


def dead_experts(expert_load: torch.Tensor) -> torch.Tensor:
    """Number of experts without a token: ``expert_load`` [..., E] -> [...] int64."""
    return (expert_load == 0).sum(-1)


def max_violation(expert_load: torch.Tensor) -> torch.Tensor:
    """Max load / mean load - 1: ``expert_load`` [..., E] -> [...] fp32; 0 is balanced, NaN without a token.

    Source: Auxiliary-loss-free load balancing, arXiv 2408.15664 (MaxVio).
    """
    load = expert_load.float()
    return load.amax(-1) / load.mean(-1) - 1


def scatter_tokens(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values [N, ...] at the N places of ``mask`` [B, T], -1 elsewhere -> [B, T, ...]."""
    out = values.new_full((*mask.shape, *values.shape[1:]), -1)
    out[mask] = values
    return out


def _concat(records: Sequence[RoutingRecord], dim: int) -> RoutingRecord:
    _check_alike(records)
    return replace(records[0], indices=torch.cat([record.indices for record in records], dim))


def _check_alike(records: Sequence[RoutingRecord]) -> None:
    kinds = {(record.layers, record.num_experts, record.indices.shape[-1]) for record in records}
    if len(kinds) != 1:
        raise ValueError(f"records must have the same layers, E and K, got {sorted(kinds)}; record with one model")
