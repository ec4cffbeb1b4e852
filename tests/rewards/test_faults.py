"""Faults of reward functions: each kind under each policy, what it costs, and what is counted and logged."""

import asyncio
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_moe.rewards import RewardCaller, caller, running
from grpo_moe.rewards.faults import FAULTS

COMPLETIONS = ["a", "b", "c", "d", "e", "f"]  # two groups of three, or three of two


def letters(prompts, completions, **columns):
    return [float(ord(c) - ord("a")) for c in completions]


def late(prompts, completions, **columns):
    time.sleep(1.5)
    return [0.0] * len(completions)


async def late_async(prompts, completions, **columns):
    await asyncio.sleep(5)


def raises(prompts, completions, **columns):
    raise KeyError("answer")


async def raises_async(prompts, completions, **columns):
    raise KeyError("answer")


def short(prompts, completions, **columns):
    return [1.0]


def huge(prompts, completions, **columns):
    return [9e35] * len(completions)


def no_list(prompts, completions, **columns):
    return "1" * len(completions)


def call(functions, *, group_size=None, completions=COMPLETIONS, **options):
    rewards = RewardCaller(functions, **{"on_error": "skip", **options})
    return rewards(["q"] * len(completions), completions, {}, group_size=group_size)


WHOLE = [
    (raises, "exception", RuntimeError),
    (raises_async, "exception", RuntimeError),
    (short, "wrong_length", ValueError),
    (no_list, "wrong_type", ValueError),
    (late, "timeout", TimeoutError),
    (late_async, "timeout", TimeoutError),
]


@pytest.mark.parametrize(("function", "kind", "error"), WHOLE)
def test_a_fault_of_the_whole_call_is_raised_or_costs_every_row(function, kind, error):
    timeout = 0.1 if kind == "timeout" else None
    with pytest.raises(error, match=f"reward function '{function.__name__}' (must|raised)"):
        call([letters, function], on_error="raise", timeout=timeout)
    output = call([letters, function], timeout=timeout)
    assert output.skipped == [True] * 6 and all(map(math.isnan, output.rewards))
    assert output.values[0] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] and all(map(math.isnan, output.values[1]))
    assert output.faults == {f"{function.__name__}/{kind}": 6}


@pytest.mark.parametrize(
    ("item", "kind"), [(math.nan, "not_finite"), (-math.inf, "not_finite"), ("2", "wrong_type"), ([1], "wrong_type")]
)
def test_a_fault_of_a_row_is_raised_or_costs_that_row(item, kind):
    def faulty(prompts, completions, **columns):
        return [1, item, None, 4, 5, 6]

    with pytest.raises(ValueError, match="'faulty' must return finite numbers or None, got .* for row 1"):
        call(faulty, on_error="raise")
    output = call([letters, faulty])
    assert output.skipped == [False, True, False, False, False, False]
    assert math.isnan(output.rewards[1])
    assert [output.rewards[i] for i in (0, 2, 3)] == [1.0, 2.0, 7.0]
    assert output.faults == {f"faulty/{kind}": 1}


def test_every_kind_is_covered_above():
    assert {kind for _, kind, _ in WHOLE} | {"not_finite"} == set(FAULTS)


def test_no_fault_leaves_no_trace(caplog):
    output = call([letters, lambda prompts, completions, **_: [None] * 6], timeout=5)
    assert output.rewards == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert output.skipped == [False] * 6 and output.faults == {} and not caplog.records


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("timeout", [None, 5])
def test_one_odd_completion_costs_its_group(is_async, timeout):
    sizes = []

    def odd(prompts, completions, **columns):
        sizes.append(len(completions))
        return [1 / (c != "d") for c in completions]

    async def odd_async(prompts, completions, **columns):
        return odd(prompts, completions)

    output = call([odd_async if is_async else odd], group_size=2, timeout=timeout)
    assert sizes == [6, 2, 2, 2]
    assert output.skipped == [False, False, True, True, False, False]
    assert output.values[0][:2] == output.values[0][4:] == [1.0, 1.0]
    assert list(output.faults.values()) == [2]


def test_parts_get_their_rows_of_every_column():
    def wants_columns(prompts, completions, answer):
        if len(completions) > 2:
            raise ValueError
        return answer

    output = RewardCaller(wants_columns, on_error="skip")(
        ["q"] * 4, COMPLETIONS[:4], {"answer": [1, 2, 3, 4]}, group_size=2
    )
    assert output.rewards == [1.0, 2.0, 3.0, 4.0]
    assert output.faults == {}  # nothing was lost


