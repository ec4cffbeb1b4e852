"""The kernels of the experts over more than 2^31 elements, and by every tile: on a GPU."""

import itertools

import pytest
import torch
from expert_cases import DEVICE, NAMES, assert_close, make_experts, outcome, truth
from torch.nn import functional as F

from grpo_moe.ops import moe_experts
from grpo_moe.ops.moe import fused, single_pass
from grpo_moe.ops.moe.activation_kernels import Gate, activate_backward
from grpo_moe.ops.moe.activations import gated_activation
from grpo_moe.ops.moe.grouped_gemm import ExpertWeight, Rows, Tile, grouped_gemm
from grpo_moe.ops.moe.grouped_outer import grouped_outer
from grpo_moe.ops.moe.reference import stacked_experts
from grpo_moe.ops.moe.routing import route
from grpo_moe.ops.moe.row_kernels import gather_rows, sum_by_expert, sum_over_slots

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
TOKENS, SLOTS, EXPERTS, WIDE, NARROW = 137_500, 8, 8, 2048, 64
PAIRS = TOKENS * SLOTS
"""Times WIDE it is 2.25e9, more than 2^31."""
ROWS, WEIGHTS = (140_000, 4, 256, 1024, 8), (256, 140, 4096, 4096, 2)
"""T * K * 2I pre-activations, or as many partial outputs; E * 2I * H and E * H * I weights."""


def randn(*shape):
    return torch.randn(*shape, device=DEVICE, dtype=BF16)


def routed(tokens=TOKENS, slots=SLOTS):
    """Every slot of every token has a row."""
    return route(torch.randint(EXPERTS, (tokens, slots), device=DEVICE), EXPERTS, 64)


def last_rows(routing, number=500):
    """Numbers of the last rows, the tokens they belong to, and their expert."""
    rows = torch.arange(routing.num_rows - number, routing.num_rows, device=DEVICE)
    assert int(routing.expert_offsets[-1]) == routing.num_rows and bool(
        (routing.expert_of_row[rows] == EXPERTS - 1).all()
    )
    return rows, routing.pair_of_row[rows].long() // routing.num_slots


def assert_near(made, expected, tolerance=1e-2):
    made, expected = made.detach().double(), expected.detach().double()
    error = float((made - expected).norm() / expected.norm())
    assert error < tolerance, error


def test_gather_rows():
    routing, values = routed(), randn(TOKENS, WIDE)
    out = gather_rows(values, routing)
    rows, tokens = last_rows(routing)
    assert out.numel() > 2**31 and torch.equal(out[rows], values[tokens])


