"""Inputs of the experts for the tests, and what an implementation makes of them."""

from __future__ import annotations

import torch

from grpo_moe.ops.moe.reference import stacked_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights", "gate_up_bias", "down_bias")


def make_experts(tokens, experts, hidden, width, slots, *, transposed=False, bias=True, dtype=torch.float32):
    """Inputs of moe_experts, biases None unless ``bias``, with some slots skipped; and an upstream gradient."""
    up, down = (2 * width, hidden), (hidden, width)
    if transposed:
        up, down = up[::-1], down[::-1]
    new = lambda *shape, scale=1.0: (scale * torch.randn(*shape, device=DEVICE)).to(dtype)  # noqa: E731
    tensors = {
        "hidden_states": new(tokens, hidden),
        "gate_up_proj": new(experts, *up, scale=hidden**-0.5),
        "down_proj": new(experts, *down, scale=width**-0.5),
        "top_k_index": torch.randint(-1, experts + 1, (tokens, slots), device=DEVICE),
        "top_k_weights": torch.rand(tokens, slots, device=DEVICE).to(dtype),
        "gate_up_bias": new(experts, 2 * width) if bias else None,
        "down_bias": new(experts, hidden) if bias else None,
    }
    return tensors, new(tokens, hidden)


def outcome(function, tensors, upstream, dtype, needed=NAMES, *, weights_dtype=None, **options):
    """{"out": output, name: gradient of each needed input} of a function that takes the tensors by name.

    They are cast to ``dtype``, top_k_weights to ``weights_dtype`` if given.
    """
    dtypes = dict.fromkeys(NAMES, dtype) | {"top_k_weights": weights_dtype or dtype}
    cast = {n: x if x is None or n not in dtypes else x.detach().to(dtypes[n]) for n, x in tensors.items()}
    leaves = {n: cast[n].requires_grad_() for n in needed if cast[n] is not None}
    out = function(**cast, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), upstream.to(dtype)) if leaves else ()
    return {"out": out.detach(), **dict(zip(leaves, grads, strict=True))}


def truth(tensors, upstream, **options):
    """:func:`outcome` of the reference in float64."""
    return outcome(stacked_experts, tensors, upstream, torch.float64, **options)


def assert_close(actual, expected, tolerance):
    """Every error is below ``tolerance`` times the largest expected value of its tensor; zeros are exact."""
    for name, x in actual.items():
        y = expected[name]
        assert x.shape == y.shape, name
        if y.numel():
            error, largest = float((x.double() - y.double()).abs().max()), float(y.abs().max())
            assert error <= tolerance * largest, f"{name}: error {error:.1e}, largest value {largest:.1e}"
