"""Key/value cache of GPT-OSS-Lite with a ring buffer for windowed layers and one length a row."""

from __future__ import annotations

import torch


class RingCache:
    """Rotated keys and values of B rows that may differ in length: no left padding, a ring where a window allows it.

    A windowed layer keeps ``min(sliding_window, max_length)`` slots and writes position p to slot p mod W; a full layer
    keeps ``max_length`` slots. Columns beyond a row's length hold stale values that :meth:`key_positions` hides.

    One forward pass is ``begin`` (how many tokens each row adds), ``update`` once a layer, ``commit``.
    """

    def __init__(self, config, batch_size: int, max_length: int, *, device=None, dtype=torch.float32):
        """Allocates 2 * kv_heads * head_dim * slots elements a layer and row."""
        self.window = config.sliding_window
        self.layer_types = config.layer_types
        self.max_length = max_length
        self.lengths = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.used = 0  # host-side bound on the longest row, so that reads need no sync
        slots = {"sliding_attention": min(self.window, max_length), "full_attention": max_length}
        shape = (batch_size, config.num_key_value_heads, 0, config.head_dim)
        self.keys, self.values = (
            [torch.zeros(*shape[:2], slots[kind], shape[3], device=device, dtype=dtype) for kind in self.layer_types]
            for _ in range(2)
        )
        self._new_tokens: torch.Tensor | None = None
        self._width = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(t.numel() * t.element_size() for t in self.keys + self.values)

    def begin(self, width: int, new_tokens: torch.Tensor | None = None) -> torch.Tensor:
        """Announces ``width`` new columns, of which the first ``new_tokens`` [B] of each row are real (all by default).

        Returns:
            Positions [B, width] of the new columns, -1 for padding.

        Raises:
            ValueError: more tokens than ``max_length`` leaves room for.
        """
        if self.used + width > self.max_length:
            raise ValueError(
                f"cached tokens must be at most max_length={self.max_length}, got {self.used} + {width}; "
                "allocate the cache for prompt and completion together"
            )
        self._width = width
        self._new_tokens = torch.full_like(self.lengths, width) if new_tokens is None else new_tokens
        columns = torch.arange(width, device=self.lengths.device)
        positions = self.lengths[:, None] + columns
        return positions if new_tokens is None else positions.masked_fill(columns >= new_tokens[:, None], -1)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new keys and values [B, kv_heads, width, D] and returns what the new queries may attend to."""
        pairs = (self.keys, keys), (self.values, values)
        if self.layer_types[layer] == "full_attention":
            self._write(pairs, layer, self._new_slots())
            return tuple(store[layer][:, :, : self.used + self._width] for store, _ in pairs)
        if self._width == 1:
            self._write(pairs, layer, (self.lengths % self._ring_size)[:, None])
            return tuple(store[layer] for store, _ in pairs)
        seen = tuple(torch.cat([store[layer], new], dim=2) if self.used else new for store, new in pairs)
        for (store, _), both in zip(pairs, seen, strict=True):
            source = self._ring_source()[:, None, :, None].expand_as(store[layer])
            store[layer] = both.gather(2, source)
        return seen

    def key_positions(self, kind: str) -> torch.Tensor:
        """Positions [B, S] of the keys that ``update`` returns for a layer of this kind, -1 where there is none."""
        if kind == "full_attention":
            return torch.arange(self.used + self._width, device=self.lengths.device).expand(len(self.lengths), -1)
        if self._width == 1:
            return self._ring_positions(self.lengths)
        new = self.lengths[:, None] + torch.arange(self._width, device=self.lengths.device)
        return torch.cat([self._ring_positions(self.lengths - 1), new], dim=1) if self.used else new

    def commit(self) -> None:
        """Counts the announced tokens as stored."""
        self.lengths = self.lengths + self._new_tokens
        self.used += self._width

    def select(self, rows: torch.Tensor) -> None:
        """Keeps the given rows, in the given order; a row may appear more than once."""
        self.lengths = self.lengths[rows]
        self.keys = [k[rows] for k in self.keys]
        self.values = [v[rows] for v in self.values]

    def get_seq_length(self, layer: int = 0) -> int:
        """Upper bound of the tokens stored in any row."""
        return self.used

    @property
    def _ring_size(self) -> int:
        return min(self.window, self.max_length)

    def _write(self, pairs, layer, slots):
        for store, new in pairs:
            store[layer].scatter_(2, slots[:, None, :, None].expand_as(new), new)

    def _new_slots(self):
        return self.lengths[:, None] + torch.arange(self._width, device=self.lengths.device)

    def _ring_positions(self, last):
        """Position held by each slot when ``last`` [B] is the newest: the largest p <= last with p = slot (mod W)."""
        slots = torch.arange(self._ring_size, device=last.device)
        positions = last[:, None] - (last[:, None] - slots) % self._ring_size
        return positions.clamp(min=-1)

    def _ring_source(self):
        """Column of [old ring | new tokens] (or of the new tokens alone) that each slot takes after the update."""
        newest = self._ring_positions(self.lengths + self._new_tokens - 1)
        fresh, slots = newest - self.lengths[:, None], torch.arange(self._ring_size, device=newest.device)
        kept = slots if self.used else torch.zeros_like(slots)
        return torch.where(fresh >= 0, fresh + (self._ring_size if self.used else 0), kept)
