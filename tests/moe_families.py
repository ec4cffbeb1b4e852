"""Tiny random models of MoE families of transformers, without a hub."""

from __future__ import annotations

import torch
import transformers
from transformers import AutoModelForCausalLM

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
EIGHT = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
ROUTED = dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=24)
LOCAL = dict(intermediate_size=24, num_local_experts=8, num_experts_per_tok=2)
SHARED = dict(shared_expert_intermediate_size=16)
LINEAR = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)
FAMILIES = {
    "qwen2_moe": ("Qwen2MoeConfig", {**EIGHT, **SHARED, "intermediate_size": 64}),
    "qwen3_moe": ("Qwen3MoeConfig", {**EIGHT, "head_dim": 16, "intermediate_size": 64, "norm_topk_prob": True}),
    "qwen3_next": ("Qwen3NextConfig", {**EIGHT, **SHARED, **LINEAR, "head_dim": 16, "intermediate_size": 64}),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", {**EIGHT, **SHARED, **LINEAR, "head_dim": 16}),
    "mixtral": ("MixtralConfig", LOCAL),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssConfig",
        {
            **LOCAL,
            "head_dim": 16,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **ROUTED,
            "num_key_value_heads": 4,
            "intermediate_size": 64,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        {**ROUTED, "head_dim": 16, "intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1},
    ),
    "granitemoe": ("GraniteMoeConfig", LOCAL),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            "intermediate_size": 64,
            "moe_num_experts": 8,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 1,
        },
    ),
    "minimax_m2": ("MiniMaxM2Config", {**LOCAL, "head_dim": 16}),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **ROUTED,
            "head_dim": 16,
            "intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 16,
            "layers_block_type": ["attention", "moe"],
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
"""Name of the configuration class and what it takes besides SMALL."""


def tiny_moe(family: str, *, changes: dict | None = None, **options):
    """A model whose experts matter: weights are large enough that leaving them out moves the logits.

    Args:
        changes: to its configuration.
        options: of ``from_config``.
    """
    torch.manual_seed(0)
    name, own = FAMILIES[family]
    config = getattr(transformers, name)(**{**SMALL, **own, **(changes or {})})
    model = AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():
        for parameter_name, p in model.named_parameters():
            if "bias" in parameter_name or "sinks" in parameter_name:
                p.normal_(0, 0.3)
            elif p.dim() >= 2:
                p.mul_(5)
                if not p.any():  # Ernie's router before transformers 5.24
                    p.normal_(0, 0.1)
    return model.float()
