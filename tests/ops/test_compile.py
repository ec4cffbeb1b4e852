"""torch.compile around the functions of the ops: one graph with the same numbers, or a refusal that says what to do."""

import pytest
import torch
from expert_cases import DEVICE, NAMES, make_experts
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

from grpo_moe.ops import (
    LossConfig,
    grpo_loss,
    grpo_loss_from_logits,
    grpo_loss_from_logps,
    moe,
    moe_experts,
    sink_attention,
    token_logps,
)
from grpo_moe.ops.loss.logits import logps_from_logits
from grpo_moe.ops.norm import rms_norm

B, T, H, V = 2, 5, 8, 11
EXPERTS = ("gate_up_proj", "down_proj", "top_k_index", "top_k_weights", "gate_up_bias", "down_bias")


def cases():
    """Name -> (function of one [10, H] tensor with gradient, what a refusal says or None)."""
    experts, _ = make_experts(B * T, 3, H, 8, 2)
    experts = {name: experts[name] for name in EXPERTS}
    weight, ids = torch.randn(V, H, device=DEVICE), torch.randint(V, (B, T), device=DEVICE)
    batch = {"advantages": torch.tensor([1.0, -1.0], device=DEVICE), "completion_mask": torch.ones(B, T, device=DEVICE)}
    config, old = LossConfig(epsilon=0.1), torch.full((B, T), -2.0, device=DEVICE)
    seen = torch.ones(1, T, T, dtype=torch.bool, device=DEVICE).tril()

    def attend(x):
        x = x.view(1, B, T, H)
        return sink_attention(x, x, x, mask=seen, sinks=x.new_zeros(B))

    return {
        "fused": (lambda x: moe_experts(x, **experts), None),
        "gpt_oss": (lambda x: moe_experts(x, **experts, activation="gpt_oss", alpha=1.5, limit=0.9), None),
        "checked": (lambda x: moe_experts(x, **experts, check=True), "check=True reads the indices .* leave it out"),
        "stacked": (
            lambda x: moe_experts(x, **experts, impl="stacked"),
            "impl='stacked'.* or use impl='fused' on a GPU",
        ),
        "function": (lambda x: moe_experts(x, **experts, activation=torch.mul), "use impl='fused' with the name of an"),
        "single_pass": (lambda x: moe_experts(x, **experts, impl="single_pass"), "impl='single_pass' are no operator"),
        "triton_grouped": (lambda x: moe_experts(x, **experts, impl="triton_grouped"), "or use impl='fused'"),
        "token_logps": (lambda x: token_logps(x, weight, ids.flatten(), chunk_size=3), "compile what is around it"),
        "grpo_loss": (
            lambda x: grpo_loss(x.view(B, T, H), weight, ids, config=config, old_logps=old, **batch).loss,
            "compile what is around it",
        ),
        "logits": (lambda x: logps_from_logits((x @ weight.T).view(B, T, V), ids), "compile what is around them"),
        "loss from logits": (
            lambda x: (
                grpo_loss_from_logits((x @ weight.T).view(B, T, V), ids, config=config, old_logps=old, **batch).loss
            ),
            "compile what is around them",
        ),
        "loss from logps": (
            lambda x: grpo_loss_from_logps(x.mean(1).view(B, T), config=config, old_logps=old, **batch).loss,
            None,
        ),
        "sink_attention": (attend, None),
        "rms_norm": (lambda x: x * rms_norm(x.detach(), x.new_ones(H), 1e-6, "product"), "rms_norm is a kernel"),
    }


@pytest.fixture(autouse=True)
def kernels_and_no_graphs(monkeypatch):
    monkeypatch.setattr(moe, "_on_gpu", lambda hidden_states: True)
    torch._dynamo.reset()


def outcome(function, rows=B * T):
    torch.manual_seed(1)
    x = torch.randn(rows, H, device=DEVICE, requires_grad=True)
    out = function(x)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


@pytest.mark.parametrize("name", cases())
def test_full_graphs_are_right_or_refused(name):
    function, refusal = cases()[name]
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    if refusal is None:
        torch.testing.assert_close(outcome(compiled), outcome(function))
    else:
        with pytest.raises(Unsupported, match=f"(?s){refusal}"):
            compiled(torch.randn(B * T, H, device=DEVICE))


@pytest.mark.parametrize("name", [name for name, (_, refusal) in cases().items() if refusal is None])
def test_full_graphs_of_any_size_and_number(name):
    """Sizes and the floats of options are symbols then."""
    function, _ = cases()[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled), outcome(function))


def test_experts_have_one_graph_for_any_number_of_tokens():
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda **given: moe_experts(**given), fullgraph=True, backend=counter)
    for tokens in (6, 9):
        tensors, upstream = make_experts(tokens, 2, 16, 8, 1)
        for name in ("hidden_states", "top_k_index", "top_k_weights"):
            torch._dynamo.mark_dynamic(tensors[name], 0)
        leaves = [tensors[name].requires_grad_() for name in NAMES]
        made = [
            (out, *torch.autograd.grad(out, leaves, upstream)) for out in (compiled(**tensors), moe_experts(**tensors))
        ]
        torch.testing.assert_close(*made)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", [name for name, (_, refusal) in cases().items() if refusal is not None])
def test_other_graphs_break_around_them_and_stay_right(name):
    function, _ = cases()[name]
    compiled = torch.compile(lambda x: function(x * 2) + 1, backend="aot_eager")
    torch.testing.assert_close(outcome(compiled), outcome(lambda x: function(x * 2) + 1))


@pytest.mark.parametrize("chunk_size", [4, 100])
def test_a_head_in_a_graph_of_any_number_of_rows(chunk_size):
    weight = torch.randn(V, H, device=DEVICE)

    def head(x):
        ids = torch.arange(len(x), device=DEVICE) % V
        return token_logps(x * 2, weight, ids, chunk_size=chunk_size) + 1

    compiled = torch.compile(head, backend="aot_eager")
    for rows in (5, 9):
        x = torch.randn(rows, H, device=DEVICE)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), head(x))
        torch.testing.assert_close(outcome(compiled, rows), outcome(head, rows))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fused", "gpt_oss", "loss from logps"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_gpu_full_graphs_by_inductor(name, dynamic):
    """Whose kernels would take a Python float for a float64."""
    function, _ = cases()[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic)
    torch.testing.assert_close(outcome(compiled), outcome(function), rtol=1e-4, atol=1e-5)
