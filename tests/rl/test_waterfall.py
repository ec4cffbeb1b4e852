"""The waterfall: a token counts once, under the first step that takes it, so that all steps add up to what came in."""

import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.ops import LossConfig, grpo_loss_from_logps
from grpo_moe.ops.loss.config import LOSS_TYPES
from grpo_moe.rl.advantages import group_advantages, reward_spread
from grpo_moe.rl.batch import Group, collate, select
from grpo_moe.rl.collect import Rollout
from grpo_moe.rl.figures import WATERFALL
from grpo_moe.rl.metrics import Metrics
from grpo_moe.rl.waterfall import add_loss_stats, add_waterfall
from grpo_moe.types import Completion, Prompt


def fall_of(metrics):
    fall = {name.removeprefix("waterfall/"): x for name, x in metrics.items() if name.startswith("waterfall/")}
    assert set(fall) <= set(WATERFALL) and all(value >= 0 for value in fall.values()), fall
    return fall


def missing(fall):
    """0 where each token counts once."""
    return 2 * fall["groups"] - sum(fall.values())


# --- each step by a trainer's own rollout


def some_unscored(prompts, completions, letter, **_):
    scores = share_of_letter(prompts, completions, letter)
    return [None if i % 4 == 1 else score for i, score in enumerate(scores)]


def first_two_alike(prompts, completions, letter, **_):
    return [0.0 if i % 4 == 0 else 2.0 * (i % 4 - 2) for i in range(len(completions))]  # 0 -2 0 2, mean 0


def fails_on_groups(prompts, completions, letter, **_):
    if len(completions) > 2 and any("e" in text for text in completions):
        raise OSError("cannot read an e")
    return share_of_letter(prompts, completions, letter)


def cautious(prompts, completions, **_):
    return [float(len(text) > 5) for text in completions]


CASES = {
    "unscored": (some_unscored, {}),
    "unscored, with KL": (some_unscored, {"beta": 0.1}),
    "no_advantage": (first_two_alike, {}),
    "no_advantage, with KL": (first_two_alike, {"beta": 0.1}),
    "skipped": (fails_on_groups, {"reward_on_error": "skip"}),
    "zero_spread": (lambda prompts, **_: [1.0] * len(prompts), {}),
    "unused": (share_of_letter, {"dynamic_sampling": True, "dynamic_sampling_oversampling": 3.0}),
    "truncated": (share_of_letter, {"mask_truncated_completions": True}),
    "clipped": (cautious, {"epsilon": 1e-4, "num_iterations": 3, "learning_rate": 0.1}),
    "entropy_masked": (share_of_letter, {"top_entropy_quantile": 0.5, "epsilon": 1e-4}),
    "off_policy_masked": (share_of_letter, {"off_policy_mask_threshold": 0.0, "epsilon": 1e-4, "num_iterations": 2}),
    "sampler_masked": (
        share_of_letter,
        {"sampler_correction": "token_mask", "sampler_clip_min": 1.0, "sampler_clip_max": 1.0000001},
    ),
    "tokens_with_gradient": (share_of_letter, {"loss_type": "cispo", "epsilon_high": 1.0, "num_iterations": 2}),
}


def step(path, reward, options):
    shared = dict(
        output_dir=str(path), per_device_train_batch_size=8, num_generations=4, steps_per_generation=4,
        max_completion_length=8, learning_rate=1e-2, use_cpu=True, show_progress=False, eval_on_start=False,
    )  # fmt: skip
    args = GRPOConfig(**{**shared, **options})
    return GRPOTrainer(tiny_model(), reward, args, prompt_rows(10), processing_class=tokenizer()).step()


@pytest.mark.parametrize("case", CASES)
def test_the_waterfall_of_a_step_adds_up(tmp_path, case):
    metrics = step(tmp_path, *CASES[case])
    fall = fall_of(metrics)
    assert fall[case.split(",")[0]] > 0 and abs(missing(fall)) < 1e-6
    if case == "tokens_with_gradient":
        assert metrics["clip_ratio"] > 0 and fall["clipped"] == 0


def some_of_everything(prompts, completions, letter, **_):
    if len(completions) > 2 and "d" in letter:
        raise OSError("cannot judge a d")
    scores = share_of_letter(prompts, completions, letter)
    scores = [score if x in "abcefgh" else 0.0 for score, x in zip(scores, letter, strict=True)]
    return [None if i % 4 == 1 else score for i, score in enumerate(scores)]


