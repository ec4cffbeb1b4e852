"""The lock of a run's folder, by which a second run is refused while one trains there."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from grpo_moe.text import clean

from .files import writing

logger = logging.getLogger(__name__)

LOCK_FILE = "run.lock"
_PATIENCE_S = 0.5
"""How long a start waits for the lock: another process may look at it just then."""
_held: dict[Path, TextIO] = {}
"""Lock files of the folders that this process trains in; not every file system keeps a process from itself."""


@contextmanager
def folder_lock(output_dir: str | os.PathLike) -> Iterator[None]:
    """Keeps the folder for this process: two runs at once would overwrite each other's metrics and checkpoints.

    The kernel gives it back however the process ends, and no child that Python starts inherits it.

    Raises:
        ValueError: another run trains in the folder.
        OSError: the folder cannot be made or written.
    """
    path = (Path(output_dir) / LOCK_FILE).resolve()
    if path in _held:
        raise _locked(output_dir, f"process {os.getpid()}, this one")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")
    with file:
        deadline = time.monotonic() + _PATIENCE_S
        while not _lock(file, fcntl.LOCK_EX):
            if time.monotonic() > deadline:
                raise _locked(output_dir, _holder(file))
            time.sleep(0.02)
        with writing(path):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        _held[path] = file
        try:
            yield
        finally:
            _held.pop(path, None)


def check_is_free(output_dir: str | os.PathLike) -> None:
    """Changes nothing, and keeps no run from its start.

    Raises:
        ValueError: a run trains in the folder.
        OSError: its lock cannot be opened.
    """
    try:
        file = open(Path(output_dir) / LOCK_FILE, "r+", encoding="utf-8")
    except FileNotFoundError:
        return
    with file:
        if not _lock(file, fcntl.LOCK_SH):
            raise _locked(output_dir, _holder(file))


def _leave_locks() -> None:
    """In a child: an flock lives until the last copy of its descriptor is closed."""
    for file in _held.values():
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_leave_locks)


def _lock(file: TextIO, kind: int) -> bool:
    """False where another process has it.

    An flock, since one of lockf would end as soon as anything in this process closes the file, as a copy of the folder.
    """
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError as error:
        logger.warning("%s cannot be locked (%s): see to it that no second run writes there", file.name, error)
    return True


def _holder(file: TextIO) -> str:
    file.seek(0)
    return clean(file.read(200)) or "another process"


def _locked(output_dir: str | os.PathLike, holder: str) -> ValueError:
    return ValueError(
        f"output_dir must be of no run that is training, got {str(output_dir)!r}, in which {holder} is; wait until it "
        "ends, end it, or choose another output_dir"
    )
