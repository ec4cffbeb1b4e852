"""The Triton head against the PyTorch head in float64, on a GPU or under Triton's interpreter; then through the ops.

The interpreter truncates float32 to bf16 where a GPU rounds, so its gradients may be off by twice as much.
"""

import math

import pytest
import torch
from test_fused_loss import make_batch, outcome, reference
from test_objective import each_variant, make_config

from grpo_moe.ops.loss import LossConfig, fused_head, grpo_loss, kernels, row_kernels, token_logps
from grpo_moe.ops.loss.head import HeadOptions, RunningSum, TorchHead
from grpo_moe.ops.loss.head_triton import TritonHead
from grpo_moe.ops.loss.reference import token_logps_reference

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
LOGP_TOLERANCE = 1e-4
GRAD_TOLERANCE = 4e-3 if ON_GPU else 1e-2  # relative Frobenius norm; bf16 rounds to 2e-3


@pytest.fixture
def triton_head(monkeypatch):
    """bf16 takes the Triton head, and the float64 truth the PyTorch head, on any device."""
    monkeypatch.setattr(fused_head, "_triton_fits", lambda w: w.dtype == torch.bfloat16 and w.shape[1] % 8 == 0)


def make_inputs(rows, vocab, width, *, std=1.0, bias=False):
    hidden = torch.randn(rows, width, device=DEVICE).bfloat16()
    weight = (torch.randn(vocab, width, device=DEVICE) * std / math.sqrt(width)).bfloat16()
    ids = torch.randint(vocab, (rows,), device=DEVICE)
    return hidden, weight, torch.randn(vocab, device=DEVICE) if bias else None, ids


def run_head(head, hidden, ids, upstream, *, with_entropy=True):
    """[logps, entropy, gradients of hidden, weight, bias]; buffers start out as NaN."""
    chunk = head.forward(hidden, ids, with_entropy=with_entropy)
    logps, entropy = chunk.logps.clone(), chunk.entropy.clone() if with_entropy else None
    sums = [RunningSum(s, head.dtype, DEVICE) for s in (head.weight.shape, (head.bias_terms, len(head.weight)))]
    grad_hidden = head.backward(chunk, upstream.to(head.dtype), grad_weight=sums[0], grad_bias=sums[1])
    return [logps, entropy, grad_hidden, sums[0].total(), sums[1].total().sum(0)]


def both_heads(rows, vocab, width, options=None, **kind):
    hidden, weight, bias, ids = make_inputs(rows, vocab, width, **kind)
    upstream, options = torch.randn(rows, device=DEVICE), options or HeadOptions()
    truth = run_head(TorchHead(weight.double(), bias, options, torch.float64), hidden.double(), ids, upstream)
    return run_head(TritonHead(weight, bias, options, rows), hidden, ids, upstream), truth


def relative_error(actual, truth):
    return float((actual.double() - truth).norm() / truth.norm())


def assert_accurate(actual, truth):
    for a, t in zip(actual[:2], truth[:2], strict=True):
        assert (a.double() - t).abs().max() < LOGP_TOLERANCE
    for a, t in zip(actual[2:], truth[2:], strict=True):
        if truth[4].numel() == 1:  # a vocabulary of one token has nothing to learn
            assert a.abs().max() < 1e-3  # two float32 sums of the same products
        else:
            assert relative_error(a, t) < GRAD_TOLERANCE


SHAPES = [(5, 127, 40), (20, 1, 40), (17, 70, 64), (1, 33, 8)]
GPU_SHAPES = [(r, v, h) for r, h in [(1, 72), (63, 200), (257, 2048)] for v in (1, 127, 1000, 50257, 151936, 248320)]
OPTIONS = [HeadOptions(0.7), HeadOptions(0.7, 0.5, 3.0), HeadOptions(1.0, 2.0)]


@pytest.mark.parametrize("shape", SHAPES)
def test_head_equals_float64(shape):
    assert_accurate(*both_heads(*shape))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", GPU_SHAPES)
def test_head_equals_float64_on_large_vocabularies(shape):
    assert_accurate(*both_heads(*shape))


