import itertools

import pytest
import torch
from expert_cases import DEVICE
from torch.nn import functional as F

from grpo_moe.ops import moe, moe_experts


def make(tokens=7, experts=4, hidden=6, intermediate=5, slots=2, biases=False, transposed=False, dtype=torch.float64):
    torch.manual_seed(0)
    new = lambda *shape: torch.randn(*shape, dtype=dtype, requires_grad=True)  # noqa: E731
    up, down = (2 * intermediate, hidden), (hidden, intermediate)
    if transposed:
        up, down = up[::-1], down[::-1]
    tensors = {
        "hidden_states": new(tokens, hidden),
        "gate_up_proj": new(experts, *up),
        "down_proj": new(experts, *down),
        "top_k_index": torch.randint(0, experts, (tokens, slots)),
        "top_k_weights": new(tokens, slots),
    }
    if biases:
        tensors |= {"gate_up_bias": new(experts, 2 * intermediate), "down_bias": new(experts, hidden)}
    return tensors


def activate(name, gate, up):
    if name == "silu":
        return F.silu(gate) * up
    if name == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def loop(tensors, activation="silu", layout="concatenated", transposed=False):
    """Token by token, slot by slot."""
    rows = []
    for t, x in enumerate(tensors["hidden_states"]):
        total = torch.zeros_like(x)
        for slot, expert in enumerate(tensors["top_k_index"][t].tolist()):
            if not 0 <= expert < len(tensors["down_proj"]):
                continue
            up, down = tensors["gate_up_proj"][expert], tensors["down_proj"][expert]
            gate_up = x @ (up if transposed else up.T)
            if "gate_up_bias" in tensors:
                gate_up = gate_up + tensors["gate_up_bias"][expert]
            half = len(gate_up) // 2
            gate, up_part = (
                (gate_up[:half], gate_up[half:]) if layout == "concatenated" else (gate_up[::2], gate_up[1::2])
            )
            y = activate(activation, gate, up_part) @ (down if transposed else down.T)
            if "down_bias" in tensors:
                y = y + tensors["down_bias"][expert]
            total = total + tensors["top_k_weights"][t, slot] * y
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("activation", "layout", "transposed", "biases"),
    list(
        itertools.product(
            ["silu", "gelu_tanh", "gpt_oss"], ["concatenated", "interleaved"], [False, True], [False, True]
        )
    ),
)
def test_values_and_every_gradient_equal_the_loop(activation, layout, transposed, biases):
    tensors = make(biases=biases, transposed=transposed)
    ours = moe_experts(**tensors, activation=activation, layout=layout, transposed=transposed)
    theirs = loop(tensors, activation, layout, transposed)
    torch.testing.assert_close(ours, theirs)
    leaves = [x for x in tensors.values() if x.requires_grad]
    weights = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), leaves),
        torch.autograd.grad((theirs * weights).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0


@pytest.mark.parametrize(("tokens", "experts", "slots"), [(1, 4, 2), (3, 16, 1), (63, 5, 5), (257, 8, 3)])
def test_ragged_sizes(tokens, experts, slots):
    tensors = make(tokens=tokens, experts=experts, slots=slots)
    torch.testing.assert_close(moe_experts(**tensors), loop(tensors))


def test_skipped_slots_add_nothing_and_get_no_gradient():
    tensors = make()
    tensors["top_k_index"][0] = -1
    tensors["top_k_index"][1, 1] = 4  # the sentinel of expert parallelism
    out = moe_experts(**tensors)
    torch.testing.assert_close(out, loop(tensors))
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    (gradient,) = torch.autograd.grad(out.square().sum(), tensors["top_k_weights"])
    assert gradient[0].abs().max() == 0 and gradient[1, 1] == 0 and gradient[1, 0] != 0


def test_experts_without_tokens_get_zero_gradients():
    tensors = make()
    tensors["top_k_index"].fill_(2)
    moe_experts(**tensors).sum().backward()
    gradient = tensors["gate_up_proj"].grad
    assert gradient[2].abs().max() > 0 and gradient[[0, 1, 3]].abs().max() == 0


@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_routed_is_a_differentiable_zero(tokens):
    tensors = make(tokens=tokens, biases=True)
    tensors["top_k_index"].fill_(-1)
    out = moe_experts(**tensors)
    out.sum().backward()
    assert out.shape == (tokens, 6) and out.abs().sum() == 0
    for name, tensor in tensors.items():
        assert not tensor.requires_grad or (tensor.grad is not None and tensor.grad.abs().sum() == 0), name


def test_the_down_bias_is_weighted():
    tensors = make(biases=True)
    with torch.no_grad():
        for name in ("gate_up_proj", "down_proj", "gate_up_bias"):
            tensors[name].zero_()
        tensors["down_bias"].fill_(1)
    out = moe_experts(**tensors)
    torch.testing.assert_close(out, tensors["top_k_weights"].sum(1, keepdim=True).expand_as(out))


def test_a_custom_activation_and_non_contiguous_input():
    tensors = make(tokens=8)
    tensors["hidden_states"] = torch.randn(6, 8, dtype=torch.float64).T
    ours = moe_experts(**tensors, activation=lambda gate, up: F.silu(gate) * up)
    torch.testing.assert_close(ours, loop(tensors))


def test_repeats_to_the_bit_in_bf16():
    tensors = {k: v.bfloat16() if v.is_floating_point() else v for k, v in make(tokens=64).items()}
    first = moe_experts(**tensors)
    assert first.dtype == torch.bfloat16 and torch.equal(first, moe_experts(**tensors))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"impl": "nonsense"}, "impl must be one of"),
        ({"activation": "relu"}, "activation must be one of"),
        ({"layout": "columns"}, "layout must be one of"),
        ({"transposed": True}, "must be of shape"),
        ({"top_k_index": torch.full((7, 2), 5)}, "top_k_index must be in"),
        ({"top_k_index": torch.full((7, 2), -2)}, "top_k_index must be in"),
        ({"top_k_weights": torch.ones(7, 3)}, "top_k_weights must be of shape"),
        ({"hidden_states": torch.ones(7)}, "hidden_states must have 2 dimensions"),
        ({"impl": "single_pass", "activation": torch.add}, "impl='single_pass' knows activations by name only"),
        ({"impl": "triton_grouped", "activation": torch.add}, "use impl='fused' or 'stacked'"),
    ],
)
def test_wrong_use_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        moe_experts(**{**make(), **change})


@pytest.mark.parametrize("impl", ["triton_grouped", "single_pass"])
def test_missing_triton_is_named(impl, monkeypatch):
    monkeypatch.setattr(moe, "HAS_TRITON", False)
    with pytest.raises(ImportError, match=f"impl='{impl}' needs Triton, .* use impl='stacked'"):
        moe_experts(**make(), impl=impl)


@pytest.mark.parametrize("impl", ["triton_grouped", "single_pass"])
def test_every_implementation_is_reached_by_its_name(impl):
    tensors = {name: x.to(DEVICE, torch.float32 if x.is_floating_point() else None) for name, x in make().items()}
    expected = moe_experts(**tensors, impl="stacked")
    torch.testing.assert_close(moe_experts(**tensors, impl=impl), expected, rtol=1e-4, atol=1e-5)
