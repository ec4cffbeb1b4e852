"""The shape of a causal LM, block by block, read from a transformers configuration without memory for its weights."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedConfig

CATEGORIES = ("embedding", "head", "attention", "router", "experts", "shared_experts", "dense_mlp", "norm")
"""What parameters are part of. Norms inside attention count as attention, a gate of shared experts as these."""


@dataclass(frozen=True)
class AttentionShape:
    """How a block mixes tokens."""

    kind: str
    """"full", "window", "mla" (latent attention; heads as it runs in training), or "linear" (gated delta rule)."""
    heads: int
    """Of queries; of values with "linear"."""
    kv_heads: int
    """Of keys and values; of keys with "linear"."""
    head_dim: int
    """Of queries and keys."""
    value_dim: int
    window: int | None = None
    """Tokens that a query sees, itself included; None: all."""


@dataclass(frozen=True)
class MLPShape:
    """What a block does with each token."""

    intermediate_size: int
    """Of each expert, or of the one dense MLP."""
    gated: bool
    """Three matrices (gate, up, down) rather than two."""
    num_experts: int = 0
    """Routed experts; 0: a dense MLP."""
    top_k: int = 0
    shared_intermediate_size: int = 0
    """Joint width of what every token visits beside its experts."""

    @property
    def kind(self) -> str:
        """ "experts" or "dense"."""
        return "experts" if self.num_experts else "dense"


@dataclass(frozen=True)
class BlockShape:
    """One decoder block; Nemotron-H's have attention or an MLP, not both."""

    attention: AttentionShape | None
    mlp: MLPShape | None
    parameters: dict[str, int]
    """By category; those of all experts."""
    multiply_adds: dict[str, int]
    """Of the weights for one token, by category; of top_k experts. Neither biases and norms nor attention scores."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and parameter counts of a causal LM.

    Counts are those of the model itself, built on the meta device; the configuration tells windows alone.
    """

    model_type: str
    hidden_size: int
    vocab_size: int
    tied_embeddings: bool
    blocks: tuple[BlockShape, ...]
    parameters: dict[str, int]
    """By category, all of ``CATEGORIES``; a tied head counts as embedding."""

    @property
    def total_parameters(self) -> int:
        """Of all categories."""
        return sum(self.parameters.values())

    @property
    def active_parameters(self) -> int:
        """Parameters less the experts that a token does not visit; the whole embedding counts, as in most model cards.

        OpenAI's cards leave the embedding out: subtract ``parameters["embedding"]`` for their number.
        """
        experts = [(block.parameters["experts"], block.mlp) for block in self.blocks if block.parameters["experts"]]
        idle = sum(count * (mlp.num_experts - mlp.top_k) // mlp.num_experts for count, mlp in experts)
        return self.total_parameters - idle

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> ModelShape:
        """The shape of the causal LM that ``config`` describes; of its language model if it has several.

        Raises:
            ValueError: no causal LM of transformers, or layers whose cost is not known here.
        """
        text = config.get_text_config()
        if type(text) not in AutoModelForCausalLM._model_mapping:
            raise ValueError(
                f"config must be that of a causal LM in transformers, got {type(text).__name__}; "
                "see AutoModelForCausalLM for those that are"
            )
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(deepcopy(text), attn_implementation="eager")
        parameters = _by_block(model)
        windows = _windows(text, len(parameters) - 1)
        hidden = model.get_input_embeddings().weight.shape[1]
        blocks = tuple(
            _block_shape(module, parameters[number], windows[number], hidden, text.model_type)
            for number, module in enumerate(model.base_model.layers)
        )
        outside = _count(parameters[None], text.model_type)
        counts = {key: outside[key] + sum(block.parameters[key] for block in blocks) for key in CATEGORIES}
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        return cls(text.model_type, hidden, head.shape[0], head is embedding, blocks, counts)


def _by_block(model: nn.Module) -> dict[int | None, dict[str, nn.Parameter]]:
    """Names inside the block and parameters, by number of the block; None: outside of blocks."""
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise _unsupported(model.config.model_type, f"no list of layers in {type(model.base_model).__name__}")
    prefix = f"{model.base_model_prefix}.layers."
    found: dict[int | None, dict[str, nn.Parameter]] = {None: {}, **{number: {} for number in range(len(layers))}}
    for name, parameter in model.named_parameters():  # a shared one comes once
        inside = name.removeprefix(prefix)
        number, _, rest = inside.partition(".")
        found[int(number) if inside != name else None][rest if inside != name else name] = parameter
    return found


def _windows(text: PreTrainedConfig, layers: int) -> list[int | None]:
    """What each layer sees, as transformers' own cache reads it from the configuration."""
    types = getattr(text, "layer_types", None) or [None] * layers
    windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=text).layers]
    windows += [None] * (layers - len(windows))  # of layers that share the keys of others
    for number, kind in enumerate(types[:layers]):
        if kind and "chunked" in kind:
            raise _unsupported(text.model_type, f"{kind} in layer {number}")
        if kind == "sliding_attention" and windows[number] is None:
            windows[number] = text.sliding_window
    return windows


