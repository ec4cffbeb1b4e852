"""Attention with learned sinks, for GPT-OSS-Lite and any model that adds a sink logit to the softmax denominator."""

from .reference import sink_attention

__all__ = ["sink_attention"]