def test_sum_over_slots():
    routing, values, weights = routed(), randn(PAIRS, WIDE), torch.rand(PAIRS, device=DEVICE)
    out = sum_over_slots(values, routing, TOKENS, weights, torch.float32)
    _, tokens = last_rows(routing)
    rows = routing.row_of_pair.view(TOKENS, SLOTS)[tokens].long()
    expected = (values[rows].float() * weights.view(TOKENS, SLOTS)[tokens, :, None]).sum(1)
    assert values.numel() > 2**31
    torch.testing.assert_close(out[tokens], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("by_token", [False, True])
def test_sum_by_expert(by_token):
    routing = routed(PAIRS, 1) if by_token else routed()
    values = randn(PAIRS, WIDE)
    out = sum_by_expert(Rows(values, by_token), routing, torch.float32)
    rows = torch.arange(int(routing.expert_offsets[-2]), routing.num_rows, device=DEVICE)
    members = values[routing.pair_of_row[rows].long()] if by_token else values[rows]
    assert_near(out[-1], members.sum(0, dtype=torch.float32), 1e-4)


@pytest.mark.parametrize("interleaved", [False, True])
def test_activate_backward(interleaved):
    routing, grad, pre = routed(), randn(PAIRS, WIDE // 2), randn(PAIRS, WIDE)
    weights = torch.rand(PAIRS, device=DEVICE)
    rows, _ = last_rows(routing)
    pairs = routing.pair_of_row[rows].long()
    upstream, leaf = grad[rows].float(), pre[rows].float().requires_grad_()  # before they are overwritten
    act = gated_activation("silu", "interleaved" if interleaved else "concatenated")
    weight = weights[pairs].requires_grad_()
    activated = act(leaf)
    expected = torch.autograd.grad(activated * weight[:, None], (leaf, weight), upstream)
    gate = Gate("silu", interleaved, 1.0, 1.0)
    grad_pre, grad_weights, weighted = activate_backward(grad, pre, weights, gate, routing, need_weighted=True, out=pre)
    assert grad_pre.numel() > 2**31
    assert_near(grad_pre[rows], expected[0])
    assert_near(grad_weights[pairs], expected[1])
    assert_near(weighted[rows], activated * weight[:, None])


TILES = [Tile(64, 64, 64, 4, 3, tma=tma) for tma in (True, False)]


@pytest.mark.parametrize("tile", TILES, ids=["tma", "pointers"])
@pytest.mark.parametrize("inner_first", [False, True])
@pytest.mark.parametrize(("n", "k", "by_token"), [(WIDE, NARROW, False), (NARROW, WIDE, False), (NARROW, WIDE, True)])
def test_grouped_gemm_of_many_rows(n, k, by_token, inner_first, tile):
    routing, values = routed(PAIRS, 1), randn(PAIRS, k)
    shape = (EXPERTS, k, n) if inner_first else (EXPERTS, n, k)
    weight = randn(*shape)
    out = grouped_gemm(Rows(values, by_token), ExpertWeight(weight, inner_first), routing, tile)
    rows, tokens = last_rows(routing)
    matrix = weight[-1] if inner_first else weight[-1].T
    assert_near(out[rows], values[tokens if by_token else rows].float() @ matrix.float())


@pytest.mark.parametrize("tile", TILES, ids=["tma", "pointers"])
@pytest.mark.parametrize("by_token", [False, True])
def test_grouped_outer_of_many_rows(by_token, tile):
    routing, left, right = routed(PAIRS, 1), randn(PAIRS, WIDE), randn(PAIRS, NARROW)
    out = torch.empty(EXPERTS, WIDE, NARROW, device=DEVICE, dtype=BF16)
    grouped_outer(Rows(left, by_token), Rows(right, by_token=False), routing, tile, out)
    rows = torch.arange(int(routing.expert_offsets[-2]), routing.num_rows, device=DEVICE)
    members = left[routing.pair_of_row[rows].long()] if by_token else left[rows]
    assert_near(out[-1], torch.mm(members.T, right[rows], out_dtype=torch.float32))


def outputs_and_gradients(tensors, upstream, needed, **options):
    leaves = [tensors[n].requires_grad_() for n in needed]
    with torch.set_grad_enabled(bool(needed)):
        out = moe_experts(**tensors, **options)
    return [out.detach(), *(torch.autograd.grad(out, leaves, upstream) if needed else ())]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("function", ROWS),
        ("function", WEIGHTS),
        ("single_pass", ROWS),  # 8 parts of I
        ("single_pass", WEIGHTS),
        ("triton_grouped", (140_000, 4, 64, 2048, 8)),
        ("triton_grouped", WEIGHTS),
    ],
)
def test_other_implementations_with_many_rows_or_weights(name, shape):
    """For "fused" see test_fused.py. The backward pass of the last two is that of the reference."""
    options = {"activation": lambda gate, up: F.silu(gate) * up} if name == "function" else {"impl": name}
    needed = [n for n in NAMES[:4] if name == "function"]
    tensors, upstream = make_experts(*shape, bias=False, dtype=BF16)
    made = outputs_and_gradients(tensors, upstream, needed, **options)
    for ours, eager in zip(made, outputs_and_gradients(tensors, upstream, needed, impl="stacked"), strict=True):
        assert ((ours - eager).norm() / eager.norm()).item() < 2e-2


