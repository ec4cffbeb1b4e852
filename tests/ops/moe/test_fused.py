"""The Triton experts against the loop over experts in float64, on a GPU or under Triton's interpreter."""

import itertools
import math

import expert_cases
import pytest
import torch
from expert_cases import DEVICE, NAMES, make_experts

from grpo_moe.ops import moe, moe_experts
from grpo_moe.ops.moe import fused, grouped_gemm, routing

ON_GPU = torch.cuda.is_available()
# the interpreter truncates to bf16 where a GPU rounds
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2 if ON_GPU else 3e-2}


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch):
    monkeypatch.setattr(moe, "_on_gpu", lambda hidden_states: hidden_states.dtype != torch.float64)


def make(*shape, bias=False, **options):
    return make_experts(*shape, bias=bias, **options)


def outcome(tensors, upstream, dtype, needed=NAMES, **options):
    return expert_cases.outcome(moe_experts, tensors, upstream, dtype, needed, **options)


def assert_close(actual, truth, dtype):
    expert_cases.assert_close(actual, truth, TOLERANCE[dtype])


SHAPES = [(7, 4, 64, 32, 2), (6, 3, 33, 19, 2), (1, 4, 32, 16, 4), (16, 4, 32, 16, 4), (5, 40, 16, 16, 2),
          (17, 2, 24, 24, 1), (9, 3, 16, 40, 2), (0, 4, 16, 16, 2)]  # fmt: skip
GPU_SHAPES = [(512, 8, 256, 128, 2), (512, 8, 97, 47, 2), (512, 7, 128, 64, 3), (512, 8, 256, 64, 1),
              (128, 8, 256, 64, 8), (70_000, 4, 64, 32, 1), (3000, 8, 512, 256, 4)]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_fused_equals_float64(shape):
    tensors, upstream = make(*shape)
    assert_close(outcome(tensors, upstream, torch.float32), outcome(tensors, upstream, torch.float64), torch.float32)


def norms(made, truth):
    return {n: float((x.double() - truth[n]).norm() / truth[n].norm().clamp(min=1e-30)) for n, x in made.items()}


def assert_no_worse_than_eager(tensors, upstream, dtype):
    truth = outcome(tensors, upstream, torch.float64)
    eager = norms(outcome(tensors, upstream, dtype, impl="stacked"), truth)
    for name, error in norms(outcome(tensors, upstream, dtype), truth).items():
        assert error <= 1.5 * eager[name] + 1e-6, f"{name}: {error:.2e}, eager {eager[name]:.2e}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_error_is_at_most_half_more_than_that_of_eager(shape, dtype):
    """The rounding of float32 sums alone may differ: an error of 1e-6 is none."""
    bias = shape[2] % 8 == 0
    tensors, upstream = make(*shape, dtype=dtype, bias=bias)
    assert_no_worse_than_eager(tensors, upstream, dtype)


@pytest.mark.gpu
def test_every_number_of_tokens_to_70():
    """Over all of them as in the tests above; one token's two gradients alone may be luckily rounded in eager."""
    rounding, ours, eager = torch.finfo(torch.bfloat16).eps / 2, [], []
    for tokens in range(71):
        tensors, upstream = make(tokens, 8, 128, 64, 2, dtype=torch.bfloat16)
        truth = outcome(tensors, upstream, torch.float64)
        ours.append(norms(outcome(tensors, upstream, torch.bfloat16), truth))
        eager.append(norms(outcome(tensors, upstream, torch.bfloat16, impl="stacked"), truth))
        for name, error in ours[-1].items():
            assert error <= 1.5 * eager[-1][name] + rounding, f"{tokens} tokens, {name}: {error:.2e}"
    for name in ours[0]:
        squares = [sum(errors[name] ** 2 for errors in made) for made in (ours, eager)]
        assert 0 < squares[0] <= 1.5**2 * squares[1], f"{name}: {squares}"


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(140_000, 4, 64, 1024, 8), (256, 140, 4096, 4096, 2)], ids=["rows", "weights"])
def test_more_than_2_to_the_31_elements(shape):
    """T * K * 2I of pre-activations; E * 2I * H and E * H * I of weights."""
    tensors, upstream = make(*shape, dtype=torch.bfloat16)
    for x in tensors.values():
        if x is not None and x.is_floating_point():
            x.requires_grad_()
    leaves = [tensors[n] for n in NAMES if tensors[n] is not None]
    made = []
    for impl in ("fused", "stacked"):
        out = moe_experts(**tensors, impl=impl)
        made.append([out.detach(), *torch.autograd.grad(out, leaves, upstream)])
        del out
    for ours, eager in zip(*made, strict=True):
        assert ((ours - eager).norm() / eager.norm()).item() < 1e-2


