"""Prefill and one-token steps of transformers models on a cache of fixed size, through their own forward."""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from grpo_moe.ops.attention import KVCache, LayerShape

from .routing import RoutingReplay, has_experts

logger = logging.getLogger(__name__)

CACHED_ATTENTION = "grpo_moe_cached"
"""For ``attn_implementation``, while a forward has ``kv_cache``; transformers makes no masks for it."""
PROBE_STEPS, LONGEST_PROBE = 16, 4096
KNOWN_WINDOWS = ("gpt_oss",)
"""Models whose window is not probed: FlexAttention would compile for half a minute; the contract's tests pass it."""


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


_one_at_a_time = threading.Lock()


@contextmanager
def _handing_over(name: str, take: Callable[[int, torch.Tensor, torch.Tensor], None]) -> Iterator[None]:
    """The attention function ``name``, which first gives each layer's number, keys and values to ``take``.

    What a layer caches by itself may be something else, as the latents of MLA.
    """
    functions, owner = ALL_ATTENTION_FUNCTIONS, threading.get_ident()

    def attend(module, query, key, value, *args, **kwargs):
        if threading.get_ident() == owner:  # models of other threads look up the same name
            take(module.layer_idx, key, value)
        # transformers' own fallback is a global of the forward that looks the name up
        function = registered or inspect.unwrap(type(module).forward).__globals__["eager_attention_forward"]
        return function(module, query, key, value, *args, **kwargs)

    with _one_at_a_time:
        registered = functions.get(name)
        functions[name] = attend
        try:
            yield
        finally:
            del functions[name]
            if functions.get(name) is not registered:  # it had been put there, not registered
                functions[name] = registered


def layer_windows(config) -> dict[int, int | None]:
    """Tokens that each layer sees of the past, itself included (None: all), by layer number.

    Raises:
        TypeError: a layer that carries another state than keys and values, or rotary factors that depend on the batch.
    """
    text = config.get_text_config()
    kinds, types = DynamicCache(config=text).layers, getattr(text, "layer_types", None) or ()
    strange = sorted({type(x).__name__ for x in kinds if type(x) not in (DynamicLayer, DynamicSlidingWindowLayer)})
    strange = [name for name in strange if name != "DummyLayer"]  # shares the keys of another layer
    chunked = [kind for kind in types if "chunked" in kind]
    if strange or chunked:
        found = ", ".join(strange or chunked)
        raise TypeError(f"model must keep keys and values alone, got {text.model_type} with {found}; use HFEngine")
    rope = getattr(text, "rope_parameters", None) or {}
    longest = getattr(text, "max_position_embeddings", None)  # Bloom has none
    original = rope.get("original_max_position_embeddings") or longest
    if rope.get("rope_type") == "longrope" and longest > original:
        raise TypeError(
            f"model must rotate a token by its own position, got {text.model_type} with longrope, whose factors depend "
            f"on the longest sequence of a batch beyond {original} tokens; lower max_position_embeddings, or use "
            "HFEngine"
        )
    windows = {number: getattr(layer, "sliding_window", None) for number, layer in enumerate(kinds)}
    for number, kind in enumerate(types):
        if kind == "sliding_attention" and windows.get(number) is None:
            windows[number] = text.sliding_window
    return windows


