"""Checks of a whole backward pass by the trainer's own loss: who gets a gradient, and the memory it takes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from grpo_moe.adapters.coverage import unreached_adapters
from grpo_moe.ops import LossConfig
from grpo_moe.rl.batch import select
from grpo_moe.rl.forecast import memory_forecast, plan_in_words
from grpo_moe.rl.metrics import Metrics
from grpo_moe.rl.sharding import whole_tensor
from grpo_moe.types import RolloutBatch

from .sample import Check, Sample, listed

MAX_MEMORY_SHARE = 0.9


def check_gradients(sample: Sample, windows: Sequence) -> list[Check]:
    """Gradients and memory of a whole backward pass."""
    trainer, on_gpu = sample.trainer, sample.trainer.accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    load = _backward(sample, windows)
    rule = f"at most {MAX_MEMORY_SHARE:.0%} of the GPU, and forecast to fit"
    fix = "lower per_device_train_batch_size or max_completion_length, or set gradient_checkpointing; see grpo-moe plan"
    memory = Check("memory", None, "measured on a GPU only", rule, fix)
    if on_gpu:
        peak, total = torch.cuda.max_memory_allocated(), torch.cuda.mem_get_info()[1]
        plan = memory_forecast(trainer, total)
        value = (
            f"{peak / 2**30:.1f} of {total / 2**30:.0f} GiB at the peak of this sample, without the optimiser's step; "
        )
        value += plan_in_words(plan)
        fits = peak <= MAX_MEMORY_SHARE * total and (plan is None or plan.fits)
        memory = Check("memory", fits, value, rule, fix)
    named = dict(trainer.policy.named_parameters())
    held = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    wrong = {
        "no gradient": [*_without_gradient(named), *unreached_adapters(named.items())],
        "not finite": [n for n, p in named.items() if not (p.grad is None or whole_tensor(p.grad).isfinite().all())],
        "gradient, but frozen": [n for n, p in named.items() if p.grad is not None and not p.requires_grad],
        "not in the optimiser": [n for n, p in named.items() if p.requires_grad and id(p) not in held],
    }
    idle, skipped = _expert_slices(named, load)
    if _every_token_counts(trainer.args):
        wrong["no gradient at experts with tokens"] = skipped
    trained = sum(p.requires_grad for p in named.values())
    values = [f"{trained} parameters train, {len(named) - trained} do not"]
    values += [listed(kind, names) for kind, names in wrong.items() if names]
    values += [listed("no token at (not a fault)", idle)] if idle else []
    gradients = Check(
        "gradients",
        not any(wrong.values()),
        "; ".join(values),
        "finite and not 0 at every parameter that trains, all of these in the optimiser, and none elsewhere",
        "freeze what cannot learn before the trainer is made, or mend what cuts it off from the loss",
    )
    return [gradients, memory]


def _backward(sample: Sample, windows: Sequence) -> dict[int, torch.Tensor]:
    """Gradients of all windows by the trainer's own loss; returns tokens [E] of each expert by layer.

    Only tokens that predict one are counted: a layer's output at the others may be unused.
    """
    trainer, load = sample.trainer, {}
    replay = trainer.routing.replay
    for window in windows:
        for number, rows in enumerate(window.micro_batches, start=1):
            part = select(sample.batch, rows)
            last = number == len(window.micro_batches)
            with trainer.synced(last):
                with nullcontext([]) if replay is None else replay.record() as records:
                    loss = trainer.loss(part, window, Metrics())
                trainer.accelerator.backward(loss * trainer.accelerator.num_processes)
            for record in records:
                record = record.unpack(part.attention_mask) if trainer.args.padding_free else record
                for layer, tokens in zip(record.layers, record.expert_load(_predicting(part)), strict=True):
                    load[layer] = load.get(layer, 0) + tokens
    return load


def _predicting(batch: RolloutBatch) -> torch.Tensor:
    """[B, S] tokens whose hidden states the loss reads."""
    columns = torch.arange(batch.input_ids.shape[1], device=batch.input_ids.device)
    ends = batch.prompt_lengths + batch.completion_mask.sum(1)
    return (columns >= batch.prompt_lengths[:, None] - 1) & (columns < ends[:, None] - 1)


def _without_gradient(named: dict[str, torch.nn.Parameter]) -> list[str]:
    """Parameters of the model itself; adapters are judged by pairs."""
    trained = {name: p for name, p in named.items() if p.requires_grad and ".lora_" not in name}
    return [name for name, p in trained.items() if p.grad is None or not whole_tensor(p.grad).count_nonzero()]


def _expert_slices(named: dict[str, torch.nn.Parameter], load: dict[int, torch.Tensor]) -> tuple[list, list]:
    """Experts that no token reached, and those that tokens reached but no gradient, in stacked parameters [E, ...]."""
    idle, skipped = dict.fromkeys(f"layer {n} expert {e}" for n, x in load.items() for e in _places(x == 0)), []
    for name, p in named.items():
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        stacked = layer in load and ".experts." in name and ".lora_" not in name and len(p) == len(load[layer])
        if stacked and p.grad is not None:
            moves = whole_tensor(p.grad).flatten(1).count_nonzero(1) > 0
            skipped += [f"{name}[{e}]" for e in _places((load[layer] > 0) & ~moves)]
    return list(idle), skipped


def _places(flags: torch.Tensor) -> list[int]:
    return flags.nonzero()[:, 0].tolist()


def _every_token_counts(args: LossConfig) -> bool:
    masks = "mask" in args.sampler_correction or args.off_policy_mask_threshold is not None
    return args.top_entropy_quantile == 1 and not masks
