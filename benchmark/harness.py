"""What the benchmarks share: arguments, environment, timing in turns, peak memory, one JSON line a point."""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

MIN_ROUNDS = 5
BUSY_CYCLES = 8_000_000
"""Of a GPU that a queued call waits for: about 4 ms."""


class WrongResult(Exception):
    """A result that must not be timed."""

    @staticmethod
    def unless(errors: dict[str, float], limits: dict[str, float]) -> None:
        """Raises it unless every error that has a limit is within it; NaN is not."""
        for name, limit in limits.items():
            if not errors[name] <= limit:
                raise WrongResult(f"{name} must be at most {limit:.2e}, got {errors[name]:.2e}")


@dataclass
class Contestant:
    """One implementation at one point, and what was measured of it."""

    call: Callable[[], object]
    """The work to time."""
    reset: Callable[[], None] = lambda: None
    """Before every call, outside of the time."""
    verify: Callable[[], dict] = dict
    """After the untimed call: fields of the line, or WrongResult."""
    slow: bool = False
    """Whether it has a third of the point's seconds, and one timed call at least, instead of all rounds."""
    facts: dict = field(default_factory=dict)
    """Fields of its line."""
    times_ms: list[float] = field(default_factory=list)
    error: str | None = None
    """Why it is not called again."""
    max_rounds: int | None = None
    queued: bool = False
    """Whether the device is kept busy while the host prepares the call, as it is in a model: the time is then the
    device's alone. Else it begins with an idle device."""

    def is_active(self) -> bool:
        return self.error is None and (self.max_rounds is None or len(self.times_ms) < self.max_rounds)