@pytest.mark.slow
def test_long_sums_in_float32_are_no_worse_than_eager(monkeypatch):
    """Of one expert's rows, in the gradient of its weights."""
    monkeypatch.setattr(fused, "GATHER_FROM", 0)
    tensors, upstream = make(3000, 1, 16, 16, 1)
    tensors["top_k_index"].fill_(0)
    truth = outcome(tensors, upstream, torch.float64, needed=("gate_up_proj", "down_proj"))
    made = norms(outcome(tensors, upstream, torch.float32, needed=("gate_up_proj", "down_proj")), truth)
    assert max(made.values()) < 2.2e-7  # 2.7e-7 in one sum


KINDS = [
    (*kind, gather_from)  # rows by TMA, or row by row
    for kind, gather_from in zip(
        itertools.product(["silu", "gelu_tanh", "gpt_oss"], ["concatenated", "interleaved"], [False, True]),
        itertools.cycle([0, 10**9, 10**9, 0]),
        strict=False,
    )
]


@pytest.mark.parametrize(("activation", "layout", "transposed", "gather_from"), KINDS)
def test_activations_layouts_and_biases_equal_float64(activation, layout, transposed, gather_from, monkeypatch):
    monkeypatch.setattr(fused, "GATHER_FROM", gather_from)
    tensors, upstream = make(9, 2, 24, 16, 2, transposed=transposed, bias=True)
    options = {"activation": activation, "layout": layout, "transposed": transposed, "limit": 0.9}
    truth = outcome(tensors, upstream, torch.float64, **options)
    assert_close(outcome(tensors, upstream, torch.float32, **options), truth, torch.float32)


