"""Runs every check on a trainer and leaves it as it was; the table that people read, and the exit code."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from accelerate.utils import gather_object

from grpo_moe.rl.metrics import Metrics
from grpo_moe.text import clean

from .gradients import check_gradients
from .losses import check_attention_sinks, check_losses, check_rollout
from .rewards import check_alignment, check_rewards
from .sample import Check, roll_out

if TYPE_CHECKING:
    from grpo_moe.rl.trainer import GRPOTrainer


def doctor(trainer: GRPOTrainer) -> list[Check]:
    """Every check, on two prompts' completions and one forward and backward of each.

    Weights, optimiser, random states, gradients, flags and the position in the prompts are left as they were. Every
    process of a run must call it; each judges its own rows.
    """
    with _untouched(trainer):
        sample = roll_out(trainer)
        windows = trainer.minibatches(sample.batch, len(sample.batch.input_ids))
        checks = [*check_losses(sample, windows), check_rollout(sample), check_attention_sinks(trainer)]
        checks += check_gradients(sample, windows)
        checks += [check_alignment(sample), *check_rewards(sample)]
    return checks


def doctor_table(checks: Sequence[Check]) -> str:
    """The checks as text, for people: what was found, and for failures what it must be and what to do."""
    lines = []
    for check in checks:
        status = {True: "ok", False: "FAIL", None: "-"}[check.ok]
        lines.append(f"{status:5}{check.name:20}{clean(check.value, 600)}")
        if check.ok is False:
            lines += [f"{'':25}must be {check.rule}", f"{'':25}fix: {check.fix}"]
    failed = sum(check.ok is False for check in checks)
    return "\n".join([*lines, f"{failed} of {len(checks)} checks failed" if failed else "no check failed"])


def run_doctor(trainer: GRPOTrainer) -> int:
    """Prints the table on the main process; returns 1 if a check failed on any process, else 0."""
    by_process = gather_object([doctor(trainer)])
    checks = [_first_fault(same) for same in zip(*by_process, strict=True)]
    if trainer.accelerator.is_main_process:
        print(doctor_table(checks), flush=True)
    return int(any(check.ok is False for check in checks))


def _first_fault(checks: Sequence[Check]) -> Check:
    """Of one check on every process: the first that failed, else that of the first process."""
    faults = [(rank, check) for rank, check in enumerate(checks) if check.ok is False]
    if not faults or len(checks) == 1:
        return checks[0]
    rank, check = faults[0]
    return replace(check, value=f"process {rank}: {check.value}")


@contextmanager
def _untouched(trainer: GRPOTrainer) -> Iterator[None]:
    position, seconds = trainer.source.state_dict(), dict(trainer.timer.totals)
    flags = {module: module.training for module in trainer.model.modules()}
    gradients = {p: p.grad for p in trainer.policy.parameters()}
    states, faults = (random.getstate(), np.random.get_state()), trainer.collector.faults.copy()
    device = trainer.accelerator.device
    for p in gradients:
        p.grad = None
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield
        trainer.routing.finish(Metrics())  # forgets the expert load of our forwards
    finally:
        for p, gradient in gradients.items():
            p.grad = gradient
        for module, flag in flags.items():
            module.training = flag
        random.setstate(states[0])
        np.random.set_state(states[1])
        trainer.collector.faults = faults
        trainer.source.load_state_dict(position)
        trainer.timer.step_seconds()
        trainer.timer.totals = seconds