@pytest.mark.parametrize(
    "loss_type",
    [x if x in ("dapo", "cispo", "gmpo", "dppo_kl") else pytest.param(x, marks=pytest.mark.slow) for x in LOSS_TYPES],
)
def test_the_waterfall_adds_up_with_every_option_at_once(tmp_path, loss_type):
    options = dict(
        loss_type=loss_type, num_iterations=3, max_completion_length=24, off_policy_mask_threshold=0.001,
        top_entropy_quantile=0.7,
        mask_truncated_completions=True, reward_on_error="skip", dynamic_sampling=True,
        dynamic_sampling_oversampling=4.0, dynamic_sampling_max_rounds=2, epsilon=0.01,
        epsilon_high=1.01 if loss_type == "cispo" else 0.01, sampler_correction="token_mask", sampler_clip_min=0.0,
        sampler_clip_max=1.0000005,
    )  # fmt: skip
    fall = fall_of(step(tmp_path, some_of_everything, options))
    assert abs(missing(fall)) < 1e-6 and sum(value > 0 for value in fall.values()) > 8, fall


# --- every loss by every option, on made-up log-probabilities

OPTIONS = {
    "sampler_correction": ["none", "token_mask"],
    "off_policy_mask_threshold": [None, 0.0],
    "top_entropy_quantile": [1.0, 0.5],
    "beta": [0.0, 0.1],
    "num_iterations": [1, 2, 3],
    "mask_truncated_completions": [False, True],
    "dynamic_sampling": [False, True],
}


def made_up_rollout(generator, dynamic_sampling):
    groups = []
    for number in range(7):
        rewards = torch.randint(0, 3, (4,), generator=generator).double()
        rewards[torch.rand(4, generator=generator) < 0.2] = torch.nan
        rewards = torch.ones(4).double() if number == 0 else rewards
        completions = []
        for i in range(4):
            n = int(torch.randint(0, 6, (), generator=generator))
            completions.append(Completion((3,) * n, (-1.0,) * n, "length" if i == 0 else "stop"))
        spread = bool(reward_spread(rewards[None]) > 0)
        groups.append(Group(Prompt((1, 2)), completions, rewards, rewards, [], number == 1, spread))
    kept = [g for g in groups if not g.skipped and (g.has_signal or not dynamic_sampling)]
    return Rollout(kept[:3] if dynamic_sampling else kept, groups, 1)


def with_logps(batch, generator):
    def near(logps, scale):
        noise = scale * torch.randn(logps.shape, generator=generator)
        return torch.where(torch.rand(logps.shape, generator=generator) < 0.02, torch.nan, logps + noise)

    old = near(batch.sampling_logps, 0.7)
    return replace(batch, old_logps=old, ref_logps=near(batch.sampling_logps, 0.3))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(chosen=st.fixed_dictionaries({name: st.sampled_from(v) for name, v in OPTIONS.items()}), seed=st.integers(0, 99))
def test_tokens_add_up_for_every_loss_and_option(loss_type, chosen, seed):
    generator = torch.Generator().manual_seed(seed)
    extra = {"epsilon_high": 1.2} if loss_type == "cispo" else {}
    args = GRPOConfig(output_dir="unused", num_generations=4, per_device_train_batch_size=4, loss_type=loss_type,
                      use_cpu=True, **extra, **chosen)  # fmt: skip
    config = LossConfig(**{field.name: getattr(args, field.name) for field in fields(LossConfig)})
    rollout, metrics = made_up_rollout(generator, args.dynamic_sampling), Metrics()
    advantages = group_advantages(torch.stack([g.rewards for g in rollout.kept]))
    batch = collate(
        rollout.kept, advantages, mask_truncated=args.mask_truncated_completions, device=torch.device("cpu")
    )
    batch = with_logps(batch, generator)
    for _ in range(args.num_iterations):
        for rows in torch.arange(len(batch.input_ids)).split(5):
            part = select(batch, rows)
            logps = (
                part.sampling_logps + 0.5 * torch.randn(part.sampling_logps.shape, generator=generator)
            ).requires_grad_()
            result = grpo_loss_from_logps(
                logps, part.advantages, part.completion_mask, config, old_logps=part.old_logps,
                ref_logps=part.ref_logps, sampling_logps=part.sampling_logps, entropy=torch.rand_like(logps),
            )  # fmt: skip
            add_loss_stats(metrics, result.stats, args)
            if (
                loss_type not in ("gmpo", "vespo") and args.beta == 0
            ):  # whose gradients may come from other tokens or be tiny
                gradient = torch.autograd.grad(result.loss, logps, allow_unused=True)[0]
                assert result.stats["num_gradient_tokens"] == gradient.count_nonzero()
    add_waterfall(metrics, rollout, advantages, args)
    fall = fall_of(metrics.reduce())
    assert abs(missing(fall)) < 1e-6
    tokens = lambda groups: sum(len(c.token_ids) for g in groups for c in g.completions)  # noqa: E731
    groups = rollout.generated
    assert fall["groups"] == tokens(groups) and fall["skipped"] == tokens(g for g in groups if g.skipped)
    assert fall["zero_spread"] == tokens(g for g in groups if not g.skipped and not g.has_signal)
    assert math.isfinite(fall["tokens_with_gradient"])
