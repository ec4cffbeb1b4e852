"""The Countdown task: what its reward accepts, and that its problems and demonstrations follow their own rules."""

import dataclasses
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_moe.rewards.countdown import ALPHABET, Countdown, countdown_reward, solves, split_of

HARD = Countdown(num_numbers=4, max_number=25, operators="+-*", max_value=500)


def reward(completion, numbers=(8, 8, 2), target=18):
    return countdown_reward(["8 8 2=18?"], [completion], numbers=[list(numbers)], target=[target], other=["ignored"])[0]


@pytest.mark.parametrize(
    "completion",
    ["8+8=16+2=18", "2+8=10+8=18", "8-8=0+2=2;8+8=16+2=18", "nonsense;;8+8=16+2=18"],
)
def test_countdown_reward_accepts_a_right_last_attempt(completion):
    assert reward(completion) == 1.0


@pytest.mark.parametrize(
    "completion",
    [
        "",
        ";",
        "18",
        "8+8=16",  # a number left out
        "8+8=16+2=18;8-8=0+2=2",  # the last attempt misses
        "8+8=16+2=18;",  # the last attempt is empty
        "8+8=16+2=19",  # wrong sum
        "8+8=17+2=18",  # wrong in between
        "9+9=18",  # other numbers
        "8+8=16+2=18+0=18",  # one number more
        "8+8=16+2=18 ",
        " 8+8=16+2=18",
        "8+8=16+2=18\n",
        "08+8=16+2=18",
        "8+08=16+2=18",
        "8+8=016+2=18",
        "8+8=16+2=018",
        "8+8=16+2=18-",
        "+8+8=16+2=18",
        "8++8=16+2=18",
        "8+8=16=16+2=18",
        "8+8+2=18",
        "8/8=1*2=2",
        "٨+8=16+2=18",  # Arabic digits
        "8+8=16+²=18",
        "8+8=16+２=18",  # full width
        "9" * 5000 + "+8=16+2=18",
    ],
)
def test_countdown_reward_refuses_all_else(completion):
    assert reward(completion) == 0.0


def test_countdown_reward_needs_each_number_once():
    assert reward("2+8=10+8=18", numbers=(2, 8, 10)) == 0.0
    assert reward("9+9=18", numbers=(9, 9, 9)) == 0.0
    assert reward("9*9=81-9=72", numbers=(9, 9, 9), target=72) == 1.0


def test_countdown_reward_refuses_a_negative_value_in_between():
    assert reward("2-8=-6+8=2", target=2) == 0.0


def test_countdown_reward_keeps_the_order_of_rows():
    completions = ["8+8=16+2=18", "x", "1+1=2+1=3"]
    numbers, targets = [[8, 8, 2], [8, 8, 2], [1, 1, 1]], [18, 18, 3]
    assert countdown_reward(["", "", ""], completions, numbers=numbers, target=targets) == [1.0, 0.0, 1.0]


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet=ALPHABET), st.text(alphabet="²٣०8+-*=;")))
def test_countdown_reward_takes_any_text(text):
    assert reward(text) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["8+8=16" + "-0=16" * 200_000, "8" * 1_000_000, "8+" * 500_000, ";" * 1_000_000])
def test_countdown_reward_is_quick_on_long_text(text):
    start = time.perf_counter()
    assert reward(text) == 0.0
    assert time.perf_counter() - start < 5  # linear: well under a second


@pytest.mark.parametrize("task", [Countdown(), HARD])
@pytest.mark.parametrize("split", ["train", "test"])
def test_rows_are_well_formed_problems_of_their_split(task, split):
    for row in task.rows(40, seed=0, split=split):
        numbers, target = row["numbers"], row["target"]
        assert row["prompt"] == " ".join(map(str, numbers)) + f"={target}?"
        assert set(row["prompt"]) <= set(ALPHABET)
        assert len(numbers) == task.num_numbers and 1 <= min(numbers) and max(numbers) <= task.max_number
        assert 1 <= target <= task.max_value
        assert split_of(numbers, target) == split


@pytest.mark.parametrize("task", [Countdown(), HARD])
def test_rows_can_be_solved(task):
    aiming = dataclasses.replace(task, aim_probability=1.0)
    rng = random.Random(0)
    for row in task.rows(20, seed=1, split="train"):
        solution = aiming.demonstration(rng, row["numbers"], row["target"])
        assert ";" not in solution
        assert reward(solution, row["numbers"], row["target"]) == 1.0


