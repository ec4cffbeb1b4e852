"""Attention with learned sinks, for GPT-OSS-Lite and any model that adds a sink logit to the softmax denominator."""

from .flex import flex_sink_attention
from .reference import sink_attention
from .sdpa import sdpa_sink_attention

__all__ = ["flex_sink_attention", "sdpa_sink_attention", "sink_attention"]
