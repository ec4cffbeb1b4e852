"""`token_logps` against the full-logits reference: values, every gradient, every option, every dtype of a CPU."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from numerics import assert_no_worse_than
from torch.utils._python_dispatch import TorchDispatchMode

from grpo_moe.ops.loss import LossConfig, grpo_loss, grpo_loss_from_logps, head, token_logps
from grpo_moe.ops.loss.reference import token_logps_reference

OPTIONS = [
    {},
    {"temperature": 0.7},
    {"logit_scale": 0.3},
    {"softcap": 2.0},
    {"temperature": 1.3, "logit_scale": 1.7, "softcap": 3.0},
]


def make_inputs(num_rows=7, width=5, vocab_size=11, dtype=torch.float64, seed=0):
    """(hidden_states, lm_head_weight, bias, target_ids), the first three with gradient."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_rows, width), (vocab_size, width), (vocab_size,)]
    tensors = [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]
    return *tensors, torch.randint(vocab_size, (num_rows,), generator=generator)


def outputs_and_gradients(function, inputs, **options):
    """[logps, entropy, gradients of hidden, weight, bias] for one fixed upstream gradient."""
    hidden, weight, bias, target_ids = inputs
    logps, entropy = function(hidden, weight, target_ids, bias=bias, return_entropy=True, **options)
    upstream = torch.linspace(-1, 2, max(len(hidden), 1), dtype=logps.dtype)[: len(hidden)]
    loss = (logps * upstream).sum() + (entropy * upstream.flip(0).square()).sum()
    return [logps, entropy, *torch.autograd.grad(loss, (hidden, weight, bias))]


