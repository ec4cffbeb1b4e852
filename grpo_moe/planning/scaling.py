"""Scaling laws in closed form: model and data for a budget, experts, checkpointing periods, the roofline of a tile."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class ScalingFit:
    """Loss in nats of a model of N parameters trained on D tokens: E + A / N^alpha + B / D^beta."""

    irreducible: float
    """E."""
    parameter_scale: float
    """A."""
    token_scale: float
    """B."""
    alpha: float
    beta: float

    def loss(self, parameters: float, tokens: float) -> float:
        """Predicted loss in nats a token."""
        return self.irreducible + self.parameter_scale / parameters**self.alpha + self.token_scale / tokens**self.beta


HOFFMANN_2022 = ScalingFit(1.69, 406.4, 410.7, 0.34, 0.28)
"""Chinchilla's approach 3, rounded as published: 93 tokens a parameter at Chinchilla's own budget, where it took 20.

Source: Hoffmann et al. 2022, arXiv 2203.15556, equation 10 of appendix D.3.
"""
BESIROGLU_2024 = ScalingFit(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""The same data fitted anew; 18 tokens a parameter at Chinchilla's budget.

Source: Besiroglu et al. 2024, arXiv 2404.10102, table 1.
"""


@dataclass(frozen=True)
class Allocation:
    """A model and its data for a budget."""

    parameters: float
    """N; the active ones of a mixture of experts."""
    tokens: float
    """D."""


def training_flops(parameters: float, tokens: float) -> float:
    """C = 6 N D: 2 FLOPs a weight and token forward, 4 backward; N counts active parameters.

    Source: Kaplan et al. 2020, arXiv 2001.08361, section 2.1.
    """
    return 6 * parameters * tokens


def compute_optimal(flops: float, fit: ScalingFit = BESIROGLU_2024) -> Allocation:
    """The allocation of least loss under C = 6 N D.

    With D = C / 6N the loss's derivative in N is 0 where alpha A / N^alpha = beta B / D^beta. Put D in and solve:
    N = G (C/6)^(beta / (alpha + beta)) and D = (C/6)^(alpha / (alpha + beta)) / G, with
    G = (alpha A / (beta B))^(1 / (alpha + beta)).

    Raises:
        ValueError: a budget that is not positive.

    Source: Hoffmann et al. 2022, arXiv 2203.15556, equation 4.
    """
    _positive("flops", flops)
    total = fit.alpha + fit.beta
    scale = (fit.alpha * fit.parameter_scale / (fit.beta * fit.token_scale)) ** (1 / total)
    pairs = flops / 6
    return Allocation(scale * pairs ** (fit.beta / total), pairs ** (fit.alpha / total) / scale)


def ratio_optimal(flops: float, tokens_per_parameter: float = 20.0) -> Allocation:
    """The allocation with D = r N: C = 6 r N^2, so N = sqrt(C / 6r).

    Raises:
        ValueError: a budget or a ratio that is not positive.

    Source: Hoffmann et al. 2022, arXiv 2203.15556: 1.4T tokens for 70B parameters; r moves with C unless alpha = beta.
    """
    _positive("flops", flops)
    _positive("tokens_per_parameter", tokens_per_parameter)
    parameters = math.sqrt(flops / (6 * tokens_per_parameter))
    return Allocation(parameters, tokens_per_parameter * parameters)


def active_parameters(routed: float, shared: float, *, num_experts: int, top_k: int) -> float:
    """N_active = k/E * N_routed + N_shared: a token visits k of E equal experts and everything else.

    Args:
        routed: parameters of all routed experts.
        shared: all others: embedding, attention, routers, shared experts, norms.
        num_experts, top_k: E and k.

    Raises:
        ValueError: k outside 1..E.

    Source: Switch Transformers, arXiv 2101.03961, section 2: FLOPs follow the experts visited, not those stored.
    """
    if not 1 <= top_k <= num_experts:
        raise ValueError(
            f"top_k must be in 1..num_experts={num_experts}, got {top_k}; a token visits that many experts"
        )
    return routed * top_k / num_experts + shared


