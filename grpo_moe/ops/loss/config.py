"""The options of the policy loss, checked once at construction, for `grpo_loss_from_logps` and the fused heads."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args, get_type_hints

from grpo_moe.checks import is_finite, is_int, is_number, keep_plain

_PPO_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
LOSS_TYPES = (*_PPO_TYPES, "cispo", "sapo", "vespo", "gmpo", "dppo_tv", "dppo_kl")
KL_ESTIMATORS = ("k1", "k2", "k3")
IMPORTANCE_SAMPLING_LEVELS = ("token", "sequence")
MIN_TEMPERATURE = 1e-6
LARGEST = 1e30  # of any number among the options: what follows from it stays within float32

_DEFAULT_SAMPLER_BOUNDS = {
    "none": (0.0, math.inf),
    "token_truncate": (0.0, 2.0),  # truncated importance sampling, Yao et al. 2025
    "token_mask": (0.5, 5.0),  # IcePop, 2510.18855
    "sequence_truncate": (0.0, 2.0),
    "sequence_mask": (0.0, 3.0),  # TRL's default
    "geometric_mask": (None, None),  # depends on the model: no default is right
}
SAMPLER_CORRECTIONS = tuple(_DEFAULT_SAMPLER_BOUNDS)

_READERS = {  # option -> the loss types that read it; set for any other, it would be ignored in silence
    "delta": _PPO_TYPES,
    "dual_clip": _PPO_TYPES,
    "sapo_temperature_pos": ("sapo",),
    "sapo_temperature_neg": ("sapo",),
    "vespo_k_pos": ("vespo",),
    "vespo_lambda_pos": ("vespo",),
    "vespo_k_neg": ("vespo",),
    "vespo_lambda_neg": ("vespo",),
}


def option(default: Any, text: str, **metadata: Any) -> Any:
    """A field with the help that its flag shows: the one description of it."""
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Options of `grpo_loss_from_logps`. Field names and defaults are TRL's where TRL has the option.

    Raises:
        ValueError: an unknown name, a value of another type or out of range, or options that do not go together. An
            option of another loss type raises as soon as it is not at its default; only the clipping bounds may stay
            set.
    """

    loss_type: str = option(
        "dapo", "One of grpo, bnpo, dr_grpo, dapo, cispo, sapo, luspo, vespo, gmpo, dppo_tv, dppo_kl."
    )
    epsilon: float = option(
        0.2,
        "Lower clipping bound: the ratio stays above 1 - epsilon. gmpo: the log-ratio stays above -epsilon. dppo_*: "
        "largest divergence (total variation, or binary KL in nats) of a token with a negative advantage. cispo, sapo "
        "and vespo do not read it.",
    )
    epsilon_high: float | None = option(
        None,
        "Upper clipping bound, as `epsilon`; None means `epsilon`. cispo: the cap of the ratio itself, at least 1.",
    )
    delta: float | None = option(
        None, "Two-sided clipping (INTELLECT-2): cap of the unclipped ratio, above 1 + epsilon_high. None: no cap."
    )
    dual_clip: float | None = option(
        None, "Dual clipping (1912.09729): the loss of a token with A < 0 is at most -dual_clip * A. None: no cap."
    )
    beta: float = option(0.0, "Weight of the KL term to the reference policy.")
    kl_estimator: str = option(
        "k3",
        "k1 = d, k2 = d^2 / 2, k3 = exp(-d) + d - 1, with d = logps - ref_logps. The expected gradient of k1 is zero "
        "unless `use_bias_correction_kl` is set.",
    )
    use_bias_correction_kl: bool = option(
        True, "Multiply the KL estimate by the ratio, gradient included (DeepSeek-V3.2)."
    )
    importance_sampling_level: str = option(
        "token",
        "token: a ratio a token. sequence: the geometric mean of the row's ratios, for each of its tokens (GSPO).",
    )
    sapo_temperature_pos: float = option(1.0, "SAPO's gate temperature where A > 0.")
    sapo_temperature_neg: float = option(1.05, "SAPO's gate temperature where A <= 0.")
    vespo_k_pos: float = option(2.0, "VESPO's power of the sequence weight where A >= 0.")
    vespo_lambda_pos: float = option(3.0, "VESPO's exponential decay in the sequence weight where A >= 0.")
    vespo_k_neg: float = option(3.0, "As `vespo_k_pos`, where A < 0.")
    vespo_lambda_neg: float = option(2.0, "As `vespo_lambda_pos`, where A < 0.")
    temperature: float = option(
        1.0, "Divides the logits of the policy. The heads read it; log-probabilities already contain it."
    )
    max_completion_length: int | None = option(
        None, "L_max in tokens, the constant denominator of dr_grpo; the other losses do not read it."
    )
    sampler_correction: str = option(
        "none",
        "Weight w = exp(old_logps - sampling_logps), without gradient, for the gap between engine and trainer. "
        "token_truncate: w cut to the bounds. token_mask: w, or 0 outside the bounds (IcePop). sequence_*: the same "
        "with the product of the row's weights. geometric_mask: 1, or 0 where the row's geometric mean is outside the "
        "bounds.",
    )
    sampler_clip_min: float | None = option(
        None, "Lower bound of the correction. None: the method's default (token_mask 0.5, else 0, which is no bound)."
    )
    sampler_clip_max: float | None = option(
        None,
        "Upper bound of the correction; inf is no bound. None: the method's default (*_truncate 2, token_mask 5, "
        "sequence_mask 3). geometric_mask has no defaults.",
    )
    off_policy_mask_threshold: float | None = option(
        None,
        "Drop rows with A < 0 whose mean of sampling_logps - logps (old_logps without an engine's) exceeds this, in "
        "nats (DeepSeek-V3.2). None: keep all.",
    )
    top_entropy_quantile: float = option(
        1.0,
        "Share of tokens, those of highest entropy in the call's batch, that take part in the policy term "
        "(2506.01939).",
    )

    def __post_init__(self):
        check_types(self)
        keep_plain(self)
        check_rules(self, loss_rules(self))

    @property
    def clip_range(self) -> tuple[float, float]:
        """(epsilon, epsilon_high), the second resolved when it is None."""
        return self.epsilon, self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def sampler_bounds(self) -> tuple[float, float]:
        """(sampler_clip_min, sampler_clip_max), each the method's default where it is None."""
        low, high = _DEFAULT_SAMPLER_BOUNDS[self.sampler_correction]
        return (
            low if self.sampler_clip_min is None else self.sampler_clip_min,
            high if self.sampler_clip_max is None else self.sampler_clip_max,
        )


