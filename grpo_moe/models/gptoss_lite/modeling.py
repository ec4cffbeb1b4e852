"""GPT-OSS-Lite as a transformers model: decoder blocks, the base model, and the causal language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast

from grpo_moe.ops.attention import KVCache
from grpo_moe.ops.attention.flex import MIN_QUERIES, SINK_ATTENTION

from .attention import AttentionMasks, GptOssLiteAttention
from .configuration import GptOssLiteConfig
from .convert import config_from_original, load_original_state_dict, original_state_dict
from .moe import GptOssLiteExperts, GptOssLiteMoE, GptOssLiteRouter, load_balancing_loss
from .rope import rotary_tables

# transformers renamed the cache argument and output field in 5.24; both names are accepted here.
CACHE_FIELD = "cache" if "cache" in MoeCausalLMOutputWithPast.__dataclass_fields__ else "past_key_values"


@dataclass
class GptOssLiteModelOutput(MoeModelOutputWithPast):
    """Base model output with the load-balancing loss, a mean over layers (None unless router logits are asked for)."""

    aux_loss: torch.Tensor | None = None


class GptOssLiteRMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight, with fp32 statistics that are differentiated through."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        """x [..., size] -> the same, in its dtype."""
        scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight).to(x.dtype)


class PinnedRouting:
    """Experts chosen in a checkpointed forward, for its recompute: routing twice could choose differently."""

    top_k_index: torch.Tensor | None = None


class GptOssLiteBlock(nn.Module):
    """x += attention(norm(x)); x += experts(norm(x))."""

    def __init__(self, config: GptOssLiteConfig, layer: int):
        super().__init__()
        self.input_layernorm = GptOssLiteRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GptOssLiteAttention(config, layer)
        self.post_attention_layernorm = GptOssLiteRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GptOssLiteMoE(config)

    def forward(self, hidden_states, rotary, masks, token_mask=None, caches=(), pinned: PinnedRouting | None = None):
        """hidden_states [B, T, H] -> the same, router_logits [N, E], top_k_index [N, K]."""
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states), rotary, masks, *caches)
        chosen = None if pinned is None else pinned.top_k_index
        out, router_logits, top_k_index = self.mlp(self.post_attention_layernorm(hidden_states), token_mask, chosen)
        if pinned is not None:
            pinned.top_k_index = top_k_index
        return hidden_states + out, router_logits, top_k_index


class GptOssLitePreTrainedModel(PreTrainedModel):
    """What transformers asks of both models of the family: initialisation, names, what they support."""

    config_class = GptOssLiteConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GptOssLiteBlock"]
    _supports_sdpa = False  # SDPA has no sink; grpo_moe.ops.sink_attention does
    _can_compile_fullgraph = False
    returns_aux_loss = True  # the base model's output has aux_loss when router logits are asked for

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers greps this file for the decorator, which stands in moe.py

    @torch.no_grad()
    def _init_weights(self, module):
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Embedding | GptOssLiteRouter):
            init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, GptOssLiteExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, GptOssLiteRMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, GptOssLiteAttention) and module.sinks is not None:
            init.zeros_(module.sinks)


class GptOssLiteModel(GptOssLitePreTrainedModel):
    """Embedding, blocks and final norm."""

    def __init__(self, config: GptOssLiteConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(GptOssLiteBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = GptOssLiteRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        cache=None,
        kv_cache: KVCache | None = None,
        **kwargs,
    ) -> GptOssLiteModelOutput:
        """Hidden states after the final norm.

        Args:
            input_ids, inputs_embeds: [B, T] or [B, T, H], one of the two.
            attention_mask: [B, past + T], 0 for padding on either side. Padding reaches no expert.
            position_ids: [B, T] rotary positions. Without mask and cache, a position that does not follow the one
                before it starts a new sequence of a packed row, and sequences do not see each other.
            past_key_values, cache: any transformers Cache but static ones.
            kv_cache: holds what came before instead, for one token [B, 1] in each of its first B rows; the caller
                counts up its ``lengths`` and sets ``attn_implementation`` to "grpo_moe_cached".
            use_cache: make a transformers DynamicCache when none is given.
            output_router_logits: also return router logits and the load-balancing loss.
        """
        cache = past_key_values if cache is None else cache
        embeds = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if kv_cache is None:
            cache = self._default_cache(cache, use_cache)
            masks, positions, token_mask = self._layout(embeds, attention_mask, position_ids, cache)
        else:
            masks, positions, token_mask = None, kv_cache.lengths[: len(embeds), None], None
        rotary = rotary_tables(self.config, positions, embeds.dtype)

        hidden_states, routes = embeds, []
        for index, block in enumerate(self.layers):
            hidden_states, *route = self._run_block(
                index, block, hidden_states, rotary, masks, token_mask, (cache, kv_cache)
            )
            routes.append(route)
        if output_router_logits is None:
            output_router_logits = self.config.output_router_logits
        aux_loss = (
            torch.stack([load_balancing_loss(*route) for route in routes]).mean() if output_router_logits else None
        )
        return GptOssLiteModelOutput(
            last_hidden_state=self.norm(hidden_states),
            router_logits=tuple(logits for logits, _ in routes) if output_router_logits else None,
            aux_loss=aux_loss,
            **{CACHE_FIELD: cache},
        )

    def _run_block(self, index, block, hidden_states, rotary, masks, token_mask, caches):
        wrapped = self.gradient_checkpointing and torch.is_grad_enabled() and index % self.config.grad_ckpt_every == 0
        if not wrapped:
            return block(hidden_states, rotary, masks, token_mask, caches)
        return self._gradient_checkpointing_func(
            block.__call__, hidden_states, rotary, masks, token_mask, (), PinnedRouting()
        )

    def _default_cache(self, cache, use_cache):
        if self.gradient_checkpointing and torch.is_grad_enabled():
            if cache is not None:
                raise ValueError("cache must be None while gradients are checkpointed; use torch.no_grad()")
            return None  # a recompute would store its keys a second time
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if cache is not None or not use_cache or torch.is_grad_enabled():
            return cache
        from transformers import DynamicCache

        return DynamicCache(config=self.config)

    def _layout(self, embeds, attention_mask, position_ids, cache):
        """Attention masks, rotary positions [B, T], and the token mask [B, T] (None when nothing is padded)."""
        batch, width = embeds.shape[:2]
        if attention_mask is not None and (not isinstance(attention_mask, torch.Tensor) or attention_mask.dim() != 2):
            raise ValueError(
                "attention_mask must be a [B, past + T] tensor; static caches are not supported, generate with "
                "grpo_moe.rollout.NativeEngine"
            )
        past = cache.get_seq_length() if cache is not None else 0
        if attention_mask is None:
            order = torch.arange(past + width, device=embeds.device).expand(batch, -1)
        elif attention_mask.shape[1] == past + width:
            order = (attention_mask.cumsum(1) - 1).masked_fill(attention_mask == 0, -1)
        else:
            raise ValueError(
                f"attention_mask must be [B, past + T] = [{batch}, {past + width}], got {tuple(attention_mask.shape)}"
            )
        new = order[:, past:]
        packed = position_ids is not None and attention_mask is None and past == 0
        segments = _segments(position_ids.expand(batch, -1)) if packed else None
        keys = lambda _, num_keys: _last_columns(order, num_keys)  # noqa: E731
        flex = self.config._attn_implementation == SINK_ATTENTION and embeds.is_cuda and width >= MIN_QUERIES
        masks = AttentionMasks(new, keys, self.config.sliding_window, segments, blocks=flex)
        positions = new.clamp(min=0) if position_ids is None else position_ids.expand(batch, -1)
        return masks, positions, _padding(new, attention_mask)


class GptOssLiteForCausalLM(GptOssLitePreTrainedModel, GenerationMixin):
    """GPT-OSS-Lite with its language-model head (tied to the embedding by default)."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: GptOssLiteConfig):
        super().__init__(config)
        self.model = GptOssLiteModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def from_original(cls, config_dict: dict, state_dict: dict[str, torch.Tensor]) -> GptOssLiteForCausalLM:
        """Builds a model from the original's configuration and weights, in the dtype of the weights.

        Raises:
            ValueError: an unknown configuration field, or weights missing, left over, or of another shape.
        """
        model = cls(config_from_original(config_dict))
        model.to(next(iter(state_dict.values())).dtype if state_dict else model.dtype)
        load_original_state_dict(model, state_dict)
        return model

    def to_original_state_dict(self) -> dict[str, torch.Tensor]:
        """The weights under the original's names, without copies."""
        return original_state_dict(self)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_router_logits: bool | None = None,
        cache=None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast:
        """Logits [B, T, V]; arguments as in :meth:`GptOssLiteModel.forward`.

        Args:
            labels: [B, T], -100 ignored; the loss shifts them and adds ``router_aux_loss_coef`` times the aux loss.
            logits_to_keep: compute only the last n positions (0: all), or the positions in a 1-D tensor.
        """
        coefficient = self.config.router_aux_loss_coef
        if output_router_logits is None and labels is not None and coefficient:
            output_router_logits = True
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_router_logits=output_router_logits,
            cache=cache,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
            if outputs.aux_loss is not None:
                loss = loss + coefficient * outputs.aux_loss
        return MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=outputs.aux_loss,
            logits=logits,
            router_logits=outputs.router_logits,
            **{CACHE_FIELD: outputs[CACHE_FIELD] if CACHE_FIELD in outputs else None},
        )


def _padding(order: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Token mask [B, T], or None when every token is real."""
    if attention_mask is None:
        return None
    real = order >= 0
    return None if bool(real.all()) else real


def _segments(position_ids: torch.Tensor) -> torch.Tensor:
    """Sequence number [B, T] of each token of a packed row: a new one where the position does not go up by one."""
    breaks = torch.zeros_like(position_ids, dtype=torch.bool)
    breaks[:, 1:] = position_ids.diff(dim=1) != 1
    return breaks.cumsum(1)


def _last_columns(order: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Positions of the keys from a transformers cache: it drops the oldest, and pads unwritten slots on the right."""
    missing = num_keys - order.shape[1]
    return nn.functional.pad(order, (0, missing), value=-1) if missing > 0 else order[:, -num_keys:]