def effective_parameters(active: float, total: float, *, gamma: float) -> float:
    """N_active^(1 - gamma) * N_total^gamma: the dense model that a mixture of experts is worth, for :meth:`loss`.

    A straight line between both in the logarithm: at gamma = 0 idle experts are worth nothing, at 1 as much as visited
    ones. There is no universal gamma: fit it to runs of one family.

    Raises:
        ValueError: gamma outside 0..1.

    Source: the idea of an effective parameter count, Clark et al. 2022, arXiv 2202.01169.
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma must be in 0..1, got {gamma}; 0 counts active parameters, 1 all of them")
    return active ** (1 - gamma) * total**gamma


def checkpoint_peak_blocks(num_blocks: int, run_length: float) -> float:
    """Peak of activations, in blocks, when runs of g blocks are checkpointed: L/g + g.

    The inputs of all L/g runs are stored, and the backward holds the g blocks of one run. As the rule has it, an input
    counts as much as what a block saves; it is less, so that shorter runs do better than the rule says.

    This is for runs. Wrapping single blocks, every g-th one, keeps what the others save: that is least at g = 1.

    Raises:
        ValueError: a run without blocks.

    Source: Chen et al. 2016, arXiv 1604.06174, section 4.
    """
    _positive("run_length", run_length)
    return num_blocks / run_length + run_length


def optimal_checkpoint_period(num_blocks: int) -> float:
    """G* = sqrt(L): d/dg (L/g + g) = 1 - L/g^2 is 0 there, and the peak is 2 sqrt(L) blocks.

    Raises:
        ValueError: no blocks.

    Source: Chen et al. 2016, arXiv 1604.06174, section 4.
    """
    _positive("num_blocks", num_blocks)
    return math.sqrt(num_blocks)


def wrapped_blocks(num_blocks: int, period: int) -> int:
    """Blocks 0, g, 2g, ... of L: ceil(L/g).

    Raises:
        ValueError: a period below 1, or no blocks.

    Source: the rule of GPT-OSS-Lite's ``grad_ckpt_every``, :mod:`grpo_moe.models.gptoss_lite`.
    """
    _positive("num_blocks", num_blocks)
    if period < 1:
        raise ValueError(f"period must be at least 1, got {period}; 1 wraps every block")
    return math.ceil(num_blocks / period)


def checkpoint_step_factor(num_blocks: int, period: int) -> float:
    """FLOPs of forward and backward when every g-th block (0, g, 2g, ...) is wrapped, relative to none.

    ceil(L/g) blocks run forward twice, so the forward rises by 1 + 1/g when g divides L. It is a third of the step
    (2 of 6 FLOPs a weight), which rises by 1 + 1/(3g): by 11 % at g = 3, by 33 % at g = 1. That is of blocks
    alone: the head, never wrapped, is in :func:`grpo_moe.planning.grpo_step_flops`.

    Raises:
        ValueError: as :func:`wrapped_blocks`.

    Source: Kaplan et al. 2020, arXiv 2001.08361, section 2.1, for the third.
    """
    return 1 + wrapped_blocks(num_blocks, period) / num_blocks / 3


def tile_traffic_reduction(block_m: int, block_n: int, *, num_weights: int = 2) -> float:
    """How much less a GEMM reads with tiles [block_m, block_n] of the output than without.

    Without tiles each multiply-add reads an operand (the other stays in a register): block_m * w * block_n elements a
    step of k, for w weights that meet the same input, as gate and up (W1 and W3) do. A tile reads block_m elements of
    the input and block_n of each weight once: block_m * w * block_n / (block_m + w * block_n), 12.8 for 16 x 32.

    Args:
        block_m, block_n: rows and columns of the tile.
        num_weights: w; 2: gate and up in one launch, 1: a plain GEMM.

    Source: Lam, Rothberg, Wolf 1991, "The cache performance and optimizations of blocked algorithms".
    """
    for name, value in (("block_m", block_m), ("block_n", block_n), ("num_weights", num_weights)):
        _positive(name, value)
    width = num_weights * block_n
    return block_m * width / (block_m + width)


def tile_intensity(block_m: int, block_n: int, *, num_weights: int = 2, element_bytes: int = 2) -> float:
    """FLOPs of a GEMM tile for each byte that it reads.

    2 FLOPs a multiply-add: 2 * block_m * w * block_n of them, over element_bytes * (block_m + w * block_n), a step of
    k. In bf16 that is the traffic reduction: 12.8 FLOP/B for 16 x 32, 42.7 for 64 x 64. Output and caches are left out.

    Source: Williams, Waterman, Patterson 2009, "Roofline".
    """
    _positive("element_bytes", element_bytes)
    return 2 * tile_traffic_reduction(block_m, block_n, num_weights=num_weights) / element_bytes


def attainable_flops(intensity: float, *, peak_flops: float, bytes_per_second: float) -> float:
    """FLOP/s under the roofline: min(peak, intensity * bandwidth); both meet at peak / bandwidth FLOP/B.

    Source: Williams, Waterman, Patterson 2009, "Roofline".
    """
    return min(peak_flops, intensity * bytes_per_second)


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise ValueError(f"{name} must be positive, got {value}; pass a size")
