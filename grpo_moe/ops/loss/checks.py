"""What the loss functions ask of their inputs; each breach is a ValueError that names the input and the rule."""

from __future__ import annotations

import torch

from grpo_moe.checks import is_count, is_finite

from .config import LossConfig

ID_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_head_inputs(hidden_states, lm_head_weight, ids_name: str, ids, bias) -> None:
    """Of a head: hidden_states [..., H], lm_head_weight [V, H], ids [...] and bias [V] or None.

    Ids are compared with V on a CPU only.
    """
    check_tensors({"hidden_states": hidden_states, "lm_head_weight": lm_head_weight, ids_name: ids})
    shape, width = tuple(hidden_states.shape[:-1]), hidden_states.shape[-1]
    if lm_head_weight.ndim != 2 or lm_head_weight.shape[1] != width or len(lm_head_weight) == 0:
        raise ValueError(
            f"lm_head_weight must be [V, H] with V >= 1 and H = {width} as hidden_states, "
            f"got shape {tuple(lm_head_weight.shape)}; under FSDP or ZeRO call this inside the model's forward"
        )
    for name, x in {"hidden_states": hidden_states, "lm_head_weight": lm_head_weight}.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} must be floating point, got {x.dtype}; cast it")
    vocab_size = len(lm_head_weight)
    if tuple(ids.shape) != shape or ids.dtype not in ID_DTYPES:
        raise ValueError(
            f"{ids_name} must be integers of shape {shape} as hidden_states, got {ids.dtype} of shape "
            f"{tuple(ids.shape)}; align them first"
        )
    if bias is not None:
        check_tensors({"bias": bias})
    if bias is not None and (tuple(bias.shape) != (vocab_size,) or not bias.is_floating_point()):
        raise ValueError(
            f"bias must be [V] with V = {vocab_size} and floating point, got {bias.dtype} of shape "
            f"{tuple(bias.shape)}; pass lm_head.bias"
        )
    for name, x in {"lm_head_weight": lm_head_weight, ids_name: ids, "bias": bias}.items():
        if x is not None and x.device != hidden_states.device:
            raise ValueError(
                f"{name} must be on {hidden_states.device} as hidden_states, got {x.device}; move it (an offloaded "
                "weight is real inside the model's forward only)"
            )


def check_ids(name: str, ids: torch.Tensor, vocab_size: int) -> None:
    """Ids in [0, V); on a GPU the check would wait for the device and is left out."""
    if ids.numel() and ids.device.type == "cpu":
        low, high = (int(x) for x in ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"{name} must be in [0, V) with V = {vocab_size}, got {low} to {high}; replace ids of ignored tokens, "
                "such as -100, by any valid one and mask their log-probabilities"
            )


def check_loss_inputs(config, like_name: str, like, advantages, completion_mask, given: dict) -> None:
    """Of a policy loss: shapes as ``like`` [B, T], and what the config needs is there.

    Args:
        config: the LossConfig.
        like_name, like: the [B, T] tensor that sets the shape.
        advantages, completion_mask: as everywhere.
        given: old_logps, ref_logps, sampling_logps and entropy, tensors or None; an entropy that is computed later is
            left out.
    """
    if not isinstance(config, LossConfig):
        raise ValueError(f"config must be a LossConfig, got {type(config).__name__}; LossConfig() has the defaults")
    check_tensors({like_name: like, "advantages": advantages, "completion_mask": completion_mask})
    check_tensors({name: x for name, x in given.items() if x is not None})
    if like.ndim != 2:
        raise ValueError(f"{like_name} must be [B, T], got shape {tuple(like.shape)}; one row a sequence")
    shape = tuple(like.shape)
    if tuple(advantages.shape) not in (shape, shape[:1]):
        raise ValueError(
            f"advantages must be [B] or [B, T] with B, T = {shape}, got shape {tuple(advantages.shape)}; "
            "one a row, or one a token"
        )
    for name, x in {"completion_mask": completion_mask, **given}.items():
        if x is not None and tuple(x.shape) != shape:
            raise ValueError(
                f"{name} must be [B, T] = {shape} as {like_name}, got shape {tuple(x.shape)}; align them first"
            )
    for name, x in {"advantages": advantages, "completion_mask": completion_mask, **given}.items():
        if x is not None and x.device != like.device:
            raise ValueError(f"{name} must be on {like.device} as {like_name}, got {x.device}; move it there")
    floats = given if like_name == "completion_ids" else {like_name: like, **given}
    for name, x in floats.items():
        if x is not None and not x.is_floating_point():
            raise ValueError(
                f"{name} must be floating point, got {x.dtype}; log-probabilities are no integers: cast it"
            )
    idle = {
        "ref_logps": ("beta", 0),
        "sampling_logps": ("sampler_correction", "none"),
        "entropy": ("top_entropy_quantile", 1),
    }
    for name, (option, off) in idle.items():
        if name in given and given[name] is None and getattr(config, option) != off:
            raise ValueError(
                f"{name} must be given with {option} = {getattr(config, option)!r}, got None; pass it or set {option} "
                f"to {off!r}"
            )


def check_count(name: str, count) -> None:
    """A number of tokens or rows: finite and at least 0, or a 0-dim tensor, which is not looked at."""
    if isinstance(count, torch.Tensor):
        if count.ndim:
            raise ValueError(f"{name} must be an int or a 0-dim tensor, got shape {tuple(count.shape)}; sum it first")
    elif not (is_finite(count) and count >= 0):
        raise ValueError(f"{name} must be an int of at least 0 or a 0-dim tensor, got {count!r}; count the tokens")


def check_temperature(temperature: float) -> None:
    """A finite number above 0."""
    if not (is_finite(temperature) and temperature > 0):
        raise ValueError(
            f"temperature must be finite and above 0, got {temperature!r}; 1.0 leaves the logits as they are"
        )


def check_chunk_size(chunk_size: int | None) -> None:
    """None, or at least 1."""
    if not (chunk_size is None or is_count(chunk_size, 1)):
        raise ValueError(f"chunk_size must be an integer of at least 1, got {chunk_size}; None chooses it")


def check_tensors(tensors: dict) -> None:
    """Dense tensors of real numbers, by name."""
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(x).__name__}; torch.as_tensor makes one")
        if x.layout != torch.strided or x.is_complex():
            got = x.dtype if x.is_complex() else x.layout
            raise ValueError(f"{name} must be a dense tensor of real numbers, got {got}; to_dense() or .real makes one")
