"""Rollout engines: completions and their log-probabilities from the policy."""

from grpo_moe.adapters.hf_head import layers_with_state

from .base import RolloutEngine
from .hf import HFEngine
from .native import NativeEngine

__all__ = ["HFEngine", "NativeEngine", "RolloutEngine", "default_engine"]


def default_engine(model, tokenizer) -> RolloutEngine:
    """NativeEngine, or HFEngine for models that it does not run."""
    engine = HFEngine if layers_with_state(model.config.get_text_config()) else NativeEngine
    return engine(model, tokenizer)
