"""FLOPs of a token, of a GRPO step by phase, and how much of a GPU's peak they used, from a model's shape.

A weight costs 2 FLOPs a token forward (multiply, add) and 4 backward: 2 for the gradient of its input and 2 for its
own. A visible pair of query and key costs ``2 * heads * (head_dim + value_dim)`` forward and twice that backward. Of
experts the top-k count, of keys those inside the causal mask and the window. Norms, softmax, activations, rotary
embeddings, sampling and the optimizer are left out, and so is what kernels compute twice (attention's backward
recomputes its scores): these are model FLOPs, as MFU wants them.

Source: Kaplan et al. 2020 (arXiv 2001.08361) section 2.1; PaLM (arXiv 2204.02311) appendix B for MFU.
"""

from __future__ import annotations

import re

from .shapes import AttentionShape, BlockShape, ModelShape

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s by words of the device's name, more words first; plain H100 and H200 are SXM.

Source: NVIDIA's data sheets, whose figures "with sparsity" are twice these.
"""


def forward_flops(
    shape: ModelShape, num_tokens: int, *, past_tokens: int = 0, head_tokens: int | None = None
) -> dict[str, int]:
    """FLOPs by category of a forward over consecutive tokens of one sequence.

    Decoding them one by one costs the same.

    Args:
        shape: of the model.
        num_tokens: at least 0.
        past_tokens: before them, whose keys and values are cached.
        head_tokens: tokens for which logits are computed; None: all.

    Returns:
        FLOPs of "attention" (projections), "attention_scores" (and the state of linear attention), "router",
        "experts", "shared_experts", "dense_mlp" and "head".
    """
    flops = dict.fromkeys(("attention", "attention_scores", "router", "experts", "shared_experts", "dense_mlp"), 0)
    for block in shape.blocks:
        for category, count in _block_flops(block, num_tokens, past_tokens).items():
            flops[category] += count
    head_tokens = num_tokens if head_tokens is None else head_tokens
    return {**flops, "head": 2 * head_tokens * shape.hidden_size * shape.vocab_size}


def backward_flops(forward: dict[str, int], *, frozen: bool = False) -> dict[str, int]:
    """FLOPs by category of the backward of a forward: twice it.

    Args:
        forward: as :func:`forward_flops` gives it.
        frozen: the weights get no gradient (LoRA, whose own matrices are left out): 2 FLOPs a weight instead of 4.
            Scores have no weights and cost the same.
    """
    return {key: count * (1 if frozen and key != "attention_scores" else 2) for key, count in forward.items()}


def flops_per_token(shape: ModelShape, sequence_tokens: int) -> dict[str, tuple[float, float]]:
    """(forward, backward) FLOPs by category of a token, on average over a sequence of ``sequence_tokens``.

    Raises:
        ValueError: an empty sequence.
    """
    _at_least("sequence_tokens", sequence_tokens, 1)
    forward = forward_flops(shape, sequence_tokens)
    backward = backward_flops(forward)
    return {key: (forward[key] / sequence_tokens, backward[key] / sequence_tokens) for key in forward}


def grpo_step_flops(
    shape: ModelShape,
    *,
    num_sequences: int,
    num_generations: int,
    prompt_tokens: int,
    completion_tokens: int,
    num_iterations: int = 1,
    old_logps: bool = False,
    reference: bool = False,
    checkpoint_period: int | None = None,
    completion_head: bool = True,
    frozen: bool = False,
) -> dict[str, int]:
    """FLOPs by phase of one step on sequences of equal length.

    - prefill: each prompt once, for its ``num_generations`` completions; logits of its last token alone.
    - decode: ``completion_tokens - 1`` forwards of one token a sequence: the prefill gives the first, and the last is
      not read.
    - old_logps, ref_logps: one forward over prompt and completion of every sequence each, if asked for.
    - forward, backward, recompute: as often as ``num_iterations``; blocks 0, g, 2g, ... are recomputed.

    Args:
        shape: of the model.
        num_sequences: P * G of the step, on all processes.
        num_generations: G.
        prompt_tokens, completion_tokens: of each sequence, at least 1.
        num_iterations: passes over the batch.
        old_logps, reference: whether the step computes these log-probs.
        checkpoint_period: g of gradient checkpointing; None: off.
        completion_head: logits of completion tokens alone in log-probs and update; False: of all tokens.
        frozen: as in :func:`backward_flops`.

    Raises:
        ValueError: a number below 1, or sequences that are not whole groups.
    """
    numbers = dict(num_generations=num_generations, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
    numbers |= dict(num_sequences=num_sequences, num_iterations=num_iterations, checkpoint_period=checkpoint_period)
    for name, value in numbers.items():
        if value is not None:
            _at_least(name, value, 1)
    if num_sequences % num_generations:
        raise ValueError(
            f"num_sequences must be a multiple of num_generations={num_generations}, got {num_sequences}; "
            "a step takes whole groups"
        )
    tokens = prompt_tokens + completion_tokens
    forward = forward_flops(shape, tokens, head_tokens=completion_tokens if completion_head else tokens)
    logps = num_sequences * sum(forward.values())
    prefill = sum(forward_flops(shape, prompt_tokens, head_tokens=1).values())
    decode = sum(forward_flops(shape, completion_tokens - 1, past_tokens=prompt_tokens).values())
    wrapped = shape.blocks[::checkpoint_period] if checkpoint_period else ()
    recompute = sum(sum(_block_flops(block, tokens, 0).values()) for block in wrapped)
    backward = sum(backward_flops(forward, frozen=frozen).values())
    return {
        "prefill": num_sequences // num_generations * prefill,
        "decode": num_sequences * decode,
        "old_logps": logps if old_logps else 0,
        "ref_logps": logps if reference else 0,
        "forward": num_iterations * logps,
        "backward": num_iterations * num_sequences * backward,
        "recompute": num_iterations * num_sequences * recompute,
    }


def visible_keys(num_tokens: int, *, past_tokens: int = 0, window: int | None = None) -> int:
    """Pairs of query and visible key of consecutive tokens: the sum of min(position, window), positions from 1.

    With all tokens past: those up to the window see 1, 2, ..., a triangle, the others ``window`` keys each.
    """

    def up_to(last: int) -> int:
        ramp = last if window is None else min(last, window)
        return ramp * (ramp + 1) // 2 + (last - ramp) * ramp

    return up_to(past_tokens + num_tokens) - up_to(past_tokens)


def model_flops_utilization(flops: float, seconds: float, peak_flops: float) -> float:
    """Share of the peak that a run used: flops / (seconds * peak_flops).

    Args:
        flops: that the model needs; without recompute, so that checkpointing does not look like work.
        seconds: they took.
        peak_flops: FLOP/s of all GPUs together.

    Raises:
        ValueError: no time or no peak.
    """
    for name, value in (("seconds", seconds), ("peak_flops", peak_flops)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, got {value}; pass what was measured and what the GPUs can do")
    return flops / (seconds * peak_flops)


def device_peak_flops(device_name: str) -> float:
    """Dense bf16 FLOP/s of one GPU, by its name from ``torch.cuda.get_device_name``.

    Raises:
        ValueError: a GPU that is not in the table, or a slice of one.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    for name, peak in PEAK_FLOPS.items():
        if "mig" not in words and words.issuperset(name.lower().split()):
            return peak
    raise ValueError(
        f"device_name must name a whole GPU of {list(PEAK_FLOPS)}, got {device_name!r}; "
        "pass its dense bf16 FLOP/s as peak_flops to model_flops_utilization"
    )


def _block_flops(block: BlockShape, num_tokens: int, past_tokens: int) -> dict[str, int]:
    flops = {category: 2 * num_tokens * count for category, count in block.multiply_adds.items() if count}
    if block.attention is not None:
        flops["attention_scores"] = _score_flops(block.attention, num_tokens, past_tokens)
    return flops


def _score_flops(attention: AttentionShape, num_tokens: int, past_tokens: int) -> int:
    """Of scores and weighted values; of a linear layer's state [key, value]: read, correct, read, a token."""
    if attention.kind == "linear":
        return 3 * 2 * num_tokens * attention.heads * attention.head_dim * attention.value_dim
    pairs = visible_keys(num_tokens, past_tokens=past_tokens, window=attention.window)
    return 2 * pairs * attention.heads * (attention.head_dim + attention.value_dim)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}; pass a number of the step")
