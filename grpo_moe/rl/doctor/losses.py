"""Checks of log-probabilities and losses: ratio, fused head, auxiliary loss, rollout against training, sinks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from grpo_moe.adapters.hf_attention import check_sinks
from grpo_moe.ops import LossConfig, grpo_loss, grpo_loss_from_logits
from grpo_moe.ops.loss.fused_head import head_dtypes
from grpo_moe.rl.batch import batch_loss, select
from grpo_moe.rl.metrics import Metrics
from grpo_moe.rl.windows import micro_batches
from grpo_moe.types import RolloutBatch

from .sample import Check, Sample, training_logps

if TYPE_CHECKING:
    from grpo_moe.rl.trainer import GRPOTrainer

MAX_LOGITS = 2**27  # elements of the full logits that the fused loss is compared with: 512 MiB in float32


@dataclass
class _Found:
    """What the losses of one micro-batch are like."""

    ratio_error: float = 0.0
    loss_error: float = 0.0
    gradient_errors: dict[str, float] = field(default_factory=dict)


def check_losses(sample: Sample, windows: Sequence) -> list[Check]:
    """Ratio, fused loss and auxiliary loss of the first micro-batch, by one forward with gradient."""
    trainer, found = sample.trainer, _Found()
    batch = sample.batch
    if batch.old_logps is None:
        batch = replace(batch, old_logps=training_logps(sample, batch))
    window = max(windows, key=lambda window: window.num_loss_tokens)
    rows = torch.arange(len(batch.input_ids))
    part = select(batch, micro_batches(batch, rows, trainer.args.per_device_train_batch_size)[0])
    counts = {"num_loss_tokens": window.num_loss_tokens, "num_sequences": window.num_sequences}

    def look(hidden_states, lm_head_weight, **head):
        found.ratio_error = _ratio_error(hidden_states, lm_head_weight, part, head, trainer.args.temperature)
        found.loss_error, found.gradient_errors = _fused_errors(hidden_states, lm_head_weight, part, head, trainer.args)
        return grpo_loss(
            hidden_states, lm_head_weight, part.completion_ids, part.completion_mask, part.advantages, trainer.args,
            **_given(part), **counts, **head,
        ).loss  # fmt: skip

    alone = trainer.accelerator.no_sync(trainer.model)  # no backward follows that would be reduced over processes
    with alone, trainer.accelerator.autocast(), trainer.routing.update(part, window, Metrics()) as routed:
        loss = batch_loss(trainer.model, part, look, padding_free=trainer.args.padding_free)
    tolerances = (1e-4, 1e-4) if sample.is_precise else (2e-2, 3e-2)
    errors = ", ".join(f"gradient of {name} {error:.1e}" for name, error in found.gradient_errors.items())
    return [
        Check(
            "ratio on-policy",
            found.ratio_error <= tolerances[0],
            f"max |ratio - 1| = {found.ratio_error:.1e}",
            f"at most {tolerances[0]:g}: old and current log-probabilities are by the same policy",
            "look for dropout, other state that a forward changes, or a temperature that one of the two leaves out",
        ),
        Check(
            "fused loss",
            all(error <= tolerances[1] for error in (found.loss_error, *found.gradient_errors.values())),
            f"relative errors: loss {found.loss_error:.1e}, {errors}",
            f"at most {tolerances[1]:g} against the full logits",
            "the head of this model is not supported: report its config",
        ),
        _check_aux_loss(trainer, loss, routed.aux_loss),
    ]


def _given(batch: RolloutBatch) -> dict[str, torch.Tensor | None]:
    return {name: getattr(batch, name) for name in ("old_logps", "ref_logps", "sampling_logps")}


@torch.no_grad()
def _ratio_error(hidden_states, lm_head_weight, part: RolloutBatch, head: dict, temperature: float) -> float:
    """Largest |ratio - 1|; with A = 1 and no clipping the loss of a token is minus its ratio."""
    config = LossConfig(epsilon=1e6, epsilon_high=1e6, temperature=temperature)
    ones = torch.ones_like(part.advantages)
    result = grpo_loss(
        hidden_states, lm_head_weight, part.completion_ids, part.completion_mask, ones, config,
        old_logps=part.old_logps, **head,
    )  # fmt: skip
    return float((result.per_token_loss + 1)[part.completion_mask].abs().amax())


@torch.enable_grad()
def _fused_errors(
    hidden_states, lm_head_weight, part: RolloutBatch, head: dict, config: LossConfig
) -> tuple[float, dict[str, float]]:
    """Relative errors of the fused loss and of its gradients against the full logits, on a corner of the rows."""
    rows = slice(0, 4)
    columns = slice(0, max(1, MAX_LOGITS // (4 * len(lm_head_weight))))
    ids, mask = part.completion_ids[rows, columns], part.completion_mask[rows, columns]
    given = {name: x if x is None else x[rows, columns] for name, x in _given(part).items()}
    apart = 0.3 * torch.sin(torch.arange(ids.numel(), device=ids.device)).view_as(ids)  # so that some ratios clip
    given["old_logps"] = given["old_logps"] + apart
    made = []
    for fused in (True, False):
        leaves = [hidden_states.detach()[rows, columns].clone(), lm_head_weight.detach().clone()]
        leaves = [leaf.requires_grad_() for leaf in leaves]
        common = (ids, mask, part.advantages[rows], config)
        if fused:
            result = grpo_loss(*leaves, *common, **given, **head)
        else:
            result = grpo_loss_from_logits(_full_logits(*leaves, **head), *common, **given)
        made.append((result.loss.item(), torch.autograd.grad(result.loss, leaves)))
    (loss, gradients), (expected, expected_gradients) = made
    names = ("hidden states", "head")
    errors = {
        name: _relative(float((a - b).float().norm()), float(b.float().norm()))
        for name, a, b in zip(names, gradients, expected_gradients, strict=True)
    }
    return _relative(abs(loss - expected), abs(expected)), errors


def _relative(error: float, size: float) -> float:
    return error / size if size else error


def _full_logits(hidden_states, weight, *, bias=None, logit_scale: float = 1.0, softcap: float | None = None):
    operand, dtype = head_dtypes(hidden_states, weight)
    with torch.autocast(hidden_states.device.type, enabled=False):
        logits = hidden_states.to(operand).to(dtype) @ weight.to(operand).to(dtype).T
        logits = (logits if bias is None else logits + bias.to(dtype)) * logit_scale
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def _check_aux_loss(trainer: GRPOTrainer, loss: torch.Tensor, aux_loss: torch.Tensor | float) -> Check:
    rule = "at most 1: the balance of the experts must not drown the rewards"
    fix = "lower router_aux_loss_coef"
    coefficient = trainer.args.router_aux_loss_coef
    if not coefficient:
        return Check("auxiliary loss", None, "off", rule, fix)
    trained = [p for p in trainer.policy.parameters() if p.requires_grad]
    norms = []
    for part in (loss, coefficient * aux_loss):
        gradients = torch.autograd.grad(part, trained, retain_graph=True, allow_unused=True)
        norms.append(float(torch.stack([g.float().norm() for g in gradients if g is not None]).norm()))
    share = norms[1] / norms[0] if norms[0] else float("inf")
    value = f"gradient {share:.2g} of the policy loss's, at router_aux_loss_coef = {coefficient}"
    return Check("auxiliary loss", share <= 1, value, rule, fix)


def check_rollout(sample: Sample) -> Check:
    """Log-probabilities of the engine against those of the training forward, with its routes and without."""
    trainer, batch = sample.trainer, sample.batch
    shares_weights = getattr(trainer.collector.engine, "model", None) is trainer.policy
    tolerance = 1e-3 if shares_weights and sample.is_precise else 0.05
    natural = _difference(training_logps(sample, replace(batch, routes=None)), batch)
    ok, values = natural[0] <= tolerance, [_difference_text(natural)]
    replays = trainer.args.routing_replay == "R3"
    if sample.routes is not None:
        replayed = _difference(training_logps(sample, replace(batch, routes=sample.routes)), batch)
        values.append(f"with the rollout's routes {_difference_text(replayed)}")
        ok = replayed[0] <= tolerance if replays else ok
    elif replays:
        ok = False
        values.append("no routes from the engine, which R3 needs")
    return Check(
        "rollout log-probs",
        ok,
        f"against training: {'; '.join(values)}",
        f"mean |difference| of at most {tolerance:g} nats {'with' if replays else 'without'} routing replay",
        "weights of the engine stale or wrongly mapped, another temperature, or another precision: compare one prompt; "
        "routing_replay R3 or a sampler_correction for what is left",
    )


def _difference(logps: torch.Tensor, batch: RolloutBatch) -> tuple[float, float, float]:
    """Mean and largest |training - rollout| in nats, and the k3 estimate of KL(rollout || training).

    Over the tokens that the engine scored; NaN where it scored none.
    """
    apart = (logps - batch.sampling_logps)[batch.completion_mask & ~batch.sampling_logps.isnan()].double()
    if not len(apart):
        return (math.nan,) * 3
    return float(apart.abs().mean()), float(apart.abs().amax()), float((apart.expm1() - apart).mean())


def _difference_text(values: tuple[float, float, float]) -> str:
    return "mean {:.1e}, max {:.1e}, KL {:.1e}".format(*values)


def check_attention_sinks(trainer: GRPOTrainer) -> Check:
    """Whether the attention reads the sinks."""
    rule, fix = "read by the attention", "load the model with attn_implementation 'grpo_moe_sinks' or 'eager'"
    count = sum(name.endswith(".sinks") for name, _ in trainer.policy.named_parameters())
    if not count:
        return Check("sinks", None, "the model has none", rule, fix)
    try:
        check_sinks(trainer.policy)
    except ValueError as error:
        return Check("sinks", False, str(error), rule, fix)
    return Check("sinks", True, f"those of {count} layers move the logits", rule, fix)
