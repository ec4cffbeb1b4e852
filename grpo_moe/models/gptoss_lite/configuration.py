"""Configuration of GPT-OSS-Lite, the native mixture-of-experts policy (502M parameters by default)."""

from __future__ import annotations

from transformers import PreTrainedConfig

MOE_DISPATCH = ("stacked", "triton_grouped", "fused")


class GptOssLiteConfig(PreTrainedConfig):
    """Shape and options of a GPT-OSS-Lite model; the defaults are the 502M model (247M active per token).

    Args:
        vocab_size, hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim: the usual.
        intermediate_size: width of each expert.
        num_experts, num_experts_per_tok, num_shared_experts: routed experts, top-k, experts every token visits.
        sliding_window: tokens that even layers (0, 2, ...) see, themselves included; odd layers see all.
        attention_sinks: one learned logit per head joins the softmax denominator.
        rope_theta, yarn_*: rotary base and YaRN context extension (scale factor 1 switches it off).
        yarn_prune_rope_global: odd layers leave the first head_dim // 4 pairs unrotated.
        max_position_embeddings: longest context in tokens.
        moe_dispatch: name of the experts implementation: "stacked" (PyTorch), "triton_grouped" (the original's: gate,
            up and activation in one Triton launch) or "fused" (all in Triton on a GPU, forward and backward).
        grad_ckpt_every: with gradient checkpointing on, wrap every g-th block (0, g, 2g, ...).
        router_aux_loss_coef: weight of the load-balancing loss when labels are given; 0 leaves it out.

    Raises:
        ValueError: a field outside its range, naming it.

    Source: shared/design/gptoss_lite.md.
    """

    model_type = "gptoss_lite"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    attribute_map = {"num_local_experts": "num_experts", "moe_intermediate_size": "intermediate_size"}

    vocab_size: int = 128_000
    hidden_size: int = 768
    intermediate_size: int = 1536
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 96
    num_experts: int = 8
    num_experts_per_tok: int = 2
    num_shared_experts: int = 1
    sliding_window: int = 128
    layer_types: list[str] | None = None
    attention_sinks: bool = True
    rope_theta: float = 100_000.0
    yarn_scale_factor: float = 32.0
    yarn_original_max_position_embeddings: int = 4096
    yarn_beta_fast: float = 32.0
    yarn_beta_slow: float = 1.0
    yarn_mscale: bool = True
    yarn_prune_rope_global: bool = True
    max_position_embeddings: int = 131_072
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    moe_dispatch: str = "stacked"
    grad_ckpt_every: int = 3
    router_aux_loss_coef: float = 0.0
    output_router_logits: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            kinds = ("sliding_attention", "full_attention")
            self.layer_types = [kinds[layer % 2] for layer in range(self.num_hidden_layers)]
        self._check()
        super().__post_init__(**kwargs)
        if self._experts_implementation is None:
            self._experts_implementation = self.moe_dispatch

    def _check(self) -> None:
        experts, heads, kv_heads = self.num_experts, self.num_attention_heads, self.num_key_value_heads
        rules = {
            "num_attention_heads": (heads % kv_heads == 0, f"a multiple of num_key_value_heads={kv_heads}"),
            "num_experts_per_tok": (1 <= self.num_experts_per_tok <= experts, f"in 1..num_experts={experts}"),
            "head_dim": (self.head_dim % 2 == 0, "even (rotary pairs)"),
            "sliding_window": (self.sliding_window >= 1, "at least 1"),
            "grad_ckpt_every": (self.grad_ckpt_every >= 1, "at least 1"),
            "moe_dispatch": (self.moe_dispatch in MOE_DISPATCH, f"one of {MOE_DISPATCH}"),
            "layer_types": (len(self.layer_types) == self.num_hidden_layers, f"{self.num_hidden_layers} names"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")
