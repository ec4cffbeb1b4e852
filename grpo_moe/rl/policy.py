"""The policy that a run trains, its frozen reference, and the log-probabilities of both."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from grpo_moe.adapters.coverage import coverage, coverage_table, unreached_adapters
from grpo_moe.adapters.hf_attention import check_sinks
from grpo_moe.adapters.hf_head import add_token_logps, check_head, check_padding_free, check_training_mode
from grpo_moe.rollout.base import checkpointed_modules
from grpo_moe.text import say
from grpo_moe.types import RolloutBatch

from .batch import batch_logps, select
from .config import GRPOConfig
from .loading import disable_dropout, move_weights, reference_model, without_adapters
from .routing import PolicyRouting, close_routing
from .sharding import shard_frozen
from .windows import micro_batches, padded


class Policy:
    """A model made ready for training, with its optimiser, reference and routers.

    Args:
        model: the policy, not wrapped; it is changed in place.
        adapters: PEFT's wrapper of it, or None; the reference is then the model without them.
        args: the options.
        accelerator: of the run.
        optimizers: an optimiser of the model's parameters and a schedule; None for those of the options.

    Raises:
        ValueError: the head, sinks, packing or routers are not supported as asked, or nothing would train.
    """

    def __init__(
        self, model: PreTrainedModel, adapters: Any, args: GRPOConfig, accelerator: Accelerator, optimizers: tuple
    ):
        self.args, self.adapters, self.accelerator = args, adapters, accelerator
        self._adapters_reached = False
        disable_dropout(model)
        close_routing(model)
        self.model = add_token_logps(model)
        if not accelerator.is_fsdp2:  # which moves its shards alone
            move_weights(model, accelerator.device)
        self.reference = None
        if args.beta:  # adapters are switched off for it
            self.reference = reference_model(model) if adapters is None else self.model
        self._check_moving_reference()
        self.routing = PolicyRouting(model, args)
        if adapters is not None and accelerator.is_main_process:
            say(coverage_table(coverage(model)))
        if not self.trainable:
            fix = "unfreeze some" if adapters is None else "load the adapters with is_trainable=True"
            raise ValueError(f"model must have parameters that require gradients, got none; {fix}")
        if halves := [name for name, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16]:
            raise ValueError(
                f"parameters that train must be float32 (or bfloat16), got float16 in {halves[0]} and "
                f"{len(halves) - 1} others, which AdamW's first step makes NaN; load the model with dtype=torch.float32"
            )
        optimizer, self.scheduler = self._optimizers(optimizers)
        accelerator.register_for_checkpointing(self.scheduler)  # prepared, it would be stepped once a process
        if not accelerator.is_fsdp2:
            self._examine()
        self.wrapped, self.optimizer = accelerator.prepare(model, optimizer)
        if self.reference is not None and adapters is None:
            self.reference = shard_frozen(self.reference, accelerator)
        if accelerator.is_fsdp2:  # no process need have held the whole model before
            self._examine()
        if args.gradient_checkpointing or checkpointed_modules(model):  # renamed in transformers 5.24
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(self.routing.checkpointing_kwargs)
            self._checkpoint_every(args.gradient_checkpointing_every)
        self.wrapped.train()

    @property
    def trainable(self) -> list[torch.nn.Parameter]:
        """Parameters that require gradients."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def add_logps(self, batch: RolloutBatch) -> RolloutBatch:
        """Adds log-probabilities by the policy before its update (unless there is just one) and by the reference."""
        if self.args.updates_per_rollout > 1 or self.args.router_aux_loss_coef:
            records = []
            old_logps = self.logps(self.model, batch, lambda part: self.routing.scoring(part, records))
            if self.args.updates_per_rollout > 1:
                batch = replace(batch, old_logps=old_logps)
            batch = self.routing.scored(batch, records, torch.cat(self._every_row(batch)))
        if self.reference is not None:
            with nullcontext() if self.adapters is None else without_adapters(self.adapters):
                batch = replace(batch, ref_logps=self.logps(self.reference, batch))
        return batch

    @torch.no_grad()
    def logps(
        self,
        model: PreTrainedModel,
        batch: RolloutBatch,
        around: Callable[[RolloutBatch], AbstractContextManager] = lambda part: nullcontext(),
    ) -> torch.Tensor:
        """Log-probabilities [B, T] of the batch under a model, in micro-batches, each run inside ``around(it)``."""
        logps = torch.zeros_like(batch.sampling_logps)
        options = {"temperature": self.args.temperature, "padding_free": self.args.padding_free}
        for rows in self._every_row(batch):
            part = select(batch, rows)
            with self.accelerator.autocast(), around(part) if len(rows) else nullcontext():
                scored = batch_logps(model, part, **options)
            logps[rows, : part.completion_ids.shape[1]] = scored.logps.float()
        return logps

    @torch.no_grad()
    def sync_reference(self) -> None:
        """Moves the reference toward the policy: ref = a * policy + (1 - a) * ref, a = ``ref_model_mixup_alpha``.

        Source: TR-DPO, arXiv 2404.09656.
        """
        for reference, policy in zip(self.reference.parameters(), self.model.parameters(), strict=True):
            reference.lerp_(policy.detach().to(reference.dtype), self.args.ref_model_mixup_alpha)

    def check_adapters(self, grad_norm: float) -> None:
        """Before the first update with a gradient: an adapter that it does not reach never learns.

        Raises:
            ValueError: naming the adapters.
        """
        if self.adapters is None or self._adapters_reached or not 0 < grad_norm < math.inf:
            return
        if unreached := unreached_adapters(self.model.named_parameters()):
            raise ValueError(
                f"adapters must all get a gradient, got none at {', '.join(unreached[:8])} ({len(unreached)} in all); "
                "take them out of target_modules and target_parameters"
            )
        self._adapters_reached = True

    def _examine(self) -> None:
        """Finds out by forwards, of parameters in their own precision, what the model does."""
        check_training_mode(self.model)
        check_head(self.model)
        check_sinks(self.model)
        if self.args.padding_free:
            check_padding_free(self.model)
        self.routing.find_rules()

    def _checkpoint_every(self, period: int | None) -> None:
        """Leaves all blocks but every ``period``-th (0, g, 2g, ...) with their activations."""
        if period is None:
            return
        if hasattr(self.model.config, "grad_ckpt_every"):  # GPT-OSS-Lite chooses its blocks itself
            self.model.config.grad_ckpt_every = period
            return
        blocks = [m for m in self.model.modules() if isinstance(m, GradientCheckpointingLayer)]
        if not blocks:
            raise ValueError(
                f"gradient_checkpointing_every must be unset for {type(self.model).__name__}, whose blocks are not "
                f"checkpointed one by one, got {period}; leave it out"
            )
        for number, block in enumerate(blocks):
            block.gradient_checkpointing = number % period == 0

    def _check_moving_reference(self) -> None:
        if not self.args.sync_ref_model:
            return
        if self.adapters is not None:
            raise ValueError("sync_ref_model must be False with adapters, whose reference is the model without")
        if self.accelerator.is_fsdp2:
            raise ValueError("sync_ref_model must be False under FSDP, whose checkpoints hold one model; use DDP")
        self.accelerator.register_for_checkpointing(self.reference)

    def _optimizers(self, given: tuple) -> tuple[torch.optim.Optimizer, Any]:
        """The optimiser and schedule given, or AdamW and the schedule of the options for what is None."""
        args = self.args
        if not isinstance(given, tuple | list) or len(given) != 2:
            raise ValueError(
                f"optimizers must be an optimiser and a schedule, each may be None, got {given!r}; pass a pair"
            )
        optimizer, scheduler = given
        if optimizer is None:
            optimizer = torch.optim.AdamW(
                self.trainable,
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
                fused=self.accelerator.device.type == "cuda" or None,  # a step without a second copy of the moments
            )
        self._check_optimizer(optimizer)
        if scheduler is None:
            scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps)
        if getattr(scheduler, "optimizer", None) is not optimizer:
            raise ValueError(
                f"optimizers must hold a schedule of their own optimiser, got {scheduler!r} of another one; pass both"
            )
        _check_step(scheduler, "LambdaLR")
        return optimizer, scheduler

    def _check_optimizer(self, optimizer: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(f"optimizers must hold a torch.optim.Optimizer or None first, got {optimizer!r}; make one")
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        left = [name for name, p in self.model.named_parameters() if p.requires_grad and id(p) not in held]
        if left:
            raise ValueError(
                f"optimizers must hold every parameter that requires a gradient, got none of {', '.join(left[:4])} "
                f"({len(left)} in all); build it from this model's parameters, or freeze these"
            )
        _check_step(optimizer, "AdamW")

    def _every_row(self, batch: RolloutBatch) -> list[torch.Tensor]:
        """All rows in micro-batches, as many on every process."""
        parts = micro_batches(batch, torch.arange(len(batch.input_ids)), self.args.per_device_train_batch_size)
        return padded(parts, max(gather_object([len(parts)])))


def _check_step(given: Any, usual: str) -> None:
    """Refuses an optimiser whose step wants a closure, as LBFGS's, and a schedule whose step wants a metric."""
    # of the class: what a schedule puts around its optimiser's step has a self in its signature
    _, *parameters = inspect.signature(type(given).step).parameters.values()
    wanted = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if wanted:
        raise ValueError(
            f"optimizers must have a step without arguments, got {type(given).__name__}, whose step needs "
            f"{', '.join(wanted)}; use another one, as {usual}"
        )
