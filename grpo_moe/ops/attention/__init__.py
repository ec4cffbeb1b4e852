"""Attention with learned sinks, for GPT-OSS-Lite and any model that adds a sink logit to the softmax denominator."""

from .flex import flex_sink_attention
from .kv_cache import KVCache, LayerShape
from .reference import sink_attention
from .sdpa import sdpa_sink_attention

__all__ = ["KVCache", "LayerShape", "flex_sink_attention", "sdpa_sink_attention", "sink_attention"]
