"""The experts that a rollout used, recorded by hooks on the routers for the training forward to replay."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from grpo_moe.adapters.routing import RoutingRecord, RoutingReplay, has_experts
from grpo_moe.types import SamplingParams


def routing_hooks(model, sampling: SamplingParams) -> AbstractContextManager[RoutingReplay | None]:
    """Hooks on the model's routers while the context is open, or None unless ``sampling.return_routes``.

    Raises:
        ValueError: a model without experts.

    Source: R3, arXiv 2510.11370 (the mask of the rollout).
    """
    if not sampling.return_routes:
        return nullcontext()
    if not has_experts(model):
        raise ValueError(
            f"return_routes must be False for {type(model).__name__}, which has no experts, got True; leave it out"
        )
    return RoutingReplay(model)


def recording(routing: RoutingReplay | None) -> AbstractContextManager[list[RoutingRecord]]:
    """A list that gets the record of each forward while the context is open; it stays empty without hooks."""
    return nullcontext([]) if routing is None else routing.record()


def sequence_routes(record: RoutingRecord, row: int, tokens: int) -> RoutingRecord:
    """Record [1, tokens, L, K] of one row of ``record`` [B, T, L, K], -1 for its last token.

    That token was sampled but never had to be forwarded; what the row did after it, beside longer ones, is cut.
    """
    return record.rows(slice(row, row + 1)).resize(tokens - 1).resize(tokens)
