"""RMSNorm modules of transformers in one kernel."""

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRMSNorm
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm

from grpo_moe.models.gptoss_lite.modeling import GptOssLiteRMSNorm
from grpo_moe.ops.norm import ROUNDINGS, fused_rms_norm, rms_norm

KINDS = {
    "qwen3": lambda size: Qwen3MoeRMSNorm(size),
    "gpt_oss": lambda size: GptOssRMSNorm(size),
    "gptoss_lite": lambda size: GptOssLiteRMSNorm(size, 1e-5),
    "gemma2": lambda size: Gemma2RMSNorm(size),
    "torch": lambda size: torch.nn.RMSNorm(size, eps=1e-6),
}


def check(kind, size, dtype, device="cpu", shape=(3, 5)):
    module = KINDS[kind](size).to(device, dtype)
    with torch.no_grad():
        module.weight.normal_()
    fused = fused_rms_norm(module)
    assert fused is not None
    given = [dtype] if dtype == torch.bfloat16 else [dtype, torch.bfloat16]
    for x_dtype in given:
        x = torch.randn(*shape, size, device=device).to(x_dtype)
        with torch.no_grad():
            expected, made = module(x), fused(x)
        assert made.dtype == expected.dtype
        tolerance = 2 * torch.finfo(x_dtype).eps if x_dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(made, expected, rtol=tolerance, atol=1e-30)
        assert float(((made - expected).abs() > 1e-5 * expected.abs()).double().mean()) < 0.02
        narrow = x[..., : size - 1]  # strided rows
        smaller = KINDS[kind](size - 1).to(device, dtype)
        torch.testing.assert_close(fused_rms_norm(smaller)(narrow), smaller(narrow).detach(), rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("kind", [x for x in KINDS if x != "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_are_found_and_equalled(kind, dtype):
    for size in (16, 33):
        check(kind, size, dtype)


@pytest.mark.parametrize(
    "module",
    [
        torch.nn.LayerNorm(16),
        torch.nn.Linear(16, 16),
        torch.nn.Identity(),
        torch.nn.RMSNorm(16, eps=1e-6, elementwise_affine=False),
    ],
)
def test_other_modules_are_left_alone(module):
    assert fused_rms_norm(module) is None


def test_a_module_with_another_formula_is_left_alone():
    class Clipped(Qwen3MoeRMSNorm):
        def forward(self, hidden_states):
            return super().forward(hidden_states).clamp(-1, 1)

    assert fused_rms_norm(Clipped(16)) is None


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [x for x in KINDS if x != "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_modules_are_equalled(kind, dtype):
    for size in (128, 768, 2048, 2880):
        check(kind, size, dtype, "cuda", (7, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_gpu_more_than_2_to_the_31_elements(rounding):
    x, weight = torch.randn(300_000, 7168, device="cuda", dtype=torch.bfloat16), torch.rand(7168, device="cuda")
    some = x[-50:].float()
    expected = some * (some.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * (weight + (rounding == "one_plus"))
    out = rms_norm(x, weight, 1e-6, rounding)
    assert x.numel() > 2**31
    torch.testing.assert_close(out[-50:].float(), expected, rtol=2**-6, atol=0)
