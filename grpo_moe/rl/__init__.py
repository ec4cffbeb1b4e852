"""Layer 3: configuration, batches, metrics, checkpoints and the trainer. The only layer that knows processes."""

from .config import GRPOConfig
from .options import parse_args
from .trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer", "parse_args"]
