"""The single-pass experts against the loop over experts in float64, on a GPU or under Triton's interpreter."""

import itertools
import math

import pytest
import torch
from expert_cases import DEVICE, NAMES, assert_close, make_experts, outcome, truth

from grpo_moe.ops.moe import single_pass
from grpo_moe.ops.moe.activations import gated_activation
from grpo_moe.ops.moe.reference import stacked_experts
from grpo_moe.ops.moe.single_pass import single_pass_experts

# the interpreter truncates to bf16 where a GPU rounds
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2 if DEVICE == "cuda" else 3e-2}


def options_of(activation="silu", layout="concatenated", transposed=False):
    """Keyword arguments of the single pass, and those of the reference."""
    numbers = {"alpha": 1.702, "limit": 0.9}
    given = {"activation": activation, "layout": layout, "transposed": transposed, **numbers}
    return given, {"act": gated_activation(activation, layout, **numbers), "transposed": transposed}


SILU, REFERENCE = options_of()


def forward(tensors, dtype=torch.float32, **changes):
    return outcome(single_pass_experts, tensors, None, dtype, (), **(SILU | changes))["out"]


def assert_forward_equals_float64(tensors, dtype, options=(SILU, REFERENCE)):
    given, reference = options
    expected = outcome(stacked_experts, tensors, None, torch.float64, (), **reference)
    assert expected["out"].count_nonzero() or not expected["out"].numel()
    out = forward(tensors, dtype, **given)
    assert out.dtype == dtype
    assert_close({"out": out}, expected, TOLERANCE[dtype])


SHAPES = [(7, 4, 64, 32, 2), (6, 3, 33, 19, 2), (1, 4, 32, 16, 4), (5, 40, 16, 16, 2), (9, 3, 16, 40, 2),
          (20, 1, 16, 16, 3), (0, 4, 16, 16, 2)]  # fmt: skip
GPU_CASES = [
    ((64, 8, 768, 3072, 2), "concatenated", False, torch.bfloat16),
    ((64, 8, 768, 3072, 2), "interleaved", True, torch.bfloat16),
    ((512, 8, 256, 1024, 2), "concatenated", True, torch.bfloat16),
    ((512, 8, 256, 1024, 2), "interleaved", False, torch.bfloat16),
    ((16, 64, 768, 1024, 2), "concatenated", False, torch.bfloat16),
    ((128, 32, 720, 720, 4), "concatenated", False, torch.bfloat16),
    ((3, 8, 768, 96, 2), "concatenated", False, torch.bfloat16),
    ((33, 8, 97, 211, 2), "concatenated", False, torch.bfloat16),
    ((33, 8, 97, 211, 2), "interleaved", True, torch.float16),
    ((64, 8, 256, 1024, 2), "concatenated", False, torch.float16),
    ((64, 8, 256, 1024, 2), "interleaved", False, torch.float32),
]


@pytest.mark.parametrize(("shape", "bias"), zip(SHAPES, itertools.cycle([False, True]), strict=False))
def test_single_pass_equals_float64(shape, bias):
    tensors, _ = make_experts(*shape, bias=bias)
    assert_forward_equals_float64(tensors, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "layout", "transposed", "dtype"), GPU_CASES)
def test_single_pass_equals_float64_on_a_gpu(shape, layout, transposed, dtype):
    tensors, _ = make_experts(*shape, transposed=transposed, dtype=dtype)
    assert_forward_equals_float64(tensors, dtype, options_of("gpt_oss", layout, transposed))


KINDS = [
    (*kind, transposed)
    for kind, transposed in zip(
        itertools.product(["silu", "gelu_tanh", "gpt_oss"], ["concatenated", "interleaved"]),
        [False, True, True, False, False, True],
        strict=True,
    )
]


@pytest.mark.parametrize(("activation", "layout", "transposed"), KINDS)
def test_activations_layouts_and_transposed_weights_equal_float64(activation, layout, transposed):
    tensors, _ = make_experts(4, 2, 16, 20, 2, transposed=transposed)
    assert_forward_equals_float64(tensors, torch.float32, options_of(activation, layout, transposed))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_equals_float64(dtype):
    tensors, _ = make_experts(4, 2, 32, 16, 2, dtype=dtype)
    assert_forward_equals_float64(tensors, dtype)


