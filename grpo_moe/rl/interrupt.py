"""Ctrl-C and SIGTERM as a request that the training loop answers between steps, with a checkpoint."""

from __future__ import annotations

import signal
import threading


class InterruptGuard:
    """Context in which the first SIGINT or SIGTERM only sets ``requested``; a second one acts as usual."""

    def __init__(self):
        self.requested = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> InterruptGuard:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_) -> None:
        self._restore()

    def _request(self, *_):
        self.requested = True
        self._restore()

    def _restore(self):
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
