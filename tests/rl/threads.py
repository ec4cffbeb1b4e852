"""Processes as threads of this one, for code that meets the others in ``gather_object`` alone."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace


def in_processes(count, work, monkeypatch, modules):
    """What ``work(accelerator)`` returns on each of the processes; one that misses a collective is an error.

    Args:
        count: of processes.
        work: f(accelerator), the same for all.
        modules: names of the modules whose ``gather_object`` is the one of the threads.
    """
    mine, met, parts = threading.local(), threading.Barrier(count, timeout=20), [None] * count

    def gather_object(objects):
        parts[mine.rank] = objects
        met.wait()
        everyone = [x for part in parts for x in part]
        met.wait()
        return everyone

    def run(rank):
        mine.rank = rank
        accelerator = SimpleNamespace(
            num_processes=count, process_index=rank, is_main_process=rank == 0, is_fsdp2=False, autocast=nullcontext
        )
        try:
            return work(accelerator)
        except BaseException:
            met.abort()
            raise

    for name in modules:
        monkeypatch.setattr(sys.modules[name], "gather_object", gather_object)
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))
