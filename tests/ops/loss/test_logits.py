"""`logps_from_logits` and `grpo_loss_from_logits` against float64 logits: the PyTorch path and the Triton kernels.

The kernels run on a GPU if there is one, else under Triton's interpreter (see conftest.py).
"""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numerics import assert_no_worse_than

from grpo_moe.ops.loss import LossConfig, grpo_loss_from_logps
from grpo_moe.ops.loss import logits as module
from grpo_moe.ops.loss.config import LOSS_TYPES
from grpo_moe.ops.loss.logits import grpo_loss_from_logits, logps_from_logits

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(params=["pytorch", "triton"], autouse=True)
def path(request, monkeypatch):
    """Runs every test on both paths, with several steps a row, or chunks a call."""
    if request.param == "triton":
        kernels = pytest.importorskip("grpo_moe.ops.loss.logits_kernels")
        if request.node.get_closest_marker("gpu") is None:
            monkeypatch.setattr(kernels, "BLOCK_V", 256)
    monkeypatch.setattr(module, "_use_triton", lambda logits: request.param == "triton")
    monkeypatch.setattr(module, "_CHUNK_BYTES", 4 * 1000 * 4)  # four rows of a thousand float32 logits
    with torch.device("cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu"):
        yield request.param


def make_inputs(batch=2, length=7, vocab_size=127, dtype=FP32, scale=3.0, seed=0):
    """(logits with gradient, ids)"""
    device = torch.get_default_device()
    options = {"generator": torch.Generator("cpu").manual_seed(seed), "device": "cpu"}
    logits = torch.randn(batch, length, vocab_size, dtype=torch.float64, **options) * scale
    ids = torch.randint(vocab_size, (batch, length), **options)
    return logits.to(device, dtype).requires_grad_(), ids.to(device)


def reference(logits, ids, temperature=1.0):
    """(log-probabilities, entropies), in the dtype of the logits."""
    all_logps = (logits / temperature).log_softmax(-1)
    entropy = -(all_logps.exp() * all_logps.masked_fill(all_logps == -torch.inf, 0)).sum(-1)
    return all_logps.gather(-1, ids[..., None]).squeeze(-1), entropy


def upstream_like(logps):
    return torch.linspace(-1, 2, logps.numel(), dtype=torch.float64).view(logps.shape).to(logps)


def logps_and_gradient(function, logits, ids, **options):
    logps = function(logits, ids, **options)
    return logps, *torch.autograd.grad(logps, logits, upstream_like(logps))


def reference_logps(logits, ids, temperature=1.0):
    return reference(logits, ids, temperature)[0]


def truth_of(logits, ids, temperature=1.0):
    return logps_and_gradient(reference_logps, logits.detach().double().requires_grad_(), ids, temperature=temperature)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("vocab_size", [1, 127, 1000])
@pytest.mark.parametrize("length, temperature", [(1, 1.0), (7, 0.7)])
def test_logps_from_logits_is_no_worse_than_eager(dtype, vocab_size, length, temperature, path):
    logits, ids = make_inputs(2, length, vocab_size, dtype)
    options = {"temperature": temperature}
    actual = logps_and_gradient(logps_from_logits, logits, ids, **options)
    assert [x.dtype for x in actual] == [FP32, dtype]
    if vocab_size == 1:
        assert all(x.abs().max() < 1e-6 for x in actual)  # a GPU fuses z / temperature into the difference
        return
    eager = logps_and_gradient(lambda x, *args, **kw: reference_logps(x.float(), *args, **kw), logits, ids, **options)
    truncates = path == "triton" and dtype == BF16 and not torch.cuda.is_available()  # the interpreter's cast to bf16
    for e, a, t in zip(eager, actual, truth_of(logits, ids, **options), strict=True):
        assert_no_worse_than(e, a, t, floor=2**-7 if truncates else 5e-7)


def test_float64_logits_are_computed_in_float64(monkeypatch):
    monkeypatch.undo()
    logits, ids = make_inputs(dtype=torch.float64)
    actual = logps_and_gradient(logps_from_logits, logits, ids, temperature=0.7)
    torch.testing.assert_close(actual, truth_of(logits, ids, 0.7), rtol=1e-12, atol=1e-13)
    assert torch.autograd.gradcheck(lambda x: logps_from_logits(x, ids[:, :2], temperature=0.7), logits[:, :2])


