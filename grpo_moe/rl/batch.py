"""From groups of completions to padded tensors, to some of their rows, to log-probabilities and the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from grpo_moe.adapters.hf_head import TokenLogpsOutput, completion_logps, completion_loss
from grpo_moe.adapters.routing_record import RoutingRecord
from grpo_moe.types import Completion, Prompt, RolloutBatch


@dataclass(frozen=True)
class Group:
    """A prompt, its G completions and their rewards."""

    prompt: Prompt
    completions: list[Completion]
    scores: torch.Tensor
    """[G] float64 weighted sums of the reward functions; NaN where none scored."""
    rewards: torch.Tensor
    """[G] float64 scores plus shaping (the overlong punishment)."""
    values: list[list[float]]
    """[F][G] of each reward function."""
    skipped: bool = False
    """Whether a reward function failed on a completion: the group takes no part in an update."""
    has_signal: bool = False
    """Whether what advantages are made of tells two completions apart; without, all advantages are exactly 0."""


def collate(
    groups: Sequence[Group], advantages: torch.Tensor, *, mask_truncated: bool, device: torch.device
) -> RolloutBatch:
    """Rows of the groups in order; with no group, one masked row, so that a forward is still possible.

    Args:
        groups: P groups of G completions.
        advantages: [P, G].
        mask_truncated: leave completions that ended without EOS out of the loss.
        device: of the tensors.

    Raises:
        ValueError: a completion has not one log-probability a token, or some have routes and some have none.
    """
    rows = [(g.prompt.input_ids, c) for g in groups for c in g.completions]
    if not rows:
        rows = [((0,), Completion((0,), (0.0,), "length"))]
        advantages, mask_truncated = torch.zeros(1), True
    prompts = [torch.tensor(ids) for ids, _ in rows]
    tokens = [torch.tensor(c.token_ids, dtype=torch.long) for _, c in rows]
    learned = [
        torch.full_like(t, not mask_truncated or c.finish_reason == "stop")
        for t, (_, c) in zip(tokens, rows, strict=True)
    ]
    sequences = [torch.cat(pair) for pair in zip(prompts, tokens, strict=True)]
    routes = [c.routes for _, c in rows if c.routes is not None]
    if len(routes) not in (0, len(rows)):
        raise ValueError(
            f"routes must be on every completion or on none, got {len(routes)} of {len(rows)}; give return_routes to "
            "every call of the engine"
        )
    return RolloutBatch(
        input_ids=pad_sequence(sequences, batch_first=True).to(device),
        attention_mask=pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True).bool().to(device),
        prompt_lengths=torch.tensor([len(p) for p in prompts], device=device),
        completion_ids=pad_sequence(tokens, batch_first=True).to(device),
        completion_mask=pad_sequence(learned, batch_first=True).bool().to(device),
        advantages=advantages.flatten().float().to(device),
        sampling_logps=pad_sequence([_sampling_logps(c) for _, c in rows], batch_first=True).to(device),
        routes=RoutingRecord.concat_rows(routes).to(device) if routes else None,
    )


def _sampling_logps(completion: Completion) -> torch.Tensor:
    """[T] fp32, NaN for a token that the engine did not score."""
    logps = [math.nan if x is None else x for x in completion.sampling_logps]
    if len(logps) != len(completion.token_ids):
        raise ValueError(
            f"sampling_logps must be one number for each of the {len(completion.token_ids)} token_ids of a completion, "
            f"got {len(logps)}; an engine gives None or NaN for a token that it did not score"
        )
    return torch.tensor(logps, dtype=torch.float32)


def select(batch: RolloutBatch, rows: torch.Tensor) -> RolloutBatch:
    """The given rows of every tensor, cut to their own longest sequence and completion.

    No rows give the first row with an empty mask: a micro-batch that adds nothing, for processes that have run out.
    """
    if not len(rows):
        batch = dataclasses.replace(batch, completion_mask=torch.zeros_like(batch.completion_mask))
        rows = torch.zeros(1, dtype=torch.long)
    given = {f.name: value for f in dataclasses.fields(batch) if (value := getattr(batch, f.name)) is not None}
    routes = given.pop("routes", None)
    chosen = {name: value[rows] for name, value in given.items()}
    width = int(chosen["attention_mask"].sum(1).max())
    completion_width = int((chosen["attention_mask"].sum(1) - chosen["prompt_lengths"]).max())
    for name, value in chosen.items():
        if value.dim() == 2:
            chosen[name] = value[:, : width if name in ("input_ids", "attention_mask") else completion_width]
    return RolloutBatch(**chosen, routes=None if routes is None else routes.rows(rows).resize(width))


def batch_logps(model, batch: RolloutBatch, **options) -> TokenLogpsOutput:
    """:func:`completion_logps` of the rows of a batch, with its options (temperature, return_entropy, ...)."""
    return completion_logps(
        model,
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        prompt_lengths=batch.prompt_lengths,
        completion_ids=batch.completion_ids,
        completion_mask=batch.completion_mask,
        **options,
    )


def batch_loss(model, batch: RolloutBatch, loss_fn: Callable[..., Any], *, padding_free: bool = False) -> Any:
    """:func:`completion_loss` of the rows of a batch."""
    return completion_loss(
        model,
        loss_fn,
        input_ids=batch.input_ids,
        attention_mask=batch.attention_mask,
        prompt_lengths=batch.prompt_lengths,
        completion_length=batch.completion_ids.shape[1],
        padding_free=padding_free,
    )
