"""Conversion between the original GPT-OSS-Lite checkpoints and ours, both ways, names and layouts."""

from __future__ import annotations

import re

import torch
from torch import nn

from .configuration import GptOssLiteConfig

CONFIG_NAMES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "n_routed_experts": "num_experts",
    "n_activated_experts": "num_experts_per_tok",
    "n_shared_experts": "num_shared_experts",
    "window_size": "sliding_window",
    "sink_bias": "attention_sinks",
    "rope_theta": "rope_theta",
    "yarn_scale_factor": "yarn_scale_factor",
    "yarn_original_max_seq_len": "yarn_original_max_position_embeddings",
    "yarn_beta_fast": "yarn_beta_fast",
    "yarn_beta_slow": "yarn_beta_slow",
    "yarn_mscale": "yarn_mscale",
    "yarn_prune_rope_global": "yarn_prune_rope_global",
    "eval_max_seq_len": "max_position_embeddings",
    "weight_tying": "tie_word_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "moe_dispatch": "moe_dispatch",
    "grad_ckpt_every": "grad_ckpt_every",
}
UNUSED_CONFIG_NAMES = {"dtype", "max_seq_len", "yarn_target_seq_len"}  # training settings without effect on the maths

# original module -> ours, inside a block; experts are handled apart
BLOCK_NAMES = {
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.kv_proj": "self_attn.kv_proj",
    "attn.o_proj": "self_attn.o_proj",
    "moe.router.gate": "mlp.gate",
}
TOP_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
SHARED_NAMES = {
    "w1": ("gate_proj", 0),
    "w3": ("up_proj", 0),
    "w2": ("down_proj", 1),
}  # ours, axis of the experts' width


def config_from_original(config_dict: dict) -> GptOssLiteConfig:
    """Maps the original's configuration fields to ours.

    Raises:
        ValueError: a field that is not known.
    """
    unknown = set(config_dict) - set(CONFIG_NAMES) - UNUSED_CONFIG_NAMES
    if unknown:
        raise ValueError(f"config_dict must hold the original's fields only, got unknown {sorted(unknown)}")
    return GptOssLiteConfig(**{ours: config_dict[name] for name, ours in CONFIG_NAMES.items() if name in config_dict})


def original_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights of a GptOssLiteForCausalLM under the original's names: views into its parameters."""
    original: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        original.update(_original_views(name, tensor, model.config))
    return original


@torch.no_grad()
def load_original_state_dict(model: nn.Module, state_dict: dict[str, torch.Tensor]) -> None:
    """Copies the original's weights into a GptOssLiteForCausalLM.

    Raises:
        ValueError: weights missing, left over, or of another shape.
    """
    views = original_state_dict(model)
    missing, extra = set(views) - set(state_dict), set(state_dict) - set(views)
    if missing or extra:
        raise ValueError(f"state_dict must fit the configuration: missing {sorted(missing)}, left over {sorted(extra)}")
    for name, view in views.items():
        if view.shape != state_dict[name].shape:
            raise ValueError(f"{name} must be of shape {tuple(view.shape)}, got {tuple(state_dict[name].shape)}")
        view.copy_(state_dict[name])


def _original_views(name, tensor, config) -> dict[str, torch.Tensor]:
    for theirs, ours in TOP_NAMES.items():
        if name == ours:
            return {theirs: tensor}
    prefix, rest = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name).groups()
    block, width = f"blocks.{prefix}", config.intermediate_size
    if rest == "self_attn.sinks":
        return {f"{block}.attn.sink_bias": tensor}
    if rest == "mlp.experts.gate_up_proj":
        gate_up = {"w1": slice(0, width), "w3": slice(width, None)}
        return {
            f"{block}.moe.experts.{expert}.{w}.weight": tensor[expert, rows]
            for expert in range(config.num_experts)
            for w, rows in gate_up.items()
        }
    if rest == "mlp.experts.down_proj":
        return {f"{block}.moe.experts.{expert}.w2.weight": weight for expert, weight in enumerate(tensor)}
    if rest.startswith("mlp.shared_experts."):
        ours = rest.split(".")[2]
        (w, axis) = next((w, axis) for w, (module, axis) in SHARED_NAMES.items() if module == ours)
        return {
            f"{block}.moe.shared_experts.{expert}.{w}.weight": part
            for expert, part in enumerate(tensor.split(width, dim=axis))
        }
    theirs = next(theirs for theirs, ours in BLOCK_NAMES.items() if rest == f"{ours}.weight")
    return {f"{block}.{theirs}.weight": tensor}
