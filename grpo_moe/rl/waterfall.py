"""Where the signal of a rollout goes: completion tokens from generation to those with a gradient, each counted once."""

from __future__ import annotations

from collections import Counter

import torch

from .batch import Group
from .collect import Rollout
from .config import GRPOConfig
from .metrics import Metrics

_OF_THE_ROLLOUT = ("groups", "skipped", "zero_spread", "unused", "truncated", "unscored", "no_advantage")
_OF_THE_LOSS = {
    "num_not_finite_tokens": "not_finite",
    "num_sampler_masked_tokens": "sampler_masked",
    "num_off_policy_masked_tokens": "off_policy_masked",
    "num_entropy_masked_tokens": "entropy_masked",
    "num_clipped_tokens": "clipped",
    "num_gradient_tokens": "tokens_with_gradient",
}


def add_waterfall(metrics: Metrics, rollout: Rollout, advantages: torch.Tensor, args: GRPOConfig) -> None:
    """Adds ``waterfall/*`` in completion tokens of a rollout on this process: all generated, and what each step takes.

    ``groups`` is all of them. A token counts under the first of these that holds, and the rest with an advantage under
    one of :func:`add_loss_stats`, so that ``groups`` is the sum of all others: ``skipped`` (of a group that a fault of
    a reward function cost), ``zero_spread`` (of one whose rewards are all equal), ``unused`` (of one beyond those
    needed), ``truncated`` (left out by mask_truncated_completions), ``unscored`` (of a completion without a reward),
    ``no_advantage`` (of one no better and no worse than its group).

    Args:
        metrics: of the step.
        rollout: of this process.
        advantages: [P, G] of its kept groups.
        args: the run's options.
    """
    advantages_of = {id(group): row for group, row in zip(rollout.kept, advantages.tolist(), strict=True)}
    tokens: Counter[str] = Counter()
    for group in rollout.generated:
        for number, completion in enumerate(group.completions):
            holds = _stops(group, number, advantages_of.get(id(group)), args.mask_truncated_completions)
            first = next((name for name, stopped in holds.items() if stopped), "left to the loss")
            tokens["groups"] += len(completion.token_ids)
            tokens[first] += len(completion.token_ids)
    for name in _OF_THE_ROLLOUT:
        metrics.add_sum(f"waterfall/{name}", tokens[name])


def _stops(group: Group, number: int, advantages: list[float] | None, mask_truncated: bool) -> dict[str, bool]:
    """Whether each step takes a completion; ``advantages`` are those of a group that is kept."""
    return {
        "skipped": group.skipped,
        "zero_spread": not group.has_signal,
        "unused": advantages is None,
        "truncated": mask_truncated and group.completions[number].finish_reason != "stop",
        "unscored": bool(group.rewards[number].isnan()),
        "no_advantage": advantages is not None and advantages[number] == 0,
    }


def add_loss_stats(metrics: Metrics, stats: dict[str, torch.Tensor], args: GRPOConfig) -> None:
    """Adds a micro-batch's tokens with an advantage by what the loss made of them, per pass over the rollout.

    ``not_finite`` (a log-probability was not), ``sampler_masked``, ``off_policy_masked``, ``entropy_masked``,
    ``clipped`` (where that stops the gradient) and ``tokens_with_gradient``; see :class:`grpo_moe.ops.loss.LossOutput`.
    """
    for name, shown in _OF_THE_LOSS.items():
        if name in stats:  # in float64: thirds of many tokens must still add up
            metrics.add_sum(f"waterfall/{shown}", stats[name].double() / args.num_iterations)
