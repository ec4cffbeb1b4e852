"""By what rule a router makes weights from logits, found by comparing with what it returned itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class RouterRule:
    """How a router makes weights from logits."""

    positions: tuple[int, int, int]
    """Of logits [N, E], weights [N, K] and experts [N, K] in the router's output."""
    scores: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    fp32: bool
    """Whether scores are taken in fp32 (or wider), or in the dtype of the logits."""
    normalise: bool
    scale: float

    def weights(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """[N, K] weights of the experts ``chosen`` [N, K] from logits [N, E]."""
        if self.fp32:
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = self.scores(logits, chosen)
        if self.normalise:  # replayed experts may all have underflown, which the router's own choice never does
            scores = scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
        return scores * self.scale

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, E] fp32 (or wider), summing to 1 over the experts."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.scores is not _sigmoid:
            return logits.softmax(-1)
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True)


def _softmax_all(logits, chosen):
    return logits.softmax(-1).gather(1, chosen)


def _softmax_chosen(logits, chosen):
    return logits.gather(1, chosen).softmax(-1)


def _sigmoid(logits, chosen):
    return logits.sigmoid().gather(1, chosen)


@torch.no_grad()
def match_rule(name: str, router: nn.Module, out: object) -> RouterRule:
    """The rule whose weights are nearest to the router's own; which output is which differs by model and version.

    Args:
        name: of the router, for messages.
        router: the module, asked for its ``routed_scaling_factor``.
        out: what it returned: logits [N, E], weights [N, K] and experts [N, K], in any order.

    Raises:
        ValueError: no rule explains the weights, or several that differ elsewhere do.
    """
    matrices = [(i, x) for i, x in enumerate(out) if x.dim() == 2] if isinstance(out, tuple) else []
    experts = [(i, x) for i, x in matrices if x.dtype == torch.int64]
    floats = [(i, x) for i, x in matrices if x.is_floating_point()]
    width = max((x.shape[1] for _, x in floats), default=0)
    scales = {1.0, *(float(m.routed_scaling_factor) for m in router.modules() if hasattr(m, "routed_scaling_factor"))}
    found = []
    for (i, chosen), ((j, logits), (k, weights)) in itertools.product(experts, itertools.permutations(floats, 2)):
        if logits.shape != (len(chosen), width) or weights.shape != chosen.shape:
            continue
        tolerance = max(1e-5, 4 * torch.finfo(logits.dtype).eps, 4 * torch.finfo(weights.dtype).eps)
        scores = (_softmax_all, _softmax_chosen, _sigmoid)
        for choice in itertools.product(scores, (True, False), (False, True), scales):
            rule = RouterRule((j, k, i), *choice)
            error = _distance(rule.weights(logits, chosen).to(weights.dtype), weights)
            if error <= tolerance:
                found.append((error, rule))
    if not found:
        raise ValueError(
            f"the router {name} ({type(router).__name__}) must return logits [N, E], experts [N, K] int64 and their "
            "softmax or sigmoid weights [N, K], normalised or not, scaled or not, got matrices "
            f"{[(list(x.shape), str(x.dtype)) for _, x in matrices]} that no such rule explains; it cannot be replayed"
        )
    least, best = min(found, key=lambda pair: pair[0])
    probe = torch.arange(8.0 * width).sin().view(8, width)
    first = torch.arange(out[best.positions[2]].shape[1]).expand(8, -1)
    rivals = [rule for error, rule in found if error <= 2 * least + 1e-6]
    if len(out[best.positions[2]]) and any(
        _distance(rule.weights(probe, first), best.weights(probe, first)) > 1e-5 for rule in rivals
    ):
        raise ValueError(
            f"the logits of router {name} must tell its rule of weights from others, got logits that fit several, as "
            "of a router that is all zeros; initialise it, or call the model on more tokens first"
        )
    return best


def _distance(made: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest value; 0 without values."""
    return float((made - expected).abs().max() / expected.abs().max()) if len(expected) else 0.0
