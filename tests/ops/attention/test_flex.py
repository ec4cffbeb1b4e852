import pytest
import torch
from numerics import assert_no_worse_than
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import create_block_mask

from grpo_moe.ops import sink_attention
from grpo_moe.ops.attention import flex_sink_attention
from grpo_moe.ops.attention.flex import dense_mask

FLOORS = {torch.float32: 5e-6, torch.bfloat16: 4e-3}  # exp2 by approximation, and one rounding more than eager


def inputs(length, dtype=torch.float32, device="cpu", *, dim=16, heads=4):
    torch.manual_seed(0)
    shapes = [(2, heads, length, dim), (2, 2, length, dim), (2, 2, length, dim), (heads,)]
    tensors = [torch.randn(*shape, dtype=torch.float64).to(dtype).to(device) for shape in shapes]
    return [x.requires_grad_() for x in tensors], torch.randn(*shapes[0]).to(dtype).to(device)


def seen(kind, length):
    """bool [2, T, T]; both paddings of a window leave queries without keys."""
    place = torch.arange(length)
    behind = place[:, None] - place
    mask = (behind >= 0).expand(2, -1, -1).clone()
    if kind != "causal":
        mask &= behind < 40
    if kind == "left_padding":
        mask[0, :, :67] = False
    if kind == "right_padding":
        mask[1, :, length - 90 :] = False
    if kind == "packed":
        ids = torch.stack([place // 100, place // 61])
        mask &= ids[:, :, None] == ids[:, None, :]
    return mask


def block_mask(mask):
    """From tensors alone, so that all kinds of mask share a compiled graph."""
    batch, queries, keys = mask.shape
    return create_block_mask(lambda b, h, q, k: mask[b, q, k], batch, None, queries, keys, device=mask.device)


def outcome(attention, tensors, weights, **options):
    *qkv, sinks = tensors
    out = attention(*qkv, sinks=sinks, **options)
    return out, *torch.autograd.grad((out * weights).sum(), tensors)


@pytest.mark.parametrize("kind", ["left_padding", "right_padding", "packed"])
def test_rescaled_values_equal_the_reference(kind):
    *qkv, sinks = (x.detach() for x in inputs(200)[0])  # PyTorch has no gradients on the CPU
    mask = seen(kind, 200)
    for with_sinks in (sinks, None):
        out = flex_sink_attention(*qkv, block_mask=block_mask(mask), sinks=with_sinks, scale=0.3)
        expected = sink_attention(*qkv, mask=mask, sinks=with_sinks, scale=0.3)
        some = mask.any(-1)[:, None, :, None]  # without a sink, the reference averages where nothing is seen
        torch.testing.assert_close(out * some, expected * some, rtol=1e-5, atol=1e-6)
        assert not out.masked_select(~some).any()


def test_gradients_pass_through_the_logsumexp(monkeypatch):
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)  # which refuses them on the CPU
    tensors, weights = inputs(200, torch.float64)
    mask = seen("left_padding", 200)
    made = outcome(flex_sink_attention, tensors, weights, block_mask=block_mask(mask))
    for a, b in zip(made, outcome(sink_attention, tensors, weights, mask=mask), strict=True):
        torch.testing.assert_close(a, b)
        assert b.abs().max() > 0
    assert not made[1][0, :, :67].any()  # of queries that see no key


def test_block_mask_becomes_the_dense_mask_again():
    mask = seen("packed", 200)
    assert torch.equal(dense_mask(block_mask(mask)), mask[:, None])


@pytest.fixture
def full_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")  # else FlexAttention takes TF32
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["causal", "left_padding", "right_padding", "packed"])
@pytest.mark.parametrize("length", [256, 331])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_is_as_exact_as_eager(dtype, length, kind, full_precision):
    if (length, kind) == (256, "causal"):
        torch._dynamo.reset()  # so that it and the kinds after it run the kernels for this length alone
    tensors, weights = inputs(length, dtype, "cuda", dim=64, heads=16)
    mask = seen(kind, length).cuda()
    made = outcome(flex_sink_attention, tensors, weights, block_mask=block_mask(mask))
    eager = outcome(sink_attention, tensors, weights, mask=mask)
    true = outcome(sink_attention, [x.detach().double().requires_grad_() for x in tensors], weights.double(), mask=mask)
    for a, b, truth in zip(made, eager, true, strict=True):
        assert a.dtype == dtype and a.isfinite().all()
        assert_no_worse_than(b, a, truth, floor=FLOORS[dtype])
    nothing = ~mask.any(-1)[:, None, :, None].expand_as(made[0])
    assert not made[0][nothing].any() and not made[1][nothing].any()


@pytest.mark.gpu
def test_more_lengths_compile_nothing(full_precision):
    def run(length):
        (*qkv, sinks), _ = inputs(length, device="cuda")
        mask = seen("packed", length).cuda()
        out = flex_sink_attention(*qkv, block_mask=block_mask(mask), sinks=sinks)
        torch.testing.assert_close(out, sink_attention(*qkv, mask=mask, sinks=sinks), rtol=1e-4, atol=1e-5)

    run(256)
    run(384)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before
    for length in (200, 512, 777):
        run(length)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before


@pytest.mark.gpu
def test_autocast_takes_float32_queries(full_precision):
    tensors, weights = inputs(256, device="cuda", dim=64, heads=16)
    mask = seen("causal", 256).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        out = flex_sink_attention(*tensors[:3], block_mask=block_mask(mask), sinks=tensors[3])
    assert out.dtype == torch.bfloat16
    made = out, *torch.autograd.grad((out * weights).sum(), tensors)
    for a, b in zip(made, outcome(sink_attention, tensors, weights, mask=mask), strict=True):
        torch.testing.assert_close(a.float(), b, rtol=0.05, atol=0.03 * float(b.detach().abs().max()))


@pytest.mark.gpu
def test_the_scores_are_never_in_memory(full_precision):
    tensors, weights = inputs(8192, torch.bfloat16, "cuda", dim=64, heads=16)
    blocks = create_block_mask(lambda b, h, q, k: (q >= k) & (q - k < 128), None, None, 8192, 8192, device="cuda")
    outcome(flex_sink_attention, tensors, weights, block_mask=blocks)  # compiles
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    outcome(flex_sink_attention, tensors, weights, block_mask=blocks)
    scores_bytes = 2 * 16 * 8192 * 8192 * 2
    assert torch.cuda.max_memory_allocated() - before < scores_bytes / 8
