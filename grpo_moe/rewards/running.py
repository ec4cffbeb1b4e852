"""Runs reward functions, plain and async, within a time limit."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import inspect
import logging
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from grpo_moe.text import clean

from .faults import EXCEPTION, TIMEOUT, Scores, all_lost
from .returned import read_returned

_MESSAGE_LIMIT = 1000  # characters
logger = logging.getLogger(__name__)

_ANSWER_S = 1.0  # for an event loop to show that nothing blocks it
_SLOW_S = 300.0  # after which a function that has no time limit is named


@dataclass(frozen=True)
class Call:
    """A reward function and the keyword arguments of one call, each [N]."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.arguments["completions"])

    def part(self, start: int, stop: int) -> Call:
        """The same call for some of the rows."""
        return Call(self.name, self.function, {name: column[start:stop] for name, column in self.arguments.items()})


def run_calls(calls: Sequence[Call], timeout: float | None) -> list[Scores]:
    """The scores of every call; faults are in there, and only interrupts (KeyboardInterrupt, SystemExit) are raised.

    Plain functions run one after another, async ones meanwhile and all at once in an event loop of their own. One that
    has no limit and does not answer is named in the log, so that a run that stands still says where.

    Args:
        calls: to make.
        timeout: seconds for each call; None for no limit. With a limit plain functions run in threads of their own.
            One that is late cannot be stopped: its daemon thread is left behind and does not keep Python from exiting.
    """
    started = [_start(call, timeout) for call in calls]
    return [_finish(call, running, timeout) for call, running in zip(calls, started, strict=True)]


@dataclass(frozen=True)
class _Running:
    future: Future  # of (what the function returned, None) or (None, what it raised)
    deadline: float | None  # seconds of time.monotonic
    is_async: bool


def _start(call: Call, timeout: float | None) -> _Running:
    deadline = None if timeout is None else time.monotonic() + timeout
    future: Future = Future()
    if timeout is None:
        with _named_when_slow(call):
            _settle(future, call)
    else:
        threading.Thread(target=_settle, args=(future, call), name=f"reward {call.name}", daemon=True).start()
        concurrent.futures.wait([future], timeout)
    returned = _result(future)[0] if future.done() else None
    if not inspect.isawaitable(returned):
        return _Running(future, deadline, is_async=False)
    return _Running(asyncio.run_coroutine_threadsafe(_settled(returned), _event_loop()), deadline, is_async=True)


def _finish(call: Call, running: _Running, timeout: float | None) -> Scores:
    remaining = None if running.deadline is None else max(running.deadline - time.monotonic(), 0.0)
    with _named_when_slow(call) if timeout is None else nullcontext():
        concurrent.futures.wait([running.future], remaining)
    if not running.future.done():
        return _late(call, running, timeout)
    returned, error = _result(running.future)
    if error is None:
        return read_returned(call.name, returned, len(call))
    raised = RuntimeError(
        f"reward function {call.name!r} raised {type(error).__name__}: {_message(error)}; "
        f"it was called with {len(call)} completions and the keywords {', '.join(call.arguments)}{_place(error)}"
    )
    raised.__cause__ = error
    return all_lost(EXCEPTION, raised, len(call))


@contextmanager
def _named_when_slow(call: Call) -> Iterator[None]:
    """One warning when what is inside takes long."""
    text = (
        f"reward function {call.name!r} has given nothing for {len(call)} completions after {_SLOW_S:g} s; a time "
        "limit (reward_timeout) would end this"
    )
    timer = threading.Timer(_SLOW_S, logger.warning, (text,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _late(call: Call, running: _Running, timeout: float | None) -> Scores:
    left = "its thread cannot be stopped and goes on"
    if running.is_async:
        left = "it was cancelled"
        running.future.cancel()
        _leave_blocked_loop()
    error = TimeoutError(
        f"reward function {call.name!r} must return within {timeout} s, got nothing for {len(call)} completions; "
        f"raise the time limit or set one inside the function ({left})"
    )
    return all_lost(TIMEOUT, error, len(call))


def _result(future: Future) -> tuple[Any, Exception | None]:
    """What a finished call returned and raised; interrupts are raised here, in the caller's thread."""
    try:
        returned, error = future.result()
    except concurrent.futures.CancelledError as cancelled:  # by the function itself
        return None, cancelled
    if error is not None and not isinstance(error, Exception):
        raise error
    return returned, error


def _settle(future: Future, call: Call) -> None:
    try:
        own = {name: list(column) for name, column in call.arguments.items()}  # one that sorts its list spoils no other
        settled = call.function(**own), None
    except BaseException as error:
        settled = None, error
    future.set_result(settled)


async def _settled(awaitable: Awaitable) -> tuple[Any, BaseException | None]:
    try:
        return await awaitable, None
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # an interrupt would end the loop, and the caller would wait for ever
        return None, error


def _place(error: BaseException) -> str:
    """The last line of the function's own file on the way: an error shown in one line has no traceback."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without our own call
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _message(error: BaseException) -> str:
    """It often quotes a completion."""
    try:
        return clean(error, _MESSAGE_LIMIT)
    except Exception:
        return "(an error whose text cannot be made)"


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """One loop in a thread of its own: works inside a notebook's loop, and keeps clients open from call to call."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="grpo_moe-rewards", daemon=True).start()
    return loop


def _leave_blocked_loop() -> None:
    """The next async call gets a new loop where this one no longer answers: a function blocks it."""
    answered = threading.Event()
    _event_loop().call_soon_threadsafe(answered.set)
    if not answered.wait(_ANSWER_S):
        _event_loop.cache_clear()
