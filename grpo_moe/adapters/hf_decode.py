"""Prefill and one-token steps of transformers models on a cache of fixed size, through their own forward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_moe.ops.attention import KVCache, LayerShape

CACHED_ATTENTION = "grpo_moe_cached"
"""For ``attn_implementation``, while a forward has ``kv_cache``; transformers makes no masks for it."""
PROBE_TOKENS, PROBE_PROMPT = 7, 4


def cached_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    kv_cache: KVCache | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: :meth:`KVCache.attend` for the one new token of each row.

    Args:
        module: the attention module; its ``layer_idx`` says which layer of the cache it has.
        query, key, value: [b, heads, 1, D], [b, kv_heads, 1, D], [b, kv_heads, 1, DV].
        attention_mask: None; the cache knows what a row sees.
        scaling, softcap: of the scores.
        s_aux: [heads] sink logits, or None.
        kv_cache: from the keyword arguments of the model's forward.

    Returns:
        [b, 1, heads, DV], and None for the weights.
    """
    if kv_cache is None or module.layer_idx not in kv_cache.layers:
        raise ValueError(
            f"{type(module).__name__} must hand kv_cache to its attention and keep keys and values of its own, got "
            f"{'none' if kv_cache is None else f'no layer {module.layer_idx} in it'}; use HFEngine for this model"
        )
    out = kv_cache.attend(module.layer_idx, query, key, value, sinks=s_aux, scale=scaling, softcap=softcap)
    return out.transpose(1, 2).to(query.dtype), None


AttentionInterface.register(CACHED_ATTENTION, cached_attention_forward)


@contextmanager
def _handing_over(name: str, take: Callable[[int, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """The attention function ``name``, which first gives each layer's number, keys and values to ``take``.

    What a layer caches by itself may be something else, as the latents of MLA.
    """
    functions, registered = ALL_ATTENTION_FUNCTIONS, ALL_ATTENTION_FUNCTIONS.get(name)

    def attend(module, query, key, value, *args, **kwargs):
        take(module.layer_idx, key, value)
        function = registered or sys.modules[type(module).__module__].eager_attention_forward  # as transformers does
        return function(module, query, key, value, *args, **kwargs)

    functions[name] = attend
    try:
        yield
    finally:
        del functions[name]
        if functions.get(name) is not registered:  # it had been put there, not registered
            functions[name] = registered


class Decoder:
    """Runs a model on prompts and then on one token a row; nothing of the model is copied.

    Args:
        model: transformers causal LM whose attention goes through transformers' interface and keeps keys and values.

    Raises:
        ValueError: steps on the cache are not what a forward over the whole sequence gives.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        self._norms: dict[nn.Module, Callable] | None = None
        self.layers: dict[int, LayerShape] = {}
        """What each layer stores of a token."""
        self._check()

    def prefill(
        self, ids: torch.Tensor, lengths: torch.Tensor, take: Callable[[int, torch.Tensor, torch.Tensor], None]
    ) -> torch.Tensor:
        """Runs prompts ids [P, S], padded on the right, by the model's own attention.

        Args:
            lengths: [P] tokens of each.
            take: gets the number, keys [P, kv_heads, S, D] and values [P, kv_heads, S, DV] of each layer.

        Returns:
            [P, S, H] hidden states.
        """
        mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).long()
        with _handing_over(self.model.config.get_text_config()._attn_implementation, take):
            return self.model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    def forward(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """Hidden states [b, H] of one token [b] more in each of the first b rows; ``cache.lengths`` stay."""
        positions = cache.lengths[: len(tokens), None]
        with self._one_token():
            given = {"input_ids": tokens[:, None], "position_ids": positions, "use_cache": False, "kv_cache": cache}
            return self.model.base_model(**given).last_hidden_state[:, 0]

    @contextmanager
    def _one_token(self) -> Iterator[None]:
        """Attention on the cache; on a GPU RMSNorms as one kernel each."""
        own = [config._attn_implementation_internal for config in self._configs]
        norms = self._fused_norms() if self.model.device.type == "cuda" else {}
        try:
            for config in self._configs:
                config._attn_implementation_internal = CACHED_ATTENTION
            for module, fused in norms.items():
                module.forward = fused
            yield
        finally:
            for config, name in zip(self._configs, own, strict=True):
                config._attn_implementation_internal = name
            for module in norms:
                del module.forward

    def _fused_norms(self) -> dict[nn.Module, Callable]:
        if self._norms is None:
            from grpo_moe.ops.norm import fused_rms_norm

            leaves = [m for m in self.model.base_model.modules() if "Norm" in type(m).__name__]
            found = {m: fused_rms_norm(m) for m in leaves if "forward" not in vars(m)}
            self._norms = {m: fused for m, fused in found.items() if fused is not None}
        return self._norms

    def _check(self) -> None:
        """Learns the layers' shapes from a few tokens, and compares steps with a forward over all of them."""
        model = self.model
        config = model.config.get_text_config()
        windows = [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers]
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        ids = torch.arange(1, 1 + PROBE_TOKENS, device=model.device)[None] % config.vocab_size
        full = torch.full((1,), PROBE_TOKENS, device=model.device)
        expected = self.prefill(ids, full, lambda layer, *pair: kept.update({layer: pair}))[0, PROBE_PROMPT:]
        for layer, (key, value) in sorted(kept.items()):
            window = windows[layer] if layer < len(windows) else None
            self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], window)
        dtype = next(iter(kept.values()))[0].dtype if kept else model.dtype
        cache = KVCache(self.layers, 1, PROBE_TOKENS, device=model.device, dtype=dtype)
        row, lengths = full * 0, full * 0 + PROBE_PROMPT
        for layer, pair in kept.items():
            prompt = [x[:, :, :PROBE_PROMPT] for x in pair]
            cache.load(layer, *prompt, rows=row, sources=row, lengths=lengths)
        cache.lengths += PROBE_PROMPT
        made = []
        for place in range(PROBE_PROMPT, PROBE_TOKENS):
            made.append(self.forward(ids[:, place], cache)[0])
            cache.lengths += 1
        expected, made = expected.double(), torch.stack(made).double()
        errors = (made - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        exact = model.dtype.itemsize >= 4 and not torch.is_autocast_enabled(model.device.type)
        # in halves rounding may send a token to other experts, but not all of them
        error, limit = (float(errors.max()), 1e-3) if exact else (float(errors.min()), 0.05)
        if not error <= limit:
            raise ValueError(
                f"steps of {type(model).__name__} on a cache must give the hidden states of a whole forward within "
                f"{limit}, got {error:.1e} apart; use HFEngine for this model"
            )
