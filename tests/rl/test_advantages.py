"""Group advantages: TRL's values, and the inputs on which other libraries go wrong."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_moe.rl.advantages import SCALES, decoupled_advantages, group_advantages, resolve_scale, reward_spread

NAN, INF = float("nan"), float("inf")


def assert_advantages(rewards, expected, **arguments):
    advantages = group_advantages(torch.as_tensor(rewards), **arguments)
    assert advantages.dtype == torch.float32
    torch.testing.assert_close(advantages, torch.tensor(expected), atol=2e-7, rtol=0)


@pytest.mark.parametrize(
    ("rewards", "group", "batch", "none"),
    [
        ([[1.0, 0, 0, 1]], [[0.86587542, -0.86587542, -0.86587542, 0.86587542]], "group", [[0.5, -0.5, -0.5, 0.5]]),
        ([[1.0, 0, 0, 0]], [[1.49970004, *[-0.49990001] * 3]], "group", [[0.75, -0.25, -0.25, -0.25]]),
        ([[1.0, 0]], [[0.7070068, -0.7070068]], "group", [[0.5, -0.5]]),
        (
            [[1.0, 0], [0.5, 0.5]],
            [[0.7070068, -0.7070068], [0.0, 0]],
            [[1.22444493, -1.22444493], [0.0, 0]],
            [[0.5, -0.5], [0.0, 0]],
        ),
        ([[1.0, NAN, 0, 1]], [[0.57725029, 0, -1.15450057, 0.57725029]], "group", [[1 / 3, 0, -2 / 3, 1 / 3]]),
    ],
)
def test_group_advantages_values_of_trl(rewards, group, batch, none):
    assert_advantages(rewards, group, scale="group")
    assert_advantages(rewards, group if batch == "group" else batch, scale="batch")
    assert_advantages(rewards, none, scale="none")


def test_group_advantages_scales_each_group_by_its_own_deviation_unless_told():
    rewards = [[1.0, 0], [10.0, 0]]
    assert_advantages(rewards, [[0.7070068, -0.7070068], [0.70709678, -0.70709678]])
    deviation = torch.tensor(rewards, dtype=torch.float64).std() + 1e-4
    expected = torch.tensor([[0.5, -0.5], [5, -5]], dtype=torch.float64) / deviation
    assert_advantages(rewards, expected.float().tolist(), scale="batch")


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [0.3, 1 / 3, -7.7, 1e30, 1e-30])
def test_group_advantages_of_equal_rewards_are_exactly_zero(scale, value):
    for dtype in (torch.float32, torch.float64):
        rewards = torch.tensor([[value] * 6, [1.0, 0, 0, 0, 0, 0]], dtype=dtype)
        assert (group_advantages(rewards, scale=scale, eps=1e-12)[0] == 0).all()


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rewards", [[NAN, NAN, NAN], [NAN, 5.0, NAN], [2.0, NAN, 2.0]])
def test_group_advantages_without_two_different_scorable_rewards_are_zero(scale, rewards):
    assert (group_advantages(torch.tensor([rewards]), scale=scale) == 0).all()
    other = group_advantages(torch.tensor([rewards, [1.0, 0.0, 0.0]]), scale=scale)
    assert (other[0] == 0).all() and (other[1] != 0).all() and other.isfinite().all()


def test_group_advantages_keep_small_differences_on_a_large_offset():
    assert_advantages(
        torch.tensor([[1.0, 1.00001, 1, 1]], dtype=torch.float64), [[-0.02380952, 0.07142857, *[-0.02380952] * 2]]
    )
    plain = group_advantages(torch.tensor([[1.0, 0, 1, 0]]))
    torch.testing.assert_close(group_advantages(torch.tensor([[10001.0, 10000, 10001, 10000]])), plain)


@pytest.mark.parametrize("scale", SCALES)
def test_group_advantages_of_fp32_rewards_are_computed_in_fp64(scale):
    rewards = 1e4 + torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(group_advantages(rewards, scale=scale), group_advantages(rewards.double(), scale=scale))


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("value", [INF, -INF])
def test_group_advantages_refuse_an_infinite_reward(scale, value):
    with pytest.raises(ValueError, match=f"rewards must be finite or NaN.*got {value} in group 1, completion 2"):
        group_advantages(torch.tensor([[0.0, 0, 0], [0, 0, value]]), scale=scale)


def test_group_advantages_refuse_a_group_of_one_and_other_shapes():
    for function in (group_advantages, reward_spread):
        with pytest.raises(ValueError, match="num_generations must be at least 2, got 1"):
            function(torch.zeros(4, 1))
        with pytest.raises(ValueError, match=r"rewards must be \[P, G\], got the shape \[4\]"):
            function(torch.zeros(4))
    with pytest.raises(ValueError, match="eps must be positive, got 0"):
        group_advantages(torch.zeros(1, 2), eps=0)


@pytest.mark.parametrize("scale", SCALES)
def test_group_advantages_of_no_group_are_empty(scale):
    assert group_advantages(torch.zeros(0, 4), scale=scale).shape == (0, 4)


def test_group_advantages_leave_rewards_as_they_are():
    rewards = torch.tensor([[1.0, NAN, 0.0]])
    before = rewards.clone()
    group_advantages(rewards)
    torch.testing.assert_close(rewards, before, equal_nan=True, rtol=0, atol=0)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from([0.0, 0.1, 1.0, -3.5, NAN]), min_size=4, max_size=4), min_size=1, max_size=4),
    st.sampled_from(SCALES),
)
def test_group_advantages_sum_to_zero_in_the_order_of_rewards(rewards, scale):
    rewards = torch.tensor(rewards)
    advantages = group_advantages(rewards, scale=scale)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(len(rewards)), atol=1e-5, rtol=0)
    assert (advantages[rewards.isnan()] == 0).all()
    better = rewards[:, :, None] > rewards[:, None, :]  # False next to a NaN
    assert (advantages[:, :, None] > advantages[:, None, :])[better].all()


def test_reward_spread_ignores_what_could_not_be_scored():
    rewards = torch.tensor([[1.0, 0, 0.5], [0.3, 0.3, 0.3], [NAN, 1, 0.25], [NAN, NAN, 7], [NAN, NAN, NAN]])
    assert reward_spread(rewards).tolist() == [1.0, 0.0, 0.75, 0.0, 0.0]


def test_reward_spread_of_partial_scores_keeps_groups_that_an_accuracy_test_would_not():
    assert (reward_spread(torch.tensor([[2.0, 3.0], [-1.0, -2.0], [0.5, 0.5]])) > 0).tolist() == [True, True, False]


def test_resolve_scale_reads_the_spellings_of_trl():
    assert [resolve_scale(scale) for scale in ("group", "batch", "none", True, False)] == [*SCALES, "group", "none"]
    rewards = torch.tensor([[1.0, 0], [4, 0]])
    assert torch.equal(group_advantages(rewards, scale=True), group_advantages(rewards, scale="group"))
    assert torch.equal(group_advantages(rewards, scale=False), group_advantages(rewards, scale="none"))
    for scale in ("std", None, ["group"]):
        with pytest.raises(ValueError, match="scale_rewards must be one of group, batch, none, or a boolean, got"):
            resolve_scale(scale)


@pytest.mark.parametrize("silent", [[0.3] * 4, [1e30] * 4, [NAN] * 4, [NAN, NAN, 5.0, NAN], [2.0, NAN, 2.0, 2.0]])
def test_decoupled_advantages_are_left_alone_by_a_column_that_tells_nothing(silent):
    told = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 7.0, 3.0, 3.0]])
    columns = torch.stack([told, torch.tensor([silent, silent])])
    expected = decoupled_advantages(told[None], [2.0])
    assert expected.abs().min() > 0.1 and expected.isfinite().all()
    assert torch.equal(decoupled_advantages(columns, [2.0, 3.0]), expected)
    assert torch.equal(decoupled_advantages(columns, [np.float32(2), Fraction(3)]), expected)
    assert torch.equal(decoupled_advantages(columns.flip(0), [3.0, 2.0]), expected)
    assert (decoupled_advantages(columns[1:], [3.0]) == 0).all()


def looped_advantages(rewards, scale, eps):
    """One group after the other in plain Python."""
    mean = lambda xs: sum(xs) / len(xs)  # noqa: E731
    deviation = lambda xs: (sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1)) ** 0.5  # noqa: E731
    everyone = deviation([x for group in rewards for x in group])
    divisor = {"group": deviation, "batch": lambda _: everyone, "none": lambda _: 1 - eps}[scale]
    return [[(x - mean(group)) / (divisor(group) + eps) for x in group] for group in rewards]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("offset, step", [(0.0, 1.0), (1e4, 1.0), (-1e6, 1.0), (1.0, 1e-5), (1e4, 1e-3)])
def test_group_advantages_equal_a_loop_over_the_groups(scale, offset, step):
    """A large offset or a small spread: E[x^2] - E[x]^2 and a floor under the variance would both show."""
    pattern = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 0], [0, 0, 0, 3], [2, 1, 0, 5]], dtype=torch.float64)
    rewards = offset + step * pattern
    actual = group_advantages(rewards, scale=scale, eps=1e-6)
    expected = torch.tensor(looped_advantages(rewards.tolist(), scale, 1e-6), dtype=torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=1e-7)
    alone = torch.cat([group_advantages(row[None], scale="group", eps=1e-6) for row in rewards])
    if scale == "group":
        assert torch.equal(alone, actual)


def test_no_member_of_a_group_has_a_deviation_without_itself():
    """The deviation of the others is 0 for the odd one of [1, 1, 1, 0]; ours is of the whole group."""
    assert_advantages([[1.0, 1, 1, 0]], [[0.49990001] * 3 + [-1.49970004]])
