"""What importing the package costs and does, and what it ships."""

import importlib.metadata
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import grpo_moe

ROOT = Path(__file__).parents[1]
IMPORTS = """
import sys, time, torch
before = time.perf_counter()
import grpo_moe
seconds = time.perf_counter() - before
assert "transformers" not in sys.modules and seconds < 0.3, seconds
assert {"GRPOTrainer", "GRPOConfig", "ops"} <= set(dir(grpo_moe)) and grpo_moe.rewards.countdown_reward
import importlib.util
assert importlib.util.find_spec("transformers") is not None and "transformers" not in sys.modules
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model("gptoss_lite", vocab_size=8, hidden_size=16, num_hidden_layers=1, head_dim=8)
assert type(config) is grpo_moe.GptOssLiteConfig
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
assert "grpo_moe_sinks" in AttentionInterface().valid_keys() and "grpo_moe" in ALL_EXPERTS_FUNCTIONS.valid_keys()
"""


def test_importing_it_is_quick_and_transformers_learns_of_it_when_it_comes():
    # the other order, transformers first, is that of this process
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_every_public_name_loads_and_an_unknown_one_is_an_attribute_error():
    assert all(getattr(grpo_moe, name).__doc__ for name in grpo_moe.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'PPOTrainer'"):
        grpo_moe.PPOTrainer  # noqa: B018


def test_the_version_is_that_of_the_distribution_and_types_are_marked():
    assert importlib.metadata.version("grpo-moe") == grpo_moe.__version__
    assert (Path(grpo_moe.__file__).parent / "py.typed").exists()


def test_every_public_name_is_documented():
    missing = []
    for found in pkgutil.walk_packages(grpo_moe.__path__, "grpo_moe."):
        module = importlib.import_module(found.name)
        own = [x for x in vars(module).values() if getattr(x, "__module__", None) == found.name]
        own = [x for x in own if inspect.isclass(x) or inspect.isfunction(x)]
        methods = [m for cls in own if inspect.isclass(cls) for m in vars(cls).values()]
        own += [m.fget if isinstance(m, property) else getattr(m, "__func__", m) for m in methods]
        checked = [x for x in own if inspect.isclass(x) or inspect.isfunction(x)]
        public = [x for x in checked if not any(part.startswith("_") for part in x.__qualname__.split("."))]
        missing += [f"{found.name}: {x.__qualname__}" for x in public if not documented(module, x)]
    assert not missing, missing


def documented(module, x) -> bool:
    """By itself, or as an override of a documented method of ours or of a framework's."""
    holder, _, name = x.__qualname__.rpartition(".")
    cls = getattr(module, holder, None)
    return bool(x.__doc__ or (cls and any(getattr(vars(base).get(name), "__doc__", None) for base in cls.__mro__)))
