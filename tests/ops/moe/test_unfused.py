"""The experts with an activation in PyTorch against the loop over experts, on a GPU or under Triton's interpreter."""

import math

import pytest
import torch
from expert_cases import DEVICE, NAMES, assert_close, make_experts, outcome, truth

from grpo_moe.ops.moe import fused, unfused
from grpo_moe.ops.moe.activations import gated_activation
from grpo_moe.ops.moe.reference import stacked_experts
from grpo_moe.ops.moe.unfused import unfused_experts


def relu(gate, up):
    return gate.relu() * up


def squared_relu(gate, up):
    return gate.relu().square() * up


def log(gate, up):
    """Neither a value nor a slope at gate 0."""
    return gate.abs().log() * up


def options_of(activation, layout="concatenated", transposed=False):
    return {"act": gated_activation(activation, layout), "transposed": transposed}


RELU = options_of(relu)


@pytest.mark.parametrize(
    ("shape", "activation"),
    [((5, 4, 32, 16, 2), relu), ((4, 2, 33, 19, 2), squared_relu), ((1, 3, 16, 16, 3), log), ((0, 4, 16, 16, 2), relu)],
)
def test_unfused_equals_float64(shape, activation):
    tensors, upstream = make_experts(*shape)
    options = options_of(activation)
    actual = outcome(unfused_experts, tensors, upstream, torch.float32, **options)
    assert set(actual) == {"out", *NAMES}
    assert_close(actual, truth(tensors, upstream, **options), 2e-5)


@pytest.mark.parametrize(
    ("transposed", "bias", "gather_from"),  # rows by TMA, or row by row
    [(False, False, 0), (False, True, 10**9), (True, False, 10**9), (True, True, 0)],
)
def test_transposed_and_biases_equal_float64(transposed, bias, gather_from, monkeypatch):
    monkeypatch.setattr(fused, "GATHER_FROM", gather_from)
    tensors, upstream = make_experts(6, 2, 24, 16, 2, transposed=transposed, bias=bias)
    options = options_of(squared_relu, "interleaved", transposed)
    actual = outcome(unfused_experts, tensors, upstream, torch.float32, **options)
    assert_close(actual, truth(tensors, upstream, **options), 2e-5)


@pytest.mark.parametrize(("dtype", "weights_dtype"), [(torch.bfloat16, torch.float32), (torch.float16, torch.float16)])
def test_half_precision_and_an_activation_in_float32(dtype, weights_dtype):
    tensors, upstream = make_experts(4, 2, 16, 16, 2, dtype=dtype)
    options = options_of(lambda gate, up: gate.to(torch.promote_types(gate.dtype, torch.float32)).sigmoid() * up)
    actual = outcome(unfused_experts, tensors, upstream, dtype, weights_dtype=weights_dtype, **options)
    assert all(x.dtype == (weights_dtype if name == "top_k_weights" else dtype) for name, x in actual.items())
    assert_close(actual, truth(tensors, upstream, **options), 3e-2 if dtype == torch.bfloat16 else 3e-3)


def test_gradients_alone_and_in_groups():
    tensors, upstream = make_experts(4, 1, 16, 16, 1)
    expected = truth(tensors, upstream, **RELU)
    for needed in ((), *((name,) for name in NAMES), NAMES[:3], NAMES[3:]):
        actual = outcome(unfused_experts, tensors, upstream, torch.float32, needed, **RELU)
        assert set(actual) == {"out", *needed}
        assert_close(actual, expected, 2e-5)


@pytest.mark.parametrize(("needed", "calls"), [
    (("top_k_weights",), {"gemm": 0, "outer": 0, "sum_by_expert": 0, "sum_over_slots": 0}),
    (("down_proj",), {"gemm": 0, "outer": 1, "sum_by_expert": 0, "sum_over_slots": 0}),
    (("gate_up_bias",), {"gemm": 1, "outer": 0, "sum_by_expert": 1, "sum_over_slots": 0}),
    (("hidden_states",), {"gemm": 2, "outer": 0, "sum_by_expert": 0, "sum_over_slots": 1}),
])  # fmt: skip
def test_only_needed_gradients_are_computed(needed, calls, monkeypatch):
    tensors, upstream = make_experts(5, 2, 16, 16, 2)
    for name in needed:
        tensors[name].requires_grad_()
    out = unfused_experts(**tensors, **RELU)
    made = dict.fromkeys(calls, 0)

    def counted(name, function):
        def call(*args, **kwargs):
            made[name] += 1
            return function(*args, **kwargs)

        return call

    for name in calls:
        monkeypatch.setattr(unfused, name, counted(name, getattr(unfused, name)))
    torch.autograd.grad(out, [tensors[name] for name in needed], upstream)
    assert made == calls


@pytest.mark.parametrize("index", [1, -1])
def test_all_tokens_to_one_expert_or_to_none(index):
    tensors, upstream = make_experts(5, 2, 16, 16, 2)
    tensors["top_k_index"].fill_(index)
    actual = outcome(unfused_experts, tensors, upstream, torch.float32, **RELU)
    assert_close(actual, truth(tensors, upstream, **RELU), 2e-5)
    assert all(bool(x.count_nonzero()) == (index == 1) for x in actual.values())