class Decoder:
    """Runs a model on prompts and then on one token a row; nothing of the model is copied.

    Args:
        model: transformers causal LM whose attention goes through transformers' interface and keeps keys and values.

    Raises:
        TypeError: as :func:`layer_windows`.
        ValueError: the model cannot run a step on the cache, or steps are not what a forward over the whole sequence
            gives.
    """

    def __init__(self, model: PreTrainedModel):
        self.model = model
        self._configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        self._norms: dict[nn.Module, Callable] | None = None
        self.layers: dict[int, LayerShape] = {}
        """What each layer stores of a token."""
        self._waits: dict[str | None, str | None] = {}  # by implementation of the experts
        windows = layer_windows(model.config)
        try:
            self._check(windows)
        except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{type(model).__name__} must run one token at a time through transformers' attention interface, got "
                f"{type(error).__name__}: {error}; use HFEngine for this model"
            ) from error

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

    def _check(self, windows: dict[int, int | None]) -> None:
        """Learns the layers' shapes, and compares steps, beyond the smallest window, with a forward over all tokens.

        In halves rounding sends some tokens to other experts: where that is too many, with their routes held.
        """
        model = self.model
        exact = model.dtype.itemsize >= 4 and not torch.is_autocast_enabled(model.device.type)
        limit = 1e-3 if exact else 0.1
        error = self._compare_steps(windows, None, largest=exact)
        if not error <= limit and not exact and has_experts(model):
            try:
                with RoutingReplay(model) as routing:
                    error = self._compare_steps(windows, routing, largest=False)
            except ValueError:  # routers that cannot be held: the first comparison stands
                pass
        if not error <= limit:
            raise ValueError(
                f"steps of {type(model).__name__} on a cache must give the hidden states of a whole forward within "
                f"{limit}, got {error:.1e} apart; use HFEngine for this model"
            )

    def _compare_steps(self, windows: dict[int, int | None], routing: RoutingReplay | None, *, largest: bool) -> float:
        """Learns the layers' shapes; relative error of the steps' hidden states, under the forward's routes if held."""
        model, device = self.model, self.model.device
        config = model.config.get_text_config()
        known = [x for x in windows.values() if x is not None and x <= LONGEST_PROBE]
        prompt = 4 if config.model_type in KNOWN_WINDOWS else min(known, default=2) + 2
        tokens = max(min(prompt + PROBE_STEPS, getattr(config, "max_position_embeddings", None) or 2**31), 2)
        prompt = min(prompt, tokens - 1)
        kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        ids = torch.arange(1, 1 + tokens, device=device)[None] * 7 % config.vocab_size
        length = torch.tensor([tokens], device=device)
        with nullcontext([]) if routing is None else routing.record() as records:
            expected = self.prefill(ids, length, lambda layer, *pair: kept.update({layer: pair}))[0, prompt:]
        for layer, (key, value) in sorted(kept.items()):
            self.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3], windows.get(layer))
        dtype = next(iter(kept.values()))[0].dtype if kept else model.dtype
        cache = KVCache(self.layers, 1, tokens + 1, device=device, dtype=dtype)
        row = torch.zeros_like(length)
        for layer, pair in kept.items():
            start = [x[:, :, :prompt] for x in pair]
            cache.load(layer, *start, rows=row, sources=row, lengths=row + prompt)
        cache.lengths += prompt
        made = []
        for place in range(prompt, tokens):
            routes = [replace(x, indices=x.indices[:, place : place + 1]) for x in records]
            with nullcontext() if routing is None else routing.replay(*routes):
                made.append(self.forward(ids[:, place], cache)[0])
            cache.lengths += 1
        expected, made = expected.double(), torch.stack(made).double()
        errors = (made - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-30)
        return float(errors.max() if largest else errors.median())

    def waits_for_host(self) -> str | None:
        """On a GPU, why a step cannot be a CUDA graph: what PyTorch says of it, logged once; None: it can."""
        experts = getattr(self.model.config.get_text_config(), "_experts_implementation", None)
        if experts not in self._waits:
            cache = KVCache(self.layers, 1, 2, device=self.model.device, dtype=self.model.dtype)
            tokens = torch.ones(1, dtype=torch.long, device=self.model.device)
            self._waits[experts] = waits = self._what_waits(tokens, cache)
            if waits:
                logger.warning(
                    "Decode steps of %s run eagerly, not as CUDA graphs, since they wait for the host (%s). "
                    'Experts do not with experts_implementation="grpo_moe" (GPT-OSS-Lite: moe_dispatch="fused").',
                    type(self.model).__name__,
                    waits,
                )
        return self._waits[experts]

    def _what_waits(self, tokens: torch.Tensor, cache: KVCache) -> str | None:
        self.forward(tokens, cache)  # kernels are compiled, workspaces made
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
            try:
                self.forward(tokens, cache)
            except RuntimeError as error:
                return str(error).splitlines()[0]
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        return None
