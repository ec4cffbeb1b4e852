"""Reward functions of every kind that users write, and the faults they make."""

import asyncio
import functools
import math
import signal
import threading

import numpy as np
import pytest
import torch

from grpo_moe.rewards import RewardCaller

PROMPTS, COMPLETIONS = ["p0", "p1", "p2"], ["a", "bb", "ccc"]


def length(prompts, completions, **columns):
    return [float(len(completion)) for completion in completions]


def from_column(prompts, completions, score, **columns):
    return score


def call(functions, score=(1.0, 2.0, 3.0), weights=None, **columns):
    return RewardCaller(functions, weights)(PROMPTS, COMPLETIONS, {"score": list(score), **columns})


def test_rewards_are_the_weighted_sum_and_values_are_unweighted():
    output = call([length, from_column], score=[10, 20, 30], weights=[2, 0.5])
    assert output.values == [[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]
    assert output.rewards == [7.0, 14.0, 21.0]


def test_a_single_function_and_default_weights():
    assert call(length).rewards == [1.0, 2.0, 3.0]


def test_none_is_left_out_of_the_sum_and_nan_where_nothing_scored():
    output = call([from_column, lambda prompts, completions, **_: [5, None, None]], score=[1, 2, None])
    assert output.rewards[:2] == [6.0, 2.0]
    assert math.isnan(output.rewards[2])
    assert output.values[0][:2] == [1.0, 2.0] and math.isnan(output.values[0][2])
    assert output.values[1][0] == 5.0 and all(map(math.isnan, output.values[1][1:]))


def test_a_weight_of_zero_still_counts_as_scored():
    assert call([from_column], score=[1, 2, 3], weights=[0]).rewards == [0.0, 0.0, 0.0]


def test_functions_get_every_column_by_keyword():
    def sees(*, completions, prompts, answer, completion_ids, **columns):
        assert prompts == PROMPTS and completions == COMPLETIONS
        assert answer == [1, 2, 3] and completion_ids == [[0], [1], [2]] and columns == {"score": [1.0, 2.0, 3.0]}
        return [0, 0, 0]

    call(sees, answer=[1, 2, 3], completion_ids=[[0], [1], [2]])


@pytest.mark.parametrize("timeout", [None, 5])
def test_a_function_that_changes_its_lists_spoils_no_other(timeout):
    def sorts(prompts, completions, score):
        completions.sort(reverse=True)
        prompts.clear()
        score.append(0.0)
        return [0.0] * 3

    async def clears(prompts, completions, score):
        await asyncio.sleep(0)
        completions.clear()
        return [0.0] * 3

    given = ["a", "bb", "ccc"]
    caller = RewardCaller([sorts, clears, length, from_column], timeout=timeout)
    assert caller(PROMPTS, given, {"score": [1.0, 2.0, 3.0]}).rewards == [2.0, 4.0, 6.0]
    assert PROMPTS == ["p0", "p1", "p2"] and given == ["a", "bb", "ccc"]


@pytest.mark.parametrize(
    "returned",
    [
        (1, 2, 3),
        [True, 2, np.float32(3)],
        [np.int64(1), np.array(2.0), torch.tensor(3)],
        np.array([1, 2, 3]),
        torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    ],
)
def test_numbers_of_other_libraries_are_read(returned):
    values = call(lambda prompts, completions, **_: returned).values[0]
    assert values == [1.0, 2.0, 3.0]
    assert all(type(value) is float for value in values)


def test_async_functions_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=5)

    async def meet(prompts, completions, **columns):
        await asyncio.get_running_loop().run_in_executor(None, meeting.wait)
        return [1.0] * len(prompts)

    assert call([meet, meet, length]).rewards == [3.0, 4.0, 5.0]


def test_async_functions_work_inside_a_running_loop_and_keep_theirs():
    loops = []

    async def scored(prompts, completions, **columns):
        loops.append(asyncio.get_running_loop())
        return [1, 2, None]

    async def notebook():
        return call(scored).rewards

    first = asyncio.run(notebook())
    assert first[:2] == call(scored).rewards[:2] == [1.0, 2.0] and math.isnan(first[2])
    assert loops[0] is loops[1]


class AsyncJudge:
    async def __call__(self, prompts, completions, **columns):
        await asyncio.sleep(0)
        return [1.0, 2.0, 3.0]


class Answer:
    """An awaitable that is no coroutine, as clients of some services return."""

    def __await__(self):
        return scaled(PROMPTS, COMPLETIONS, 1).__await__()


async def scaled(prompts, completions, by, **columns):
    await asyncio.sleep(0)
    return [by * len(completion) for completion in completions]


@pytest.mark.parametrize("timeout", [None, 5])
@pytest.mark.parametrize(
    "function",
    [
        AsyncJudge(),
        AsyncJudge().__call__,
        functools.partial(scaled, by=1),
        lambda prompts, completions, **columns: scaled(prompts, completions, 1),  # plain, returns the coroutine
        lambda prompts, completions, **columns: Answer(),
    ],
)
def test_async_functions_of_every_form_are_awaited(function, timeout):
    assert RewardCaller(function, timeout=timeout)(PROMPTS, COMPLETIONS, {}).rewards == [1.0, 2.0, 3.0]


def test_plain_functions_run_in_the_calling_thread():
    def times_out(prompts, completions, **columns):
        signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGALRM))  # raises outside the main thread
        return [0, 0, 0]

    call(times_out)


