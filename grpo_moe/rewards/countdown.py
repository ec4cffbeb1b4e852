"""Countdown with a visible search, the task of the default recipe: problems, demonstrations and the reward.

A prompt reads `8 8 2=18?`: reach 18 with 8, 8 and 2. A completion is one or more attempts such as
`8+8=16+2=18`, separated by `;`: each a running calculation that uses every number once. Only the last attempt is
judged, so a policy may try before it answers.
"""

from __future__ import annotations

import hashlib
import operator
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

ALPHABET = "0123456789+-*=; ?"
"""Every character of prompts and completions, for a character tokenizer."""

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}

_MAX_DIGITS = 9  # of a number that the reward reads: keeps its arithmetic cheap on any text
_NUMBER = re.compile(rf"0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}}")
_STEP = re.compile(rf"([+*-])({_NUMBER.pattern})=({_NUMBER.pattern})")
_MAX_DRAWS = 10_000  # a split that gives no problem in so many draws has none


def countdown_reward(
    prompts: Sequence[Any],
    completions: Sequence[str],
    numbers: Sequence[Sequence[int]],
    target: Sequence[int],
    **columns: Any,
) -> list[float]:
    """1.0 where the last attempt of a completion solves its problem, else 0.0.

    Args:
        prompts: [N], not read.
        completions: [N] texts; any text is safe, in time linear in its length.
        numbers: [N] lists of the given numbers.
        target: [N] targets.
        columns: Other dataset columns, not read.
    """
    return [
        float(solves(completion.rpartition(";")[2], row_numbers, row_target))
        for completion, row_numbers, row_target in zip(completions, numbers, target, strict=True)
    ]


def solves(attempt: str, numbers: Sequence[int], target: int) -> bool:
    """Whether a running calculation is right, uses exactly `numbers` once each and ends on `target`.

    Only ASCII digits without leading zeros and the operators + - * are read, so a negative result cannot be written.
    """
    first = _NUMBER.match(attempt)
    if first is None:
        return False
    value, position = int(first[0]), first.end()
    used = [value]
    while step := _STEP.match(attempt, position):
        number = int(step[2])
        value = OPERATIONS[step[1]](value, number)
        if value != int(step[3]):
            return False
        used.append(number)
        position = step.end()
    return position == len(attempt) and value == target and sorted(used) == sorted(numbers)