@pytest.mark.parametrize("interpret", ["0", "1"])
def test_kernels_run_on_gpus_and_under_the_interpreter(interpret, monkeypatch):
    monkeypatch.undo()
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", interpret)
    logits, _ = make_inputs(1, 1, 5)
    assert module._use_triton(logits) == (interpret == "1" or logits.is_cuda)
    assert not module._use_triton(logits.double())


@pytest.mark.parametrize("inplace", [False, True])
def test_masked_cells_are_neither_read_nor_given_a_gradient(inplace):
    logits, ids = make_inputs()
    expected = logps_and_gradient(logps_from_logits, logits, ids)
    mask = torch.ones(2, 7)
    mask[0, 2:5] = mask[1, 6] = 0
    broken = logits.detach().masked_fill(mask[..., None] == 0, math.nan).requires_grad_()
    broken_ids = ids.masked_fill(mask == 0, -100)
    actual = logps_and_gradient(logps_from_logits, broken, broken_ids, completion_mask=mask, inplace=inplace)
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a[mask == 1], e[mask == 1])
        assert torch.equal(a[mask == 0], torch.zeros_like(a[mask == 0]))


def test_nan_upstream_gradient_of_masked_cells_is_dropped():
    logits, ids = make_inputs(1, 2, 5)
    logps = logps_from_logits(logits, ids, completion_mask=torch.tensor([[True, False]]))
    (gradient,) = torch.autograd.grad(logps, logits, torch.tensor([[1.0, math.nan]]))
    assert gradient[0, 0].count_nonzero() and gradient.isfinite().all() and not gradient[0, 1].count_nonzero()


def test_all_masked_rows_and_no_rows():
    logits, ids = make_inputs()
    actual = logps_and_gradient(logps_from_logits, logits, ids, completion_mask=torch.zeros(2, 7))
    assert not any(x.count_nonzero() for x in actual)
    logits = torch.zeros(0, 3, 5, requires_grad=True)
    actual = logps_and_gradient(logps_from_logits, logits, torch.zeros(0, 3, dtype=torch.int64))
    assert [tuple(x.shape) for x in actual] == [(0, 3), (0, 3, 5)]


@pytest.mark.parametrize("inplace", [False, True])
def test_row_without_upstream_gradient_gets_zero_even_if_it_is_nan(inplace):
    logits, ids = make_inputs()
    (expected,) = torch.autograd.grad(logps_from_logits(logits, ids), logits, torch.ones(2, 7))
    keep = torch.tensor([[True] * 3 + [False] * 2 + [True] * 2, [False] + [True] * 6])
    broken = logits.detach().masked_fill(~keep[..., None], math.nan).requires_grad_()
    logps = logps_from_logits(broken, ids, inplace=inplace)
    assert torch.equal(logps.isnan(), ~keep)
    (actual,) = torch.autograd.grad(torch.where(keep, logps, 0).sum(), broken)
    assert torch.equal(actual, expected.masked_fill(~keep[..., None], 0))


def test_logits_of_minus_infinity_remove_tokens():
    logits, ids = make_inputs(1, 5, 600)
    removed = torch.zeros(1, 5, 600, dtype=torch.bool)
    removed[0, 0, :300] = removed[0, 1, 256:512] = True  # whole steps of the kernel, the first one among them
    removed[0, 2] = True
    removed[0, 2, 599] = False
    removed[0, 3, 17] = True
    ids[0] = torch.tensor([599, 5, 599, 17, 3])
    logits = logits.detach().masked_fill(removed, -math.inf).requires_grad_()
    actual = logps_and_gradient(logps_from_logits, logits, ids)
    torch.testing.assert_close(actual, truth_of(logits, ids), check_dtype=False, rtol=1e-5, atol=1e-6)
    assert actual[0][0, 2] == 0 and actual[0][0, 3] == -math.inf and actual[1].isfinite().all()


