"""Pass rate and reward on held-out prompts, sampled and greedy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate.utils import gather_object

from grpo_moe.types import Prompt, SamplingParams

from .advantages import reward_spread
from .batch import Group
from .collect import Collector


def evaluate(collector: Collector, prompts: Sequence[Prompt]) -> tuple[dict[str, float], list[Group]]:
    """One sampled and one greedy completion a prompt, shared out over the processes.

    Returns:
        Metrics, equal on every process: eval_pass_rate, eval_reward and eval_mean_length of the sampled completions,
        eval_greedy_pass_rate of the greedy ones; and this process's sampled groups.
    """
    args, accelerator = collector.args, collector.accelerator
    mine = prompts[accelerator.process_index :: accelerator.num_processes]
    sampled, greedy = (
        collector.generate_groups(
            mine,
            SamplingParams(args.max_completion_length, temperature=t, seed=args.seed),
            phases=("evaluation", "evaluation"),
        )
        for t in (args.eval_temperature, 0.0)
    )
    totals = {
        "pass_rate": _passes(sampled, args.pass_threshold),
        "greedy_pass_rate": _passes(greedy, args.pass_threshold),
        "reward": sum(float(g.scores.nansum()) for g in sampled),
        "mean_length": sum(len(c.token_ids) for g in sampled for c in g.completions),
    }
    everyone = gather_object([totals])
    metrics = {f"eval_{name}": sum(part[name] for part in everyone) / len(prompts) for name in totals}
    return metrics, sampled


def _passes(groups: list[Group], threshold: float) -> int:
    return sum(int((g.scores >= threshold).sum()) for g in groups)  # NaN compares false


def rollout_metrics(groups: list[Group], names: Sequence[str], threshold: float) -> dict[str, tuple[float, float]]:
    """(mean, weight) of each metric of the groups that a process generated.

    Args:
        groups: all groups, those that dynamic sampling dropped included.
        names: of the reward functions, in the order of ``Group.values``.
        threshold: a completion passes when its score is at least this.
    """
    if not groups:
        return {}
    scores = torch.stack([g.scores for g in groups])  # [P, G]
    rewards = torch.stack([g.rewards for g in groups])
    completions = [c for g in groups for c in g.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.float64)
    truncated = torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.float64)
    means = {
        "reward": rewards.nanmean(),
        "reward_std": torch.stack([_sample_std(row[~row.isnan()]) for row in rewards]).mean(),
        "frac_reward_zero_std": (reward_spread(rewards) == 0).double().mean(),
        "pass_rate": (scores >= threshold).double().mean(),
        "completions/mean_length": lengths.mean(),
        "completions/clipped_ratio": truncated.mean(),
    }
    for number, name in enumerate(names):
        means[f"rewards/{name}"] = torch.tensor([g.values[number] for g in groups]).nanmean()
    return {name: (float(value), float(len(completions))) for name, value in means.items()}


def _sample_std(values: torch.Tensor) -> torch.Tensor:
    return values.std() if len(values) > 1 else values.new_zeros(())
