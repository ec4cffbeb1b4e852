"""Draws of tokens: PyTorch by its frequencies, Triton against PyTorch."""

import pytest
import torch

from grpo_moe.ops import sampling, sampling_kernels


def cases():
    torch.manual_seed(0)
    logits = 3 * torch.randn(40, 101)
    logits[1] = 0
    logits[2, 7:] = -torch.inf
    logits[3, :-1] = -torch.inf
    logits[4, 50] = 200.0
    logits[5] -= 100
    return logits


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0, 2.5])
def test_triton_equals_pytorch(temperature):
    logits = cases()
    for draw in range(2):
        uniform = torch.rand(40, dtype=torch.float64)
        if draw == 0:
            uniform[:20] = 0.0
            uniform[20:] = 1 - 2.0**-53
        tokens, logps = sampling_kernels.sample(logits, uniform, temperature)
        expected, expected_logps = sampling.sample_tokens(logits, uniform, temperature)
        torch.testing.assert_close(logps[tokens == expected], expected_logps[tokens == expected], rtol=1e-5, atol=2e-5)
        assert torch.isfinite(logps).all()
        for row in (tokens != expected).nonzero()[:, 0].tolist():  # float32 sums: a neighbour at most
            sums = (logits[row].double() / temperature).softmax(-1).cumsum(-1)
            edge = sums[min(int(tokens[row]), int(expected[row]))]
            assert abs(float(edge - uniform[row])) < 1e-5


def test_triton_reads_strided_logits_and_survives_nan():
    wide = torch.randn(4, 100)
    uniform = torch.rand(4, dtype=torch.float64)
    expected = sampling.sample_tokens(wide[:, :70], uniform, 1.0)
    tokens, logps = sampling_kernels.sample(wide[:, :70], uniform, 1.0)
    assert torch.equal(tokens, expected[0])
    torch.testing.assert_close(logps, expected[1])
    wide[2] = torch.nan
    tokens, _ = sampling_kernels.sample(wide, uniform, 1.0)
    assert ((tokens >= 0) & (tokens < 100)).all()


def test_draws_follow_the_distribution():
    logits = torch.randn(1, 12)
    expected = (logits / 0.8).softmax(-1)[0]
    for draw, rows in ((sampling.sample_tokens, 8000), (sampling_kernels.sample, 400)):
        tokens, _ = draw(logits.expand(rows, -1), torch.rand(rows, dtype=torch.float64), 0.8)
        frequencies = torch.bincount(tokens, minlength=12) / rows
        assert (frequencies - expected).abs().max() < 4 * (0.25 / rows) ** 0.5


@pytest.mark.gpu
def test_gpu_kernel_equals_pytorch_on_a_large_vocabulary():
    for temperature in (0.0, 0.7, 1.0):
        logits = 4 * torch.randn(64, 151_936, device="cuda")
        uniform = torch.rand(64, dtype=torch.float64, device="cuda")
        tokens, logps = sampling.sample_tokens(logits, uniform, temperature)
        expected, expected_logps = sampling.sample_tokens(logits.double(), uniform, temperature)
        same = tokens == expected
        assert same.float().mean() > 0.9
        torch.testing.assert_close(logps[same], expected_logps[same].float(), rtol=1e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_gpu_more_than_2_to_the_31_logits(temperature):
    logits = torch.randn(14_500, 151_936, device="cuda")
    uniform = torch.rand(14_500, dtype=torch.float64, device="cuda")
    assert logits.numel() > 2**31
    tokens, logps = sampling_kernels.sample(logits, uniform, temperature)
    expected, expected_logps = sampling.sample_tokens(logits[-64:].double(), uniform[-64:], temperature)
    same = tokens[-64:] == expected
    assert same.float().mean() > 0.9  # float32 sums may end at a neighbour
    torch.testing.assert_close(logps[-64:][same], expected_logps[same].float(), rtol=1e-5, atol=2e-5)
