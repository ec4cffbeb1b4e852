"""The GRPO family of losses, from log-probabilities [B, T] and advantages to a scalar, for every head and trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from grpo_moe.checks import plain

from .checks import check_count, check_loss_inputs
from .config import LossConfig
from .policy import MAX_LOG_RATIO, POLICY_LOSSES, PolicyInputs, PolicyLoss, bounded_difference, row_mean, row_sum

Count = int | torch.Tensor


@dataclass(frozen=True)
class LossOutput:
    """What `grpo_loss_from_logps` returns."""

    loss: torch.Tensor
    """Scalar to minimise, already divided by the normaliser."""
    per_token_loss: torch.Tensor
    """[B, T] with gradient, before the normaliser; 0 where a token does not take part."""
    stats: dict[str, torch.Tensor]
    """Detached scalars. To combine calls: names that start with `num_` add up, names that end in `_max` take the
    maximum, all others are means over the tokens of the loss, to be weighted by `num_tokens`.

    Always: num_tokens (that took part), num_dropped_tokens (a log-probability was not finite), ratio_mean, ratio_max,
    clip_ratio, clip_ratio_low, clip_ratio_high (share of tokens whose clipping acts), approx_kl (k3 estimate of
    KL(old || new), nats).
    What becomes of the tokens of the mask that have an advantage, each counted once, under the first that holds:
    num_not_finite_tokens (dropped), num_sampler_masked_tokens, num_off_policy_masked_tokens, num_entropy_masked_tokens
    (the last three only with their option), num_clipped_tokens (and without gradient for it), num_gradient_tokens
    (whose term of the policy loss has a gradient).
    With beta: kl (the estimate, without beta and ratio). With entropy: entropy; with its quantile: entropy_masked.
    With sampling_logps: sampling_logp_difference_mean and _max (of |old - sampling|, nats), sampling_kl (k3 estimate of
    KL(sampling || old), nats), sampling_ratio_mean and sampling_ratio_square_mean (of exp(old - sampling): the first
    squared over the second is the effective sample size, as a share), num_unscored_tokens (sampling log-probability
    not finite). With a sampler correction: sampler_ratio_mean (of the weight applied),
    sampler_masked (share of weights that are 0). With the off-policy mask: off_policy_masked."""


def grpo_loss_from_logps(
    logps: torch.Tensor,
    advantages: torch.Tensor,
    completion_mask: torch.Tensor,
    config: LossConfig,
    *,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    sampling_logps: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    num_loss_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> LossOutput:
    """Policy loss, plus beta times the KL to the reference, of one micro-batch.

    Order, as in TRL: ratio, per-token loss, off-policy mask, entropy mask, sampler correction, then + beta * KL
    (which none of the masks touch), then the normaliser.

    Normaliser: dapo, bnpo, cispo, vespo and dppo_* divide the sum over tokens by `num_loss_tokens`; grpo, sapo and
    gmpo average each row over its tokens, luspo sums it, and divide the sum over rows by `num_sequences`; dr_grpo
    divides the sum over tokens by num_sequences * max_completion_length. Given the counts of the whole optimiser step,
    the losses of its micro-batches add up to the loss of the step, however it is split (except under
    `top_entropy_quantile`, whose threshold is of the call). Rows without a token count as sequences, as in TRL.

    What stands at masked cells, and in rows without a token, is never used: NaN or inf there changes nothing.
    A token whose logps or old_logps (with beta, ref_logps too) is not finite is treated as masked and counted in
    `stats["num_dropped_tokens"]`. A sampling log-probability that is not finite gives its token the weight 1 and no
    off-policy evidence; an entropy that is not finite counts as 0. Log-ratios are cut to +-20 (ratios to 2e-9 ... 5e8)
    and have no gradient beyond. The arithmetic is in float32, in float64 if `logps` is. No host synchronisation.

    Args:
        logps: [B, T] log-probabilities of the completion tokens, with gradient, nats.
        advantages: [B], or [B, T] for one a token; must be finite where a token takes part. No gradient.
        completion_mask: [B, T], nonzero where a token takes part.
        config: the options.
        old_logps: [B, T] of the policy that generated, by the trainer. None: on-policy, `logps` without gradient.
        ref_logps: [B, T] of the reference model, needed if beta is not 0.
        sampling_logps: [B, T] reported by the engine, needed by a sampler correction.
        entropy: [B, T] of the policy's distribution, nats, needed by `top_entropy_quantile`. No gradient.
        num_loss_tokens: tokens of the optimiser step, int or 0-dim tensor. None: those that take part in this call.
        num_sequences: rows of the optimiser step, int or 0-dim tensor. None: B.

    Raises:
        ValueError: a shape does not fit, or an input that the config needs is missing.

    Source: DeepSeekMath (2402.03300) for GRPO; `policy.py` names the paper of each loss, `LossConfig` of each option.
    """
    given = {"old_logps": old_logps, "ref_logps": ref_logps, "sampling_logps": sampling_logps, "entropy": entropy}
    counts = (num_loss_tokens, num_sequences)
    loss, per_token_loss, parts = _evaluate(logps, advantages, completion_mask, config, given, counts)
    return LossOutput(loss, per_token_loss, _stats(*parts))


def loss_value(logps, advantages, completion_mask, config, *, num_loss_tokens, num_sequences, **given) -> torch.Tensor:
    """The loss of :func:`grpo_loss_from_logps` alone, for those who need its gradient and no statistics."""
    return _evaluate(logps, advantages, completion_mask, config, given, (num_loss_tokens, num_sequences))[0]


def _evaluate(logps, advantages, completion_mask, config: LossConfig, given: dict, counts: tuple):
    """Loss, per-token loss [B, T] and what :func:`_stats` reads."""
    check_loss_inputs(config, "logps", logps, advantages, completion_mask, given)
    old_logps = logps.detach() if given["old_logps"] is None else given["old_logps"]
    optional = {**given, "old_logps": old_logps}
    if config.beta == 0:
        optional["ref_logps"] = None
    batch = _clean(logps, advantages, completion_mask, **optional)

    token_log_ratio = bounded_difference(batch.logps, batch.old_logps)  # [B, T]
    ratio = _LEVELS[config.importance_sampling_level](token_log_ratio, batch.mask).exp()  # [B, T] or [B, 1]
    sampler_weight = _sampler_weight(batch, config)
    inputs = PolicyInputs(
        logps=batch.logps,
        old_logps=batch.old_logps,
        token_log_ratio=token_log_ratio,
        ratio=ratio,
        advantages=batch.advantages,
        mask=batch.mask,
        sampler_weight=sampler_weight,
    )
    policy = POLICY_LOSSES[config.loss_type](inputs, config)
    off_policy = _off_policy(batch, config)
    low_entropy = _low_entropy(batch, config)
    kl = None if batch.ref_logps is None else _KL_ESTIMATORS[config.kl_estimator](batch)

    loss = policy.loss  # [B, T]
    if off_policy is not None:
        loss = loss.masked_fill(off_policy, 0)
    if low_entropy is not None:
        loss = loss.masked_fill(low_entropy, 0)
    if sampler_weight is not None:  # vespo has the weight in its own already
        loss = loss * (sampler_weight > 0 if config.loss_type == "vespo" else sampler_weight)
    if kl is not None:
        loss = loss + config.beta * (kl * ratio if config.use_bias_correction_kl else kl)
    per_token_loss = torch.where(batch.mask, loss, 0)

    num_tokens = _at_least_one("num_loss_tokens", counts[0], batch.mask.sum())
    num_rows = _at_least_one("num_sequences", counts[1], len(logps))
    total = _AGGREGATIONS[config.loss_type](per_token_loss, batch.mask, config, num_tokens, num_rows)
    options = {"kl": kl, "off_policy_masked": off_policy, "entropy_masked": low_entropy}
    return total, per_token_loss, (batch, inputs, policy, options)


@dataclass(frozen=True)
class _Batch:
    """The inputs in one dtype, [B, T] each; finite everywhere, 0 where the mask is False, gradient in logps only."""

    logps: torch.Tensor
    old_logps: torch.Tensor
    ref_logps: torch.Tensor | None
    sampling_logps: torch.Tensor | None
    entropy: torch.Tensor | None
    advantages: torch.Tensor
    mask: torch.Tensor
    dropped: torch.Tensor
    has_advantage: torch.Tensor
    """Of the mask that was given: dropped tokens too."""
    scored: torch.Tensor | None


def _clean(logps, advantages, completion_mask, *, old_logps, ref_logps, sampling_logps, entropy) -> _Batch:
    dtype = torch.promote_types(logps.dtype, torch.float32)
    wanted = completion_mask != 0
    logps, old_logps = logps.to(dtype), old_logps.detach().to(dtype)
    finite = logps.isfinite() & old_logps.isfinite()
    if ref_logps is not None:
        ref_logps = ref_logps.detach().to(dtype)
        finite = finite & ref_logps.isfinite()
    mask = wanted & finite

    def fill(x: torch.Tensor | None, keep: torch.Tensor = mask) -> torch.Tensor | None:
        # where, not a product: 0 * NaN is NaN, and so is the gradient of exp(inf) * 0
        return None if x is None else torch.where(keep, x, 0)

    scored = None
    if sampling_logps is not None:
        sampling_logps = sampling_logps.detach().to(dtype)
        scored = mask & sampling_logps.isfinite()
    if entropy is not None:
        entropy = entropy.detach().to(dtype).nan_to_num(0, 0, 0)
    if advantages.ndim == 1:
        advantages = advantages[:, None]
    return _Batch(
        logps=fill(logps),
        old_logps=fill(old_logps),
        ref_logps=fill(ref_logps),
        sampling_logps=fill(sampling_logps, scored),
        entropy=fill(entropy),
        advantages=fill(advantages.detach().to(dtype)),
        mask=mask,
        dropped=wanted & ~finite,
        has_advantage=wanted & (advantages != 0),
        scored=scored,
    )


def _sampler_log_ratio(batch: _Batch) -> torch.Tensor:
    return torch.where(batch.scored, bounded_difference(batch.old_logps, batch.sampling_logps), 0)


def _sampler_weight(batch: _Batch, config: LossConfig) -> torch.Tensor | None:
    if config.sampler_correction == "none":
        return None
    level, rule = _SAMPLER_CORRECTIONS[config.sampler_correction]
    log_weight = level(_sampler_log_ratio(batch), batch.mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    low, high = config.sampler_bounds
    return rule(log_weight.exp(), low, high)


def _truncate(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return weight.clamp(low, high)


def _zero_outside(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.where((weight >= low) & (weight <= high), weight, 0)


def _one_inside(weight: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return ((weight >= low) & (weight <= high)).to(weight.dtype)


def _off_policy(batch: _Batch, config: LossConfig) -> torch.Tensor | None:
    """[B, T] True where the off-policy mask drops the token; the distance is of the row."""
    if config.off_policy_mask_threshold is None:
        return None
    logps = batch.logps.detach()
    if batch.sampling_logps is None:
        distance = bounded_difference(batch.old_logps, logps)
    else:
        distance = torch.where(batch.scored, bounded_difference(batch.sampling_logps, logps), 0)
    return (batch.advantages < 0) & (row_mean(distance, batch.mask) > config.off_policy_mask_threshold)


def _low_entropy(batch: _Batch, config: LossConfig) -> torch.Tensor | None:
    """[B, T] True where the entropy is below the quantile of the call's tokens; ties at the quantile are kept."""
    if config.top_entropy_quantile == 1:
        return None
    if batch.mask.numel() == 0:
        return ~batch.mask
    threshold = torch.where(batch.mask, batch.entropy, torch.nan).nanquantile(1 - config.top_entropy_quantile)
    return ~(batch.entropy >= threshold)  # no token: the threshold is NaN and nothing is kept