def test_rows_depend_on_seed_and_split_alone():
    assert Countdown().rows(2, seed=7, split="test") == [  # fixed: the same on every machine
        {"prompt": "9 4 3=16?", "numbers": [9, 4, 3], "target": 16},
        {"prompt": "3 5 4=4?", "numbers": [3, 5, 4], "target": 4},
    ]
    assert Countdown().rows(5, seed=7) == Countdown().rows(5, seed=7, split="train")
    assert Countdown().rows(5, seed=7) != Countdown().rows(5, seed=8)
    assert Countdown().rows(5, seed=7) == Countdown().rows(9, seed=7)[:5]


def test_split_of_is_stable_and_holds_out_one_problem_in_ten():
    assert split_of([8, 8, 2], 18) == split_of([2, 8, 8], 18)
    problems = [([a, b, c], t) for a in range(1, 10) for b in range(a, 10) for c in range(b, 10) for t in range(1, 28)]
    held_out = sum(split_of(*problem) == "test" for problem in problems) / len(problems)
    assert 0.08 < held_out < 0.12
    # Fixed for good: a change of the hash would move test problems into training.
    assert [target for target in range(1, 31) if split_of([1, 1, 1], target) == "test"] == [8, 12, 29]


def demonstrations(task, n):
    rng = random.Random(3)
    rows = [task.problem(rng) for _ in range(n)]
    return [(row, task.demonstration(rng, row["numbers"], row["target"])) for row in rows]


@pytest.mark.parametrize("task", [Countdown(), HARD])
def test_demonstrations_are_right_calculations_that_stop_at_a_hit(task):
    for row, text in demonstrations(task, 100):
        attempts = text.split(";")
        assert len(text) < task.max_completion_length and len(attempts) <= task.max_attempts
        for i, attempt in enumerate(attempts):
            value = int(attempt.rpartition("=")[2])
            assert 0 <= value <= task.max_value
            assert solves(attempt, row["numbers"], value)
            assert value != row["target"] or i == len(attempts) - 1


def test_demonstrations_go_on_with_the_given_probability_and_do_not_aim():
    drawn = demonstrations(Countdown(), 2000)
    missed_first = [text for row, text in drawn if not reward(text.split(";")[0], row["numbers"], row["target"])]
    went_on = sum(";" in text for text in missed_first) / len(missed_first)
    assert 0.26 < went_on < 0.34
    assert 0.05 < sum(reward(text, row["numbers"], row["target"]) for row, text in drawn) / len(drawn) < 0.5
    assert all(";" not in text for _, text in demonstrations(Countdown(continue_probability=0), 50))


def test_max_completion_length_fits_the_longest_demonstration():
    assert len("9+9=18+9=27;" * 5) == Countdown().max_completion_length
    long = dataclasses.replace(Countdown(), continue_probability=1.0, operators="+", max_number=9)
    texts = [text for _, text in demonstrations(long, 300)]
    assert max(map(len, texts)) <= long.max_completion_length - 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_numbers": 1}, "num_numbers must be at least 2, got 1"),
        ({"operators": "+/"}, "operators must be one or more of"),
        ({"operators": ""}, "operators must be"),
        ({"max_number": 100}, "max_number must be between 1 and max_value, got 100"),
        ({"max_value": 10**9}, "max_value must be below"),
        ({"max_attempts": 0}, "max_attempts must be at least 1"),
        ({"continue_probability": 1.5}, "continue_probability must be between 0 and 1"),
        ({"aim_probability": -0.5}, "aim_probability must be between 0 and 1"),
    ],
)
def test_countdown_refuses_settings_out_of_range(settings, message):
    with pytest.raises(ValueError, match=message):
        Countdown(**settings)


def test_countdown_says_when_there_is_nothing_to_draw():
    with pytest.raises(ValueError, match="split must be 'train' or 'test', got 'dev'"):
        Countdown().rows(1, seed=0, split="dev")
    with pytest.raises(ValueError, match="split must hold a problem"):
        Countdown(num_numbers=2, max_number=1, operators="-").rows(1, seed=0)
    with pytest.raises(ValueError, match="target must be within reach"):
        Countdown(aim_probability=1).demonstration(random.Random(0), [1, 1, 1], 50)
