"""Collecting rollouts: which groups have a signal, by what their advantages are made of, and which are kept."""

import math

import pytest
import torch
from accelerate import Accelerator
from threads import in_processes
from tiny import tokenizer

from grpo_moe import GRPOConfig
from grpo_moe.data import PromptSource
from grpo_moe.rewards import RewardCaller
from grpo_moe.rl import collect
from grpo_moe.rl.advantages import group_advantages
from grpo_moe.rl.batch import collate
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
    assert used.advantages(groups).isfinite().all()
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


@pytest.mark.parametrize("scale", ["group", "batch"])
def test_processes_share_out_whole_groups_and_get_the_advantages_of_their_own_rows(tmp_path, scale, monkeypatch):
    """Rewards that differ in every group by more than a factor, so that a row of another process is seen."""
    prompts = [{"prompt": "abcdefghijkl"[i], "number": i} for i in range(12)]
    reward = lambda number, g: float((7 * g * g + 3 * number * g) % 11)  # noqa: E731

    def score(prompts, completions, number, **_):
        assert prompts == ["abcdefghijkl"[i] for i in number]
        return [reward(i, int(text)) for i, text in zip(number, completions, strict=True)]

    def work(accelerator):
        options = dict(num_generations=8, per_device_train_batch_size=16, scale_rewards=scale)
        used = collector(tmp_path, score, **options)
        used.accelerator, rank = accelerator, accelerator.process_index
        source = PromptSource(prompts, tokenizer(), seed=0, shuffle=False)
        collected = []
        for _ in range(2):
            rollout = used.collect(source, SamplingParams(8, 8))
            kept = rollout.kept[rank % 2 :]  # processes need not have the same number of groups
            collected.append((kept, used.advantages(kept)))
        assert source.position == 2 * 3 * 2  # rollouts, processes, prompts each
        return collected

    made = in_processes(3, work, monkeypatch, ["grpo_moe.rl.collect"])
    for turn in range(2):
        first = 6 * turn
        numbers = [[group.prompt.columns["number"] for group in process[turn][0]] for process in made]
        assert numbers == [[first, first + 1], [first + 3], [first + 4, first + 5]]
        order = [number for mine in numbers for number in mine]
        rewards = torch.tensor([[reward(number, g) for g in range(8)] for number in order])
        expected = dict(zip(order, group_advantages(rewards, scale=scale), strict=True))
        for process, mine in zip(made, numbers, strict=True):
            kept, advantages = process[turn]
            assert all(len(group.completions) == 8 for group in kept)
            torch.testing.assert_close(advantages, torch.stack([expected[number] for number in mine]))


def test_groups_are_those_of_the_engine_whatever_turns_a_prompt_holds(tmp_path):
    """Conversations that are equal up to the last turn, hold assistant turns, or are equal altogether."""
    start = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = [[*start, {"role": "user", "content": last}] for last in "cddc"] + [start, start[:1]]
    used = collector(tmp_path, lambda prompts, completions, number, **_: [
        n * (completion[0]["content"] == "2") for n, completion in zip(number, completions, strict=True)
    ])  # fmt: skip
    prompts = [Prompt((1, 2), raw=chat, index=i, columns={"number": i}) for i, chat in enumerate(chats)]
    groups = used.generate_groups(prompts, SAMPLING)
    assert [(group.prompt.raw, group.scores.tolist()) for group in groups] == [
        (chat, [0, 0, i, 0]) for i, chat in enumerate(chats)
    ]
    advantages = used.advantages(groups)
    assert (advantages[0] == 0).all() and (advantages[1:, 2] > 1).all()


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


class NumberedEngine:
    """Completions whose every token is the prompt's number, and as many as that of the completion and one."""

    def generate(self, prompts, sampling):
        return [
            [Completion((p.index,) * (g + 1), (-1.0,) * (g + 1), "stop", f"{p.index} {g}") for g in range(4)]
            for p in prompts
        ]


def test_advantages_stay_with_their_completions_when_a_group_in_the_middle_is_dropped(tmp_path):
    def reward(prompts, completions, **_):
        pairs = [[int(number) for number in text.split()] for text in completions]
        return [0.5 if index == 1 else float((g + index) % 4) ** 2 for index, g in pairs]

    used = collector(tmp_path, reward, steps_per_generation=2, dynamic_sampling=True, dynamic_sampling_max_rounds=1)
    used.engine = NumberedEngine()
    rollout = used.collect(Source(), SAMPLING)
    kept = [group.prompt.index for group in rollout.kept]
    assert kept == [i for i in range(len(rollout.generated)) if i != 1] and len(kept) >= 2
    batch = collate(rollout.kept, used.advantages(rollout.kept), mask_truncated=False, device=torch.device("cpu"))
    assert len(batch.advantages) == 4 * len(kept)
    for row, advantage in enumerate(batch.advantages):
        index, g = int(batch.completion_ids[row, 0]), int(batch.completion_mask[row].sum()) - 1
        scores = torch.tensor([[float((other + index) % 4) ** 2 for other in range(4)]])
        assert (index, g) == (kept[row // 4], row % 4)
        assert advantage == group_advantages(scores)[0, g]


@pytest.mark.parametrize("scale, expected", [
    ("group", [0.7070068, -0.7070068]), (True, [0.7070068, -0.7070068]),
    ("batch", [1.22444493, -1.22444493]), ("none", [0.5, -0.5]), (False, [0.5, -0.5]),
])  # fmt: skip
def test_the_scale_of_the_options_is_that_of_the_advantages_over_all_processes(tmp_path, monkeypatch, scale, expected):
    """Rewards [1, 0] on this process and [.5, .5] on the other: "batch" is the deviation of the four."""
    options = dict(num_generations=2, per_device_train_batch_size=2, scale_rewards=scale)
    used = collector(tmp_path, always(1, 0), **options)
    mine = used.generate_groups(Source().take(1), SamplingParams(8, 2))
    theirs = collector(tmp_path, always(0.5, 0.5), **options).generate_groups(Source().take(1), SamplingParams(8, 2))
    monkeypatch.setattr(collect, "gather_object", lambda parts: [*parts, [used._parts(group) for group in theirs]])
    torch.testing.assert_close(used.advantages(mine), torch.tensor([expected]), rtol=0, atol=2e-7)