# with few rows an expert they are read by token, with many they are gathered before
CASES = [
    (kind, tile, BF16, [0 if step == 3 else 10**9])
    for kind, tiles in fused._TILES.items()
    for step, tile in enumerate(tiles)
]
CASES += [(kind, tiles[kind == "gate_up"], dtype, [0, 10**9]) for kind in fused._TILES
          for tiles, dtype in ((fused._PORTABLE, torch.float16), (fused._FLOAT32, torch.float32))]  # fmt: skip
TOLERANCE = {BF16: 2e-2, torch.float16: 5e-3, torch.float32: 1e-4}


@pytest.mark.parametrize(("kind", "tile", "dtype", "gathered_from"), CASES)
def test_every_tile_equals_float64(kind, tile, dtype, gathered_from, monkeypatch):
    """Output and every gradient, dx among them, whatever tile the number of rows would have chosen."""
    used, chosen = [], fused.tile_of
    monkeypatch.setattr(fused, "_torch_is_faster", lambda *given: False)  # Triton's outer products, too

    def tile_of(wanted, rows, like):
        used.append(wanted == kind)
        return tile if wanted == kind else chosen(wanted, rows, like)

    monkeypatch.setattr(fused, "tile_of", tile_of)
    for gather_from, transposed in itertools.product(gathered_from, (False, True)):
        monkeypatch.setattr(fused, "GATHER_FROM", gather_from)
        tensors, upstream = make_experts(300, 5, 200, 104, 2, transposed=transposed, dtype=dtype)
        made = outcome(moe_experts, tensors, upstream, dtype, transposed=transposed)
        reference = {"act": gated_activation("silu", "concatenated"), "transposed": transposed}
        assert_close(made, truth(tensors, upstream, **reference), TOLERANCE[dtype])
    assert any(used)


def test_every_tile_of_the_single_pass_equals_float64(monkeypatch):
    tiles = set()
    for dtype, experts, width in itertools.product((BF16, torch.float32), (2, 64), (96, 97, 4096)):
        up = ExpertWeight(torch.empty(experts, 2 * width, 256, device=DEVICE, dtype=dtype), False)
        down = ExpertWeight(torch.empty(experts, 256, width, device=DEVICE, dtype=dtype), False)
        tiles |= {(dtype, single_pass.tile_for(2**n, up, down)) for n in range(14)}
    assert len(tiles) > 8
    for (dtype, tile), transposed in zip(tiles, itertools.cycle([False, True]), strict=False):
        monkeypatch.setattr(single_pass, "tile_for", lambda *given, tile=tile: tile)
        tensors, _ = make_experts(90, 5, 200, 104, 2, transposed=transposed, dtype=dtype)
        made = outcome(moe_experts, tensors, None, dtype, (), transposed=transposed, impl="single_pass")
        reference = {"act": gated_activation("silu", "concatenated"), "transposed": transposed}
        assert_close(made, outcome(stacked_experts, tensors, None, torch.float64, (), **reference), TOLERANCE[dtype])


@pytest.mark.parametrize("tokens", [12, 5000])
def test_torch_writes_zeros_for_experts_without_rows(tokens):
    """In memory that held NaN, with all rows at one expert; pytorch #192497 left it as it was."""
    experts, m, n = 64, 64, 128
    index = torch.full((tokens, 2), 3, device=DEVICE)
    index[:, 1] = -1
    routing, left, right = route(index, experts, 64), randn(2 * tokens, m), randn(2 * tokens, n)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    poison = [torch.full((experts, m, n), torch.nan, device=DEVICE, dtype=BF16) for _ in range(8)]
    places = {x.data_ptr() for x in poison}
    del poison
    out = fused.torch_grouped_outer(left, right, routing)
    if out.data_ptr() not in places:
        pytest.skip("the allocator gave other memory")
    idle = torch.arange(experts, device=DEVICE) != 3
    assert not out[idle].count_nonzero()
    assert_near(out[3], left[:tokens].float().T @ right[:tokens].float())