def test_extreme_logits():
    logits = torch.tensor([[[800.0, -800.0, 0.0], [-800.0, 800.0, 0.0], [torch.finfo(FP32).min, 100.0, -math.inf]]])
    logits.requires_grad_()
    logps = logps_from_logits(logits, torch.tensor([[0, 0, 1]]))
    assert logps.tolist() == [[0, -1600, 0]]
    (gradient,) = torch.autograd.grad(logps.sum(), logits)
    assert gradient.tolist() == [[[0, 0, 0], [1, -1, 0], [0, 0, 0]]]


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_slices_of_longer_logits_are_read_in_place(ids_dtype):
    logits, _ = make_inputs(3, 8, 300)
    ids = torch.arange(24).view(8, 3).T[:, 1:].to(ids_dtype)
    mask = torch.ones(8, 3, dtype=torch.bool).T[:, 1:]
    assert not any(x.is_contiguous() for x in (logits[:, :-1], ids, mask))
    actual = logps_and_gradient(lambda x, y: logps_from_logits(x[:, :-1], y, completion_mask=mask), logits, ids)
    expected = logps_and_gradient(lambda x, y: reference_logps(x[:, :-1], y.long()), logits, ids)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("layout", ["sequence first", "vocabulary first", "expanded"])
def test_other_strides(layout):
    logits, ids = make_inputs(2, 3, 300)
    base = logits.detach()
    if layout == "sequence first":
        strided = base.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "vocabulary first":
        strided = base.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    else:
        logits = base[:1].expand(2, 3, 300).contiguous().requires_grad_()
        strided = base[:1].expand(2, 3, 300)
    assert not strided.is_contiguous()
    actual = logps_and_gradient(logps_from_logits, strided.requires_grad_(), ids)
    torch.testing.assert_close(actual, logps_and_gradient(logps_from_logits, logits, ids), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("sliced", [False, True])
def test_inplace_writes_the_same_gradient_over_the_logits(dtype, sliced):
    def gradients(inplace):
        leaf, ids = make_inputs(2, 7 + sliced, 300, dtype)
        whole = leaf * 1
        logits = whole[:, :-1] if sliced else whole
        caught = []
        logits.register_hook(caught.append)
        before = logits.detach().clone()
        logps = logps_from_logits(logits, ids[:, :7], temperature=0.9, inplace=inplace)
        assert torch.equal(logits, before)
        logps.backward(upstream_like(logps))
        assert (caught[0].data_ptr() == logits.data_ptr()) == inplace
        assert torch.equal(logits, caught[0] if inplace else before)
        return leaf.grad

    expected = gradients(False)
    assert expected.count_nonzero() and torch.equal(gradients(True), expected)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_second_backward_raises_after_inplace_only(retain_graph):
    logits, ids = make_inputs()
    logps = logps_from_logits(logits * 1, ids, inplace=True)
    logps.sum().backward(retain_graph=retain_graph)
    with pytest.raises(RuntimeError, match="inplace must be False for a second backward pass"):
        logps.sum().backward()
    logps = logps_from_logits(logits, ids)
    first, second = (torch.autograd.grad(logps.sum(), logits, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second)


def test_inplace_is_noticed_by_operations_that_saved_the_logits():
    logits, ids = make_inputs()
    logps = logps_from_logits(torch.tanh(logits), ids, inplace=True)  # tanh differentiates through its own result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logps.sum().backward()


def test_no_grad_and_inference_mode():
    logits, ids = make_inputs()
    expected = logps_from_logits(logits, ids).detach()
    with torch.no_grad():
        assert torch.equal(logps_from_logits(logits, ids), expected)
    with torch.inference_mode():
        assert torch.equal(logps_from_logits(logits, ids, inplace=True), expected)


def test_entropy_equals_the_reference_and_has_no_gradient():
    logits, ids = make_inputs(2, 4, 600, scale=5.0)
    logits = logits.detach()
    logits[0, 0, :256] = logits[0, 1, 1:] = -math.inf
    logits[0, 2], logits[1, 3] = 0, math.nan
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[1, 3] = False
    logits.requires_grad_()
    logps, entropy = module._logps_and_entropy(logits, ids, mask, 0.8, False, with_entropy=True)
    expected = torch.where(mask, reference(logits.detach().double(), ids, 0.8)[1], 0)
    torch.testing.assert_close(entropy, expected.float(), rtol=1e-5, atol=2e-6)
    assert abs(entropy[0, 1]) < 1e-6 and float(entropy[0, 2]) == pytest.approx(math.log(600))
    assert logps.requires_grad and not entropy.requires_grad
    alone = logps_from_logits(logits, ids, completion_mask=mask, temperature=0.8)
    assert torch.equal(logps.nan_to_num(neginf=-1.0), alone.nan_to_num(neginf=-1.0))


VARIANTS = [{"loss_type": t, "importance_sampling_level": level} for t in LOSS_TYPES for level in ("token", "sequence")
            if level == "token" or t not in ("vespo", "gmpo", "dppo_tv", "dppo_kl")]  # fmt: skip
OPTIONS = [
    {"beta": 0.1, "kl_estimator": "k2"},
    {"sampler_correction": "token_truncate"},
    {"off_policy_mask_threshold": 0.01},
    {"top_entropy_quantile": 0.4},
]


@pytest.mark.parametrize("options", VARIANTS + OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_grpo_loss_from_logits_equals_the_loss_of_the_reference(options):
    cap = {"epsilon_high": 5.0} if options.get("loss_type") == "cispo" else {}
    config = LossConfig(temperature=0.8, max_completion_length=9, **cap, **options)
    logits, ids = make_inputs(3, 4, 300)
    exact = logits.detach().double().requires_grad_()
    logps, entropy = reference(exact, ids, config.temperature)
    noise = torch.randn(3, 3, 4) * 0.2
    old, ref, sampling = (logps.detach().float() + x for x in noise)
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0]])
    extra = {"old_logps": old, "ref_logps": ref, "sampling_logps": sampling, "num_loss_tokens": 20, "num_sequences": 5}
    advantages = torch.tensor([1.0, -0.7, 0.4])
    entropy = {"entropy": entropy.detach()} if "top_entropy_quantile" in options else {}
    expected = grpo_loss_from_logps(logps, advantages, mask, config, **extra, **entropy)
    actual = grpo_loss_from_logits(logits, ids, mask, advantages, config, **extra)
    for output, leaf in ((actual, logits), (expected, exact)):
        (output.loss * 3).backward()
        assert leaf.grad.count_nonzero()
    assert ("entropy" in actual.stats) == bool(entropy)
    torch.testing.assert_close(actual.loss.double(), expected.loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(actual.stats, {k: v.float() for k, v in expected.stats.items()}, rtol=1e-4, atol=1e-5)


def test_grpo_loss_from_logits_inplace_gives_the_same_gradient():
    gradients = []
    for inplace in (False, True):
        logits, ids = make_inputs()
        output = grpo_loss_from_logits(
            logits * 1, ids, torch.ones(2, 7), torch.tensor([1.0, -1.0]), LossConfig(), inplace=inplace
        )
        gradients += torch.autograd.grad(output.loss, logits)
    assert gradients[0].count_nonzero() and torch.equal(*gradients)


IDS = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize("change, message", [
    ({"logits": torch.zeros(6, 5)}, r"logits must be floating point \[B, T, V\].* got torch.float32 of shape \(6, 5\)"),
    ({"logits": torch.zeros(2, 3, 0)}, "V >= 1"),
    ({"logits": torch.zeros(2, 3, 5, dtype=torch.int64)}, "got torch.int64"),
    ({"completion_ids": IDS[:, 1:]}, r"completion_ids must be integers \[B, T\] = \(2, 3\) as logits"),
    ({"completion_ids": IDS.float()}, "got torch.float32 of shape"),
    ({"completion_ids": IDS.bool()}, "got torch.bool"),
    ({"completion_ids": IDS + 5}, r"completion_ids must be in \[0, V\) with V = 5 .*, got 5 to 5; mask"),
    ({"completion_ids": IDS - 100}, "got -100 to -100"),
    ({"completion_ids": IDS.to("meta")}, "completion_ids must be on cpu as logits, got meta; move"),
    ({"completion_mask": torch.ones(2, 3, device="meta")}, "completion_mask must be on cpu as logits, got meta; move"),
    ({"completion_mask": torch.ones(2)}, r"completion_mask must be \[B, T\] = \(2, 3\) as logits, got shape \(2,\)"),
    ({"temperature": 0.0}, "temperature must be finite and above 0, got 0.0"),
    ({"temperature": math.nan}, "temperature"),
    ({"logits": torch.zeros(2, 5, 3).mT, "inplace": True}, "inplace must be False unless .* last stride is 1, got 3"),
    ({"logits": torch.zeros(1, 3, 5).expand(2, 3, 5), "inplace": True}, "inplace must be False if rows share memory"),
    ({"logits": torch.zeros(99).as_strided((2, 3, 5), (9, 5, 1)), "inplace": True}, "rows share memory"),
], ids=str)  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    arguments = {"logits": torch.zeros(2, 3, 5, device="cpu"), "completion_ids": IDS}
    with pytest.raises(ValueError, match=message):
        logps_from_logits(**arguments | change)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, Fraction, int])
