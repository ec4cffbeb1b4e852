"""Where a run stands: all that a checkpoint keeps besides weights, optimiser and the position in the data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .config import GRPOConfig

MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class TrainerState:
    """All randomness of a run is a function of this and the seed."""

    run_id: str = ""
    step: int = 0
    """Optimiser updates counted, skipped ones included."""
    rollouts: int = 0
    train_seconds: float = 0.0
    """Of training steps, over all resumes; evaluation apart."""
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    faulty_in_a_row: int = 0
    """Rollouts all of whose groups a fault of a reward function cost."""
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """By name: "before" and "after"."""
    phase_seconds: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)
    """"step" and "value" of the best evaluation by metric_for_best_model."""

    def is_done(self, args: GRPOConfig) -> bool:
        """Whether ``max_steps`` or ``max_train_seconds`` is reached."""
        limit = args.max_train_seconds
        return self.step >= args.max_steps or (limit is not None and self.train_seconds >= limit)

    def ending(self, args: GRPOConfig) -> str:
        """Which limit ``is_done`` has found, in words."""
        if self.step >= args.max_steps:
            return f"update {self.step} has reached max_steps {args.max_steps}: raise it to go on"
        return (
            f"stopped after update {self.step} of {args.max_steps}: max_train_seconds {args.max_train_seconds:g} is "
            "over; raise it to go on"
        )

    def crossed(self, every: int | None, before: int) -> bool:
        """Whether the step went past a multiple of ``every`` since ``before``."""
        return every is not None and self.step // every > before // every

    def count_update(self, num_loss_tokens: int, grad_norm: float) -> bool:
        """Counts an update; returns whether to make it: it has tokens and a finite gradient."""
        self.step += 1
        makes = bool(num_loss_tokens) and math.isfinite(grad_norm)
        self.skipped_updates += not makes
        self.skipped_in_a_row = 0 if makes else self.skipped_in_a_row + bool(num_loss_tokens)
        return makes

    def check_gradients(self, grad_norm: float) -> None:
        """Raises FloatingPointError when several updates in a row had a non-finite gradient."""
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise FloatingPointError(
                f"grad_norm must be finite, got {grad_norm} in {MAX_SKIPPED_IN_A_ROW} updates in a row at update "
                f"{self.step}; lower learning_rate or max_grad_norm, or look at the rewards"
            )

    def check_rewards(self, metrics: dict[str, float]) -> None:
        """Raises RuntimeError when reward functions failed on every group of several rollouts in a row."""
        groups = metrics["sampling/groups_generated"]
        all_lost = 0 < groups == metrics["sampling/groups_skipped"]
        self.faulty_in_a_row = self.faulty_in_a_row + 1 if all_lost else 0
        if self.faulty_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            faults = {k.removeprefix("reward_faults/"): int(v) for k, v in metrics.items() if "reward_faults/" in k}
            raise RuntimeError(
                f"reward functions must score some group, got faults in all {groups:.0f} groups of each of "
                f"{MAX_SKIPPED_IN_A_ROW} rollouts in a row ({faults}); see the error with reward_on_error='raise'"
            )

    def is_best(self, metrics: dict[str, float], args: GRPOConfig) -> bool:
        """Whether an evaluation is the best so far by ``metric_for_best_model``; it is then remembered."""
        name = args.metric_for_best_model
        if name is None or not metrics:
            return False
        if name not in metrics:
            raise ValueError(f"metric_for_best_model must be one of {', '.join(metrics)}, got {name!r}")
        sign = 1 if args.greater_is_better else -1
        if not math.isfinite(metrics[name]) or self.best and sign * metrics[name] <= sign * self.best["value"]:
            return False
        self.best = {"step": self.step, "value": metrics[name]}
        return True
