"""What every implementation of the experts must do alike: odd sizes and indices, autocast, dirty memory, inference."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from expert_cases import DEVICE, NAMES, assert_close, make_experts, outcome, truth
from torch.nn import functional as F

from grpo_moe.ops import moe, moe_experts
from grpo_moe.ops.moe.activations import gated_activation

IMPLEMENTATIONS = {
    "stacked": {"impl": "stacked"},
    "fused": {},
    "function": {"activation": lambda gate, up: F.silu(gate) * up},
    "single_pass": {"impl": "single_pass"},
    "triton_grouped": {"impl": "triton_grouped"},
}
REFERENCE = {"act": gated_activation("silu", "concatenated"), "transposed": False}
each_implementation = pytest.mark.parametrize("options", IMPLEMENTATIONS.values(), ids=list(IMPLEMENTATIONS))


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    monkeypatch.setattr(moe, "_on_gpu", lambda hidden_states: hidden_states.dtype != torch.float64)


KINDS = {
    "drawn": lambda index, experts: index,  # with slots to skip
    "duplicates": lambda index, experts: index[:, :1].clamp(0, experts - 1).expand_as(index),
    "first": lambda index, experts: torch.zeros_like(index),
    "none": lambda index, experts: torch.full_like(index, experts),
}


def assert_index_is_kept(made, given, expected, tolerance):
    """The truth, and zeros to the bit for unrouted slots and for experts without a row."""
    assert set(made) == {"out", *NAMES}
    assert_close(made, expected, tolerance)
    index, experts = given["top_k_index"], len(given["down_proj"])
    routed = (index >= 0) & (index < experts)
    assert not made["top_k_weights"][~routed].count_nonzero()
    idle = torch.ones(experts, dtype=torch.bool, device=DEVICE)
    idle[index[routed]] = False
    for name in ("gate_up_proj", "down_proj", "gate_up_bias", "down_bias"):
        assert not made[name][idle].count_nonzero(), name


@pytest.mark.parametrize("impl", moe.IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", [np.float32, Fraction])
def test_every_kind_of_number_is_a_number_of_gpt_oss(impl, kind):
    tensors, upstream = make_experts(2, 3, 16, 8, 2)
    numbers = [{"alpha": kind(1.75), "limit": kind(0.5)}, {"alpha": 1.75, "limit": 0.5}]
    options = {"impl": impl, "activation": "gpt_oss"}
    made, expected = (outcome(moe_experts, tensors, upstream, torch.float32, **options, **x) for x in numbers)
    assert all(torch.equal(made[name], x) for name, x in expected.items())


@each_implementation
@pytest.mark.parametrize(
    ("tokens", "experts", "kind"),
    [(0, 3, "drawn"), (1, 5, "drawn"), (1, 5, "first"), (2, 3, "duplicates"), (2, 9, "none"), (3, 13, "drawn")],
)
def test_few_tokens_duplicates_and_experts_without_rows(tokens, experts, kind, options):
    """K = 4: fewer tokens than slots, and more experts than pairs."""
    tensors, upstream = make_experts(tokens, experts, 16, 8, 4)
    given = tensors | {"top_k_index": KINDS[kind](tensors["top_k_index"], experts)}
    made = outcome(moe_experts, given, upstream, torch.float32, **options)
    assert_index_is_kept(made, given, truth(given, upstream, **REFERENCE), 2e-5)


@each_implementation
@pytest.mark.parametrize("index", [-2, 4, 2**31 + 1, -(2**32)])
def test_an_index_that_names_no_expert_is_refused_or_skipped(index, options):
    tensors, _ = make_experts(5, 3, 16, 16, 2)
    tensors["top_k_index"][2] = torch.tensor([index, 1])
    skipped = tensors | {"top_k_index": tensors["top_k_index"].clone()}
    skipped["top_k_index"][2, 0] = -1
    with torch.no_grad():
        expected = moe_experts(**skipped, **options)
        with pytest.raises(ValueError, match=r"top_k_index must be in -1..3 .* look at the router"):
            moe_experts(**tensors, **options, check=True)
        if options.get("impl") in ("stacked", "triton_grouped"):  # they wait for the host anyway
            with pytest.raises(ValueError, match="top_k_index must be in -1..3"):
                moe_experts(**tensors, **options)
        else:
            assert torch.equal(moe_experts(**tensors, **options), expected)


@each_implementation
@pytest.mark.parametrize(("dtype", "bias"), [(torch.bfloat16, True), (torch.float16, False)])
def test_autocast_with_float32_parameters(dtype, bias, options):
    check_autocast(dtype, bias, options)


def check_autocast(dtype, bias, options):
    tensors, upstream = make_experts(4, 2, 16, 16, 2, bias=bias)

    def under_autocast(**given):
        with torch.autocast(DEVICE, dtype):
            return moe_experts(**given, **options)

    made = outcome(under_autocast, tensors, upstream, torch.float32)
    assert all(x.dtype == torch.float32 for x in made.values())
    assert_close(made, truth(tensors, upstream, **REFERENCE), 4e-2 if dtype == torch.bfloat16 else 5e-3)
    assert not torch.equal(made["out"], moe_experts(**tensors, **options))


@each_implementation
def test_two_steps_in_memory_full_of_nan(options, monkeypatch):
    """The first may leave in its parameters what the second one meets."""
    tensors, upstream = make_experts(5, 3, 16, 8, 2)
    tensors["top_k_index"][tensors["top_k_index"] == 1] = -1  # an expert without rows, and slots to skip

    def two_steps():
        leaves = {n: tensors[n].clone().requires_grad_() for n in NAMES}
        for _ in range(2):
            out = moe_experts(**tensors | leaves, **options)
            grads = torch.autograd.grad(out, list(leaves.values()), upstream)
            leaves = {
                n: (x - 0.1 * g).detach().requires_grad_() for (n, x), g in zip(leaves.items(), grads, strict=True)
            }
        return leaves

    clean = two_steps()
    poison = lambda x: x.fill_(math.nan if x.is_floating_point() else 2**30)  # noqa: E731
    for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        made = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *a, made=made, **k: poison(made(*a, **k)))
    assert torch.empty(3).isnan().all()
    for name, x in two_steps().items():
        assert x.isfinite().all() and torch.equal(x, clean[name]), name


@each_implementation
def test_training_after_inference_mode(options):
    tensors, upstream = make_experts(3, 2, 16, 8, 2)
    with torch.inference_mode():
        scored = moe_experts(**tensors, **options)
    made = outcome(moe_experts, tensors, upstream, torch.float32, **options)
    assert torch.equal(made["out"], scored)
    assert_close(made, truth(tensors, upstream, **REFERENCE), 2e-5)


# --- on a GPU only ---


@pytest.mark.gpu
@each_implementation
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gpu_two_steps_in_an_allocator_full_of_nan(dtype, options):
    """Unlike the test above it reaches the memory that torch's own kernels allocate."""
    tensors, upstream = make_experts(300, 6, 128, 64, 2, dtype=dtype)
    tensors["top_k_index"][tensors["top_k_index"] == 2] = -1

    def two_steps():
        leaves = {n: tensors[n].clone().requires_grad_() for n in NAMES}
        for _ in range(2):
            out = moe_experts(**tensors | leaves, **options)
            grads = torch.autograd.grad(out, list(leaves.values()), upstream)
            leaves = {
                n: (x - 0.1 * g).detach().requires_grad_() for (n, x), g in zip(leaves.items(), grads, strict=True)
            }
        return leaves

    def fill_with_nan():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        sizes = [2**n for n in range(6, 26)] * 8
        kept = [torch.full((size,), math.nan, device="cuda") for size in sizes]
        torch.cuda.synchronize()
        del kept

    clean = {n: x.detach().cpu() for n, x in two_steps().items()}
    fill_with_nan()
    assert torch.empty(4096, device="cuda").isnan().any()
    for name, x in two_steps().items():
        assert x.isfinite().all(), name
        torch.testing.assert_close(x.detach().cpu(), clean[name], rtol=1e-2, atol=1e-3)


@pytest.mark.gpu
@each_implementation
@pytest.mark.parametrize(("tokens", "experts"), [(1, 64), (2, 64), (7, 8), (300, 8)])
def test_gpu_few_tokens_duplicates_and_one_expert_in_bf16(tokens, experts, options):
    """K = 8, so that seven tokens are K - 1.

    The gradient of a routing weight is one sum over the width, which a drawn upstream lets cancel down to bf16's
    rounding of its terms; the output as a part of upstream prevents that.
    """
    tensors, drawn = make_experts(tokens, experts, 128, 64, 8, dtype=torch.bfloat16)
    for kind in KINDS.values():
        given = tensors | {"top_k_index": kind(tensors["top_k_index"], experts)}
        upstream = drawn + truth(given, drawn, **REFERENCE)["out"].to(torch.bfloat16)
        made = outcome(moe_experts, given, upstream, torch.bfloat16, **options)
        assert_index_is_kept(made, given, truth(given, upstream, **REFERENCE), 4e-2)


@pytest.mark.gpu
@each_implementation
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_autocast_with_float32_parameters(dtype, bias, options):
    check_autocast(dtype, bias, options)
