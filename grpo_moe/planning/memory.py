"""Memory of a GRPO step on each GPU by phase and category, from a configuration: whether it fits, and what would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from .activations import ATTENTIONS
from .hardware import GIB, Hardware
from .phases import Phases, RunShape
from .shapes import ModelShape

SHARDINGS = ("none", "ddp", "fsdp2", "zero2", "zero3")
MARGIN_GB = 2.0
_ATTENTION_NAMES = {"eager": "eager", "sdpa": "sdpa", "flex_attention": "flex", "grpo_moe_sinks": "flex"}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each GPU."""

    phases: dict[str, dict[str, int]]
    """By phase, then by category."""
    capacity_bytes: int
    rollout_rows: int
    """Sequences decoded at once: fewer than asked for where memory ends, then in turns."""
    wanted_rows: int

    @property
    def peak_phase(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=self.bytes_of)

    @property
    def peak_bytes(self) -> int:
        """What it needs."""
        return self.bytes_of(self.peak_phase)

    @property
    def fits(self) -> bool:
        """Whether it fits the GPU, with one sequence of a rollout at least."""
        return self.peak_bytes <= self.capacity_bytes and self.rollout_rows > 0

    def bytes_of(self, phase: str) -> int:
        """Of a phase, everything counted."""
        return sum(self.phases[phase].values())

    def allocated_bytes(self, phase: str) -> int:
        """Of a phase, as ``torch.cuda.max_memory_allocated`` counts: without the context and the allocator's slack."""
        return sum(count for name, count in self.phases[phase].items() if name not in ("context", "slack"))


def plan_memory(
    model_config: PreTrainedConfig | ModelShape,
    run: RunShape,
    hardware: Hardware,
    num_gpus: int = 1,
    sharding: str = "none",
) -> MemoryPlan:
    """Bytes of each phase of a GRPO step on one GPU, at its worst moment.

    P parameters of which T train (all, or those of LoRA), w bytes each (4: the fp32 masters that the trainer loads),
    V vocabulary, H hidden, N tokens of a micro-batch of which N_c of completions; n GPUs. Every phase has

    - weights: wP ("fsdp2", "zero3": /n). ZeRO keeps bf16 weights and fp32 "master_copy" 4T/n. "lora": 4T.
    - optimizer: AdamW's two moments, 2wT, made at the first step and kept ("fsdp2", "zero*": /n).
    - reference: the copy of :func:`grpo_moe.rl.loading.reference_model`, wP, sharded as the weights.
    - ddp_buckets: DDP's reducer holds the gradients a second time, wT.
    - context, slack: outside of the allocator, and what it cannot use.

    rollout (:mod:`grpo_moe.rollout.native`):

    - weight_copies: under autocast the experts in bf16 for its length (``experts_in``), so the head, and autocast's own
      cache of the rest: 2P. "gathered": under FSDP2 all parameters (:func:`grpo_moe.rl.sharding.whole_parameters`).
      "folded_lora": the experts once more where they have adapters (:func:`grpo_moe.adapters.hf_lora.folded_lora`); in
      forward_backward each block has its own, among its activations, and whole gradients of it for a moment.
    - kv_cache: rows times tokens, a window's ring in windowed layers; rows are cut to 0.8 of the memory that is free.
    - logits: fp32, three times over the rows; prefill: one block's temporaries for at most 65,536 tokens of prompts.

    old_logps: the largest block without gradients, the head's chunk.

    forward_backward, at the worst of the moments (head's sweep, its backward, each block's backward, the end):

    - activations: those of :func:`grpo_moe.planning.activations.block_memory`, by kind "activations_full",
      "activations_window", ... ; of a checkpointed block its input, and at its own moment all of it. "outside_blocks":
      the embedding's indices, rotary tables, the final norm.
    - weight_copies: under autocast each block keeps bf16 copies of its weights with its activations (a checkpointed one
      at its moment alone, but the dense ones up to the end of the forward). "gathered" under FSDP2: two blocks (one is
      prefetched) and what is outside of blocks, in bf16, which stays.
    - temporaries: of the block whose moment it is: of experts sorted rows, their gradients, the weights' gradients in
      bf16; a checkpointed block's activations again.
    - head: one chunk of exps in bf16 (:mod:`grpo_moe.ops.loss.head_triton`: 6,144 rows, 4,096 beyond 12,288), a bf16
      copy of the weight under autocast, gradients of hidden states, of the weight 4VH in fp32; logits never.
    - gradients: of what the backward pass has passed; all from the start when micro-batches accumulate. FSDP2 adds the
      block's whole gradient before and in its reduction (fp32).

    optimizer_step: gradients wT (AdamW is fused: its step needs nothing more).

    Args:
        model_config: a transformers configuration, or its shape.
        run: the options.
        hardware: the GPU.
        num_gpus: n.
        sharding: "none" (one GPU), "ddp", "fsdp2"; "zero2" and "zero3" of DeepSpeed, which this trainer does not run,
            for comparison.

    Raises:
        ValueError: an option out of range; linear attention, whose kernels keep what they like.
    """
    shape, run = _resolve(model_config, run)
    _check(shape, run, num_gpus, sharding)
    return MemoryPlan(*Phases(shape, run, hardware, num_gpus, sharding).plan())