Rules = Iterable[tuple[bool, str, str, str]]  # (holds, option, what it must be, how to mend it)
_NUMBERS = {int: is_int, float: is_number}


def check_types(config: LossConfig) -> None:
    """Values from YAML or a script may be of any type; the rules compare numbers.

    Raises:
        ValueError: an option of another type than its field, or a number that is not finite or beyond float32.
    """
    for name, allowed in _allowed_types(type(config)).items():
        value = getattr(config, name)
        if not any(_NUMBERS[kind](value) if kind in _NUMBERS else isinstance(value, kind) for kind in allowed):
            names = " or ".join("None" if kind is type(None) else kind.__name__ for kind in allowed)
            raise ValueError(f"{name} must be {names}, got {value!r}; check its type")
        no_bound = name == "sampler_clip_max" and value == math.inf
        if is_number(value) and not (is_finite(value) or no_bound):
            raise ValueError(f"{name} must be finite, got {value!r}; leave it out for its default")
        if is_number(value) and not (abs(float(value)) <= LARGEST or no_bound):
            raise ValueError(f"{name} must be at most {LARGEST:g} in size, got {value!r}; it would overflow float32")


@functools.cache
def _allowed_types(config: type) -> dict[str, tuple[type, ...]]:
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(config).items()}


def check_rules(config: LossConfig, rules: Rules) -> None:
    """Raises ValueError for the first rule that does not hold."""
    for holds, name, rule, fix in rules:
        if not holds:
            raise ValueError(f"{name} must be {rule}, got {getattr(config, name)!r}; {fix}")


