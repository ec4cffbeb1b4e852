"""Rollout engines: completions and their log-probabilities from the policy."""

from grpo_moe.models.gptoss_lite import GptOssLiteForCausalLM

from .base import RolloutEngine
from .hf import HFEngine
from .native import NativeEngine

__all__ = ["HFEngine", "NativeEngine", "RolloutEngine", "default_engine"]


def default_engine(model, tokenizer) -> RolloutEngine:
    """NativeEngine for GPT-OSS-Lite, HFEngine for any other transformers model."""
    engine = NativeEngine if isinstance(model, GptOssLiteForCausalLM) else HFEngine
    return engine(model, tokenizer)
