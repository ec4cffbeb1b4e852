"""Rotary position embedding of GPT-OSS-Lite: interleaved pairs, YaRN frequencies, pruned rotation on full layers."""

from __future__ import annotations

import logging
import math
from functools import lru_cache

import torch

logger = logging.getLogger(__name__)


@lru_cache(maxsize=64)
def yarn_inverse_frequencies(
    head_dim: int, theta: float, scale: float, original_length: int, beta_fast: float, beta_slow: float
) -> torch.Tensor:
    """Inverse frequencies [head_dim // 2] in fp32 on the CPU: low ones divided by ``scale``, high ones kept.

    Source: YaRN, arXiv 2309.00071, section 3.2, with the ramp bounds of shared/design/gptoss_lite.md.
    """
    half = head_dim // 2
    pairs = torch.arange(half, dtype=torch.float32)
    base = 1 / theta ** (pairs / half)
    if scale <= 1:
        return base
    low = max(math.floor(half / math.log2(original_length / beta_slow * math.pi)), 0)
    high = min(math.ceil(half / math.log2(original_length / beta_fast * math.pi)), half - 1)
    if high <= low:
        logger.warning("YaRN ramp is empty (low %d, high %d): the frequencies stay unscaled.", low, high)
        return base
    ramp = ((pairs - low) / max(high - low, 1)).clamp(0, 1)
    return base * (1 - ramp) + base / scale * ramp


@lru_cache(maxsize=64)
def _on_device(device: torch.device, *settings) -> torch.Tensor:
    """The frequencies where they are needed: a CUDA graph cannot copy them there."""
    return yarn_inverse_frequencies(*settings).to(device)


def rotary_tables(config, positions: torch.Tensor, dtype: torch.dtype) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Cosines and sines [B, T, head_dim // 2] by layer type, YaRN's magnitude scale included.

    Args:
        config: GptOssLiteConfig.
        positions: [B, T] integer positions.
        dtype: of the activations; the tables have it or fp32, whichever is wider.
    """
    frequencies = _on_device(
        positions.device,
        config.head_dim,
        config.rope_theta,
        config.yarn_scale_factor,
        config.yarn_original_max_position_embeddings,
        config.yarn_beta_fast,
        config.yarn_beta_slow,
    )
    stretched = config.yarn_mscale and config.yarn_scale_factor > 1
    magnitude = 0.1 * math.log(config.yarn_scale_factor) + 1 if stretched else 1.0
    angles = positions[..., None].to(torch.promote_types(dtype, torch.float32)) * frequencies
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    tables = {"sliding_attention": (cos, sin), "full_attention": (cos, sin)}
    if config.yarn_prune_rope_global:
        kept = torch.arange(cos.shape[-1], device=cos.device) >= config.head_dim // 4
        tables["full_attention"] = (torch.where(kept, cos, 1.0), torch.where(kept, sin, 0.0))
    return tables


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the interleaved pairs (2k, 2k + 1) of x [B, heads, T, D] by tables [B, T, D // 2]."""
    first, second = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.flatten(-2).to(x.dtype)
