"""What the processes of a run tell each other, by threads that stand for them."""

import threading
from types import SimpleNamespace

import pytest

from grpo_moe.rl import processes
from grpo_moe.rl.processes import on_main


@pytest.fixture
def two_ranks(monkeypatch):
    """Calls a function with the accelerator of each; returns what each raised. A collective that one misses fails."""
    barrier, told, own = threading.Barrier(2, timeout=5), {}, threading.local()

    def gather(objects):
        told[own.rank] = objects
        barrier.wait()
        return [*told[0], *told[1]]

    monkeypatch.setattr(processes, "gather_object", gather)

    def call(function):
        raised = [None, None]

        def work(rank):
            own.rank = rank
            try:
                function(SimpleNamespace(is_main_process=rank == 0))
            except Exception as error:
                raised[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return raised

    return call


@pytest.mark.parametrize("error", [ValueError("another run trains here"), PermissionError(13, "no right", "run.lock")])
def test_on_main_raises_on_every_process_what_the_main_one_raised(two_ranks, error):
    def fails():
        raise error

    assert two_ranks(lambda accelerator: on_main(accelerator, fails)) == [error, error]


def test_on_main_calls_on_the_main_process_alone(two_ranks):
    calls = []
    assert two_ranks(lambda accelerator: on_main(accelerator, lambda: calls.append(1))) == [None, None]
    assert calls == [1]