def test_every_kind_of_number_is_a_temperature(kind, path):
    logits, ids = make_inputs(1, 2, 5)
    assert torch.equal(*(logps_from_logits(logits, ids, temperature=t) for t in (kind(2), 2.0)))


def test_id_out_of_range_that_a_gpu_does_not_check_gives_nan(path, monkeypatch):
    if path == "pytorch":
        pytest.skip("PyTorch's gather checks it")
    monkeypatch.setattr(module, "_check_ids", lambda *args: None)
    logits, _ = make_inputs(1, 3, 127)
    assert logps_from_logits(logits, torch.tensor([[-1, 127, 2**31]])).isnan().all()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("batch, length, vocab_size", [(1, 65_537, 1000), (2, 8_200, 151_936)])
def test_many_rows_and_many_logits(batch, length, vocab_size, path):
    """More rows than grid y has, and more than 2^31 logits."""
    if path == "pytorch":
        pytest.skip("the kernels' limits")
    logits = torch.randn(batch, length, vocab_size, device="cuda", dtype=BF16).requires_grad_()
    ids = torch.randint(vocab_size, (batch, length), device="cuda")
    some = logits.detach()[:, -5:].double().requires_grad_()
    expected = logps_and_gradient(reference_logps, some, ids[:, -5:])
    logps = logps_from_logits(logits, ids, inplace=True)
    upstream = torch.zeros_like(logps)
    upstream[:, -5:] = upstream_like(expected[0])
    (gradient,) = torch.autograd.grad(logps, logits, upstream)
    torch.testing.assert_close(logps[:, -5:].double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient[:, -5:].double(), expected[1], rtol=1e-2, atol=1e-6)
    assert not gradient[:, :-5].count_nonzero()


@pytest.mark.parametrize("vocab_size", [1, 127, 129, 1000, 50257])
def test_peaked_logits_far_below_zero_see_no_column_beyond_the_vocabulary(vocab_size, path, monkeypatch):
    """Logits around -40 with one on top: a column of zeros, as of a padded tile, would have all the probability."""
    if path == "triton" and vocab_size > 1000:
        monkeypatch.setattr(pytest.importorskip("grpo_moe.ops.loss.logits_kernels"), "BLOCK_V", 4096)
    logits, _ = make_inputs(1, 3, vocab_size, scale=2.0)
    top = vocab_size // 2
    logits = logits.detach() - 40
    logits[..., top] = -20
    logits.requires_grad_()
    ids = torch.tensor([[top, 0, vocab_size - 1]])
    actual, truth = logps_and_gradient(logps_from_logits, logits, ids), truth_of(logits, ids)
    assert vocab_size == 1 or (0 > truth[0][0, 0] > -1e-2 and truth[0][0, 1] < -9)
    for a, t in zip(actual, truth, strict=True):
        torch.testing.assert_close(a.double(), t, rtol=1e-5, atol=1e-5)
