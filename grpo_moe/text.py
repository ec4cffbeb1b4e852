"""Makes text of models, datasets and files fit to be shown, and shows it: nothing in it steers a terminal or hides."""

from __future__ import annotations

import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any, TextIO

logger = logging.getLogger(__name__)

TEXT_LIMIT = 160  # characters of a prompt or completion

# Shown as nothing although they are letters, marks or unassigned: Unicode's Default_Ignorable_Code_Point beyond the
# categories below (fillers, joiners, variation selectors), and the braille pattern without dots.
_INVISIBLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u2800\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)


# A whole CSI or OSC sequence; without its first character the rest would be left over as text. A start ends the search
# for the end of the one before: linear in the text.
_SEQUENCE = re.compile(r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|(?:\x1b\]|\x9d)[^\x07\x1b\x9c\x9d]*(?:\x07|\x1b\\|\x9c)")


def clean(text: Any, limit: int = TEXT_LIMIT) -> str:
    r"""`str(text)` as one line of at most `limit` characters, none of which can steer a terminal or is invisible.

    Newlines and tabs are shown as \n and \t, lone surrogates as \udXXX; of a longer text, the start and the end stay.
    """
    text = str(text)
    if len(text) > 8 * limit:  # a bound on the work, before the cut that counts
        text = text[: 4 * limit] + "..." + text[-4 * limit :]
    text = printable(text.replace("\n", r"\n").replace("\t", r"\t"))
    if len(text) <= limit:
        return text
    tail = limit // 3
    return f"{text[: limit - tail - 3]}...{text[len(text) - tail :]}"


def printable(text: Any) -> str:
    r"""`str(text)`, of any length, less what steers or hides except newlines and tabs; lone surrogates as \udXXX."""
    kept = (c for c in _SEQUENCE.sub("", str(text)) if c in "\n\t" or not steers_or_hides(c))
    return encodable("".join(kept))


def steers_or_hides(character: str) -> bool:
    """Whether it is a control, a format (bidi, zero width, tag), a separator of lines, private or invisible.

    Newlines and tabs are controls too; spaces are not.
    """
    return unicodedata.category(character) in ("Cc", "Cf", "Co", "Zl", "Zp") or bool(_INVISIBLE.match(character))


def encodable(text: str, encoding: str = "utf-8") -> str:
    r"""`text` with what `encoding` cannot hold written as \uXXXX: lone surrogates, and more where it is not UTF-8."""
    return text.encode(encoding, "backslashreplace").decode(encoding)


def say(line: str) -> None:
    """Prints a line for the person at the terminal; work does not end where standard output takes no more."""
    print(line, file=LenientFile(sys.stdout), flush=True)


class LenientFile:
    """A text file that takes every character, and that may be gone: what it does not take is lost, with one warning.

    Standard output is None without a console, and fails when it was closed, or is a pipe that nobody reads any more.
    """

    _has_warned = False

    def __init__(self, file: TextIO | None):
        self._file = file

    def write(self, text: str) -> int:
        """Writes what the file takes; returns the length of the text."""
        self._try(lambda file: file.write(encodable(text, getattr(file, "encoding", None) or "utf-8")))
        return len(text)

    def flush(self) -> None:
        """Flushes the file if it is there."""
        self._try(lambda file: file.flush())

    def _try(self, work: Callable[[TextIO], Any]) -> None:
        try:
            if self._file is not None:
                work(self._file)
        except (OSError, ValueError) as error:  # ValueError: it is closed
            if not LenientFile._has_warned:
                LenientFile._has_warned = True
                logger.warning(
                    "Standard output takes no more text (%s): what is said there from here on is lost.", error
                )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)