@pytest.mark.parametrize("options", OPTIONS)
def test_head_options_and_bias_equal_float64(options):
    assert_accurate(*both_heads(17, 70, 64, options, bias=True))


@pytest.mark.parametrize("rows", [1, 17])
def test_row_far_above_its_estimate_is_computed_again(rows, monkeypatch):
    monkeypatch.setattr(row_kernels, "PROBES", 2)
    offsets = []
    raise_offsets = kernels.raise_offsets
    monkeypatch.setattr(
        kernels, "raise_offsets", lambda m, t, o, again: (offsets.append(int(again)), raise_offsets(m, t, o, again))
    )
    actual, truth = both_heads(rows, 100, 64, std=150.0)
    assert offsets == [1] and actual[0].isfinite().all()
    assert (actual[0].double() - truth[0]).abs().max() < 2e-6 * truth[0].abs().max() + LOGP_TOLERANCE
    assert relative_error(actual[2], truth[2]) < GRAD_TOLERANCE


def test_common_rows_are_computed_once(monkeypatch):
    flags = []
    row_sums = kernels.row_sums
    monkeypatch.setattr(kernels, "row_sums", lambda *a, **k: flags.append(out := row_sums(*a, **k)) or out)
    both_heads(17, 100, 64)
    assert int(flags[0][2]) == 0


