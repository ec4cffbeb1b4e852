"""What a run needs by the planner: its memory for messages and the doctor, and the FLOPs of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from grpo_moe import planning

from .batch import Group
from .collect import Rollout
from .config import GRPOConfig

if TYPE_CHECKING:
    from .trainer import GRPOTrainer


def run_shape(args: GRPOConfig, config: Any, **given: Any) -> planning.RunShape:
    """What of the options decides memory, for one process; ``given`` are fields that no option says, or others."""
    period = args.gradient_checkpointing_every or getattr(config, "grad_ckpt_every", 1)
    known = dict(
        micro_batch=args.per_device_train_batch_size,
        completion_tokens=args.max_completion_length,
        prompts_per_rollout=args.prompts_per_rollout,
        num_generations=args.num_generations,
        accumulates=args.gradient_accumulation_steps > 1,
        old_logps=args.updates_per_rollout > 1 or args.router_aux_loss_coef > 0,
        reference=args.beta > 0,
        checkpoint_period=period if args.gradient_checkpointing else None,
        padding_free=args.padding_free,
        bf16=args.bf16,
        routes=args.routing_replay == "R3",
        experts="stacked" if getattr(config, "moe_dispatch", None) == "stacked" else "fused",
    )
    return planning.RunShape(**known | given)


def memory_forecast(trainer: GRPOTrainer, memory_bytes: int) -> planning.MemoryPlan | None:
    """The plan of a trainer on GPUs of this size; None where the planner does not know the model."""
    accelerator, config = trainer.accelerator, trainer.policy.config
    adapters = None if trainer.adapters is None else trainer.adapters.active_peft_config
    given = {
        "prompt_tokens": trainer.source.longest(),
        "bf16": accelerator.mixed_precision == "bf16",
        "lora_rank": getattr(adapters, "r", 0),
        "lora_experts": any("experts" in name for name in getattr(adapters, "target_parameters", None) or ()),
        "weight_bytes": 2 if trainer.policy.dtype.itemsize == 2 else 4,
    }
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    hardware = planning.Hardware("this GPU", memory_bytes, 0.0, is_hopper)
    sharding = "fsdp2" if accelerator.is_fsdp2 else "ddp" if accelerator.num_processes > 1 else "none"
    copies = accelerator.parallelism_config.dp_replicate_size if accelerator.parallelism_config else 1
    try:
        run = run_shape(trainer.args, config, **given)
        return planning.plan_memory(config, run, hardware, accelerator.num_processes // copies, sharding)
    except ValueError:
        return None


def forecast_in_words(trainer: GRPOTrainer, memory_bytes: int) -> str:
    """:func:`memory_forecast` in a line."""
    return plan_in_words(memory_forecast(trainer, memory_bytes))


def plan_in_words(plan: planning.MemoryPlan | None) -> str:
    """The phases of a plan in a line."""
    if plan is None:
        return "no forecast: the planner does not know the model"
    phases = ", ".join(f"{phase} {plan.bytes_of(phase) / 2**30:.1f}" for phase in plan.phases)
    return f"forecast: {phases} of {plan.capacity_bytes / 2**30:.1f} GiB"


class Utilization:
    """Model FLOPs of each phase over what the GPUs can do; nothing on other devices or for models not known.

    Args:
        config: of the policy.
        args: the options.
        trains_all: False where most weights are frozen, as under LoRA.
    """

    def __init__(self, config: Any, args: GRPOConfig, *, trains_all: bool):
        self.args, self.trains_all, self.shape = args, trains_all, None
        if torch.cuda.is_available():
            with suppress(ValueError):
                self.peak = planning.device_peak_flops(torch.cuda.get_device_name())
                self.shape = planning.ModelShape.from_config(config)

    def metrics(self, rollout: Rollout, seconds: dict[str, float]) -> dict[str, float]:
        """``mfu/<phase>`` of this process for its groups, by their mean lengths; recomputation does not count.

        None of rollouts that run beside the update.
        """
        if self.shape is None:
            return {}
        phases = {"update": self._flops(rollout.kept, "forward", "backward")}
        if not self.args.rollout_lag:
            phases["rollout"] = self._flops(rollout.generated, "prefill", "decode")
        return {
            f"mfu/{phase}": planning.model_flops_utilization(count, seconds[phase], self.peak)
            for phase, count in phases.items()
            if count and seconds.get(phase)
        }

    def _flops(self, groups: Sequence[Group], *parts: str) -> int:
        completions = [c for group in groups for c in group.completions]
        if not completions:
            return 0
        flops = planning.grpo_step_flops(
            self.shape,
            num_sequences=len(completions),
            num_generations=self.args.num_generations,
            prompt_tokens=round(sum(len(g.prompt.input_ids) for g in groups) / len(groups)),
            completion_tokens=max(1, round(sum(len(c.token_ids) for c in completions) / len(completions))),
            num_iterations=self.args.num_iterations,
            frozen=not self.trains_all,
        )
        return sum(flops[part] for part in parts)
