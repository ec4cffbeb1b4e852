"""Files of a run: written whole or not at all, with errors that name them, and JSON that is strict."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_NO_RIGHT, _NO_FOLDER = (errno.EACCES, errno.EPERM), (errno.ENOENT, errno.ENOTDIR)
_RULE = "must be in a folder with room that can be written"


@contextmanager
def atomic_path(path: str | os.PathLike) -> Iterator[Path]:
    """Yields a path beside `path` to write to; it replaces `path` when the block ends and is removed when it raises.

    Raises:
        OSError: as :func:`writing`.
    """
    path = Path(path)
    temporary = _temporary(path)
    with writing(path):
        try:
            yield temporary
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: str | os.PathLike) -> Iterator[None]:
    """Around the writing of a file or a folder of files, whose errors often name none.

    Raises:
        OSError: the disk is full or the place cannot be written; of the errno, and so of the class, that it had, with
            ``path`` as its filename. Any other error of the block, as of another file that it reads, stays as it is.
    """
    try:
        yield
    except (OSError, SafetensorError) as error:
        number, reason = _number_and_reason(error)
        if not _is_of_the_place(error, number, Path(path)):
            raise
        text = f"{path} {_RULE}, got: {reason}; free some space or choose another folder"
        raise OSError(number, text, str(path)) from error


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


def _number_and_reason(error: Exception) -> tuple[int | None, str]:
    """The errno, which safetensors only tells in words, and what is wrong."""
    if isinstance(error, OSError):
        return error.errno, str(error.strerror or error)
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else None, str(error)


def _is_of_the_place(error: Exception, number: int | None, path: Path) -> bool:
    """Whether it says that ``path`` cannot be written, and that in no words of ours yet."""
    if _RULE in str(error):
        return False
    name = getattr(error, "filename", None)
    if not isinstance(name, str | bytes | os.PathLike):  # of an open file; a socket too may lack the right
        return number in _NO_ROOM or (number in _NO_RIGHT and isinstance(error, SafetensorError))
    lost = number in _NO_FOLDER and not path.parent.is_dir()
    return (lost or number in _NO_ROOM + _NO_RIGHT) and _is_on_the_way(name, path)


def _is_on_the_way(name: str | bytes | os.PathLike, path: Path) -> bool:
    """Whether it is the file at ``path``, its temporary, one in it, or a folder above it."""
    named, path = Path(os.path.abspath(os.fsdecode(name))), Path(os.path.abspath(path))
    return named == _temporary(path) or named.is_relative_to(path) or path.is_relative_to(named)


def json_lines(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, one at a time, without a last line torn by a crash.

    Raises:
        ValueError: it cannot be read, a line other than the last is not JSON, or one is no object or has a step that is
            no number; file and line are named.
    """
    try:
        file = open(path, "rb")
    except OSError as error:
        raise ValueError(f"{path} must be a file that can be read, got {error.strerror}; move it away") from error
    torn = None
    with file:
        for number, line in enumerate(file, start=1):
            if torn is not None:
                raise torn
            try:
                row = parse_json(line)
            except ValueError as error:  # raised unless it is the last
                torn = _faulty_line(path, "JSON lines", line, number)
                torn.__cause__ = error
                continue
            if not isinstance(row, dict):
                raise _faulty_line(path, "JSON objects", line, number)
            if row.get("step") is not None and not is_number(row["step"]):
                raise _faulty_line(path, "numbers for step", line, number)
            yield row


def is_number(value: Any) -> bool:
    """Whether it is a finite number that a float can hold."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _faulty_line(path: str | os.PathLike, wanted: str, line: bytes, number: int) -> ValueError:
    line = line.rstrip(b"\r\n")[:80]
    return ValueError(f"{path} must hold {wanted}, got {line!r} in line {number}; mend or remove the line")


def parse_json(text: str | bytes) -> Any:
    """``json.loads`` of any content.

    Raises:
        ValueError: it is no JSON, or nested too deep to be ours.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("JSON is nested too deep") from error


def strict_json(value: Any, indent: int | None = None) -> str:
    """JSON of nested dicts, lists and scalars in ASCII, with null for NaN and infinities.

    Raises:
        TypeError: a value is none of these.
    """
    return json.dumps(to_plain(value), indent=indent, allow_nan=False)


def to_plain(value: Any) -> Any:
    """Python scalars for 0-dim tensors and NumPy scalars, None for NaN and infinities, in nested dicts and lists."""
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
