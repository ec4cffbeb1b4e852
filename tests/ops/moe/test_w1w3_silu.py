"""The experts of GPT-OSS-Lite against the loop over experts, on a GPU or under Triton's interpreter."""

import itertools

import pytest
import torch
from expert_cases import NAMES, assert_close, make_experts, outcome, truth

from grpo_moe.ops.moe import reference, w1w3_silu
from grpo_moe.ops.moe.activations import gated_activation
from grpo_moe.ops.moe.reference import stacked_experts
from grpo_moe.ops.moe.w1w3_silu import triton_grouped_experts

SILU = {"activation": "silu", "layout": "concatenated", "alpha": 1.702, "limit": 7.0}


def act_of(options):
    return gated_activation(options["activation"], options["layout"], alpha=options["alpha"], limit=options["limit"])


@pytest.mark.parametrize("shape", [(7, 4, 64, 32, 2), (6, 3, 33, 19, 2), (1, 4, 32, 16, 4), (0, 4, 16, 16, 2)])
def test_triton_grouped_equals_float64_and_its_gradients_the_reference(shape):
    check(*make_experts(*shape), SILU, transposed=False)


@pytest.mark.parametrize(
    ("activation", "layout", "transposed", "bias"),
    itertools.product(["silu", "gelu_tanh", "gpt_oss"], ["concatenated", "interleaved"], [False, True], [False, True]),
)
def test_activations_layouts_and_biases_equal_float64(activation, layout, transposed, bias):
    options = {"activation": activation, "layout": layout, "alpha": 1.5, "limit": 0.9}
    check(*make_experts(4, 2, 24, 16, 2, transposed=transposed, bias=bias), options, transposed)


def check(tensors, upstream, options, transposed):
    """Values against float64, gradients to the bit against the reference."""
    actual = outcome(triton_grouped_experts, tensors, upstream, torch.float32, transposed=transposed, **options)
    reference = {"act": act_of(options), "transposed": transposed}
    assert_close(actual, truth(tensors, upstream, **reference), 2e-5)
    eager = outcome(stacked_experts, tensors, upstream, torch.float32, **reference)
    assert all(torch.equal(actual[name], x) for name, x in eager.items() if name != "out")


@pytest.mark.parametrize(("dtype", "weights_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_half_precision(dtype, weights_dtype):
    tensors, upstream = make_experts(5, 2, 32, 16, 2, dtype=dtype)
    options = {"weights_dtype": weights_dtype, "transposed": False, **SILU}
    actual = outcome(triton_grouped_experts, tensors, upstream, dtype, **options)
    assert all(x.dtype == (weights_dtype if name == "top_k_weights" else dtype) for name, x in actual.items())
    expected = truth(tensors, upstream, act=act_of(SILU), transposed=False)
    assert_close(actual, expected, 3e-2 if dtype == torch.bfloat16 else 3e-3)


@pytest.mark.parametrize("needed", [(), *((name,) for name in NAMES)])
def test_only_needed_gradients(needed, monkeypatch):
    tensors, upstream = make_experts(5, 3, 16, 16, 2)
    given = []

    def spy(hidden, up, down, index, weights, *, gate_up_bias, down_bias, **options):
        given.extend([hidden, up, down, weights, gate_up_bias, down_bias])
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        return stacked_experts(hidden, up, down, index, weights, **biases, **options)

    monkeypatch.setattr(reference, "stacked_experts", spy)
    actual = outcome(triton_grouped_experts, tensors, upstream, torch.float32, needed, transposed=False, **SILU)
    assert set(actual) == {"out", *needed}
    assert tuple(name for name, x in zip(NAMES, given, strict=bool(needed)) if x.requires_grad) == needed
    assert_close(actual, truth(tensors, upstream, act=act_of(SILU), transposed=False), 2e-5)


def test_nothing_routed_gives_zeros():
    tensors, upstream = make_experts(5, 3, 16, 16, 2)
    tensors["top_k_index"].fill_(-1)
    actual = outcome(triton_grouped_experts, tensors, upstream, torch.float32, transposed=False, **SILU)
    assert set(actual) == {"out", *NAMES} and not any(x.count_nonzero() for x in actual.values())


def test_strided_inputs():
    tensors, upstream = make_experts(8, 2, 32, 16, 2)
    strided = dict(tensors)
    strided["hidden_states"] = tensors["hidden_states"].T.contiguous().T
    strided["gate_up_proj"] = tensors["gate_up_proj"][:1].expand(2, -1, -1)
    strided["top_k_index"] = tensors["top_k_index"].T.contiguous().T
    strided["top_k_weights"] = tensors["top_k_weights"][:, :1].expand(-1, 2)
    expected = truth(strided, upstream, needed=(), act=act_of(SILU), transposed=False)
    assert_close({"out": triton_grouped_experts(**strided, transposed=False, **SILU)}, expected, 2e-5)


def test_larger_tiles_give_the_same(monkeypatch):
    tensors, upstream = make_experts(9, 2, 40, 24, 2)
    expected = truth(tensors, upstream, needed=(), act=act_of(SILU), transposed=False)
    monkeypatch.setattr(w1w3_silu, "_tile", lambda hidden_states: w1w3_silu.Tile(64, 64, 32, 4, 3))
    assert_close({"out": triton_grouped_experts(**tensors, transposed=False, **SILU)}, expected, 2e-5)


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        ((1, 1, 8193, 1, 1), {}, "hidden size must be at most 8192 .* got 8193; use impl='stacked' or impl='fused'"),
        ((1, 1, 1, 8193, 1), {}, "intermediate size must be at most 8192 .* got 8193; use impl='stacked'"),
        ((2, 1, 8, 8, 1), {"activation": "relu"}, "activation must be one of"),
        ((2, 1, 8, 8, 1), {"top_k_index": torch.full((2, 1), 2)}, "top_k_index must be in -1..1"),
    ],
)
def test_wrong_use_is_named(shape, change, message):
    tensors, _ = make_experts(*shape)
    with pytest.raises(ValueError, match=message):
        triton_grouped_experts(**{**tensors, "transposed": False, **SILU, **change})


def test_float64_is_named():
    tensors, _ = make_experts(2, 1, 8, 8, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="got torch.float64; use impl='stacked'"):
        triton_grouped_experts(**tensors, transposed=False, **SILU)


def test_a_cpu_without_the_interpreter_is_named(monkeypatch):
    monkeypatch.setattr(w1w3_silu, "INTERPRET", False)
    tensors = {name: x.cpu() for name, x in make_experts(2, 1, 8, 8, 1)[0].items()}
    with pytest.raises(RuntimeError, match="must be on a CUDA GPU .* got cpu; .*impl='stacked'"):
        triton_grouped_experts(**tensors, transposed=False, **SILU)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_triton_grouped_equals_float64_on_a_gpu(dtype, layout):
    tensors, upstream = make_experts(512, 8, 256, 128, 2, dtype=dtype)
    options = {**SILU, "layout": layout}
    actual = outcome(triton_grouped_experts, tensors, upstream, dtype, transposed=False, **options)
    assert_close(actual, truth(tensors, upstream, act=act_of(options), transposed=False), 1e-2)