@pytest.mark.parametrize("needed", [("hidden_states",), ("down_proj", "down_bias"), NAMES])
def test_gradients_are_those_of_the_reference(needed):
    tensors, upstream = make_experts(4, 2, 16, 16, 2)
    actual = outcome(single_pass_experts, tensors, upstream, torch.float32, needed, **SILU)
    expected = outcome(stacked_experts, tensors, upstream, torch.float32, needed, **REFERENCE)
    assert all(expected[name].count_nonzero() and torch.equal(actual[name], expected[name]) for name in needed)
    assert_close(actual, truth(tensors, upstream, **REFERENCE), 2e-5)


def test_no_gradient_is_asked_of_what_needs_none(monkeypatch):
    asked = []
    grad = torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda out, leaves, *a: asked.append(len(leaves)) or grad(out, leaves, *a)
    )
    tensors, upstream = make_experts(4, 2, 16, 16, 2, bias=False)
    outcome(single_pass_experts, tensors, upstream, torch.float32, ("gate_up_proj",), **SILU)
    assert asked == [1, 1]  # the test's own, and the one inside


def test_nothing_routed_gives_zeros():
    tensors, _ = make_experts(5, 3, 16, 16, 2)
    tensors["top_k_index"].fill_(3)
    assert not forward(tensors).count_nonzero()


def test_repeats_are_bitwise_equal():
    tensors, _ = make_experts(4, 2, 16, 20, 2)
    assert torch.equal(forward(tensors), forward(tensors))


def test_garbage_in_unused_memory_is_never_read(monkeypatch):
    tensors, _ = make_experts(4, 2, 17, 19, 2)
    clean = forward(tensors)
    empty = torch.Tensor.new_empty

    def poisoned(self, *shape, **kwargs):
        made = empty(self, *shape, **kwargs)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    assert torch.equal(clean, forward(tensors))


def test_strided_and_expanded_inputs():
    tensors, _ = make_experts(5, 2, 16, 16, 2)
    strided = tensors | {
        "hidden_states": tensors["hidden_states"].T.contiguous().T,
        "down_proj": tensors["down_proj"][:1].expand(2, -1, -1),
        "top_k_index": tensors["top_k_index"].T.contiguous().T,
        "top_k_weights": tensors["top_k_weights"][:, :1].expand(-1, 2),
    }
    assert torch.equal(forward(strided), forward({n: x.contiguous() for n, x in strided.items()}))


@pytest.mark.parametrize(
    ("dtype", "changes", "message"),
    [
        (torch.float32, {"activation": "relu"}, "activation must be one of silu"),
        (torch.float32, {"layout": "mixed"}, "layout must be one of"),
        (torch.float64, {}, 'hidden_states must be one of torch.bfloat16.*got torch.float64.*impl="stacked"'),
    ],
)
def test_what_the_kernel_does_not_know_is_refused(dtype, changes, message):
    tensors, _ = make_experts(3, 2, 16, 16, 2)
    with pytest.raises(ValueError, match=message):
        forward(tensors, dtype, **changes)


def test_mixed_dtypes_are_refused():
    tensors, _ = make_experts(3, 2, 16, 16, 2)
    tensors["down_bias"] = tensors["down_bias"].bfloat16()
    with pytest.raises(ValueError, match="down_bias must be torch.float32 as hidden_states, got torch.bfloat16"):
        single_pass_experts(**tensors, **SILU)


def test_cpu_tensors_without_the_interpreter_are_refused(monkeypatch):
    monkeypatch.setattr(single_pass, "INTERPRET", False)
    tensors = {n: x.cpu() for n, x in make_experts(3, 2, 16, 16, 2)[0].items()}
    with pytest.raises(RuntimeError, match='hidden_states must be on a CUDA GPU, got cpu; use impl="stacked"'):
        forward(tensors)


@pytest.mark.gpu
def test_gpu_cuda_graph_replays_another_routing():
    tensors, _ = make_experts(64, 8, 256, 1024, 2, dtype=torch.bfloat16)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        single_pass_experts(**tensors, **SILU)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = single_pass_experts(**tensors, **SILU)
    tensors["top_k_index"].copy_(torch.randint(-1, 9, (64, 2), device=DEVICE))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, single_pass_experts(**tensors, **SILU))