def largest_micro_batch(
    model_config: PreTrainedConfig | ModelShape, run: RunShape, hardware: Hardware, *args, **kwargs
) -> int:
    """The largest micro-batch whose plan fits, up to the rows of a rollout; 0: none. Arguments of :func:`plan_memory`.

    The rollout stays as it is.
    """
    shape, run = _resolve(model_config, run)
    rows = run.prompts_per_rollout * run.num_generations

    def fits(size: int) -> bool:
        return plan_memory(shape, replace(run, micro_batch=size), hardware, *args, **kwargs).fits

    return _largest(fits, rows)


def largest_completion(
    model_config: PreTrainedConfig | ModelShape,
    run: RunShape,
    hardware: Hardware,
    *args,
    limit: int = 131_072,
    **kwargs,
) -> int:
    """The most completion tokens whose plan fits, up to ``limit``; 0: none. Arguments of :func:`plan_memory`."""
    shape, run = _resolve(model_config, run)

    def fits(tokens: int) -> bool:
        return plan_memory(shape, replace(run, completion_tokens=tokens), hardware, *args, **kwargs).fits

    return _largest(fits, limit)


def choose_checkpointing(
    model_config: PreTrainedConfig | ModelShape, run: RunShape, hardware: Hardware, *args, **kwargs
) -> int | None:
    """The checkpointing that recomputes least and fits: None for none, else the largest period.

    Raises:
        ValueError: not even period 1 fits; says by how much.
    """
    shape, run = _resolve(model_config, run)
    for period in (None, *range(len(shape.blocks), 0, -1)):
        plan = plan_memory(shape, replace(run, checkpoint_period=period), hardware, *args, **kwargs)
        if plan.fits:
            return period
    over = (plan.peak_bytes - plan.capacity_bytes) / GIB
    raise ValueError(
        f"memory must hold {plan.peak_phase} with every block checkpointed, got {over:.1f} GiB too little; lower "
        "micro_batch or completion_tokens, shard over more GPUs, or train LoRA"
    )


def estimate_model_memory_gb(
    *,
    num_parameters: int,
    num_layers: int,
    hidden_size: int,
    intermediate_size: int,
    kv_heads: int,
    head_dim: int,
    batch: int,
    tokens: int,
    window: int | None = None,
    windowed_layers: int = 0,
    steady_state: bool = False,
    checkpoint_period: int | None = None,
    overhead_gb: float | None = None,
) -> float:
    """GPT-OSS-Lite's own rule of thumb, in GiB; :func:`plan_memory` is the estimate to trust.

    16 bytes a parameter (fp32 weights, gradients, two moments); keys and values in bf16; activations
    ``L * S * B * (H + 9 I) * 2``, of which checkpointing every g-th block keeps 1/g + (1 - 1/g)/2.

    Args:
        num_parameters: of the model.
        num_layers, hidden_size, intermediate_size, kv_heads, head_dim: of the model.
        batch, tokens: B rows of S tokens.
        window, windowed_layers: of layers with a window; they hold max(window, S) tokens, ``window`` in steady state.
        steady_state: whether windowed layers hold their window alone.
        checkpoint_period: g; None: no checkpointing.
        overhead_gb: for everything else; None: 17 % of the GPU's memory, at least 2 and at most 13.7; 2 without a GPU.

    Raises:
        ValueError: a period below 1.

    Source: shared/design/gptoss_lite.md, "The original's memory heuristic".
    """
    if checkpoint_period is not None:
        _at_least(checkpoint_period=checkpoint_period)
    windowed = (window or 0) if steady_state else max(window or 0, tokens)
    slots = windowed_layers * windowed + (num_layers - windowed_layers) * tokens
    cache = 2 * kv_heads * head_dim * 2 * batch * slots
    stored = 1.0 if checkpoint_period is None else 1 / checkpoint_period + (1 - 1 / checkpoint_period) / 2
    activations = num_layers * tokens * batch * (hidden_size + 9 * intermediate_size) * 2 * stored
    if overhead_gb is None:
        total = torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else 0
        overhead_gb = min(13.7, max(2.0, 0.17 * total))
    return (16 * num_parameters + cache + activations) / GIB + overhead_gb


