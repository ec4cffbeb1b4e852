"""Which schedule of the fused loss is exact for which options: see `grpo_loss`."""

from __future__ import annotations

from .config import LossConfig

SCHEDULES = ("one-pass", "sequence-linear", "two-pass")
_BY_ROW = ("vespo", "gmpo")  # whatever the level of their ratio


def choose_schedule(
    config: LossConfig, wanted: str, old_given: bool, per_token_advantages: bool, longest: int, chunk_size: int
) -> str:
    """The wanted schedule, or the cheapest one for "auto".

    Args:
        config: of the loss.
        wanted: "auto" or a schedule.
        old_given: whether old log-probabilities were given: without, every ratio is 1.
        per_token_advantages: whether advantages are [B, T].
        longest: most tokens in a sequence.
        chunk_size: most tokens in a chunk.

    Raises:
        ValueError: the wanted schedule would not be exact.
    """
    fits = {
        "one-pass": config.top_entropy_quantile == 1 and (not whole_rows(config, old_given) or longest <= chunk_size),
        "sequence-linear": is_linear(config, per_token_advantages),
        "two-pass": True,
    }
    if wanted == "auto":
        return next(name for name in SCHEDULES if fits[name])
    if not fits[wanted]:
        raise ValueError(
            f"schedule must be exact for loss_type {config.loss_type!r} at the {config.importance_sampling_level} "
            f"level with sequences of {longest} tokens in chunks of {chunk_size}, got {wanted!r}; use 'auto'"
        )
    return wanted


def whole_rows(config: LossConfig, old_given: bool) -> bool:
    """Whether the gradient at a token depends on log-probabilities of its row's other tokens."""
    by_row = config.loss_type in _BY_ROW or config.importance_sampling_level == "sequence"
    if config.off_policy_mask_threshold is not None or (by_row and config.beta and config.use_bias_correction_kl):
        return True
    if old_given:
        return by_row
    # every ratio is 1, but a sampler's weight compares the log-probabilities with the engine's
    if config.sampler_correction.startswith("token"):
        return by_row
    return config.sampler_correction != "none"


def without_ratio(config: LossConfig) -> bool:
    """Whether the loss weighs log-probabilities, with a gradient however far they are from the old ones."""
    return config.loss_type in ("vespo", "cispo")


def is_linear(config: LossConfig, per_token_advantages: bool) -> bool:
    """Whether all tokens of a row have one coefficient, but for those without gradient (dropped, or cut to 20 nats)."""
    if config.beta != 0 or config.top_entropy_quantile != 1 or per_token_advantages:
        return False
    if without_ratio(config) and config.sampler_correction.startswith("token"):
        return False  # the token's own weight multiplies its log-probability; elsewhere it weighs the row's ratio
    return config.loss_type == "vespo" or (
        config.importance_sampling_level == "sequence" and config.loss_type not in _BY_ROW
    )