def test_the_gemm_is_compiled_once_whatever_the_number_of_rows(monkeypatch):
    kernel, constants = kernels._exp_logits_kernel, set()

    class Watched:
        def __getitem__(self, grid):
            def run(*args, **names):
                constants.add(tuple(sorted(names.items())))
                return kernel[grid](*args, **names)

            return run

    monkeypatch.setattr(kernels, "_exp_logits_kernel", Watched())
    for rows in (1, 17, 33, 80):
        hidden, weight, bias, ids = make_inputs(rows, 20, 16)
        TritonHead(weight, bias, HeadOptions(), rows).forward(hidden, ids)
    assert len(constants) == 3  # the pass, its maxima, the pass again


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_broken_row_gives_nan_and_touches_no_other(value):
    hidden, weight, _, ids = make_inputs(6, 50, 64)
    hidden[2, 3] = value
    upstream = torch.randn(6, device=DEVICE)
    upstream[2] = 0
    head = TritonHead(weight, None, HeadOptions(), 6)
    logps, _, grad_hidden, grad_weight, _ = run_head(head, hidden, ids, upstream)
    keep = torch.arange(6, device=DEVICE) != 2
    clean = run_head(TritonHead(weight, None, HeadOptions(), 6), hidden[keep], ids[keep], upstream[keep])
    assert logps[2].isnan() and torch.count_nonzero(grad_hidden[2]) == 0
    torch.testing.assert_close(logps[keep], clean[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(grad_weight, clean[3], rtol=1e-3, atol=1e-5)


def test_head_is_deterministic():
    hidden, weight, bias, ids = make_inputs(17, 100, 64, bias=True)
    upstream = torch.randn(17, device=DEVICE)
    first, second = (run_head(TritonHead(weight, bias, HeadOptions(), 17), hidden, ids, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_scaled_rounds_once():
    x = torch.randn(37, 50, device=DEVICE)
    scale = torch.tensor(1 / 3, device=DEVICE)
    torch.testing.assert_close(row_kernels.scaled(x, scale, torch.float32), x * scale, rtol=0, atol=0)
    assert torch.allclose(row_kernels.scaled(x, scale, torch.bfloat16).float(), x * scale, rtol=2**-7)


def wide(batch):
    return {n: x.double() if n in ("hidden_states", "lm_head_weight") else x for n, x in batch.items()}


def bf16_batch(**kind):
    batch = make_batch(dtype=torch.bfloat16, hidden=16, vocab=40, std=0.25, **kind)
    return {n: x.to(DEVICE) for n, x in batch.items()}


@each_variant
def test_every_loss_through_the_triton_head(variant, triton_head):
    config, batch = make_config(variant), bf16_batch()
    truth = outcome(reference, config, wide(batch))
    output, gradients = outcome(grpo_loss, config, batch, chunk_size=4)
    torch.testing.assert_close(output.loss.double(), truth[0].loss, rtol=1e-4, atol=1e-5)
    for a, t in zip(gradients, truth[1], strict=True):
        assert torch.count_nonzero(t) and a.dtype == torch.bfloat16
        assert relative_error(a, t) < 2 * GRAD_TOLERANCE


@pytest.mark.parametrize("schedule", ["one-pass", "two-pass"])
def test_schedules_agree_through_the_triton_head(schedule, triton_head):
    batch = bf16_batch()
    bias = torch.linspace(-1, 1, 40, device=DEVICE)
    expected = outcome(reference, LossConfig(), wide(batch), bias=bias.double(), softcap=3.0)
    actual = outcome(grpo_loss, LossConfig(), batch, schedule=schedule, bias=bias, softcap=3.0)
    for a, t in zip(actual[1], expected[1], strict=True):
        assert relative_error(a, t) < 2 * GRAD_TOLERANCE


@pytest.mark.parametrize("with_entropy", [False, True])
def test_token_logps_through_the_triton_head(with_entropy, triton_head):
    hidden, weight, bias, ids = make_inputs(20, 40, 16, bias=True)
    leaves = [x.requires_grad_() for x in (hidden, weight, bias)]

    def gradients(function, hidden, weight, bias):
        made = function(hidden, weight, ids, bias=bias, temperature=0.7, return_entropy=with_entropy)
        logps, entropy = made if with_entropy else (made, made)
        upstream = torch.linspace(-1, 1, 20, device=DEVICE, dtype=logps.dtype)
        return logps, torch.autograd.grad((logps * upstream).sum() + with_entropy * entropy.square().sum(), leaves)

    actual = gradients(lambda *a, **k: token_logps(*a, **k, chunk_size=8), *leaves)
    truth = gradients(token_logps_reference, *(x.double() for x in leaves))
    assert (actual[0].double() - truth[0]).abs().max() < LOGP_TOLERANCE
    for a, t in zip(actual[1], truth[1], strict=True):
        assert relative_error(a, t.double()) < 2 * GRAD_TOLERANCE


@pytest.mark.parametrize("vocab", [1, 127, 129, 1000])
def test_peaked_logits_far_below_zero_see_no_column_beyond_the_vocabulary(vocab):
    """Logits around -40 with one on top: a column of zeros, as of a padded tile, would have all the probability."""
    hidden = (1 + 0.2 * torch.rand(5, 16, device=DEVICE)).bfloat16()
    weight = (torch.randn(vocab, 16, device=DEVICE) * 0.5 - 2.5).bfloat16()
    weight[vocab // 2] = -1.25
    ids = torch.tensor([vocab // 2, 0, vocab - 1, 0, vocab // 2], device=DEVICE)
    upstream = torch.linspace(0.5, 1, 5, device=DEVICE)
    truth = run_head(TorchHead(weight.double(), None, HeadOptions(), torch.float64), hidden.double(), ids, upstream)
    assert vocab == 1 or (0 > truth[0][0] > -0.1 and truth[0][1] < -3)
    assert_accurate(run_head(TritonHead(weight, None, HeadOptions(), 5), hidden, ids, upstream), truth)


def test_a_bias_of_minus_infinity_removes_its_token():
    """Logits 0, 1, -inf: .5822 nats of entropy, no NaN, and what is removed learns nothing."""
    hidden, ids = torch.ones(2, 8, device=DEVICE).bfloat16(), torch.tensor([0, 1], device=DEVICE)
    weight = torch.zeros(3, 8, device=DEVICE).bfloat16()
    bias = torch.tensor([0.0, 1.0, -math.inf], device=DEVICE)
    upstream = torch.tensor([1.0, 0.5], device=DEVICE)
    actual = run_head(TritonHead(weight, bias, HeadOptions(), 2), hidden, ids, upstream)
    assert actual[1].tolist() == pytest.approx([0.5822] * 2, abs=1e-4)
    assert all(x.isfinite().all() for x in actual) and actual[3][2].count_nonzero() == 0 and actual[4][2] == 0
    truth = run_head(TorchHead(weight.double(), bias, HeadOptions(), torch.float64), hidden.double(), ids, upstream)
    for a, t in zip((actual[0], actual[3], actual[4]), (truth[0], truth[3], truth[4]), strict=True):
        torch.testing.assert_close(a.double(), t.double(), rtol=1e-2, atol=1e-4)


# --- on a GPU only ---


def gpu_batch(rows=4, width=300, hidden=200, vocab=1000, dtype=torch.bfloat16):
    batch = make_batch(rows=rows, width=width, dtype=dtype, hidden=hidden, vocab=vocab, std=hidden**-0.5)
    lengths = torch.tensor([width, width // 2, 1, width - 1])[:rows]
    batch["completion_mask"] = torch.arange(width) < lengths[:, None]
    return {n: x.cuda() for n, x in batch.items()}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 63, 257])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gpu_gradients_are_no_worse_than_eager(dtype, width, level):
    torch.backends.cuda.matmul.allow_tf32 = False
    batch = gpu_batch(width=width, dtype=dtype)
    config = LossConfig(importance_sampling_level=level)  # a mean over tokens: no row weighs more than its tokens
    truth, actual = outcome(reference, config, wide(batch)), outcome(grpo_loss, config, batch, chunk_size=128)

    def eager(config, batch):
        z = batch["hidden_states"] @ batch["lm_head_weight"].T
        logps = z.float().log_softmax(-1).gather(-1, batch["completion_ids"][..., None])[..., 0]
        names = ("advantages", "completion_mask", "old_logps")
        from grpo_moe.ops import grpo_loss_from_logps

        return grpo_loss_from_logps(logps, config=config, **{n: batch[n] for n in names})

    leaves = {n: batch[n].clone().requires_grad_() for n in ("hidden_states", "lm_head_weight")}
    expected = torch.autograd.grad(eager(config, {**batch, **leaves}).loss, list(leaves.values()))
    for a, e, t in zip(actual[1], expected, truth[1], strict=True):
        assert relative_error(a, t) <= 1.5 * relative_error(e, t) + 1e-6


@pytest.mark.gpu
def test_gpu_sequence_of_65536_tokens():
    batch = gpu_batch(rows=1, width=65536, hidden=64, vocab=1000)
    for level in ("token", "sequence"):
        config = LossConfig(importance_sampling_level=level, epsilon=0.9, epsilon_high=9.0)  # no ratio near a bound
        truth = outcome(reference, config, wide(batch))
        for a, t in zip(outcome(grpo_loss, config, batch)[1], truth[1], strict=True):
            assert relative_error(a, t) < GRAD_TOLERANCE


@pytest.mark.gpu
def test_gpu_autocast_takes_the_triton_head():
    batch = gpu_batch(dtype=torch.float32)
    rounded = {n: x.bfloat16() if n in ("hidden_states", "lm_head_weight") else x for n, x in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        actual = outcome(grpo_loss, LossConfig(), batch)
    truth = outcome(reference, LossConfig(), wide(rounded))
    for a, t in zip(actual[1], truth[1], strict=True):
        assert a.dtype == torch.float32 and relative_error(a, t) < GRAD_TOLERANCE


@pytest.mark.gpu
def test_gpu_one_pass_in_a_cuda_graph():
    batch = gpu_batch()
    leaves = {n: batch[n].clone().requires_grad_() for n in ("hidden_states", "lm_head_weight")}

    def step():
        loss = grpo_loss(config=LossConfig(), **{**batch, **leaves}).loss
        return loss, *torch.autograd.grad(loss, list(leaves.values()))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        expected = [x.clone() for x in step()]
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x in captured:
        x.detach().fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured[0], expected[0], rtol=1e-5, atol=1e-6)
    for a, e in zip(captured[1:], expected[1:], strict=True):
        assert relative_error(a, e.double()) < GRAD_TOLERANCE


@pytest.mark.gpu
def test_gpu_memory_does_not_grow_with_the_rows():
    peaks = []
    for width in (2048, 8192):
        batch = gpu_batch(width=width, hidden=64, vocab=50_000)
        leaves = {n: batch[n].clone().requires_grad_() for n in ("hidden_states", "lm_head_weight")}
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grpo_loss(config=LossConfig(), **{**batch, **leaves}, chunk_size=1024).loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] - peaks[0] < 60 * 2**20  # the gradient of the hidden states and numbers a token; logits: 2.4 GB


@pytest.mark.gpu
def test_gpu_qwen_vocabulary_and_deepseek_width():
    """A row of 7,168 and one of 151,936 elements in blocks, 1.1e9 weights."""
    assert_accurate(*both_heads(257, 151_936, 7168))


LARGE = {"probabilities": (14_400, 151_936, 64), "weights": (300, 262_400, 8192)}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", LARGE.values(), ids=list(LARGE))
def test_gpu_more_than_2_to_the_31_elements(shape):
    """Of a chunk's probabilities, or of the head's weight; of the last rows, at the last ids of the vocabulary."""
    rows, vocab, width = shape
    assert max(rows * vocab, vocab * width) > 2**31
    hidden, weight, bias, _ = make_inputs(rows, vocab, width, bias=True)
    ids = vocab - 1 - torch.arange(rows, device=DEVICE).flip(0) % 1000
    upstream = torch.zeros(rows, device=DEVICE)
    upstream[-64:] = torch.linspace(-1, 2, 64, device=DEVICE)
    actual = run_head(TritonHead(weight, bias, HeadOptions(), rows), hidden, ids, upstream)

    some = hidden[-64:]
    logits = torch.mm(some, weight.T, out_dtype=torch.float32) + bias
    all_logps = logits.double().log_softmax(-1)
    grad = -all_logps.exp() * upstream[-64:, None]
    grad[torch.arange(64, device=DEVICE), ids[-64:]] += upstream[-64:]
    assert (actual[0][-64:] - all_logps.gather(1, ids[-64:, None])[:, 0]).abs().max() < 2 * LOGP_TOLERANCE
    assert (actual[1][-64:] + (all_logps.exp() * all_logps).sum(1)).abs().max() < 2 * LOGP_TOLERANCE
    grad_hidden = torch.mm(grad.bfloat16(), weight, out_dtype=torch.float32)
    assert relative_error(actual[2][-64:], grad_hidden.double()) < 2 * GRAD_TOLERANCE
    assert not actual[2][:-64].count_nonzero()
    assert relative_error(actual[3][-1000:], grad[:, -1000:].T @ some.double()) < GRAD_TOLERANCE
    assert relative_error(actual[4][-1000:], grad[:, -1000:].sum(0)) < GRAD_TOLERANCE


@pytest.mark.gpu
def test_gpu_scaled_sums_of_more_than_2_to_the_31_elements():
    x = torch.randn(262_400, 8192, device="cuda")
    made = row_kernels.scaled(x, torch.tensor(0.5, device="cuda"), torch.bfloat16)
    assert x.numel() > 2**31
    torch.testing.assert_close(made[-9:].float(), x[-9:] * 0.5, rtol=2**-7, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("frozen", ["lm_head_weight", "hidden_states"])
def test_gpu_a_frozen_part_takes_no_memory(frozen):
    """The weight's gradient would take 1.2 GB in float32, that of the hidden states 34 MB."""
    batch = gpu_batch(rows=4, width=2048, hidden=2048, vocab=151_936)
    peaks = []
    for needed in (("hidden_states", "lm_head_weight"), ({"hidden_states", "lm_head_weight"} - {frozen})):
        leaves = {n: batch[n].clone().requires_grad_() for n in needed}
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = grpo_loss(config=LossConfig(), **{**batch, **leaves}, chunk_size=1024).loss
        torch.autograd.grad(loss, list(leaves.values()))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del leaves, loss
    assert peaks[0] - peaks[1] > (0.9 * 4 * 151_936 * 2048 if frozen == "lm_head_weight" else 0)
