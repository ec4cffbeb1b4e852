"""The soft overlong penalty of DAPO."""

import math

import pytest

from grpo_moe.rewards import soft_overlong_penalty


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (10**9, -1.0)],
)
def test_soft_overlong_penalty_values_of_the_paper(num_tokens, penalty):
    assert soft_overlong_penalty(num_tokens, 20480, 4096) == penalty


def test_soft_overlong_penalty_is_plain_zero_below_the_cache():
    assert math.copysign(1, soft_overlong_penalty(5, 100, 10)) == 1


def test_soft_overlong_penalty_over_the_whole_length():
    assert [soft_overlong_penalty(n, 4, 4) for n in range(6)] == [0.0, -0.25, -0.5, -0.75, -1.0, -1.0]


@pytest.mark.parametrize("cache_length", [0, -1, 101])
def test_soft_overlong_penalty_refuses_a_cache_out_of_range(cache_length):
    with pytest.raises(ValueError, match=rf"cache_length must be between 1 and .*\(100\), got {cache_length}"):
        soft_overlong_penalty(5, 100, cache_length)


def test_soft_overlong_penalty_refuses_a_negative_length():
    with pytest.raises(ValueError, match="num_tokens must be 0 or positive, got -1"):
        soft_overlong_penalty(-1, 100, 10)
