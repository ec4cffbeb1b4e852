"""grpo_moe: GRPO fine-tuning of Mixture-of-Experts language models."""

from .adapters import hf_attention as _register_attention  # noqa: F401  registers the attention with sinks
from .adapters import hf_experts as _register_experts  # noqa: F401  registers the experts implementations
from .models.gptoss_lite import GptOssLiteConfig, GptOssLiteForCausalLM
from .rl import GRPOConfig, GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "GptOssLiteConfig", "GptOssLiteForCausalLM"]