def test_a_late_function_is_not_called_again_by_group():
    calls = []

    def slow(prompts, completions, **columns):
        calls.append(len(completions))
        time.sleep(1)

    output = call([slow], group_size=2, timeout=0.1)
    assert calls == [6] and all(output.skipped)


def test_a_function_of_weight_zero_costs_no_group():
    output = call([letters, raises], weights=[1, 0])
    assert output.skipped == [False] * 6 and output.rewards == output.values[0]
    assert output.faults == {"raises/exception": 6}


def test_each_kind_is_logged_once_a_function(caplog):
    returned = iter([[math.nan] * 2, [math.nan, "x"], [math.nan, "x"]])

    def faulty(prompts, completions, **columns):
        return next(returned)

    rewards = RewardCaller([faulty, raises], on_error="skip")
    faults = [rewards(["q"] * 2, ["a", "b"], {}).faults for _ in range(3)]
    assert faults[0] == {"faulty/not_finite": 2, "raises/exception": 2}
    assert faults[1] == faults[2] == {"faulty/not_finite": 1, "faulty/wrong_type": 1, "raises/exception": 2}
    assert len(caplog.records) == 3
    assert "'faulty' must return finite numbers or None, got nan for row 0" in caplog.messages[0]
    assert "from now on they are only counted, as raises/exception" in caplog.messages[1]
    assert f"line {raises.__code__.co_firstlineno + 1}, in raises" in caplog.messages[1]  # where it was raised
    assert "got 'x' (str) for row 1" in caplog.messages[2]
    told = caplog.records[1]
    assert isinstance(told.reward_error.__cause__, KeyError) and told.exc_info is None  # a formatter writes that raw


def test_check_raises_whatever_the_policy():
    place = rf"keywords prompts, completions \({__file__}, line {raises.__code__.co_firstlineno + 1}\)$"
    with pytest.raises(ValueError, match=f"'raises' raised KeyError.*{place}"):
        RewardCaller(raises, on_error="skip").check(["q"], {})
    with pytest.raises(ValueError, match="weighted sum .* got 1.8e[+]36 for row 0 from huge 9e[+]35, huge_2 9e[+]35"):
        RewardCaller([huge, huge], on_error="skip").check(["q"], {})
    with pytest.raises(ValueError, match="'late_async' must return within 0.1 s, got nothing for 1 completions"):
        RewardCaller(late_async, on_error="skip", timeout=0.1).check(["q"], {})


@pytest.mark.parametrize("value", [9e35, -9e35])
def test_a_sum_that_overflows_is_a_fault_of_its_row(value, caplog):
    def first(prompts, completions, **columns):
        return [value, 1, None, value, value, 3]

    def second(prompts, completions, **columns):
        return [value, 1, None, -value, 2, 3]

    message = (
        f"weighted sum .* must be finite and .*, got {2 * value} for row 0 from first {value}, second {value}; ret"
    )
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        call([first, second], on_error="raise")
    output = call([first, second])
    assert output.skipped == [True, False, False, False, False, False]
    assert math.isnan(output.rewards[0]) and output.rewards[1] == 2.0 and output.rewards[3:] == [0.0, value, 6.0]
    assert output.values[0][0] == output.values[1][0] == value
    assert output.faults == {"weighted_sum/not_finite": 1} and len(caplog.records) == 1
    weighted = call([first, second], weights=[1e300, -1e300], on_error="skip")  # inf - inf
    assert weighted.skipped == [True, False, False, True, True, False] and weighted.rewards[5] == 0.0


def test_a_failed_call_spoils_no_list_of_its_parts():
    def greedy(prompts, completions, **columns):
        own = list(completions)
        completions.clear()
        if len(own) > 2:
            raise ValueError
        return [float(ord(c) - ord("a")) for c in own]

    assert call(greedy, group_size=2).rewards == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("group_size", [0, 4, 7])
def test_a_group_size_that_does_not_fit_is_refused(group_size):
    with pytest.raises(ValueError, match=f"group_size must divide the 6 completions, got {group_size}"):
        call(letters, group_size=group_size)


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("is_async", [False, True])
def test_an_interrupt_is_never_swallowed(timeout, interrupt, is_async):
    def stops(prompts, completions, **columns):
        raise interrupt

    async def stops_async(prompts, completions, **columns):
        raise interrupt

    with pytest.raises(interrupt):
        call([stops_async if is_async else stops], timeout=timeout)
    assert call([raises_async], timeout=timeout).skipped == [True] * 6  # the event loop lives


