"""What keeps a run from wasting a day: loud warnings at the first rollout, and what to do when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from grpo_moe.types import Completion, Prompt

from .batch import Group, collate
from .config import GRPOConfig
from .metrics import Metrics
from .windows import Window

if TYPE_CHECKING:
    from .trainer import GRPOTrainer


def rollout_warnings(groups: Sequence[Group], args: GRPOConfig) -> list[str]:
    """What is wrong with a first rollout that no later one mends by itself."""
    if not groups:
        return []
    completions = [c for group in groups for c in group.completions]
    scores = torch.cat([group.scores for group in groups])
    found = []
    if all(c.finish_reason == "length" for c in completions):
        found.append(
            f"all {len(completions)} completions were cut at max_completion_length = {args.max_completion_length}: "
            "raise it, or check that the policy knows its end-of-sequence token"
        )
    if scores.isnan().all():
        found.append("no reward function scored any completion: check what they return")
    elif bool((scores.nan_to_num(0) == 0).all()):
        found.append("every reward is 0: check the reward functions on a completion that should pass")
    elif not any(group.has_signal for group in groups):
        found.append("all completions of each prompt have the same reward: there is nothing to learn from yet")
    return found


@contextmanager
def out_of_memory_explained(args: GRPOConfig, planned: Callable[[int], str]) -> Iterator[None]:
    """An error that says what was held, what the planner expects and what to lower, in place of CUDA's.

    Args:
        planned: f(bytes of the GPU) giving the planner's numbers, called at need.

    Raises:
        RuntimeError: the GPU's memory ran out inside.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        held, total = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.mem_get_info()[1]
        raise RuntimeError(
            f"a step must fit the GPU's {total / 2**30:.0f} GiB, got {held:.1f} GiB of tensors at the peak "
            f"({planned(total)}); lower "
            f"per_device_train_batch_size ({args.per_device_train_batch_size}; raise gradient_accumulation_steps and "
            f"steps_per_generation by the same factor, the update stays) or max_completion_length "
            f"({args.max_completion_length}), or set gradient_checkpointing ({args.gradient_checkpointing}) or "
            f"padding_free ({args.padding_free})"
        ) from error


def rehearse(trainer: GRPOTrainer) -> None:
    """On a GPU, micro-batches of the longest prompt and completions, forward and backward, so that memory ends early.

    After the first rollout, when the optimiser has its state; rollouts are not rehearsed. Nothing is learned:
    advantages are 0, and the gradient is dropped.
    """
    if trainer.accelerator.device.type != "cuda":
        return
    rows, tokens = trainer.args.per_device_train_batch_size, trainer.args.max_completion_length
    prompt = Prompt((1,) * trainer.source.longest())
    completion = Completion((1,) * tokens, (0.0,) * tokens, "stop")
    group = Group(prompt, [completion] * rows, torch.zeros(rows), torch.zeros(rows), [])
    batch = collate([group], torch.zeros(rows), mask_truncated=False, device=trainer.accelerator.device)
    known = batch.sampling_logps
    batch = replace(batch, old_logps=known, ref_logps=known if trainer.args.beta else None)
    window = Window([torch.arange(rows)], rows * tokens, rows, expert_load=torch.zeros(()))
    for _ in range(min(2, trainer.args.gradient_accumulation_steps)):  # the second beside the gradients of the first
        trainer.accelerator.backward(trainer.loss(batch, window, Metrics()))
    trainer.routing.finish(Metrics())
    trainer.optimizer.zero_grad()