class Judge:
    def __call__(self, prompts, completions, **columns):
        return [0, 0, 0]


def test_names_are_readable_and_unique():
    def length_2(prompts, completions, **columns):
        return [0, 0, 0]

    functions = [length, length, length_2, functools.partial(length, extra=1), lambda **_: [0, 0, 0], Judge()]
    assert RewardCaller(functions).names == ["length", "length_2", "length_2_2", "length_3", "lambda", "Judge"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1, 2], "reward function 'faulty' must return a list of 3 numbers, got 2; return one number"),
        (np.zeros(4), "must return a list of 3 numbers, got 4"),
        (1.0, "must return a list of 3 numbers, got float"),
        (None, "must return a list of 3 numbers, got NoneType"),
        ("123", "must return a list of 3 numbers, got str"),
        ({0: 1, 1: 1, 2: 1}, "must return a list of 3 numbers, got dict"),
        (torch.tensor(1.0), "must return a list of 3 numbers, got Tensor"),
        ([1, "2", 3], r"'faulty' must return finite numbers or None, got '2' \(str\) for row 1"),
        ([1, 2, [3]], r"got \[3\] \(list\) for row 2"),
        (torch.zeros(3, 1), r"got \[0.0\] \(list\) for row 0"),
        ([1, torch.zeros(2), 3], r"\(Tensor\) for row 1"),
        ([1j, 2, 3], r"\(complex\) for row 0"),
        ([10**400, 2, 3], r"\(int\) for row 0"),
        ([10**5000, 2, 3], r"got a value without repr \(int\) for row 0"),
        ([1, 2, math.nan], "'faulty' must return finite numbers or None, got nan for row 2; return None"),
        ([1, -math.inf, 3], "got -inf for row 1"),
        (np.array([np.inf, 0, 0]), "got inf for row 0"),
    ],
)
def test_a_faulty_return_value_is_named(returned, message):
    def faulty(prompts, completions, **columns):
        return returned

    with pytest.raises(ValueError, match=message):
        call([length, faulty])


def raises(prompts, completions, **columns):
    raise KeyError("answer")


async def raises_later(prompts, completions, **columns):
    await asyncio.sleep(0)
    raise KeyError("answer")


@pytest.mark.parametrize("function", [raises, raises_later])
def test_an_exception_names_the_function_and_keeps_its_cause(function):
    message = (
        f"reward function '{function.__name__}' raised KeyError: 'answer'; it was called with 3 completions .*score"
    )
    with pytest.raises(RuntimeError, match=message) as caught:
        call([length, function])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_function_without_the_columns_is_told_what_it_was_called_with():
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'score'.*keywords prompts, completions, score"):
        call(lambda prompts, completions: [0, 0, 0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([],), "reward_funcs must hold at least one function, got none"),
        (([length, 3],), "reward_funcs must be functions, got 3"),
        ((3,), "reward_funcs must be a function or a list of them, got 3; pass the function"),
        (("some/model",), r"reward_funcs must be functions, got the text 'some/model'; .*ModelReward\(path\)"),
        (([length, "some/model"],), "got the text 'some/model'"),
        ((torch.nn.Linear(1, 1),), r"got the model Linear; wrap it: ModelReward\(model, tokenizer\)"),
        (([length, from_column], [1]), r"weights must be one number for each .*length, from_column.*got \[1.0\]"),
        (
            ([length], 1.0),
            r"reward_weights must be one number for each reward function \(length\), got 1.0; give a list",
        ),
        (([length], ["a"]), r"reward_weights must be one number for each .*got \['a'\]; give numbers"),
        (([length], "1"), "reward_weights must be one number for each .*got '1'; give a list"),
        (([length], [None]), "reward_weights must be one number for each .*got \\[None\\]; give numbers"),
        (([length], [math.nan]), r"reward_weights must be finite, got \[nan\]"),
    ],
)
def test_a_faulty_construction_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardCaller(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_error": "ignore"}, "on_error must be 'raise' or 'skip', got 'ignore'"),
        ({"timeout": 0}, "timeout must be a positive number of seconds, got 0; leave it out for no limit"),
        ({"timeout": math.nan}, "timeout must be a positive number of seconds, got nan"),
    ],
)
def test_an_unknown_policy_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RewardCaller(length, **options)


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"answer must be as long as completions \(3\), got 1"):
        call(length, answer=[1])
    with pytest.raises(ValueError, match="columns must not be named .*'completions'; rename the column"):
        call(length, completions=COMPLETIONS)
    with pytest.raises(ValueError, match=r"prompts must be as long as completions \(1\), got 3"):
        RewardCaller(length)(PROMPTS, ["a"], {})


def test_check_finds_a_fault_on_two_rows():
    seen = []

    def function(prompts, completions, score):
        seen.append((prompts, completions, score))
        return [0.0]

    with pytest.raises(ValueError, match="'function' must return a list of 2 numbers, got 1"):
        RewardCaller(function).check(PROMPTS, {"score": [1, 2, 3]})
    assert seen == [(["p0", "p1"], ["", ""], [1, 2])]


def test_check_passes_a_sound_function_and_chats():
    def turns(prompts, completions, **columns):
        return [float(len(completion[0]["content"])) for completion in completions]

    RewardCaller([length, from_column]).check(["p0"], {"score": [1]})
    RewardCaller(turns).check([[{"role": "user", "content": "hi"}]], {})