def test_a_time_limit_leaves_what_is_in_time_alone():
    async def quick_async(prompts, completions, **columns):
        await asyncio.sleep(0.01)
        return letters(prompts, completions)

    start = time.perf_counter()
    output = call([late, late_async, letters, quick_async], weights=[0, 0, 1, 1], timeout=0.3)
    assert time.perf_counter() - start < 1.4
    assert output.rewards == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert output.faults == {"late/timeout": 6, "late_async/timeout": 6}


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_without_a_limit_that_does_not_answer_is_named_while_it_runs(is_async, caplog, monkeypatch):
    monkeypatch.setattr(running, "_SLOW_S", 0.05)

    def waits_for_the_warning():
        deadline = time.monotonic() + 5
        while not caplog.messages and time.monotonic() < deadline:
            time.sleep(0.01)

    def slow(prompts, completions, **columns):
        waits_for_the_warning()
        return [1.0] * len(completions)

    async def slow_async(prompts, completions, **columns):
        await asyncio.get_running_loop().run_in_executor(None, waits_for_the_warning)
        return [1.0] * len(completions)

    function = slow_async if is_async else slow
    assert call([letters, function], on_error="raise").values[1] == [1.0] * 6
    message = f"'{function.__name__}' has given nothing for 6 completions after 0.05 s; a time limit (reward_timeout) "
    assert len(caplog.messages) == 1 and message in caplog.text
    time.sleep(0.1)
    assert len(caplog.messages) == 1  # none of the one that answered


def test_a_late_async_function_is_cancelled():
    cancelled = threading.Event()

    async def waits(prompts, completions, **columns):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    call([waits], timeout=0.1)
    assert cancelled.wait(5)


def test_an_async_function_that_blocks_its_loop_does_not_block_the_next():
    async def blocks(prompts, completions, **columns):
        time.sleep(3)

    async def sound(prompts, completions, **columns):
        return [1] * len(completions)

    assert call([blocks], timeout=0.1).faults == {"blocks/timeout": 6}
    assert call([sound], timeout=1).rewards == [1.0] * 6


@pytest.mark.parametrize("function", [TimeoutError, asyncio.CancelledError])
def test_time_outs_and_cancellations_inside_a_function_are_its_exceptions(function):
    async def own(prompts, completions, **columns):
        raise function

    assert call([own], timeout=5).faults == {"own/exception": 6}


def test_a_late_thread_does_not_keep_python_from_exiting():
    code = """
import importlib, sys, time, types
package = types.ModuleType("rewards")  # without the rest of the library, which takes long to import
package.__path__ = [sys.argv[1]]
sys.modules["rewards"] = package
caller = importlib.import_module("rewards.caller")
score = caller.RewardCaller(lambda **_: time.sleep(600), on_error="skip", timeout=0.05)
print(score(["q"], ["c"], {}).faults)
"""
    folder = str(Path(caller.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("{'lambda/timeout': 1}\n", 0), done.stderr


class Hostile:
    def __init__(self, method, error):
        self.method, self.error = method, error

    def __getattr__(self, name):
        raise self.error(name)

    def __repr__(self):
        raise self.error("repr")

    def __float__(self):
        raise self.error("float")

    def __len__(self):
        return -1


class HostileList(list):
    def __iter__(self):
        raise OSError("iter")

    def __len__(self):
        raise OSError("len")


errors = st.sampled_from([ValueError, AttributeError, ZeroDivisionError, OSError])
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.just(10**5000),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.decimals(),
    st.fractions(),
    st.builds(Hostile, st.just("x"), errors),
    st.sampled_from([torch.tensor(1.0), torch.zeros(2), torch.zeros(1, device="meta"), torch.Tensor, list, object()]),
)
returns = st.one_of(
    scalars,
    st.lists(scalars, max_size=3),
    st.lists(scalars, min_size=2, max_size=2),
    st.tuples(scalars, scalars),
    st.dictionaries(st.integers(0, 2), scalars, max_size=2),
    st.sets(st.integers(), max_size=3),
    st.sampled_from([HostileList([1, 2]), iter([1, 2]), range(2), torch.ones(2, device="meta"), torch.ones(2, 1)]),
)


@settings(max_examples=300, deadline=None)
@given(returns)
def test_whatever_comes_back_is_scored_or_named(returned):
    def function(prompts, completions, **columns):
        return returned

    output = call([function], completions=["a", "b"])
    for value, reward, skipped in zip(output.values[0], output.rewards, output.skipped, strict=True):
        assert type(value) is float and not math.isinf(value)
        assert math.isnan(reward) == math.isnan(value)
        assert not skipped or math.isnan(reward)
    assert sum(output.faults.values()) == sum(output.skipped)
    if any(output.skipped):
        with pytest.raises(ValueError, match="reward function 'function' must return"):
            call([function], completions=["a", "b"], on_error="raise")
    else:
        again = call([function], completions=["a", "b"], on_error="raise")
        assert str(again) == str(output)