def test_weight_gradients_by_torch_equal_those_by_triton(monkeypatch):
    def loop(left, right, plan):
        bounds = itertools.pairwise(plan.expert_offsets.tolist())
        return torch.stack([left[a:b].T @ right[a:b] for a, b in bounds])

    if not ON_GPU:
        monkeypatch.setattr(fused, "torch_grouped_outer", loop)  # torch has it on a GPU only
    monkeypatch.setattr(fused, "GATHER_FROM", 0)
    for experts, transposed in ((3, False), (64, True)):  # without rows for most of the 64
        tensors, upstream = make(12, experts, 32, 16, 2, transposed=transposed, dtype=torch.bfloat16)
        poison = [torch.full_like(tensors[n], math.nan) for n in NAMES[1:3]]
        del poison  # what a new tensor finds in its memory
        truth = outcome(tensors, upstream, torch.float64, transposed=transposed)
        assert_close(outcome(tensors, upstream, torch.bfloat16, transposed=transposed), truth, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    tensors, upstream = make(9, 3, 32, 16, 2, bias=True, dtype=dtype)
    assert_close(outcome(tensors, upstream, dtype), outcome(tensors, upstream, torch.float64), dtype)


@pytest.mark.parametrize("needed", [(), *((name,) for name in NAMES), NAMES[:3], NAMES[3:]])
def test_every_subset_of_gradients(needed):
    tensors, upstream = make(5, 3, 16, 16, 2, bias=True)
    truth = outcome(tensors, upstream, torch.float64, NAMES)
    actual = outcome(tensors, upstream, torch.float32, needed)
    assert set(actual) == {"out", *needed}
    assert_close(actual, truth, torch.float32)


def test_all_tokens_to_one_expert_and_none_at_all():
    tensors, upstream = make(9, 3, 24, 16, 2)
    for index in (1, -1):
        tensors["top_k_index"] = torch.full_like(tensors["top_k_index"], index)
        actual, truth = (outcome(tensors, upstream, dtype) for dtype in (torch.float32, torch.float64))
        assert_close(actual, truth, torch.float32)
        if index == -1:
            assert not any(x.count_nonzero() for x in actual.values())


@pytest.mark.parametrize("gather_from", [0, 10**9])
def test_garbage_in_unused_memory_is_never_read(gather_from, monkeypatch):
    monkeypatch.setattr(fused, "GATHER_FROM", gather_from)
    tensors, upstream = make(11, 6, 32, 16, 2, bias=True)
    tensors["top_k_index"][tensors["top_k_index"] == 3] = 2  # an expert without rows
    clean = outcome(tensors, upstream, torch.float32)

    def poisoned(make_empty):
        def call(*args, **kwargs):
            made = make_empty(*args, **kwargs)
            return made.fill_(math.nan if made.is_floating_point() else 2**30)

        return call

    for holder, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(holder, name, poisoned(getattr(holder, name)))
    dirty = outcome(tensors, upstream, torch.float32)
    assert all(torch.equal(clean[name], x) for name, x in dirty.items())


def test_strided_and_expanded_inputs():
    tensors, upstream = make(8, 2, 32, 16, 2)
    strided = dict(tensors)
    strided["hidden_states"] = tensors["hidden_states"].T.contiguous().T
    strided["down_proj"] = tensors["down_proj"][:1].expand(2, -1, -1)
    strided["top_k_weights"] = tensors["top_k_weights"][:, :1].expand(-1, 2)
    plain = {n: x if x is None else x.contiguous() for n, x in strided.items()}
    upstream = upstream.T.contiguous().T
    assert_close(outcome(strided, upstream, torch.float32), outcome(plain, upstream, torch.float64), torch.float32)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gpt_oss"])
def test_a_token_of_nan_stays_nan_and_alone(activation):
    tensors, _ = make(6, 3, 16, 16, 2)
    tensors["top_k_index"].clamp_(0, 2)
    tensors["hidden_states"][2, 3] = math.nan
    out = moe_experts(**tensors, activation=activation)
    assert out[2].isnan().all() and out[[0, 1, 3, 4, 5]].isfinite().all()


def test_an_index_beyond_32_bits_is_skipped():
    tensors, _ = make(4, 3, 16, 16, 2, bias=True)
    skipped = tensors | {"top_k_index": tensors["top_k_index"].clone()}
    tensors["top_k_index"][1, 0], skipped["top_k_index"][1, 0] = 2**32, -1
    assert torch.equal(moe_experts(**tensors), moe_experts(**skipped))


@pytest.mark.parametrize(
    "options",
    [{}, {"activation": lambda gate, up: gate * up}, {"impl": "single_pass"}],
    ids=["fused", "function", "single_pass"],
)
def test_a_second_derivative_is_refused(options):
    tensors, _ = make(4, 3, 16, 16, 2)
    hidden = tensors["hidden_states"].requires_grad_()
    total = moe_experts(**tensors, **options).sum()
    with pytest.raises(RuntimeError, match="create_graph must be False .* use impl='stacked'"):
        torch.autograd.grad(total, hidden, create_graph=True)


def test_autocast_in_the_backward_pass_changes_nothing():
    tensors, upstream = make(6, 3, 16, 16, 2, bias=True)
    weights = tensors["top_k_weights"].requires_grad_()
    out = moe_experts(**tensors)
    (expected,) = torch.autograd.grad(out, weights, upstream, retain_graph=True)
    with torch.autocast(DEVICE, torch.bfloat16):
        (grad,) = torch.autograd.grad(out, weights, upstream)
    assert torch.equal(grad, expected)


def test_repeats_are_bitwise_equal_and_a_retained_graph_gives_the_same():
    tensors, upstream = make(9, 3, 24, 16, 3)
    first, second = (outcome(tensors, upstream, torch.float32) for _ in range(2))
    assert all(torch.equal(first[name], x) for name, x in second.items())
    leaves = {n: x.requires_grad_() for n, x in tensors.items() if n in NAMES and x is not None}
    out = moe_experts(**tensors)
    for retain in (True, False):
        grads = torch.autograd.grad(out, list(leaves.values()), upstream, retain_graph=retain)
        assert all(torch.equal(first[name], grad) for name, grad in zip(leaves, grads, strict=True))


def test_memory_efficient_overwrites_and_says_so(monkeypatch):
    tensors, upstream = make(9, 3, 24, 16, 2)
    overwritten = []
    through = fused.activate_backward

    def watched(grad, pre, *args, **options):
        made = through(grad, pre, *args, **options)
        overwritten.append(made[0].data_ptr() == pre.data_ptr())
        return made

    monkeypatch.setattr(fused, "activate_backward", watched)
    plain, frugal = (outcome(tensors, upstream, torch.float32, memory_efficient=m) for m in (False, True))
    assert overwritten == [False, True]
    assert all(torch.equal(plain[name], x) for name, x in frugal.items())
    hidden = tensors["hidden_states"].clone().requires_grad_()
    out = moe_experts(**{**tensors, "hidden_states": hidden}, memory_efficient=True)
    torch.autograd.grad(out, hidden, upstream, retain_graph=True)
    with pytest.raises(RuntimeError, match="memory_efficient must be False for a second backward pass"):
        torch.autograd.grad(out, hidden, upstream)


def test_inference_keeps_nothing(monkeypatch):
    kept = []
    gate_up = fused.gate_up
    monkeypatch.setattr(fused, "gate_up", lambda *a, keep, **k: kept.append(keep) or gate_up(*a, keep=keep, **k))
    tensors, upstream = make(8, 4, 32, 16, 2)
    outcome(tensors, upstream, torch.float32, needed=())
    with torch.no_grad():
        moe_experts(**tensors)
    assert kept == [False, False]


def test_autocast_rounds_the_inputs():
    tensors, _ = make(8, 4, 32, 16, 2)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = moe_experts(**tensors)
    names = ("hidden_states", "gate_up_proj", "down_proj")
    rounded = moe_experts(**{n: x.bfloat16() if n in names else x for n, x in tensors.items()})
    assert out.dtype == torch.float32 and torch.equal(out, rounded.float())


def test_router_weights_in_float32_are_not_rounded():
    tensors, upstream = make(9, 3, 32, 16, 2, bias=True, dtype=torch.bfloat16)
    precise = tensors | {"top_k_weights": torch.rand(9, 2, device=DEVICE)}
    leaf = precise["top_k_weights"].requires_grad_()
    (grad,) = torch.autograd.grad(moe_experts(**precise), leaf, upstream)
    truth = outcome(precise, upstream, torch.float64)
    assert grad.dtype == torch.float32
    assert_close({"top_k_weights": grad.double()}, truth, torch.bfloat16)
    rounded = moe_experts(**precise | {"top_k_weights": leaf.bfloat16()})
    assert not torch.equal(rounded, moe_experts(**precise))


def test_custom_activation_runs_between_the_gemms():
    tensors, upstream = make(8, 4, 32, 16, 2)
    relu = lambda gate, up: gate.relu() * up  # noqa: E731
    truth = outcome(tensors, upstream, torch.float64, activation=relu)
    assert_close(outcome(tensors, upstream, torch.float32, activation=relu), truth, torch.float32)


@pytest.mark.parametrize("options", [{}, {"memory_efficient": True, "activation": "gpt_oss", "layout": "interleaved"}])
def test_compiles_as_one_graph(options):
    tensors, upstream = make(9, 3, 24, 16, 2, bias=True)
    compiled = torch.compile(lambda **given: moe_experts(**given, **options), fullgraph=True, backend="aot_eager")
    leaves = {n: tensors[n].requires_grad_() for n in NAMES}
    made = []
    for function in (lambda **given: moe_experts(**given, **options), compiled):
        out = function(**tensors)
        made.append([out, *torch.autograd.grad(out, list(leaves.values()), upstream)])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


def test_exports_as_one_operator():
    class Layer(torch.nn.Module):
        def forward(self, **given):
            return moe_experts(**given)

    tensors, _ = make(5, 3, 16, 16, 2)
    program = torch.export.export(Layer(), (), tensors)
    assert [n.target for n in program.graph.nodes].count(torch.ops.grpo_moe.experts.default) == 1
    assert torch.equal(program.module()(**tensors), moe_experts(**tensors))


def test_operator_passes_opcheck():
    tensors, _ = make(5, 3, 16, 16, 2)
    given = [tensors[n] for n in ("hidden_states", "gate_up_proj", "down_proj", "top_k_weights")]
    given = [x.requires_grad_() for x in given]
    torch.library.opcheck(
        fused._experts,
        (*given, None, None, tensors["top_k_index"], "silu", False, 1.0, 1.0, False, "auto", False, True),
        test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
    )


def test_routing_sorts_pairs_and_tiles_cover_them():
    for tokens, slots, experts in [(0, 2, 3), (1, 1, 1), (50, 3, 5), (5, 4, 33), (90, 2, 40)]:
        index = torch.randint(-1, experts + 1, (tokens, slots), device=DEVICE)
        plan, flat = routing.route(index, experts, 16), index.flatten()
        routed = (flat >= 0) & (flat < experts)
        order = torch.where(routed, flat, experts).argsort(stable=True)[: int(routed.sum())]
        assert torch.equal(plan.pair_of_row[: len(order)].long(), order)
        inverse = torch.full_like(flat, -1)
        inverse[order] = torch.arange(len(order), device=DEVICE)
        assert torch.equal(plan.row_of_pair.long(), inverse)
        assert torch.equal(plan.expert_of_row[: len(order)].long(), flat[order])
        offsets = plan.expert_offsets.tolist()
        assert offsets == [0, *torch.bincount(flat[order], minlength=experts).cumsum(0).tolist()]
        for block in (4, 16):
            expert, first, count = plan.tiles(block)
            expected = [(e, r) for e in range(experts) for r in range(offsets[e], offsets[e + 1], block)]
            made = list(zip(expert.tolist(), first.tolist(), strict=True))[: int(count) if tokens else 0]
            assert made == expected


def test_check_looks_at_the_indices():
    tensors, _ = make(5, 3, 16, 16, 2)
    tensors["top_k_index"][0, 0] = 7
    with pytest.raises(ValueError, match="top_k_index must be in -1..3"):
        moe_experts(**tensors, check=True)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [7, 256, 9000])
@pytest.mark.parametrize("options", [{}, {"activation": lambda gate, up: gate.relu() * up}], ids=["named", "function"])
def test_gpu_cuda_graph_replays_another_routing(tokens, options):
    tensors, upstream = make(tokens, 8, 128, 64, 2, bias=True, dtype=torch.bfloat16)
    leaves = [tensors[n].requires_grad_() for n in NAMES]

    def step():
        out = moe_experts(**tensors, **options)
        return out, *torch.autograd.grad(out, leaves, upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(), step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    tensors["top_k_index"].copy_(torch.randint(-1, 9, (tokens, 2), device=DEVICE))
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))


@pytest.mark.gpu
def test_gpu_four_and_eight_warps_agree(monkeypatch):
    tensors, upstream = make(600, 4, 256, 128, 2, dtype=torch.bfloat16)
    made = []
    for warps in (4, 8):
        tile = grouped_gemm.Tile(64, 64, 64, warps, 3)
        monkeypatch.setattr(fused, "tile_of", lambda *given, tile=tile: tile)
        made.append(outcome(tensors, upstream, torch.bfloat16))
    for name, x in made[0].items():
        assert (x - made[1][name]).abs().max() <= 1e-2 * x.abs().max()
