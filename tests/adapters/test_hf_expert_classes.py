"""Every experts class that this version of transformers puts on its interface, against its own eager form."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers

import grpo_moe  # noqa: F401  registers the experts

DECORATED = re.compile(r"@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)")
MODELS = Path(transformers.__file__).parent / "models"
CLASSES = {
    name: f"transformers.models.{file.parent.name}.{file.stem}"
    for file in sorted(MODELS.glob("*/modeling_*.py"))
    for name in DECORATED.findall(file.read_text(encoding="utf-8"))
}
REFUSED = {"MuseSparkExperts"}  # normalises the output of each expert
SIZES = ("intermediate_size", "moe_intermediate_size", "expert_intermediate_size", "ffn_hidden_size")
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_moe_experts")
CONFIG = {
    **dict.fromkeys(SIZES, 24),
    **dict.fromkeys(COUNTS, 4),
    "hidden_size": 32,
    "moe_hidden_size": 32,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "mlp_gate_softcap": 5.0,
    "mlp_up_softcap": 5.0,
    "mlp_bias": False,
    "swiglu_limit": 7.0,
    "swiglu_alpha": 1.702,
    "rms_norm_eps": 1e-6,
    "post_norm_eps": 1e-6,
}


def make(name):
    config = SimpleNamespace(**CONFIG, _experts_implementation="eager")
    module = getattr(importlib.import_module(CLASSES[name]), name)(config)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.3)
    return module


def outcome(module, implementation, hidden_states, top_k_index, top_k_weights):
    module.config._experts_implementation = implementation
    module.zero_grad()
    leaves = [x.clone().requires_grad_() for x in (hidden_states, top_k_weights)]
    out = module(leaves[0], top_k_index, leaves[1])
    out.square().sum().backward()
    return {"out": out.detach(), "hidden_states": leaves[0].grad, "top_k_weights": leaves[1].grad} | {
        n: p.grad for n, p in module.named_parameters()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_outputs_and_gradients_equal_those_of_eager(name):
    module = make(name)
    inputs = torch.randn(9, 32), torch.stack([torch.randperm(4)[:2] for _ in range(9)]), torch.rand(9, 2)
    expected = outcome(module, "eager", *inputs)
    if name in REFUSED:
        with pytest.raises(ValueError, match=f"cannot run {name}: it normalises"):
            outcome(module, "grpo_moe", *inputs)
        return
    for tensor, found in outcome(module, "grpo_moe", *inputs).items():
        largest = expected[tensor].abs().max()
        assert largest > 0 and (found - expected[tensor]).abs().max() <= 1e-5 * largest, tensor


def test_the_classes_are_found():
    assert len(CLASSES) > 50 and {"Qwen3MoeExperts", "GptOssExperts", "MixtralExperts"} <= set(CLASSES)
