"""The eleven policy losses: from the ratio and the advantage of each token to its loss, before masks and normaliser."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .config import LossConfig

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut to +-20 nats: exp(20) = 4.9e8 times any advantage is finite in float32, exp(88.8) is not."""

_VESPO_MIN_LOG_WEIGHT = math.log(1e-8)
_DPPO_MAX_RATIO = 20.0  # verl's truncation of the stop-gradient ratio


@dataclass(frozen=True)
class PolicyInputs:
    """What a policy loss may read; finite everywhere, 0 at masked cells."""

    logps: torch.Tensor
    """[B, T], the only input with gradient; the two ratios carry it too."""
    old_logps: torch.Tensor
    """[B, T]."""
    token_log_ratio: torch.Tensor
    """[B, T] logps - old_logps, bounded."""
    ratio: torch.Tensor
    """[B, T], or [B, 1] at the sequence level."""
    advantages: torch.Tensor
    """[B, T]."""
    mask: torch.Tensor
    """[B, T] bool."""
    sampler_weight: torch.Tensor | None
    """[B, T] or [B, 1] weight of the sampler correction; only vespo reads it."""


class PolicyLoss(NamedTuple):
    """Loss and clipping of each token, of the inputs' shape [B, T]; masked cells hold anything finite."""

    loss: torch.Tensor
    clipped_low: torch.Tensor
    """Bool: the bound on a falling probability (small ratio) acts."""
    clipped_high: torch.Tensor
    """Bool: the bound on a rising probability (large ratio) acts."""
    clip_stops: bool = True
    """Whether a clipped token has no gradient."""


def bounded_difference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a - b, cut to +-MAX_LOG_RATIO, without gradient beyond."""
    return (a - b).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def row_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of x over the masked-in tokens of each row, [B, T] -> [B, 1]."""
    return torch.where(mask, x, 0).sum(-1, keepdim=True)


