"""Rollout engines: completions and their log-probabilities from the policy."""

from grpo_moe.adapters.hf_head import layers_with_state

from .base import RolloutEngine
from .hf import HFEngine
from .native import NativeEngine
from .vllm import FolderTransfer, NCCLTransfer, VLLMEngine

__all__ = [
    "FolderTransfer",
    "HFEngine",
    "NCCLTransfer",
    "NativeEngine",
    "RolloutEngine",
    "VLLMEngine",
    "default_engine",
]


def default_engine(model, tokenizer) -> RolloutEngine:
    """NativeEngine, or HFEngine for models with layers that carry another state than keys and values."""
    engine = HFEngine if layers_with_state(model.config.get_text_config()) else NativeEngine
    return engine(model, tokenizer)
