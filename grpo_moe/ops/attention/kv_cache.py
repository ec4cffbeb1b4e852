"""Keys and values of sequences that grow by a token, in buffers of fixed size that a CUDA graph can replay over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .reference import sink_attention


@dataclass(frozen=True)
class LayerShape:
    """What a layer stores of a token, and how far back it looks."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    """Tokens that a query sees, itself included; None: all."""


class KVCache:
    """Rotated keys and values of R rows of any lengths: a ring of ``window`` slots a layer that has one.

    Position p stands in slot ``p % slots``. The first b rows can be used alone.

    Args:
        layers: shape by layer number.
        rows: R.
        max_length: tokens that a row can hold.
        device, dtype: of the buffers.
    """

    def __init__(self, layers: dict[int, LayerShape], rows: int, max_length: int, *, device, dtype: torch.dtype):
        self.layers, self.max_length = layers, max_length
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        """[R] tokens that each row holds."""
        self.longest = max_length
        """Bound on the tokens of any row, the new one included; only the PyTorch path looks at it."""
        self.keys, self.values = {}, {}
        for number, layer in layers.items():
            slots = min(layer.window or max_length, max_length)
            shape = (rows, layer.kv_heads, slots)
            self.keys[number] = torch.zeros(*shape, layer.key_dim, device=device, dtype=dtype)
            self.values[number] = torch.zeros(*shape, layer.value_dim, device=device, dtype=dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(x.nbytes for store in (self.keys, self.values) for x in store.values())

    def load(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        rows: torch.Tensor,
        sources: torch.Tensor,
        lengths: torch.Tensor,
    ) -> None:
        """Copies prompts into rows; their ``lengths`` are left to the caller.

        Args:
            layer: number.
            keys, values: [P, kv_heads, S, D or DV] of positions 0 to S - 1, padded on the right.
            rows, sources: [n] row to fill, and which of the P prompts fills it.
            lengths: [P] tokens of each prompt.
        """
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            slots, width = store.shape[2], new.shape[2]
            if width <= slots:
                store[rows, :, :width] = new[sources].to(store.dtype)
                continue
            newest = lengths[:, None] - 1
            places = torch.arange(slots, device=new.device)
            positions = (newest - (newest - places) % slots).clamp(min=0)  # [P, slots]: the newest of each slot
            new = new.gather(2, positions[:, None, :, None].expand(-1, new.shape[1], -1, new.shape[3]))
            store[rows] = new[sources].to(store.dtype)

    def keep(self, rows: torch.Tensor) -> None:
        """Moves these rows [n] to the front, in their order."""
        for store in (*self.keys.values(), *self.values.values()):
            store[: len(rows)] = store[rows]
        self.lengths[: len(rows)] = self.lengths[rows]

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
        scale: float | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Stores the next token of the first b rows and attends to all that its layer sees; ``lengths`` stay.

        Args:
            layer: number.
            query: [b, heads, 1, D]; head h reads kv head ``h // (heads // kv_heads)``.
            key, value: [b, kv_heads, 1, D] and [b, kv_heads, 1, DV] of the token at position ``lengths``.
            sinks: [heads] logits, or None.
            scale: multiplies the scores; 1/sqrt(D) by default.
            softcap: bounds them: softcap * tanh(score / softcap); None leaves them.

        Returns:
            [b, heads, 1, DV] in the dtype of the buffers.
        """
        rows = len(query)
        keys, values, lengths = self.keys[layer][:rows], self.values[layer][:rows], self.lengths[:rows]
        if keys.is_cuda and keys.dtype != torch.float64:
            from .decode_kernels import decode_attention

            new = (query[:, :, 0], key[:, :, 0], value[:, :, 0])
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            out = decode_attention(*new, keys, values, lengths, sinks=sinks, scale=scale, softcap=softcap)
            return out[:, :, None]
        slots = keys.shape[2]
        for store, new in ((keys, key), (values, value)):
            place = (lengths % slots)[:, None, None, None].expand_as(new)
            store.scatter_(2, place, new.to(store.dtype))
        used = min(slots, self.longest)
        mask = torch.arange(used, device=keys.device) <= lengths[:, None]  # a full ring holds no other tokens
        return sink_attention(
            query.to(keys.dtype),
            keys[:, :, :used],
            values[:, :, :used],
            mask=mask[:, None],
            sinks=sinks,
            scale=scale,
            softcap=softcap,
        )


def bytes_per_row(layers: Sequence[LayerShape], max_length: int, dtype: torch.dtype) -> int:
    """Bytes of keys and values that a row of :class:`KVCache` takes."""
    slots = ((x, min(x.window or max_length, max_length)) for x in layers)
    return sum(x.kv_heads * n * (x.key_dim + x.value_dim) * dtype.itemsize for x, n in slots)
