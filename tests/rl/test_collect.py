"""Collecting rollouts: which groups have a signal, by what their advantages are made of, and which are kept."""

import math

import pytest
import torch
from accelerate import Accelerator

from grpo_moe import GRPOConfig
from grpo_moe.rewards import RewardCaller
from grpo_moe.rl.collect import Collector
from grpo_moe.rl.guards import rollout_warnings
from grpo_moe.rl.metrics import Metrics, PhaseTimer
from grpo_moe.rl.record import rollout_metrics
from grpo_moe.rl.waterfall import add_waterfall
from grpo_moe.types import Completion, Prompt, SamplingParams

GDPO = {"multi_objective_aggregation": "normalize_then_sum"}
SAMPLING = SamplingParams(8, 4)


class Engine:
    """Completions 0, 1, 2, ... of three tokens each."""

    def generate(self, prompts, sampling):
        tokens = (5, 6, 7)
        return [
            [Completion(tokens, (-1.0,) * 3, "stop", str(i)) for i in range(sampling.num_generations)] for _ in prompts
        ]


class Source:
    def take(self, count):
        return [Prompt((1, 2), raw="p", index=i) for i in range(count)]


def always(*values):
    """A reward function that gives each group these."""
    return lambda prompts, completions, **_: [values[int(text)] for text in completions]


def collector(path, functions, weights=None, **options):
    shared = dict(
        output_dir=str(path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8, use_cpu=True,
    )  # fmt: skip
    args = GRPOConfig(**{**shared, **options})
    rewards = RewardCaller(functions, weights, on_error=args.reward_on_error)
    return Collector(
        Engine(), rewards, args, Accelerator(cpu=True), timer=PhaseTimer(), policy=torch.nn.Linear(1, 1)
    )  # fmt: skip


def test_gdpo_keeps_groups_whose_sum_of_rewards_is_constant_but_whose_advantages_are_not(tmp_path):
    functions = [always(0, 1, 0, 1), always(3, 1, 3, 1)]
    used = collector(tmp_path, functions, [2, 1], dynamic_sampling=True, **GDPO)
    rollout = used.collect(Source(), SAMPLING)
    assert len(rollout.kept) == used.args.prompts_per_rollout and rollout.rounds == 1
    advantages = used.advantages(rollout.kept)
    assert advantages.abs().min() > 0.9 and (advantages[:, 1] > 0).all()
    metrics = Metrics()
    add_waterfall(metrics, rollout, advantages, used.args)
    fall = metrics.reduce()
    assert fall["waterfall/zero_spread"] == fall["waterfall/no_advantage"] == 0
    assert rollout_metrics(rollout.generated, used.rewards.names, 1.0)["frac_reward_zero_std"][0] == 0
    assert rollout_warnings(rollout.generated, used.args) == []


def test_without_gdpo_a_constant_sum_has_no_signal_anywhere(tmp_path):
    used = collector(tmp_path, [always(0, 1, 0, 1), always(0, -2, 0, -2)], [2, 1], dynamic_sampling=True)
    rollout = used.collect(Source(), SAMPLING)
    assert rollout.kept == [] and not any(group.has_signal for group in rollout.generated)
    metrics = Metrics()
    add_waterfall(metrics, rollout, used.advantages([]), used.args)
    fall = metrics.reduce()
    assert fall["waterfall/zero_spread"] == fall["waterfall/groups"] == 3 * 4 * len(rollout.generated)
    assert rollout_metrics(rollout.generated, used.rewards.names, 1.0)["frac_reward_zero_std"][0] == 1


@pytest.mark.parametrize("options", [{}, GDPO])
@pytest.mark.parametrize(
    ("functions", "weights", "has_signal"),
    [
        ([always(1, 1, 1, 1), always(0, 1, 0, 1)], [1, 1], True),
        ([always(1, 1, 1, 1), always(0, 1, 0, 1)], [1, 0], False),  # a spread that no weight lets through
        ([always(0.1, 0.1, 0.1, 0.1), always(7, 7, 7, 7)], [1, 1], False),
        ([always(None, None, 3, None), always(None, None, None, None)], [1, 1], False),
        ([always(None, 2, 3, None), always(None, None, None, None)], [1, 1], True),
        ([always(0, 1, 0, 1), always(0, -1, 0, -1)], [1, 1], False),  # the two cancel in both ways of adding
    ],
)
def test_a_group_without_a_signal_has_no_advantage_and_one_with_it_has(
    tmp_path, options, functions, weights, has_signal
):
    used = collector(tmp_path, functions, weights, **options)
    groups = used.generate_groups(Source().take(2), SAMPLING)
    assert [group.has_signal for group in groups] == [has_signal] * 2
    assert bool(used.advantages(groups).any()) == has_signal


def test_the_overlong_punishment_is_a_signal(tmp_path):
    def by_length(engine):
        made = [[Completion((5,) * n, (-1.0,) * n, "length", "0") for n in (1, 8, 1, 8)]]
        engine.generate = lambda prompts, sampling: made
        return engine

    for options in ({}, GDPO):
        used = collector(tmp_path, always(1), overlong_cache_length=4, **options)
        by_length(used.engine)
        (group,) = used.generate_groups(Source().take(1), SAMPLING)
        assert group.has_signal and used.advantages([group])[0, 0] > 0


def test_a_group_of_one_has_no_signal(tmp_path):
    (group,) = collector(tmp_path, always(3), **GDPO).generate_groups(Source().take(1), SamplingParams(8, 1))
    assert group.has_signal is False and math.isclose(group.rewards[0], 3)


def test_groups_that_a_fault_cost_count_nowhere_in_an_update(tmp_path):
    def fails(prompts, completions, **_):
        if len(completions) > 4:
            raise OSError("all at once")  # then group by group
        fails.calls += 1
        if fails.calls == 1:
            raise OSError("the first group")
        return [float(text) for text in completions]

    fails.calls = 0
    used = collector(tmp_path, fails, reward_on_error="skip")
    rollout = used.collect(Source(), SAMPLING)
    assert [group.skipped for group in rollout.generated] == [True] + [False] * (len(rollout.generated) - 1)
    assert rollout.kept == rollout.generated[1:]