def assert_all_close(actual, expected, **tolerance):
    for name, a, b in zip(("logps", "entropy", "hidden", "weight", "bias"), actual, expected, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("vocab_size", [1, 127, 129, 1000])
@pytest.mark.parametrize("chunk_size", [1, 4, 100, None])
def test_token_logps_equals_the_reference(vocab_size, chunk_size):
    inputs = make_inputs(9, 33, vocab_size)
    expected = outputs_and_gradients(token_logps_reference, inputs)
    assert vocab_size == 1 or all(x.count_nonzero() for x in expected)
    assert_all_close(outputs_and_gradients(token_logps, inputs, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_equal_the_reference_and_change_the_result(options):
    inputs = make_inputs()
    actual = outputs_and_gradients(token_logps, inputs, chunk_size=3, **options)
    assert_all_close(actual, outputs_and_gradients(token_logps_reference, inputs, **options))
    assert not options or not torch.equal(actual[0], token_logps(*inputs[:2], inputs[3], bias=inputs[2]))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_gradients_equal_finite_differences(softcap, return_entropy):
    hidden, weight, bias, target_ids = make_inputs(4, 3, 5)

    def function(hidden, weight, bias):
        options = {"temperature": 0.8, "softcap": softcap, "return_entropy": return_entropy, "chunk_size": 3}
        return token_logps(hidden, weight, target_ids, bias=bias, **options)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_without_entropy_the_logps_and_gradients_are_the_same():
    hidden, weight, bias, target_ids = make_inputs()
    alone = token_logps(hidden, weight, target_ids, bias=bias)
    paired, _ = token_logps(hidden, weight, target_ids, bias=bias, return_entropy=True)
    assert torch.equal(alone, paired)
    for a, b in zip(*(torch.autograd.grad(x.sum(), (hidden, weight, bias)) for x in (alone, paired)), strict=True):
        assert torch.equal(a, b)


def test_entropy_alone_has_its_gradient():
    hidden, weight, _, target_ids = make_inputs()
    gradients = [
        torch.autograd.grad(f(hidden, weight, target_ids, return_entropy=True)[1].sum(), (hidden, weight))
        for f in (token_logps, token_logps_reference)
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("needed", [{"hidden"}, {"weight"}, {"bias"}, {"hidden", "bias"}, set()])
def test_only_the_needed_gradients_are_computed(needed):
    hidden, weight, bias, target_ids = make_inputs()
    tensors = {"hidden": hidden, "weight": weight, "bias": bias}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name in needed)
    logps = token_logps(hidden, weight, target_ids, bias=bias)
    assert logps.requires_grad == bool(needed)
    if needed:
        returned = logps.grad_fn.apply(torch.ones_like(logps), None)[:3]
        assert [g is not None for g in returned] == [name in needed for name in tensors]


@pytest.mark.parametrize("name", ["token_logps", "grpo_loss"])
def test_a_frozen_head_needs_no_tensor_of_its_size(name):
    hidden, weight, _, target_ids = make_inputs(12, 5, 50)  # 250 weights, two rows of logits less than half of that
    batch = {"advantages": torch.tensor([1.0, -1.0]), "completion_mask": torch.ones(2, 6)}
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                real = isinstance(x, torch.Tensor) and x.device.type == "cpu"
                if real and x.untyped_storage().data_ptr() not in given:
                    made.append(x.untyped_storage().nbytes() // x.itemsize)
            return out

    given = {x.untyped_storage().data_ptr() for x in (hidden, weight)}
    for trains in (True, False):
        weight.requires_grad_(trains)
        made.clear()
        with Sizes():
            if name == "token_logps":
                loss = token_logps(hidden, weight, target_ids, chunk_size=2).sum()
            else:
                ids = target_ids.view(2, 6)
                loss = grpo_loss(hidden.view(2, 6, 5), weight, ids, config=LossConfig(), **batch, chunk_size=2).loss
            loss.backward()
        assert (max(made) >= weight.numel()) == trains
    assert hidden.grad.count_nonzero()


def test_no_grad_keeps_no_graph_and_inference_mode_does_not_spoil_training():
    hidden, weight, _, target_ids = make_inputs()
    with torch.no_grad():
        assert token_logps(hidden, weight, target_ids).grad_fn is None
    with torch.inference_mode():
        token_logps(hidden, weight, target_ids)
    token_logps(hidden, weight, target_ids).sum().backward()


def test_backward_twice_through_a_retained_graph_gives_the_same():
    hidden, weight, bias, target_ids = make_inputs()
    logps, entropy = token_logps(hidden, weight, target_ids, bias=bias, return_entropy=True)
    loss = logps.sum() + entropy.square().sum()
    first = torch.autograd.grad(loss, (hidden, weight, bias), retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, (hidden, weight, bias)), strict=True):
        assert torch.equal(a, b)


def test_no_rows_give_empty_results_and_zero_gradients():
    actual = outputs_and_gradients(token_logps, make_inputs(num_rows=0))
    assert [tuple(x.shape) for x in actual] == [(0,), (0,), (0, 5), (11, 5), (11,)]
    assert all(x.count_nonzero() == 0 for x in actual)


def test_non_contiguous_inputs():
    hidden, weight, bias, target_ids = make_inputs(7, 6, 8)
    strided = [x.detach().T.contiguous().T.requires_grad_() for x in (hidden, weight)]
    ids = target_ids.repeat_interleave(2)[::2]
    assert not strided[0].is_contiguous() and not strided[1].is_contiguous() and not ids.is_contiguous()
    actual = outputs_and_gradients(token_logps, (*strided, bias, ids), chunk_size=3)
    assert_all_close(actual, outputs_and_gradients(token_logps_reference, (hidden, weight, bias, target_ids)))


@pytest.mark.parametrize("with_entropy", [False, True])
def test_row_without_upstream_gradient_adds_nothing_even_if_it_is_nan(with_entropy):
    hidden, weight, bias, target_ids = make_inputs()
    keep = torch.tensor([True, True, False, True, True, False, True])
    broken = hidden.detach().masked_fill(~keep[:, None], math.nan).requires_grad_()

    def gradients(hidden, target_ids, keep):
        logps, entropy = token_logps(hidden, weight, target_ids, bias=bias, return_entropy=True, chunk_size=2)
        values = logps + 2 * entropy if with_entropy else logps
        return torch.autograd.grad(torch.where(keep, values, 0).sum(), (hidden, weight, bias))

    actual = gradients(broken, target_ids, keep)
    kept = hidden.detach()[keep].requires_grad_()
    expected = gradients(kept, target_ids[keep], torch.tensor(True))
    torch.testing.assert_close((actual[0][keep], *actual[1:]), expected)
    assert actual[0][~keep].count_nonzero() == 0


def test_tied_weight_sums_both_gradients():
    _, weight, _, target_ids = make_inputs()
    hidden_of = weight[:7]  # the embedding of seven tokens
    (actual,) = torch.autograd.grad(token_logps(hidden_of, weight, target_ids).sum(), weight)
    (expected,) = torch.autograd.grad(token_logps_reference(weight[:7], weight, target_ids).sum(), weight)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_low_precision_is_no_worse_than_eager(dtype, softcap):
    """Truth: the same rounded inputs in float64. Eager: logits in the inputs' dtype, then a float32 log-softmax."""
    inputs = make_inputs(63, 64, 257, dtype)
    truth = outputs_and_gradients(
        token_logps_reference, [x.detach().double().requires_grad_() for x in inputs[:3]] + [inputs[3]], softcap=softcap
    )

    def eager(hidden, weight, target_ids, *, bias, return_entropy, softcap):
        logits = torch.nn.functional.linear(hidden, weight, bias)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        logps = logits.float().log_softmax(-1)
        return logps.gather(-1, target_ids[:, None])[:, 0], -(logps.exp() * logps).sum(-1)

    actual = outputs_and_gradients(token_logps, inputs, softcap=softcap, chunk_size=20)
    assert [x.dtype for x in actual] == [torch.float32, torch.float32, dtype, dtype, dtype]
    for a, e, t in zip(actual, outputs_and_gradients(eager, inputs, softcap=softcap), truth, strict=True):
        assert_no_worse_than(e, a, t, floor=1e-6)
    torch.testing.assert_close(actual[0].double(), truth[0], atol=1e-4, rtol=0)


def test_weight_gradient_accumulates_in_fp32_over_chunks():
    """A thousand chunks of equal rows: a bf16 running sum would stop growing at 256 times an addend."""
    hidden = torch.full((1024, 4), 1.0, dtype=torch.bfloat16)
    weight = torch.zeros(3, 4, dtype=torch.bfloat16, requires_grad=True)
    token_logps(hidden, weight, torch.zeros(1024, dtype=torch.int64), chunk_size=1).sum().backward()
    torch.testing.assert_close(weight.grad[0].float(), torch.full((4,), 1024 * 2 / 3), rtol=4e-3, atol=0)


FP32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (FP32, BF16)])
def test_autocast_casts_the_operands_itself(dtypes):
    hidden, weight, bias, target_ids = make_inputs(dtype=torch.float32)
    hidden, weight = (x.detach().to(d).requires_grad_() for x, d in zip((hidden, weight), dtypes, strict=True))
    rounded = [x.detach().bfloat16().requires_grad_() for x in (hidden, weight)]
    with torch.autocast("cpu", torch.bfloat16):
        actual = outputs_and_gradients(token_logps, (hidden, weight, bias, target_ids))
    expected = outputs_and_gradients(token_logps, (*rounded, bias, target_ids))
    assert [x.dtype for x in actual[2:]] == [*dtypes, torch.float32]
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
    for a, e in zip(actual[2:], expected[2:], strict=True):
        torch.testing.assert_close(a.float(), e.float(), rtol=2**-8, atol=1e-6)


def test_mixed_dtypes_use_the_wider_one():
    hidden, weight, bias, target_ids = make_inputs(dtype=torch.float32)
    hidden = hidden.detach().bfloat16()
    expected = token_logps_reference(hidden.float(), weight, target_ids, bias=bias)
    torch.testing.assert_close(token_logps(hidden, weight, target_ids, bias=bias), expected)


def test_peaked_and_extreme_logits():
    weight = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    hidden = torch.tensor([[800.0], [-800.0]], dtype=torch.float64)
    logps, entropy = token_logps(hidden, weight, torch.tensor([0, 0]), return_entropy=True)
    torch.testing.assert_close(logps, torch.tensor([0.0, -1600.0], dtype=torch.float64))
    assert entropy.tolist() == [0, 0]


def test_bias_of_minus_infinity_removes_a_token():
    """Logits 0, 1, -inf: the entropy is that of two tokens, .5822, and every gradient is finite."""
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[0.0], [1.0], [5.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    target_ids = torch.tensor([1])
    actual = outputs_and_gradients(token_logps, (hidden, weight, bias, target_ids))
    assert actual[1].item() == pytest.approx(0.5822, abs=1e-4)
    assert all(torch.isfinite(x).all() for x in actual)
    kept = (hidden, weight[:2].detach().requires_grad_(), bias[:2].detach().requires_grad_(), target_ids)
    expected = outputs_and_gradients(token_logps_reference, kept)
    torch.testing.assert_close([actual[i][:2] for i in range(5)], expected)


def test_default_chunk_bounds_the_logits_by_bytes(monkeypatch):
    rows = []
    logits = head.TorchHead.logits
    monkeypatch.setitem(head._CHUNK_BYTES, "cpu", 4 * 1000 * 8)  # eight rows of a thousand float32 logits
    monkeypatch.setattr(
        head.TorchHead, "logits", lambda self, hidden, *rest: rows.append(len(hidden)) or logits(self, hidden, *rest)
    )
    hidden, weight, _, target_ids = make_inputs(20, 4, 1000, torch.float32)
    token_logps(hidden, weight, target_ids).sum().backward()
    assert rows == [8, 8, 4] * 2


def test_fused_and_full_logits_give_the_same_policy_loss():
    hidden, weight, _, target_ids = make_inputs(6, 5, 11)
    gradients = []
    for function in (token_logps, token_logps_reference):
        logps, entropy = (x.view(2, 3) for x in function(hidden, weight, target_ids, return_entropy=True))
        old_logps = logps.detach() + torch.tensor([[0.1, -0.3, 0.0], [0.4, 0.0, -0.1]], dtype=torch.float64)
        options = {"old_logps": old_logps, "ref_logps": old_logps - 0.1, "entropy": entropy}
        config = LossConfig(beta=0.1, top_entropy_quantile=0.5)
        loss = grpo_loss_from_logps(logps, torch.tensor([1.0, -1.0]), torch.ones(2, 3), config, **options).loss
        gradients.append(torch.autograd.grad(loss - 0.01 * entropy.mean(), (hidden, weight)))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("change, message", [
    ({"hidden_states": torch.zeros(2, 3, 5)}, r"hidden_states must be \[N, H\], got shape \(2, 3, 5\)"),
    ({"lm_head_weight": torch.zeros(11, 4)}, r"lm_head_weight must be \[V, H\].* got shape \(11, 4\)"),
    ({"lm_head_weight": torch.zeros(0, 5)}, "V >= 1"),
    ({"lm_head_weight": torch.zeros(0)}, "FSDP"),
    ({"target_ids": torch.zeros(6, dtype=torch.int64)}, "target_ids must be integers"),
    ({"target_ids": torch.zeros(7)}, "target_ids must be integers"),
    ({"target_ids": torch.tensor([0] * 6 + [11])}, r"target_ids must be in \[0, V\) with V = 11, got 0 to 11"),
    ({"target_ids": torch.tensor([0] * 6 + [-100])}, "got -100 to 0"),
    ({"bias": torch.zeros(5)}, r"bias must be \[V\]"),
    ({"bias": torch.zeros(11, device="meta")}, "bias must be on cpu as hidden_states, got meta; move it"),
    ({"lm_head_weight": torch.zeros(11, 5, device="meta")}, "lm_head_weight must be on cpu as hidden_states, got meta"),
    ({"temperature": 0.0}, "temperature must be finite and above 0, got 0.0"),
    ({"temperature": -1.0}, "temperature"),
    ({"temperature": math.nan}, "temperature"),
    ({"softcap": 0.0}, "softcap"),
    ({"logit_scale": math.inf}, "logit_scale"),
    ({"chunk_size": 0}, "chunk_size"),
], ids=str)  # fmt: skip
def test_wrong_arguments_are_named(change, message):
    arguments = {"hidden_states": torch.zeros(7, 5), "lm_head_weight": torch.zeros(11, 5),
                 "target_ids": torch.zeros(7, dtype=torch.int64)}  # fmt: skip
    with pytest.raises(ValueError, match=message):
        token_logps(**arguments | change)


@pytest.mark.parametrize("vocab_size", [1, 127, 129, 1000, 50257])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaked_logits_far_below_zero_see_no_column_beyond_the_vocabulary(vocab_size, dtype):
    """Logits of -60 to -20 with one on top: a column of zeros, as of a padded tile, would have all the probability."""
    generator = torch.Generator().manual_seed(0)
    weight = -3 - torch.rand(vocab_size, 8, generator=generator) * 4
    weight[vocab_size // 2] = -2.5
    hidden = torch.ones(3, 8) + 0.1 * torch.rand(3, 8, generator=generator)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight)]
    ids = torch.tensor([vocab_size // 2, 0, vocab_size - 1])
    actual = token_logps(*leaves, ids, return_entropy=True)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    truth = token_logps_reference(*exact, ids, return_entropy=True)
    assert vocab_size == 1 or (0 > truth[0][0] > -0.1 and truth[0][1] < -3)
    for a, t in zip(actual, truth, strict=True):
        torch.testing.assert_close(a.double(), t, rtol=1e-5, atol=1e-5)
    gradients = [torch.autograd.grad(x[0].sum(), y) for x, y in ((actual, leaves), (truth, exact))]
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-3
    for a, t in zip(*gradients, strict=True):
        torch.testing.assert_close(a.double(), t, rtol=tolerance, atol=tolerance * 0.1)


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, Fraction, int])
def test_every_kind_of_number_is_a_number_of_a_head(kind):
    hidden, weight, ids = torch.randn(3, 4), torch.randn(5, 4), torch.arange(3)
    options = {"temperature": 2.0, "logit_scale": 3.0, "softcap": 4.0}
    given = {name: kind(value) for name, value in options.items()}
    expected = token_logps(hidden, weight, ids, **options, chunk_size=2)
    assert torch.equal(token_logps(hidden, weight, ids, **given, chunk_size=np.int64(2)), expected)
