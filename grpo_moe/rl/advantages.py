"""Group-relative advantages from the rewards of P prompts with G completions each, for the policy loss."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from grpo_moe.checks import check_number, is_finite
from grpo_moe.rewards.faults import LARGEST_REWARD

SCALES = ("group", "batch", "none")


def group_advantages(rewards: torch.Tensor, *, scale: str | bool = "group", eps: float = 1e-4) -> torch.Tensor:
    """How much better each completion is than the mean of its group: (R - mean) / (std + eps).

    Standard deviations are those of a sample (ddof = 1). NaN marks a completion that no reward function could score: it
    takes no part in means and deviations, and its advantage is 0. A group whose scorable rewards are all equal, or that
    has fewer than two, gets exactly 0. Means and deviations are computed in float64.

    Args:
        rewards: [P, G], G >= 2, finite or NaN.
        scale: What divides: "group", the deviation of the group (GRPO); "batch", the deviation of all rewards given, so
            pass those of the global batch, not of one process (Lite PPO); "none", nothing (Dr. GRPO). See
            `resolve_scale` for booleans.
        eps: Added to the deviation, positive.

    Returns:
        [P, G] fp32.

    Raises:
        ValueError: Wrong shape, a group of one, an infinite or huge reward, unknown scale.

    Source:
        GRPO (2402.03300), Dr. GRPO (2503.20783), Lite PPO (2508.08221); defaults of TRL 1.16.
    """
    scale = resolve_scale(scale)
    check_number("eps", eps, lambda x: x > 0, "positive", fix="1e-4 is the default")
    constant = reward_spread(rewards)[:, None] == 0  # [P, 1]
    rewards = rewards.double()
    scorable = ~rewards.isnan()
    num_scorable = scorable.sum(dim=1, keepdim=True)  # [P, 1]
    mean = rewards.nansum(dim=1, keepdim=True) / num_scorable
    # A rounded mean would leave a constant group a difference that a small eps blows up.
    centred = torch.where(scorable & ~constant, rewards - mean, 0.0)
    if scale == "group":
        variance = centred.square().sum(dim=1, keepdim=True) / (num_scorable - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + eps)
    elif scale == "batch":
        centred = centred / (sample_std(rewards[scorable]) + eps)
    return centred.float()


def decoupled_advantages(values: torch.Tensor, weights: Sequence[float], *, eps: float = 1e-4) -> torch.Tensor:
    """Several rewards, each normalised in its group, weighted and added, then normalised over the batch.

    A reward on a large scale cannot drown another. Where a function did not score a completion it adds nothing; a
    completion that none scored, and a group in which the sum tells no two completions apart, gets exactly 0.

    Args:
        values: [F, P, G] of each reward function, NaN where it did not score; of the global batch.
        weights: [F].
        eps: added to deviations, positive.

    Returns:
        [P, G] fp32.

    Raises:
        ValueError: as :func:`group_advantages`, for each function.

    Source:
        GDPO (2601.05242); TRL's ``multi_objective_aggregation="normalize_then_sum"``.
    """
    total = decoupled_rewards(values, weights, eps=eps)  # [P, G]
    tells = reward_spread(total)[:, None] > 0
    known = total[~total.isnan()]
    scaled = (total - known.mean()) / (sample_std(known) + eps)
    return torch.where(tells, scaled, 0.0).nan_to_num(0.0).float()


def decoupled_rewards(values: torch.Tensor, weights: Sequence[float], *, eps: float = 1e-4) -> torch.Tensor:
    """What :func:`decoupled_advantages` compares: several rewards, each normalised in its group, weighted and added.

    Args:
        values, weights, eps: as there; a group depends on no other.

    Returns:
        [P, G] float64, NaN where no function scored. All equal in a group in which none tells two completions apart.
    """
    listed = isinstance(weights, Sequence) and len(weights) == len(values)
    if not listed or not all(map(is_finite, weights)):
        rule = f"a finite number for each of {len(values)} functions"
        raise ValueError(f"weights must be {rule}, got {weights}; give a list")
    total = torch.zeros(values.shape[1:], dtype=torch.float64)
    for weight, rewards in zip(weights, values, strict=True):
        total += float(weight) * group_advantages(rewards, scale="group", eps=eps).double()
    return total.masked_fill(values.isnan().all(0), torch.nan)


def reward_spread(rewards: torch.Tensor) -> torch.Tensor:
    """Largest minus smallest scorable reward of each group: 0 where a group has nothing to learn from.

    Dynamic sampling keeps the groups where this is positive; unlike a mean strictly between 0 and 1 it holds for any
    scores, and unlike a standard deviation it is free of rounding.

    Args:
        rewards: [P, G], G >= 2, finite or NaN (not scorable).

    Returns:
        [P] float64; 0 for a group with fewer than two scorable rewards.

    Raises:
        ValueError: Wrong shape, a group of one, an infinite or huge reward.

    Source:
        Dynamic sampling: DAPO (2503.14476), section 3.2.
    """
    _check(rewards)
    rewards = rewards.double()
    unknown = rewards.isnan()
    highest = rewards.masked_fill(unknown, -torch.inf).amax(dim=1)
    lowest = rewards.masked_fill(unknown, torch.inf).amin(dim=1)
    return (highest - lowest).clamp(min=0)  # -inf without a scorable reward


def resolve_scale(scale: str | bool) -> str:
    """TRL's `scale_rewards`, where True means "group" and False "none", as one of `SCALES`.

    Raises:
        ValueError: Anything else.
    """
    if isinstance(scale, bool):
        return "group" if scale else "none"
    if scale not in SCALES:
        raise ValueError(
            f"scale_rewards must be one of {', '.join(SCALES)}, or a boolean, got {scale!r}; check the spelling"
        )
    return scale


def sample_std(values: torch.Tensor) -> torch.Tensor:
    """Sample standard deviation of [N], 0 for fewer than two."""
    return values.std() if values.numel() > 1 else values.new_zeros(())


def _check(rewards: torch.Tensor) -> None:
    if not isinstance(rewards, torch.Tensor) or rewards.is_complex():
        got = rewards.dtype if isinstance(rewards, torch.Tensor) else type(rewards).__name__
        raise ValueError(f"rewards must be a tensor of real numbers, got {got}; torch.tensor makes one")
    if rewards.dim() != 2:
        raise ValueError(f"rewards must be [P, G], got the shape {list(rewards.shape)}; one row a prompt")
    if rewards.shape[1] < 2:
        raise ValueError(
            f"num_generations must be at least 2, got {rewards.shape[1]}; advantages compare completions of one prompt"
        )
    too_large = rewards.double().abs() > LARGEST_REWARD
    if too_large.any():
        group, row = too_large.nonzero()[0].tolist()
        value = rewards[group, row].item()
        raise ValueError(
            f"rewards must be finite or NaN (not scorable), and at most {LARGEST_REWARD:g} in size, got {value} in "
            f"group {group}, completion {row}; mend the reward function"
        )