def _k1(batch: _Batch) -> torch.Tensor:
    return bounded_difference(batch.logps, batch.ref_logps)


def _k2(batch: _Batch) -> torch.Tensor:
    return bounded_difference(batch.logps, batch.ref_logps).square() / 2


def _k3(batch: _Batch) -> torch.Tensor:
    log_ratio = bounded_difference(batch.ref_logps, batch.logps)
    return log_ratio.expm1() - log_ratio


def _token_mean(loss, mask, config, num_tokens, num_rows):
    return loss.sum() / num_tokens


def _row_mean_of_means(loss, mask, config, num_tokens, num_rows):
    return row_mean(loss, mask).sum() / num_rows


def _row_mean_of_sums(loss, mask, config, num_tokens, num_rows):
    return loss.sum() / num_rows


def _constant_length(loss, mask, config, num_tokens, num_rows):
    return loss.sum() / (num_rows * config.max_completion_length)


@torch.no_grad()
def _stats(
    batch: _Batch, inputs: PolicyInputs, policy: PolicyLoss, options: dict[str, torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    mask, dtype = batch.mask, batch.logps.dtype
    means = {
        "ratio_mean": inputs.ratio,
        "clip_ratio": policy.clipped_low | policy.clipped_high,
        "clip_ratio_low": policy.clipped_low,
        "clip_ratio_high": policy.clipped_high,
        "approx_kl": inputs.token_log_ratio.expm1() - inputs.token_log_ratio,
        "entropy": batch.entropy,
        **options,
    }
    maxima = {"ratio_max": inputs.ratio}
    counts = {"num_tokens": mask, "num_dropped_tokens": batch.dropped}
    if batch.sampling_logps is not None:
        log_ratio = _sampler_log_ratio(batch)
        means["sampling_logp_difference_mean"] = maxima["sampling_logp_difference_max"] = log_ratio.abs()
        means["sampling_kl"] = log_ratio.expm1() - log_ratio
        means["sampling_ratio_mean"], means["sampling_ratio_square_mean"] = log_ratio.exp(), (2 * log_ratio).exp()
        counts["num_unscored_tokens"] = mask & ~batch.scored
    if inputs.sampler_weight is not None:
        means["sampler_ratio_mean"] = inputs.sampler_weight
        means["sampler_masked"] = inputs.sampler_weight == 0
    stops = {name: means.get(name) for name in ("sampler_masked", "off_policy_masked", "entropy_masked")}
    clipped = means["clip_ratio"] if policy.clip_stops else torch.zeros_like(mask)
    counts |= _fates(batch.has_advantage, {"not_finite": batch.dropped, **stops, "clipped": clipped})
    num_tokens = mask.sum().clamp(min=1)

    def total(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x.to(dtype), 0).sum()

    def largest(x: torch.Tensor) -> torch.Tensor:
        return torch.where(mask, x, 0).amax() if mask.numel() else x.new_zeros(())

    return {
        **{name: x.sum().to(dtype) for name, x in counts.items()},
        **{name: total(x) / num_tokens for name, x in means.items() if x is not None},
        **{name: largest(x) for name, x in maxima.items()},
    }


def _fates(tokens: torch.Tensor, stops: dict[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """The tokens [B, T] by the first stop that holds, those that none stops as num_gradient_tokens."""
    fates = {}
    for name, stopped in stops.items():
        if stopped is not None:
            fates[f"num_{name}_tokens"] = tokens & stopped
            tokens = tokens & ~stopped
    return {**fates, "num_gradient_tokens": tokens}


def _at_least_one(name: str, count: Count | None, local: Count) -> Count:
    count = local if count is None else count
    check_count(name, count)
    return count.clamp(min=1) if isinstance(count, torch.Tensor) else max(plain(count), 1)


_LEVELS = {"token": lambda log_ratio, mask: log_ratio, "sequence": row_mean}
_KL_ESTIMATORS = {"k1": _k1, "k2": _k2, "k3": _k3}
_SAMPLER_CORRECTIONS: dict[str, tuple[Callable, Callable]] = {
    "token_truncate": (_LEVELS["token"], _truncate),
    "token_mask": (_LEVELS["token"], _zero_outside),
    "sequence_truncate": (row_sum, _truncate),
    "sequence_mask": (row_sum, _zero_outside),
    "geometric_mask": (row_mean, _one_inside),
}
_AGGREGATIONS = {
    "dapo": _token_mean,
    "bnpo": _token_mean,
    "cispo": _token_mean,
    "vespo": _token_mean,
    "dppo_tv": _token_mean,
    "dppo_kl": _token_mean,
    "grpo": _row_mean_of_means,
    "sapo": _row_mean_of_means,
    "gmpo": _row_mean_of_means,
    "luspo": _row_mean_of_sums,
    "dr_grpo": _constant_length,
}
