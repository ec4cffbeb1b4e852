"""Rollout engines: completions and their log-probabilities from the policy."""

from .base import RolloutEngine
from .hf import HFEngine
from .native import NativeEngine

__all__ = ["HFEngine", "NativeEngine", "RolloutEngine"]
