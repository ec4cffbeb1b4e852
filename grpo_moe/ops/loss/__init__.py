"""Policy losses on log-probabilities, and the head that computes log-probabilities without the logits."""

from .config import LossConfig
from .fused_head import head_logits, token_logps
from .fused_loss import grpo_loss
from .logits import grpo_loss_from_logits
from .objective import LossOutput, grpo_loss_from_logps

__all__ = [
    "LossConfig",
    "LossOutput",
    "grpo_loss",
    "grpo_loss_from_logits",
    "grpo_loss_from_logps",
    "head_logits",
    "token_logps",
]
