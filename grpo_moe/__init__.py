"""grpo_moe: GRPO fine-tuning of Mixture-of-Experts language models.

Importing it takes no time: what is below loads when it is first asked for. transformers learns of GPT-OSS-Lite and of
our experts and attention as soon as both packages are imported, in either order.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .models.gptoss_lite import GptOssLiteConfig, GptOssLiteForCausalLM
    from .rl import GRPOConfig, GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "GptOssLiteConfig", "GptOssLiteForCausalLM"]

_MODULES = {
    "GRPOConfig": ".rl",
    "GRPOTrainer": ".rl",
    "GptOssLiteConfig": ".models.gptoss_lite",
    "GptOssLiteForCausalLM": ".models.gptoss_lite",
}
_PARTS = {"adapters", "data", "models", "ops", "planning", "rewards", "rl", "rollout", "types"}


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return importlib.import_module(f".{name}", __name__)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *_PARTS})


def _register() -> None:
    """Adds GPT-OSS-Lite to the Auto classes, "grpo_moe" to the experts and "grpo_moe_sinks" to the attentions."""
    for module in (".models.gptoss_lite", ".adapters.hf_experts", ".adapters.hf_attention"):
        importlib.import_module(module, __name__)


class _WithTransformers(importlib.abc.MetaPathFinder):
    """Registers as soon as transformers has been imported; whoever only looks whether it is there changes nothing."""

    def find_spec(self, name, path=None, target=None):
        if name != "transformers":
            return None
        place = sys.meta_path.index(self)
        sys.meta_path.remove(self)  # so that the others find it
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(place, self)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module):
                execute(module)
                sys.meta_path.remove(self)
                _register()

            spec.loader.exec_module = execute_and_register
        return spec


if "transformers" in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _WithTransformers())