@dataclass
class Backward:
    """Forward and backward of a loss: the call and the reset of a contestant."""

    loss: Callable[[], torch.Tensor]
    leaves: tuple[torch.Tensor, ...]
    """Whose gradients a reset clears."""

    def __call__(self) -> None:
        self.loss().backward()

    def reset(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None


def arguments(description: str, impls: list[str]) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended to it")
    parser.add_argument("--impls", nargs="+", choices=impls, help="default: all that fit the device")
    parser.add_argument("--seconds", type=float, default=5.0, help="of timing a point; at least 5 rounds")
    parser.add_argument("--max-seconds", type=float, default=330.0, help="of the whole run; then it stops")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a tiny shape, to see that everything runs")
    parser.add_argument("--resume", action="store_true", help="leave out what has a line in --out already")
    return parser


def environment(device: torch.device) -> dict[str, str]:
    """Fields of every line: gpu, torch, triton, float32_matmul_precision, commit, date (UTC).

    Every script asks for them before its work, so that a missing GPU is said here, on standard error.
    """
    on_gpu = device.type == "cuda"
    if not on_gpu:
        print("no CUDA GPU: sizes made for one may take hours and all memory; see --help", file=sys.stderr)
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else f"none ({platform.machine()} CPU)",
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def package_version(name: str) -> str:
    """Version of an installed distribution, or "unknown"."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def commit() -> str:
    """$COMMIT, which a copy of the tree away from its repository needs, or git's HEAD, or "unknown"."""
    if os.environ.get("COMMIT"):
        return os.environ["COMMIT"]
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class JsonLines:
    """Appends records to a file and prints them, each flushed at once: a later crash loses nothing.

    Args:
        path: of the file; its folder is made.
        common: fields of every record, after its own.
        resume: whether `has` looks at what the file held before.
    """

    def __init__(self, path: Path, common: dict[str, str], resume: bool = False):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._common = path, common
        self._known = read_lines(path) if resume else []

    def has(self, record: dict) -> bool:
        """Whether an earlier line has all of these fields."""
        return any(record.items() <= line.items() for line in self._known)

    def write(self, record: dict) -> None:
        line = json.dumps({**record, **self._common})
        print(line, flush=True)
        with self._path.open("a") as file:
            file.write(line + "\n")

    def write_point(self, contestants: dict[str, Contestant], fields: dict, flops: float) -> None:
        """A line for each contestant: `fields`, its facts, and its error or its times. None for one not reached."""
        for impl, contestant in contestants.items():
            record = {**fields, "impl": impl, **contestant.facts}
            if contestant.error is not None:
                self.write({**record, "error": contestant.error})
            elif contestant.times_ms:
                times = summary(contestant.times_ms)
                self.write({**record, **times, "tflops": round(flops / times["ms"] / 1e9, 1)})


def read_lines(path: Path) -> list[dict]:
    """The records of a file; none if there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []


class Deadline:
    """A budget of wall time, in seconds from its construction."""

    def __init__(self, seconds: float):
        self._start, self._seconds = time.perf_counter(), seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def passed(self) -> bool:
        return self.elapsed() >= self._seconds

    def say(self, text: str) -> None:
        """Prints it with the time."""
        print(f"[{self.elapsed():5.0f} s] {text}", flush=True)


def measure(contestants: dict[str, Contestant], device: torch.device, *, seconds: float, deadline: Deadline) -> None:
    """One untimed call of each for memory and its `verify`, then :func:`interleave`. Whoever fails is left out."""
    for name, contestant in contestants.items():
        if contestant.is_active() and not deadline.passed():
            deadline.say(f"first call of {name}")
            attempt(contestant, device, lambda c: _first_call(c, device, seconds))
    interleave(list(contestants.values()), device, seconds=seconds, deadline=deadline)


def interleave(contestants: list[Contestant], device: torch.device, *, seconds: float, deadline: Deadline) -> None:
    """Times the contestants in turns, so that heat and clocks are the same for all; whoever begins changes each round.

    Args:
        contestants: called at least once before, so that nothing compiles here.
        device: of the work.
        seconds: rounds go on for so long, and for at least 5 rounds.
        deadline: once it passes, no further round begins.
    """
    start, rounds = time.perf_counter(), 0
    while any(x.is_active() for x in contestants) and not deadline.passed():
        if rounds >= MIN_ROUNDS and time.perf_counter() - start >= seconds:
            return
        first = rounds % len(contestants)
        for contestant in contestants[first:] + contestants[:first]:
            if contestant.is_active():
                attempt(contestant, device, lambda c: c.times_ms.append(elapsed_ms(c, device)))
        rounds += 1


def rounds_ms(calls: list[Callable[[], object]], device: torch.device, deadline: Deadline) -> list[float]:
    """Time of all calls together, a sum a round, once they have kept the device busy for a second.

    Raises:
        RuntimeError: a call failed.
    """
    for _ in ("heat", "measure"):
        contestants = [Contestant(call) for call in calls]
        interleave(contestants, device, seconds=1.0, deadline=deadline)
    failed = [x.error for x in contestants if x.error is not None]
    if failed:
        raise RuntimeError(failed[0])
    return [sum(times) for times in zip(*(x.times_ms for x in contestants), strict=True)]


def _first_call(contestant: Contestant, device: torch.device, seconds: float) -> None:
    begin = time.perf_counter()
    contestant.facts["peak_gib"] = peak_gib(contestant, device)
    if contestant.slow:
        contestant.max_rounds = max(1, round(seconds / 3 / (time.perf_counter() - begin)))
    contestant.facts |= contestant.verify()


def attempt(contestant: Contestant, device: torch.device, work: Callable[[Contestant], None]) -> None:
    """Does the work; its exception becomes the contestant's error, and the others go on."""
    try:
        work(contestant)
        return
    except Exception as error:
        contestant.error = describe(error)
    contestant.reset()  # the exception is gone by now, and with it the frames that held tensors
    free_memory(device)


def elapsed_ms(contestant: Contestant, device: torch.device) -> float:
    """Time of one call, after its reset: between CUDA events, or by the clock on a CPU."""
    contestant.reset()
    if device.type != "cuda":
        start = time.perf_counter()
        contestant.call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    if contestant.queued:
        torch.cuda._sleep(BUSY_CYCLES)
    begin.record()
    contestant.call()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end)


def summary(times_ms: list[float]) -> dict[str, float | int]:
    """ms (median), p20, p80 and rounds of a list that is not empty."""
    ordered = sorted(times_ms)
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in (0.2, 0.8))
    median = statistics.median(ordered)
    return {"ms": round(median, 4), "p20": round(low, 4), "p80": round(high, 4), "rounds": len(ordered)}


def peak_gib(contestant: Contestant, device: torch.device) -> float | None:
    """Most memory of one untimed call beyond what was allocated before it, in GiB; None on a CPU."""
    contestant.reset()
    free_memory(device)
    if device.type != "cuda":
        contestant.call()
        return None
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    contestant.call()
    torch.cuda.synchronize(device)
    return round((torch.cuda.max_memory_allocated(device) - before) / 2**30, 3)


def free_memory(device: torch.device) -> None:
    """Gives unused memory back to a GPU. Raises if an earlier kernel broke the device for this process."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def describe(error: Exception) -> str:
    """An exception in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
