"""The cosine length reward."""

import math

import pytest

from grpo_moe.rewards import RewardCaller, answer_reward, cosine_length_reward


def rewards(lengths, scores, maximum=100, **options):
    function = cosine_length_reward(lambda prompts, completions, **_: scores, maximum, **options)
    n = len(lengths)
    return function(["q"] * n, ["c"] * n, completion_ids=[[0] * length for length in lengths])


def test_cosine_length_reward_at_its_ends_and_in_the_middle():
    assert rewards([0, 50, 100, 200], [1, 1, 1, 1]) == pytest.approx([1.0, 0.75, 0.5, 0.5])
    assert rewards([0, 50, 100, 200], [0, 0, 0, 0]) == pytest.approx([-1.0, -0.75, -0.5, -0.5])


def test_cosine_length_reward_is_the_formula_of_the_paper():
    [reward] = rewards([30], [1], right=(2.0, 1.0))
    assert reward == pytest.approx(1 + 0.5 * (2 - 1) * (1 + math.cos(30 * math.pi / 100)))


def test_cosine_length_reward_keeps_none_and_passes_columns_on():
    assert rewards([5], [None]) == [None]
    caller = RewardCaller(cosine_length_reward(answer_reward, 4))
    assert caller.names == ["cosine_length_reward"]
    output = caller(["q", "q"], ["7", "8"], {"answer": ["7", "7"], "completion_ids": [[], [1, 2, 3, 4]]})
    assert output.rewards == pytest.approx([1.0, -0.5])


async def judge(prompts, completions, **columns):
    return [1.0]


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((judge, 10), {}, "scorer must be a plain reward function"),
        ((None, 10), {}, "scorer must be a plain reward function"),
        ((answer_reward, 0), {}, "max_completion_length must be at least 1 token, got 0"),
        ((answer_reward, 10), {"wrong": (math.nan, 0)}, "wrong must be two finite numbers"),
    ],
)
def test_cosine_length_reward_refuses_what_makes_no_reward(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        cosine_length_reward(*arguments, **options)
