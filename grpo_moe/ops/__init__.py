"""Layer 0: kernels and their plain PyTorch forms. Needs torch and triton; knows no model, trainer or process."""

from .attention import sink_attention
from .loss import (
    LossConfig,
    LossOutput,
    grpo_loss,
    grpo_loss_from_logits,
    grpo_loss_from_logps,
    head_logits,
    token_logps,
)
from .moe import moe_experts

__all__ = [
    "LossConfig",
    "LossOutput",
    "grpo_loss",
    "grpo_loss_from_logits",
    "grpo_loss_from_logps",
    "head_logits",
    "moe_experts",
    "sink_attention",
    "token_logps",
]
