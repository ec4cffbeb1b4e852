"""What the benchmarks share: the environment of a line, timing in turns, peak memory, and one JSON line a point."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

MIN_ROUNDS = 5


def environment(device: torch.device) -> dict[str, str]:
    """Fields of every line: gpu, torch, triton, float32_matmul_precision, commit, date (UTC)."""
    on_gpu = device.type == "cuda"
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
    """

    def __init__(self, path: Path, common: dict[str, str]):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._common = common

    def write(self, record: dict) -> None:
        line = json.dumps({**record, **self._common})
        print(line, flush=True)
        self._file.write(line + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: Path) -> list[dict]:
    """The records of a file; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


class Deadline:
    """A budget of wall time, in seconds from its construction."""

    def __init__(self, seconds: float):
        self._start, self._seconds = time.perf_counter(), seconds

    def elapsed(self) -> float:
        return time.perf_counter() - self._start

    def passed(self) -> bool:
        return self.elapsed() >= self._seconds


@dataclass
class Contestant:
    """One implementation at one point, and what :func:`interleave` measured of it."""

    call: Callable[[], object]
    """The work to time."""
    reset: Callable[[], None] = lambda: None
    """Before every call, outside of the time."""
    max_rounds: int | None = None
    """Timed calls at most."""
    times_ms: list[float] = field(default_factory=list)
    error: str | None = None
    """Of the call that failed; it is not called again."""

    def is_active(self) -> bool:
        return self.error is None and (self.max_rounds is None or len(self.times_ms) < self.max_rounds)


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
                _time_once(contestant, device)
        rounds += 1


def _time_once(contestant: Contestant, device: torch.device) -> None:
    try:
        contestant.reset()
        contestant.times_ms.append(elapsed_ms(contestant.call, device))
    except Exception as error:  # recorded in the contestant's line; the others go on
        contestant.error = describe(error)
    if contestant.error is not None:
        contestant.reset()
        free_memory(device)


def elapsed_ms(call: Callable[[], object], device: torch.device) -> float:
    """Time of one call: between CUDA events, or by the clock on a CPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    begin.record()
    call()
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
    """Gives unused memory back to the device. Raises if an earlier kernel broke the device for this process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def relative_error(x: torch.Tensor, truth: torch.Tensor) -> float:
    """|x - truth| / |truth| in float64, Frobenius norms; NaN if the truth is all zeros."""
    truth = truth.double()
    return float((x.double() - truth).norm() / truth.norm())


def describe(error: Exception) -> str:
    """An exception in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"[:300]