def loss_rules(config: LossConfig) -> Rules:
    """Those of the loss options, whose types are right."""
    return itertools.chain(_name_rules(config), _range_rules(config), _loss_type_rules(config), _sampler_rules(config))


def _name_rules(config: LossConfig) -> Rules:
    choices = {
        "loss_type": LOSS_TYPES,
        "kl_estimator": KL_ESTIMATORS,
        "importance_sampling_level": IMPORTANCE_SAMPLING_LEVELS,
        "sampler_correction": SAMPLER_CORRECTIONS,
    }
    for name, known in choices.items():
        yield getattr(config, name) in known, name, f"one of {', '.join(known)}", "check the spelling"


def _range_rules(config: LossConfig) -> Rules:
    for name in ("epsilon", "epsilon_high", "beta", "off_policy_mask_threshold"):
        value = getattr(config, name)
        yield value is None or 0 <= value < math.inf, name, "finite and at least 0", "0 is the smallest value"
    shapes = [name for name in _READERS if name.startswith(("sapo_", "vespo_"))]
    for name in ("max_completion_length", *shapes):
        value = getattr(config, name)
        yield value is None or 0 < value < math.inf, name, "finite and above 0", "the formula divides by it or needs it"
    rule = f"finite and at least {MIN_TEMPERATURE}"
    fits = MIN_TEMPERATURE <= config.temperature < math.inf
    yield fits, "temperature", rule, "logits divided by less overflow: sampling would be greedy"
    yield 0 < config.top_entropy_quantile <= 1, "top_entropy_quantile", "in (0, 1]", "1.0 keeps every token"
    yield config.dual_clip is None or 1 < config.dual_clip < math.inf, "dual_clip", "finite and above 1", "3.0 is usual"


def _loss_type_rules(config: LossConfig) -> Rules:
    kind = f"with loss_type {config.loss_type!r}"
    default = {field.name: field.default for field in dataclasses.fields(config)}
    for name, readers in _READERS.items():
        unread = f"left at {default[name]} {kind}"
        read = config.loss_type in readers or getattr(config, name) == default[name]
        yield read, name, unread, f"only {', '.join(readers)} read it"
    level_is_free = config.loss_type in (*_PPO_TYPES, "cispo", "sapo")
    level_fits = level_is_free or config.importance_sampling_level == "token"
    yield level_fits, "importance_sampling_level", f"'token' {kind}", "this loss sets the level of its ratio itself"
    cap_fits = config.loss_type != "cispo" or config.clip_range[1] >= 1
    yield cap_fits, "epsilon_high", f"at least 1 {kind}", "it caps the ratio itself there; 5.0 is usual"
    length_fits = config.loss_type != "dr_grpo" or config.max_completion_length is not None
    yield length_fits, "max_completion_length", f"set {kind}", "it is the constant denominator of this loss"
    lowest = 1 + config.clip_range[1]
    delta_fits = config.delta is None or lowest < config.delta < math.inf
    yield delta_fits, "delta", f"finite and above 1 + epsilon_high = {lowest}", "or lower epsilon_high"
    one_cap = config.delta is None or config.dual_clip is None
    yield one_cap, "dual_clip", "None when delta is set", "both cap the loss of negative advantages: keep one"


def _sampler_rules(config: LossConfig) -> Rules:
    kind = f"with sampler_correction {config.sampler_correction!r}"
    for name in ("sampler_clip_min", "sampler_clip_max"):
        given = getattr(config, name) is not None
        yield config.sampler_correction != "none" or not given, name, f"None {kind}", "choose a correction for it"
        needed = config.sampler_correction == "geometric_mask"
        yield given or not needed, name, f"set {kind}", "no default suits every model: 0.999 and 1.001 are strict"
    low, high = config.sampler_bounds
    yield 0 <= low < high, "sampler_clip_min", f"at least 0 and below sampler_clip_max = {high}", f"it is {low}"
    fits = config.loss_type != "vespo" or config.sampler_correction in ("none", "token_truncate", "token_mask")
    allowed = "none, token_truncate or token_mask with loss_type 'vespo'"
    yield fits, "sampler_correction", allowed, "vespo multiplies the tokens' weights into its own sequence weight"
