"""The running sequences of a rollout: what was drawn, and how far each may go, in device tensors of fixed size."""

from __future__ import annotations

import torch

from .base import uniforms

Where = slice | torch.Tensor
"""Rows: a slice in a captured step, an int64 tensor otherwise."""


class Rows:
    """R rows, each empty, running or finished. Nothing here waits for the device.

    Args:
        rows: R.
        max_new_tokens: that any sequence may draw.
        stop_ids: that end a sequence.
        device: of everything.
    """

    def __init__(self, rows: int, max_new_tokens: int, stop_ids: tuple[int, ...], device: torch.device):
        def zeros(*shape, dtype=torch.long):
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.keys, self.room, self.counts, self.token = (zeros(rows) for _ in range(4))
        self.live, self.stopped = (zeros(rows, dtype=torch.bool) for _ in range(2))
        self.tokens = zeros(rows, max_new_tokens)
        self.logps = zeros(rows, max_new_tokens, dtype=torch.float32)
        self.routes: torch.Tensor | None = None
        """[R, max_new_tokens, L, K] experts of each drawn token, when it is forwarded."""
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.long, device=device)
        self._numbers = torch.arange(rows, device=device)

    def start(self, rows: torch.Tensor, keys: torch.Tensor, room: torch.Tensor) -> None:
        """Puts new sequences into rows [n]: their random streams, and the tokens that each may draw."""
        self.keys[rows], self.room[rows] = keys, room
        self.counts[rows], self.live[rows], self.stopped[rows] = 0, True, False

    def uniform(self, where: Where) -> torch.Tensor:
        """The number that decides each row's next token, float64."""
        return uniforms(self.keys[where], self.counts[where])

    def append(self, where: Where, tokens: torch.Tensor, logps: torch.Tensor) -> None:
        """Adds a token to each of these rows that is running; those that stop or have no room left finish."""
        rows, live, counts = self._numbers[where], self.live[where], self.counts[where]
        column = counts.clamp(max=self.tokens.shape[1] - 1)
        for store, new in ((self.tokens, tokens), (self.logps, logps)):
            store[rows, column] = torch.where(live, new, store[rows, column])
        stops = live & (tokens[:, None] == self._stop_ids).any(1)
        self.token[where] = torch.where(live, tokens, self.token[where])
        self.stopped[where] |= stops
        going_on = live & ~stops & (counts + 1 < self.room[where])
        self.counts[where] += live
        self.live[where] = going_on

    def append_routes(self, where: Where, routes: torch.Tensor) -> None:
        """Experts [n, L, K] of the newest token of each of these rows; of finished ones they go nowhere that counts."""
        self.routes[self._numbers[where], self.counts[where] - 1] = routes

    def keep(self, rows: torch.Tensor) -> None:
        """Moves these rows [n] to the front, in their order."""
        stores = [self.keys, self.room, self.counts, self.token, self.live, self.stopped, self.tokens, self.logps]
        for store in stores if self.routes is None else [*stores, self.routes]:
            store[: len(rows)] = store[rows]
        self.live[len(rows) :] = False
