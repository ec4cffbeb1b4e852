"""Rollout engines: completions and their log-probabilities from the policy."""

import logging

from .base import RolloutEngine
from .hf import HFEngine
from .native import NativeEngine
from .vllm import FolderTransfer, NCCLTransfer, VLLMEngine

logger = logging.getLogger(__name__)

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
    """NativeEngine, or HFEngine for models with layers that carry another state than keys and values; it says so."""
    try:
        return NativeEngine(model, tokenizer)
    except TypeError as error:
        logger.warning("Rollouts go through HFEngine, not NativeEngine: %s.", error)
        return HFEngine(model, tokenizer)