def row_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of x over the masked-in tokens of each row, 0 where there is none, [B, T] -> [B, 1]."""
    return row_sum(x, mask) / mask.sum(-1, keepdim=True).clamp(min=1)


def _ppo(x: PolicyInputs, config: LossConfig) -> PolicyLoss:
    """Clipped surrogate (1707.06347), with the upper bound apart (DAPO 2503.14476), two-sided (INTELLECT-2 2505.07291)
    or dual clip (1912.09729). At the sequence level: GSPO 2507.18071; summed over the row: LUSPO 2602.05261."""
    low, high = config.clip_range
    capped = x.ratio if config.delta is None else x.ratio.clamp(max=config.delta)
    loss = -torch.min(capped * x.advantages, x.ratio.clamp(1 - low, 1 + high) * x.advantages)
    falls, rises = x.advantages < 0, x.advantages > 0
    if config.dual_clip is not None:
        loss = torch.where(falls, torch.min(loss, -config.dual_clip * x.advantages), loss)
    clipped_high = rises & (x.ratio > 1 + high)
    cap = config.dual_clip if config.delta is None else config.delta
    if cap is not None:
        clipped_high = clipped_high | (falls & (x.ratio > cap))
    return PolicyLoss(loss, falls & (x.ratio < 1 - low), clipped_high)


def _cispo(x: PolicyInputs, config: LossConfig) -> PolicyLoss:
    """REINFORCE with the ratio as a capped weight (MiniMax-M1 2506.13585); the cap is epsilon_high itself."""
    weight = x.ratio.detach().clamp(max=config.epsilon_high)
    return PolicyLoss(-weight * x.advantages * x.logps, _nowhere(x), x.ratio > config.epsilon_high, clip_stops=False)


def _sapo(x: PolicyInputs, config: LossConfig) -> PolicyLoss:
    """A sigmoid gate in place of the clip (2511.20347)."""
    temperature = _select(x.advantages > 0, config.sapo_temperature_pos, config.sapo_temperature_neg, x.advantages)
    gate = torch.sigmoid(temperature * (x.ratio - 1)) * 4 / temperature
    return PolicyLoss(-gate * x.advantages, _nowhere(x), _nowhere(x))


def _vespo(x: PolicyInputs, config: LossConfig) -> PolicyLoss:
    """REINFORCE weighted by phi(W) = exp(lambda + k log W - lambda W), W the row's product of ratios and sampler
    weights (2602.10693). A token whose sampler weight is 0 is left out of W rather than driving it to 0."""
    log_ratio, counted = x.token_log_ratio.detach(), x.mask
    if x.sampler_weight is not None:
        log_ratio, counted = log_ratio + x.sampler_weight.log(), counted & (x.sampler_weight > 0)
    log_weight = row_sum(log_ratio, counted).clamp(_VESPO_MIN_LOG_WEIGHT, MAX_LOG_RATIO)  # [B, 1]
    rises = x.advantages >= 0
    k = _select(rises, config.vespo_k_pos, config.vespo_k_neg, x.advantages)
    decay = _select(rises, config.vespo_lambda_pos, config.vespo_lambda_neg, x.advantages)
    phi = (decay + k * log_weight - decay * log_weight.exp()).clamp(max=MAX_LOG_RATIO).exp()
    return PolicyLoss(-phi * x.advantages * x.logps, _nowhere(x), _nowhere(x))


def _gmpo(x: PolicyInputs, config: LossConfig) -> PolicyLoss:
    """The row's geometric mean of the ratios, each clipped in log space on the side its advantage pushes to
    (2507.20673); every token of the row has this loss."""
    low, high = config.clip_range
    clipped_high = (x.advantages > 0) & (x.token_log_ratio > high)
    clipped_low = (x.advantages < 0) & (x.token_log_ratio < -low)
    log_ratio = x.token_log_ratio.masked_fill(clipped_high, high).masked_fill(clipped_low, -low)
    return PolicyLoss(-row_mean(log_ratio, x.mask).exp() * x.advantages, clipped_low, clipped_high)


def _dppo_tv(x: PolicyInputs, config: LossConfig) -> PolicyLoss:
    """Masked REINFORCE: a token stops where its probability moved too far the way its advantage pushes (2602.04879)."""
    low, high = config.clip_range
    moved = (x.logps.exp() - x.old_logps.exp()).detach()
    return _dppo(x, moved < -low, moved > high)


def _dppo_kl(x: PolicyInputs, config: LossConfig) -> PolicyLoss:
    """As dppo_tv, by the KL between the two Bernoulli distributions "this token or another" (2602.04879)."""
    low, high = config.clip_range
    old_prob = x.old_logps.exp()
    others, old_others = (-torch.expm1(lp.detach()).clamp(max=0) + 1e-8 for lp in (x.logps, x.old_logps))
    kl = old_others * (old_others / others).log() - old_prob * x.token_log_ratio.detach()
    fell, rose = x.logps < x.old_logps, x.logps > x.old_logps
    return _dppo(x, fell & (kl > low), rose & (kl > high))


def _dppo(x: PolicyInputs, fell_too_far: torch.Tensor, rose_too_far: torch.Tensor) -> PolicyLoss:
    stopped_low, stopped_high = fell_too_far & (x.advantages <= 0), rose_too_far & (x.advantages > 0)
    weight = x.ratio.detach().clamp(max=_DPPO_MAX_RATIO).masked_fill(stopped_low | stopped_high, 0)
    return PolicyLoss(-weight * x.advantages * x.logps, stopped_low, stopped_high)


def _select(condition: torch.Tensor, yes: float, no: float, like: torch.Tensor) -> torch.Tensor:
    return torch.full_like(like, no).masked_fill(condition, yes)  # where() of two floats would be float32


def _nowhere(x: PolicyInputs) -> torch.Tensor:
    return torch.zeros_like(x.mask)


POLICY_LOSSES: dict[str, Callable[[PolicyInputs, LossConfig], PolicyLoss]] = {
    "grpo": _ppo,
    "bnpo": _ppo,
    "dr_grpo": _ppo,
    "dapo": _ppo,
    "luspo": _ppo,
    "cispo": _cispo,
    "sapo": _sapo,
    "vespo": _vespo,
    "gmpo": _gmpo,
    "dppo_tv": _dppo_tv,
    "dppo_kl": _dppo_kl,
}