def _block_shape(
    module: nn.Module, parameters: dict[str, nn.Parameter], window: int | None, hidden: int, model_type: str
) -> BlockShape:
    counts = _count(parameters, model_type)
    weights = {name: p for name, p in parameters.items() if p.dim() >= 2 and "bias" not in name}
    multiply_adds = _count(weights, model_type)
    attention = _attention_shape(module, window, model_type) if counts["attention"] else None
    mlp = None
    shared, dense = (_width(weights, name, hidden) for name in ("shared_experts", "dense_mlp"))
    if counts["experts"]:
        down = next((p for name, p in weights.items() if name.endswith("experts.down_proj")), None)
        top_k = next((m.top_k for m in module.modules() if isinstance(getattr(m, "top_k", None), int)), None)
        if down is None or top_k is None:
            raise _unsupported(model_type, "experts without a down_proj [E, ., .] or a router without top_k")
        num_experts, matrix = down.shape[0], prod(down.shape[1:])
        gated = multiply_adds["experts"] > 2 * down.numel()
        mlp = MLPShape(matrix // hidden, gated, num_experts, top_k, shared + dense)
        multiply_adds["experts"] = multiply_adds["experts"] * top_k // num_experts
    elif counts["dense_mlp"]:
        mlp = MLPShape(dense, multiply_adds["dense_mlp"] > 2 * dense * hidden)
    return BlockShape(attention, mlp, counts, multiply_adds)


def _attention_shape(block: nn.Module, window: int | None, model_type: str) -> AttentionShape:
    for module in block.modules():
        if hasattr(module, "kv_lora_rank") and not hasattr(module, "indexer"):
            heads = module.num_heads
            return AttentionShape("mla", heads, heads, module.qk_head_dim, module.v_head_dim, window)
        if hasattr(module, "num_v_heads") and hasattr(module, "head_k_dim"):
            heads = module.num_v_heads, module.num_k_heads
            return AttentionShape("linear", *heads, module.head_k_dim, module.head_v_dim)
        if hasattr(module, "head_dim") and hasattr(module, "o_proj"):
            heads = module.o_proj.in_features // module.head_dim
            kv_heads = module.kv_heads if hasattr(module, "kv_heads") else heads // module.num_key_value_groups
            kind = "full" if window is None else "window"
            return AttentionShape(kind, heads, kv_heads, module.head_dim, module.head_dim, window)
    raise _unsupported(model_type, f"a {type(block).__name__} that mixes tokens in another way")


def _width(weights: dict[str, nn.Parameter], category: str, hidden: int) -> int:
    """Inputs of the matrix [hidden, width] that ends an MLP; 0: there is none."""
    ends = [p.shape[1] for name, p in weights.items() if _category(name) == category and p.shape[0] == hidden]
    return max(ends, default=0)


def _count(parameters: dict[str, nn.Parameter], model_type: str) -> dict[str, int]:
    counts = Counter()
    for name, parameter in parameters.items():
        category = _category(name)
        if category is None:
            raise _unsupported(model_type, f"the parameter {name}")
        counts[category] += parameter.numel()
    return {category: counts[category] for category in CATEGORIES}


def _category(name: str) -> str | None:
    """By the parts of a parameter's name, in a block or outside of blocks."""
    parts = name.split(".")[:-1]
    if not parts:
        return None
    rules = (
        ("norm", "norm" in parts[0]),  # first, for post_attention_layernorm
        (
            "attention",
            any("attn" in x or "attention" in x or x in ("q_proj", "k_proj", "v_proj", "o_proj") for x in parts),
        ),
        ("experts", "experts" in parts),
        ("shared_experts", any(x.startswith("shared") for x in parts)),
        ("router", any(x in ("gate", "router") for x in parts)),
        ("dense_mlp", any(x in ("mlp", "feed_forward", "up_proj", "down_proj", "gate_proj") for x in parts)),
        ("norm", "norm" in parts[-1] or parts[-1] == "norm_f"),
        ("embedding", "embed" in parts[-1]),
        ("head", parts[-1] == "lm_head"),
    )
    return next((category for category, holds in rules if holds), None)


def _unsupported(model_type: str, what: str) -> ValueError:
    return ValueError(
        f"config must be that of a model of decoder blocks with softmax, latent or gated-delta attention and "
        f"dense or routed MLPs, got {model_type} with {what}; count its FLOPs by hand"
    )