@pytest.mark.parametrize(("gather_from", "skipped"), [(0, slice(1, 3)), (10**9, slice(1, 3)), (0, slice(None))])
def test_garbage_reaches_no_result_and_no_gradient(gather_from, skipped, monkeypatch):
    monkeypatch.setattr(fused, "GATHER_FROM", gather_from)
    tensors, upstream = make_experts(5, 2, 16, 16, 2)
    tensors["top_k_index"][skipped] = -1
    scale = torch.tensor(0.7, device=DEVICE, requires_grad=True)  # a parameter of the activation meets every row
    leaves = {name: tensors[name].requires_grad_() for name in NAMES} | {"scale": scale}

    def run():
        out = unfused_experts(**tensors, **options_of(lambda gate, up: log(gate * scale + 0.1, up)))
        grads = torch.autograd.grad(out, list(leaves.values()), upstream)
        return {"out": out, **dict(zip(leaves, grads, strict=True))}

    clean = run()
    new_empty, empty_like, empty = torch.Tensor.new_empty, torch.empty_like, torch.empty
    poison = lambda x: x.fill_(math.nan if x.is_floating_point() else 2**30)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: poison(new_empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    dirty = run()
    assert all(x.isfinite().all() and torch.equal(clean[name], x) for name, x in dirty.items())


def test_a_parameter_of_the_activation_gets_its_gradient():
    tensors, upstream = make_experts(5, 2, 16, 16, 2)
    grads = []
    for function, dtype in ((unfused_experts, torch.float32), (stacked_experts, torch.float64)):
        scale = torch.tensor(0.7, device=DEVICE, dtype=dtype, requires_grad=True)
        options = options_of(lambda gate, up, scale=scale: (gate * scale).sin() * up)
        cast = {n: x.to(dtype) if x.is_floating_point() else x for n, x in tensors.items()}
        out = function(**cast, **options)
        grads.append(torch.autograd.grad(out, scale, upstream.to(dtype))[0])
    assert grads[1].abs() > 1e-3
    torch.testing.assert_close(grads[0].double(), grads[1], rtol=1e-4, atol=0)


def test_strided_inputs_and_gradients():
    tensors, upstream = make_experts(5, 2, 16, 16, 2)
    strided = dict(tensors)
    strided["hidden_states"] = tensors["hidden_states"].T.contiguous().T
    strided["down_proj"] = tensors["down_proj"][:1].expand(2, -1, -1)
    strided["top_k_index"] = tensors["top_k_index"].T.contiguous().T
    strided["top_k_weights"] = tensors["top_k_weights"][:, :1].expand(-1, 2)
    upstream = upstream.T.contiguous().T
    # an activation whose result and gradient are strided too
    options = {"act": lambda gate_up: (gate_up.T[:16].relu() * gate_up.T[16:]).T, "transposed": False}
    actual = outcome(unfused_experts, strided, upstream, torch.float32, **options)
    assert_close(actual, truth(strided, upstream, **options), 2e-5)


def test_repeats_are_bitwise_equal_and_a_retained_graph_gives_the_same():
    tensors, upstream = make_experts(4, 2, 16, 16, 2)
    first = outcome(unfused_experts, tensors, upstream, torch.float32, **RELU)
    leaves = [tensors[name].requires_grad_() for name in NAMES]
    out = unfused_experts(**tensors, **RELU)
    assert torch.equal(first["out"], out)
    for keep in (True, False):
        grads = torch.autograd.grad(out, leaves, upstream, retain_graph=keep)
        assert all(torch.equal(first[name], x) for name, x in zip(NAMES, grads, strict=True))


def test_an_activation_of_the_wrong_shape_is_named():
    tensors, _ = make_experts(4, 2, 16, 16, 2)
    with pytest.raises(ValueError, match=r"activation must return shape \(8, 16\), got \(8, 32\); see layout"):
        unfused_experts(**tensors, act=lambda gate_up: gate_up, transposed=False)


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(512, 8, 256, 128, 2), (512, 8, 97, 47, 2), (64, 8, 256, 128, 2)])
def test_unfused_equals_float64_on_a_gpu(shape, transposed):
    tensors, upstream = make_experts(*shape, transposed=transposed, dtype=torch.bfloat16)
    options = options_of(squared_relu, transposed=transposed)
    actual = outcome(unfused_experts, tensors, upstream, torch.bfloat16, **options)
    assert_close(actual, truth(tensors, upstream, **options), 2e-2)
    again = outcome(unfused_experts, tensors, upstream, torch.bfloat16, **options)
    assert all(torch.equal(actual[name], x) for name, x in again.items())


@pytest.mark.gpu
def test_unfused_never_waits_for_the_host():
    tensors, upstream = make_experts(512, 8, 256, 128, 2, dtype=torch.bfloat16)
    outcome(unfused_experts, tensors, upstream, torch.bfloat16, **RELU)
    torch.cuda.set_sync_debug_mode("error")
    try:
        outcome(unfused_experts, tensors, upstream, torch.bfloat16, **RELU)
    finally:
        torch.cuda.set_sync_debug_mode("default")
