"""The rows of a rollout dealt into optimiser windows, the same whatever the number of processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_moe.types import RolloutBatch

from .config import GRPOConfig


@dataclass(frozen=True)
class Window:
    """The rows of one optimiser update on this process, and the counts over all processes."""

    micro_batches: list[torch.Tensor]
    """Row numbers; an empty one stands for a masked row."""
    num_loss_tokens: int
    num_sequences: int
    """Rows, those without a token too: what mask_truncated_completions leaves out of the loss stays in the divisor of
    the losses that average over rows, as in TRL. Rows without an advantage, not scored or no better than their group,
    count in both numbers, as in TRL; groups that a fault of a reward function cost count in neither."""
    expert_load: torch.Tensor | int = 0
    """[L, E] tokens of each expert by the policy before the updates, for the load-balancing loss."""
    num_routed_tokens: int = 0
    """Tokens that the load was counted over."""


def deal_windows(
    batch: RolloutBatch,
    num_rows: int,
    args: GRPOConfig,
    accelerator: Accelerator,
    *,
    seed: int,
    routing_counts: Callable[[RolloutBatch, torch.Tensor], tuple],
) -> list[Window]:
    """The first ``num_rows`` rows dealt into optimiser windows, each with its counts over all processes.

    The rows of all processes are shuffled as one list, so the windows do not depend on the number of processes; their
    sizes differ by at most one row.
    Every process gets the same number of windows, and in each the same number of micro-batches: a process with
    fewer rows fills up with empty ones, so that no collective is missed.

    Args:
        seed: of the shuffle.
        routing_counts: f(batch, rows) giving the last two counts of :class:`Window` on this process.
    """
    rows_by_process = gather_object([num_rows])
    first = sum(rows_by_process[: accelerator.process_index])
    order = torch.randperm(sum(rows_by_process), generator=torch.Generator().manual_seed(seed))
    dealt = order.tensor_split(args.windows_per_rollout)
    dealt = [rows[(first <= rows) & (rows < first + num_rows)] - first for rows in dealt]
    parts = [micro_batches(batch, rows, args.per_device_train_batch_size) for rows in dealt]
    mask = batch.completion_mask.sum(1).cpu()
    mine = [
        (len(part), int(mask[rows].sum()), len(rows), *routing_counts(batch, rows))
        for part, rows in zip(parts, dealt, strict=True)
    ]
    everyone = gather_object([mine])
    made = []
    for number, part in enumerate(parts):
        micro, *counts = zip(*(counts[number] for counts in everyone), strict=True)
        made.append(Window(padded(part, max(micro)), *map(sum, counts)))
    return made


def micro_batches(batch: RolloutBatch, rows: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Row numbers in micro-batches of at most ``size`` rows, rows of like length together to save padding."""
    by_length = rows[batch.attention_mask.sum(1).cpu()[rows].argsort(stable=True)]
    return list(by_length.split(size))


def padded(micro_batches: list[torch.Tensor], count: int) -> list[torch.Tensor]:
    """The micro-batches and empty ones up to ``count``: a process that has fewer must miss no collective."""
    return micro_batches + [torch.zeros(0, dtype=torch.long)] * (count - len(micro_batches))
