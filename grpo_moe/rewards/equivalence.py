"""Scores the final answer of a completion by mathematical equivalence to the ``answer`` column, with math-verify."""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .answer import marked_answer, same_answer
from .text import completion_text

logger = logging.getLogger(__name__)

_WORKER = Path(__file__).with_name("equivalence_worker.py")
_MAX_ANSWER_CHARACTERS = 1000
_MAX_CHARACTERS = 100_000  # of a completion's end that is looked at
_NUMBER = re.compile(r"(?:(?<!\w)-)?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?(?:/[0-9]+)?")


class MathReward:
    """A reward function: 1.0 where the final answer equals the row's ``answer`` as mathematics, else 0.0.

    The final answer is what the last ``<answer>...</answer>`` or ``\\\\boxed{...}`` holds, else the last number.
    ``answer`` is LaTeX or a number, marked in the same way or not. Answers equal as text or as numbers need no parsing;
    all others are compared by math-verify in a process of its own, which is ended when it takes too long, and no text
    is ever evaluated as Python. A completion whose comparison is not done in time, or ends that process, is wrong;
    where the right answer cannot be read the row is not scored (None).

    Args:
        time_limit: seconds for one comparison.

    Raises:
        ImportError: math-verify is not installed.
        ValueError: time_limit is not positive.

    Source:
        github.com/huggingface/Math-Verify.
    """

    __name__ = "math_equivalence"

    def __init__(self, *, time_limit: float = 2.0):
        if importlib.util.find_spec("math_verify") is None:
            raise ImportError("math_verify must be installed for MathReward, got none; pip install 'math-verify>=0.9'")
        if not 0 < time_limit < math.inf:
            raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit}")
        self.time_limit = time_limit
        self._process: subprocess.Popen | None = None
        self._lock = threading.Lock()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
    ) -> list[float | None]:
        """The rewards [N].

        Args:
            prompts: [N], not used.
            completions: [N] texts or chat messages.
            answer: [N] the right answers.
            columns: Other dataset columns, not used.
        """
        verdicts: dict[tuple[str, str], float | None] = {}
        pairs = [(_right_answer(a), _given_answer(c)) for a, c in zip(answer, completions, strict=True)]
        for pair in pairs:
            if pair not in verdicts:
                verdicts[pair] = self._verdict(*pair)
        return [verdicts[pair] for pair in pairs]

    def _verdict(self, right: str, given: str) -> float | None:
        if same_answer(given, right):
            return float(bool(right)) if right else None
        if len(right) > _MAX_ANSWER_CHARACTERS or not right:
            return None
        if not 0 < len(given) <= _MAX_ANSWER_CHARACTERS:
            return 0.0
        with self._lock:
            same = self._compare(right, given)
        return None if same is None else float(same)

    def _compare(self, right: str, given: str) -> bool | None:
        """Whether the worker finds them equal; False where that ends it, None where it cannot read the right one."""
        process = self._worker()
        try:
            process.stdin.write(json.dumps([right, given, self.time_limit]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BaseException:  # an interrupt would leave the answer to be read as the next one's
            self._stop()
            raise
        if not line.endswith("\n"):
            self._stop()
            if process.returncode != -signal.SIGALRM:
                logger.warning("comparing %r ended math-verify with code %d: wrong", given[:100], process.returncode)
            return False
        return json.loads(line)

    def _worker(self) -> subprocess.Popen:
        if self._process is None:
            command = [sys.executable, "-P", "-W", "ignore", str(_WORKER)]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")
            self._end = weakref.finalize(self, _end, self._process)
            if self._process.stdout.readline() != "ready\n":
                self._stop()
                raise RuntimeError(f"{_WORKER.name} must start, got an early end; look at its error output above")
        return self._process

    def _stop(self) -> None:
        self._process = None
        self._end()


def _end(process: subprocess.Popen) -> None:
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        process.stdin.close()
    except BrokenPipeError:  # what it had not read
        pass


def _right_answer(answer: Any) -> str:
    text = str(answer)
    marked = marked_answer(text)
    return (text if marked is None else marked).strip().strip("$").strip()


def _given_answer(completion: Any) -> str:
    text = completion_text(completion)[-_MAX_CHARACTERS:]
    marked = marked_answer(text)
    if marked is not None:
        return marked.strip("$").strip()
    return next(reversed(_NUMBER.findall(text)), "")
