"""The small rollout that the checks look at, and what a check says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.rl.batch import Group, batch_logps, collate, select
from grpo_moe.rl.windows import micro_batches
from grpo_moe.types import Prompt, RolloutBatch

if TYPE_CHECKING:
    from grpo_moe.rl.trainer import GRPOTrainer

PROMPTS = 2  # on each process
MAX_NAMES = 8  # that a value lists


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    ok: bool | None
    """None: does not apply to this run, or cannot be judged."""
    value: str
    """What was found."""
    rule: str
    """What it must be."""
    fix: str
    """What to do when it is not."""


@dataclass(frozen=True)
class Sample:
    """A rollout as an update would see it, but for its advantages."""

    trainer: GRPOTrainer
    groups: list[Group]
    batch: RolloutBatch
    """With old and reference log-probabilities, every token in the loss, and advantages 1 and -0.5 in turn: the
    rewards of an untrained policy are often all equal, and would leave nothing to look at."""
    routes: RoutingRecord | None
    """Of the rollout."""

    @property
    def is_precise(self) -> bool:
        """Whether products are in float32 or wider."""
        narrow = any(p.element_size() < 4 for p in self.trainer.policy.parameters())
        return self.trainer.accelerator.mixed_precision == "no" and not narrow


def roll_out(trainer: GRPOTrainer) -> Sample:
    """Completions of the next prompts of this process, collated and scored as for an update."""
    world, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
    prompts = trainer.source.take(PROMPTS * world)[rank * PROMPTS : (rank + 1) * PROMPTS]
    groups = _generate(trainer, prompts)
    count = sum(len(group.completions) for group in groups)
    advantages = torch.tensor([1.0, -0.5]).repeat(count)[:count]
    batch = collate(groups, advantages, mask_truncated=False, device=trainer.accelerator.device)
    routes = batch.routes
    if trainer.args.routing_replay != "R3":
        batch = replace(batch, routes=None)
    return Sample(trainer, groups, trainer.add_reference_logps(batch), routes)


def _generate(trainer: GRPOTrainer, prompts: list[Prompt]) -> list[Group]:
    """Groups, with the rollout's routes where there are experts and the engine returns them."""
    collect, sampling = trainer.collector.generate_groups, trainer.sampling
    if trainer.routing.replay is not None and not sampling.return_routes:
        try:
            return collect(prompts, replace(sampling, return_routes=True))
        except ValueError:  # not every engine can; what else is wrong raises again
            pass
    return collect(prompts, sampling)


def training_logps(sample: Sample, batch: RolloutBatch) -> torch.Tensor:
    """Log-probabilities [B, T] by the training forward, as before an update; replays the batch's routes."""
    trainer, made = sample.trainer, torch.zeros_like(batch.sampling_logps)
    options = {"temperature": trainer.args.temperature, "padding_free": trainer.args.padding_free}
    for rows in micro_batches(batch, torch.arange(len(made)), trainer.args.per_device_train_batch_size):
        part = select(batch, rows)
        with torch.no_grad(), trainer.accelerator.autocast(), trainer.routing.scoring(part, []):
            logps = batch_logps(trainer.policy, part, **options).logps
        made[rows, : logps.shape[1]] = logps.float()
    return made


def listed(kind: str, names: Sequence[str]) -> str:
    """The first names, and how many there are."""
    more = f" ({len(names)} in all)" if len(names) > MAX_NAMES else ""
    return f"{kind}: {', '.join(names[:MAX_NAMES])}{more}"
