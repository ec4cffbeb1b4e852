"""Where the signal of a rollout goes: completion tokens from generation to those with a gradient."""

from __future__ import annotations

from .advantages import reward_spread
from .batch import Group
from .collect import Rollout
from .config import GRPOConfig
from .metrics import Metrics


def add_waterfall(metrics: Metrics, rollout: Rollout, args: GRPOConfig) -> None:
    """Adds ``waterfall/*`` in completion tokens of a rollout on this process: all generated, and what each step takes.

    ``groups`` (all generated), ``zero_spread`` (of groups whose rewards are all equal), ``unused`` (of groups beyond
    those needed), ``truncated`` (left out by mask_truncated_completions); the rest is added by :func:`add_loss_stats`.
    """
    kept = {id(group) for group in rollout.kept}
    telling = [group for group in rollout.generated if _has_spread(group)]
    learning = [group for group in telling if id(group) in kept]
    metrics.add_sum("waterfall/groups", _tokens(rollout.generated))
    metrics.add_sum("waterfall/zero_spread", _tokens(rollout.generated) - _tokens(telling))
    metrics.add_sum("waterfall/unused", _tokens(telling) - _tokens(learning))
    truncated = 0
    if args.mask_truncated_completions:
        truncated = sum(len(c.token_ids) for g in learning for c in g.completions if c.finish_reason != "stop")
    metrics.add_sum("waterfall/truncated", truncated)


def add_loss_stats(metrics: Metrics, stats: dict, args: GRPOConfig) -> None:
    """Adds a micro-batch's tokens by what the loss made of them, per pass over the rollout."""
    passes = args.num_iterations
    for name in ("sampler_masked", "clip_ratio", "off_policy_masked", "entropy_masked"):
        if name in stats:
            shown = "clipped" if name == "clip_ratio" else name
            metrics.add_sum(f"waterfall/{shown}", stats[name] * stats["num_tokens"] / passes)
    metrics.add_sum("waterfall/tokens_with_gradient", stats["num_gradient_tokens"] / passes)


def _has_spread(group: Group) -> bool:
    return bool(reward_spread(group.rewards[None]) > 0)


def _tokens(groups: list[Group]) -> int:
    return sum(len(c.token_ids) for group in groups for c in group.completions)
