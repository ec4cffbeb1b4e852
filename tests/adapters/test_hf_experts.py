import pytest
import torch
from test_hf_head import CONFIGS
from transformers import AutoModelForCausalLM, GptOssConfig

import grpo_moe  # noqa: F401  registers the experts


def test_a_transformers_moe_runs_on_our_experts():
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_moe"])
    ids = torch.randint(3, 64, (2, 8))
    model.set_experts_implementation("eager")
    expected = model(ids).logits
    model.set_experts_implementation("stacked")
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


def test_experts_of_another_form_are_refused_by_name():
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, experts_implementation="stacked")
    with pytest.raises(ValueError, match="got .*GptOssExperts"):
        model(torch.randint(3, 64, (1, 4)))
