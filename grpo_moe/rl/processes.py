"""The processes of a run: their Accelerator, what they agree on, and whether they still hold the same parameters."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch.distributed.tensor import DTensor

from .config import GRPOConfig
from .launch import runs_on_cpu, world_size
from .sharding import check_parallelism, shard_on_cpus, sharding_plugin


def make_accelerator(args: GRPOConfig) -> Accelerator:
    """Accelerate for a run with these options.

    Raises:
        RuntimeError: a state made before knows of other processes.
        ValueError: DeepSpeed, FSDP or parallelism that is not supported, another precision than before, a missing
            tracker.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        raise ValueError(
            "distributed_type must not be DEEPSPEED, whose engine steps by itself, got ACCELERATE_USE_DEEPSPEED; FSDP2 "
            "shards as ZeRO-3 does (recipes/accelerate/fsdp2.yaml; with fsdp_reshard_after_forward: false as ZeRO-2)"
        )
    mixed_precision = "bf16" if args.bf16 else None  # None: as accelerate was launched
    on_cpu, plugin = runs_on_cpu(args.use_cpu), sharding_plugin(mixed_precision)
    if on_cpu and plugin is not None:
        shard_on_cpus(plugin)
    try:
        accelerator = Accelerator(
            mixed_precision=mixed_precision,
            cpu=on_cpu,
            fsdp_plugin=plugin,
            log_with=args.report_to if args.report_to != "none" else None,
            project_dir=args.output_dir,
        )
    except ValueError as error:
        if "already been initialized" not in str(error):
            raise
        raise ValueError(f"bf16 and use_cpu must be those of the first trainer of this process: {error}") from error
    wanted = mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if accelerator.mixed_precision != wanted:
        raise ValueError(
            f"bf16 must be that of the first trainer of this process, whose precision is "
            f"{accelerator.mixed_precision!r}, got {args.bf16}; start another process"
        )
    if args.report_to not in (None, "none") and not accelerator.log_with:
        raise ValueError(f"report_to must be a tracker that is installed, got {args.report_to!r}; install it")
    if world_size() != accelerator.num_processes:
        raise RuntimeError(
            f"num_processes must be {world_size()} as launched, got {accelerator.num_processes}; make no accelerate "
            "state before the trainer, or one with runs_on_cpu()"
        )
    check_parallelism(accelerator)
    accelerator.gradient_accumulation_steps = 1  # its backward would divide; the loss has its own normaliser
    return accelerator


def agree(*flags: bool) -> list[bool]:
    """Each flag, true everywhere when it is true on any process."""
    return [any(column) for column in zip(*gather_object([flags]), strict=True)]


def on_main(accelerator: Accelerator, work: Callable[[], None]) -> None:
    """Calls ``work`` on the main process; every process calls this.

    Raises:
        OSError, ValueError: what ``work`` raised, on every process: none may wait for one that has ended.
    """
    error = None
    try:
        if accelerator.is_main_process:
            work()
    except (OSError, ValueError) as caught:
        error = caught
    told = [other for other in gather_object([error]) if other is not None]
    if told:
        raise error or told[0]


@torch.no_grad()
def check_ranks_agree(model: torch.nn.Module) -> None:
    """Raises RuntimeError when parameters that every process holds whole are not the same on all."""
    whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
    sums = gather_object([[float(p.double().sum()) for p in whole]])
    if any(other != sums[0] for other in sums):
        raise RuntimeError("parameters must be equal on all processes after training, got different sums; report this")


def end_trackers(accelerator: Accelerator) -> None:
    """Closes the trackers. accelerate's own ``end_training`` would also end the process group, which saving needs."""
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.wait_for_everyone()
    atexit.register(accelerator.state.destroy_process_group)