def assert_fits_in_available_gpu(required_gb: float, *, available_gb: float | None = None) -> None:
    """Refuses a job that needs more than the GPU has free, less a margin of 2 GB.

    Args:
        required_gb: in GiB.
        available_gb: in GiB; None: what ``torch.cuda.mem_get_info`` says is free on the current GPU.

    Raises:
        ValueError: it does not fit, or there is no GPU to ask.
    """
    if available_gb is None:
        if not torch.cuda.is_available():
            raise ValueError("available_gb must be given without a GPU, got None; pass the memory of the one to come")
        available_gb = torch.cuda.mem_get_info()[0] / GIB
    if not required_gb + MARGIN_GB <= available_gb:
        raise ValueError(
            f"required_gb must be at most {available_gb - MARGIN_GB:.2f} ({available_gb:.2f} GiB free less a margin of "
            f"{MARGIN_GB:.0f}), got {required_gb:.2f}; shorten the sequences, lower the micro-batch, or switch "
            "gradient checkpointing on"
        )


def _resolve(model_config: PreTrainedConfig | ModelShape, run: RunShape) -> tuple[ModelShape, RunShape]:
    """The shape, and the run with the attention that the configuration names, unless it names one itself."""
    if isinstance(model_config, ModelShape):
        return model_config, run
    named = _ATTENTION_NAMES.get(getattr(model_config, "_attn_implementation", None))
    return ModelShape.from_config(model_config), replace(run, attention=run.attention or named)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """The largest number in 1..limit that fits, by bisection; 0: not even 1."""
    low, high = 0, limit + 1
    if fits(limit):
        return limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _check(shape: ModelShape, run: RunShape, num_gpus: int, sharding: str) -> None:
    sizes = ("micro_batch", "prompt_tokens", "completion_tokens", "prompts_per_rollout", "num_generations")
    _at_least(**{name: getattr(run, name) for name in sizes}, num_gpus=num_gpus)
    linear = any(block.attention is not None and block.attention.kind == "linear" for block in shape.blocks)
    rules = (
        (
            "model_type",
            shape.model_type,
            not linear,
            "of a model of softmax attention",
            "linear attention is not known",
        ),
        ("sharding", sharding, sharding in SHARDINGS, f"one of {', '.join(SHARDINGS)}", "check the spelling"),
        ("sharding", sharding, sharding != "none" or num_gpus == 1, f"ddp or fsdp2 on {num_gpus} GPUs", "choose one"),
        ("weight_bytes", run.weight_bytes, run.weight_bytes in (2, 4), "2 or 4", "4 are fp32 masters"),
        ("attention", run.attention, run.attention in (None, *ATTENTIONS), f"one of {ATTENTIONS}", "or None"),
        ("experts", run.experts, run.experts in ("fused", "stacked"), "fused or stacked", "fused are the kernels"),
        ("lora_rank", run.lora_rank, run.lora_rank >= 0, "at least 0", "0 trains everything"),
        ("lora_experts", run.lora_experts, run.lora_rank > 0 or not run.lora_experts, "False", "give a lora_rank"),
    )
    for name, value, holds, rule, fix in rules:
        if not holds:
            raise ValueError(f"{name} must be {rule}, got {value!r}; {fix}")
    if run.checkpoint_period is not None:
        _at_least(checkpoint_period=run.checkpoint_period)


def _at_least(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}; give a positive number")
