"""Configurations of published MoE models by name, so that a plan needs neither a download nor a folder."""

from __future__ import annotations

from transformers import AutoConfig, PreTrainedConfig

_GPT_OSS = {
    "model_type": "gpt_oss",
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "num_experts_per_tok": 4,
    "tie_word_embeddings": False,
}
PRESETS = {
    "gptoss-lite": {"model_type": "gptoss_lite", "moe_dispatch": "fused"},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {**_GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**_GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "olmoe-1b-7b": {
        "model_type": "olmoe",
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
}
"""What decides sizes, from the config.json of Qwen/Qwen3-30B-A3B-Instruct-2507, openai/gpt-oss-20b and -120b,
allenai/OLMoE-1B-7B-0125; GPT-OSS-Lite's are its defaults,
but for its experts, which run fused."""


def preset_config(name: str) -> PreTrainedConfig:
    """The configuration of a published model.

    "gptoss-lite" needs ``import grpo_moe``, which registers it.

    Raises:
        ValueError: another name.
    """
    if name not in PRESETS:
        raise ValueError(f"model must be a folder or one of {', '.join(PRESETS)}, got {name!r}; check the spelling")
    values = dict(PRESETS[name])
    return AutoConfig.for_model(values.pop("model_type"), **values)