@dataclass(frozen=True)
class Countdown:
    """The task and its difficulty. Every draw is a function of the random generator handed in, and of nothing else.

    Raises:
        ValueError: A field is out of its range.
    """

    num_numbers: int = 3
    """Numbers in a problem, at least 2."""
    max_number: int = 9
    """Numbers are drawn from 1 to this."""
    operators: str = "+-"
    """Operators of problems and demonstrations, of + - *. The reward reads all three."""
    max_value: int = 99
    """Every intermediate value of problems and demonstrations lies between 0 and this."""
    max_attempts: int = 5
    """Most attempts in a demonstration."""
    continue_probability: float = 0.3
    """Probability that a demonstration goes on after an attempt that missed."""
    aim_probability: float = 0.0
    """Probability that an attempt of a demonstration is a solution on purpose; the others are random."""

    def __post_init__(self):
        _require(self.num_numbers >= 2, "num_numbers", "at least 2", self.num_numbers)
        _require(1 <= self.max_number <= self.max_value, "max_number", "between 1 and max_value", self.max_number)
        _require(self.max_value < 10**_MAX_DIGITS, "max_value", f"below 10**{_MAX_DIGITS}", self.max_value)
        known = bool(self.operators) and set(self.operators) <= set(OPERATIONS)
        _require(known, "operators", f"one or more of {''.join(OPERATIONS)}", repr(self.operators))
        _require(self.max_attempts >= 1, "max_attempts", "at least 1", self.max_attempts)
        for name in ("continue_probability", "aim_probability"):
            _require(0 <= getattr(self, name) <= 1, name, "between 0 and 1", getattr(self, name))

    @property
    def max_completion_length(self) -> int:
        """Longest demonstration in characters, plus one for the EOS token."""
        number, value = len(str(self.max_number)), len(str(self.max_value))
        attempt = number + (self.num_numbers - 1) * (len("+") + number + len("=") + value)
        return self.max_attempts * (attempt + len(";"))  # one separator less, one EOS more

    def rows(self, n: int, seed: int, split: str = "train") -> list[dict[str, Any]]:
        """n rows with the columns `prompt`, `numbers`, `target`: the same for the same arguments, on every machine.

        Drawn with replacement: a small task repeats problems.
        """
        rng = random.Random(f"countdown {split} {seed}")
        return [self.problem(rng, split) for _ in range(n)]

    def problem(self, rng: random.Random, split: str = "train") -> dict[str, Any]:
        """One row of a split, with a target of at least 1 that the numbers reach.

        Raises:
            ValueError: Unknown split, or one that holds no problem of this difficulty.
        """
        _require(split in ("train", "test"), "split", "'train' or 'test'", repr(split))
        for _ in range(_MAX_DRAWS):
            numbers = [rng.randint(1, self.max_number) for _ in range(self.num_numbers)]
            _, target = next(self._attempts(rng, numbers), ("", 0))
            if target >= 1 and split_of(numbers, target) == split:
                return {"prompt": f"{' '.join(map(str, numbers))}={target}?", "numbers": numbers, "target": target}
        raise ValueError(f"split must hold a problem of {self}, got none in {split!r}; allow larger or more numbers")

    def demonstration(self, rng: random.Random, numbers: Sequence[int], target: int) -> str:
        """Attempts for a supervised warm start: one more follows with `continue_probability`, and a hit ends them.

        The last attempt may well miss: demonstrations teach the form of an answer and leave finding one to RL.

        Raises:
            ValueError: No attempt is possible, or none reaches the target when one should.
        """
        attempts = []
        while len(attempts) < self.max_attempts:
            aims = rng.random() < self.aim_probability
            possible = (found for found in self._attempts(rng, numbers) if not aims or found[1] == target)
            attempt, value = next(possible, (None, None))
            if attempt is None:
                raise ValueError(f"target must be within reach of {numbers} under {self}, got {target}")
            attempts.append(attempt)
            if value == target or rng.random() >= self.continue_probability:
                break
        return ";".join(attempts)

    def _attempts(self, rng: random.Random, numbers: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Every running calculation within the bounds and its result, in random order; the first alone is cheap."""
        for i in rng.sample(range(len(numbers)), len(numbers)):
            yield from self._continuations(rng, str(numbers[i]), numbers[i], _without(numbers, i))

    def _continuations(
        self, rng: random.Random, text: str, value: int, rest: Sequence[int]
    ) -> Iterator[tuple[str, int]]:
        if not rest:
            yield text, value
            return
        moves = [(i, symbol) for i in range(len(rest)) for symbol in self.operators]
        rng.shuffle(moves)
        for i, symbol in moves:
            result = OPERATIONS[symbol](value, rest[i])
            if 0 <= result <= self.max_value:
                yield from self._continuations(rng, f"{text}{symbol}{rest[i]}={result}", result, _without(rest, i))


def split_of(numbers: Sequence[int], target: int) -> str:
    """The split of a problem, whatever the order of its numbers, the seed or the machine: "test" for one in ten."""
    key = f"{sorted(numbers)}={target}".encode()
    return "test" if int.from_bytes(hashlib.sha256(key).digest()) % 10 == 0 else "train"


def _without(items: Sequence[int], i: int) -> list[int]:
    return [*items[:i], *items[i + 1 :]]


def _require(holds: bool, name: str, rule: str, value: object) -> None:
    if not holds:
        raise ValueError(f"{name} must be {rule}, got {value}")
