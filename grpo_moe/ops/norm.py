"""RMSNorm of a module in one Triton kernel, with the roundings of the module's own code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import nn

from .triton_launch import INTERPRET, launch

ROUNDINGS = ("normalized", "product", "one_plus")
"""Of y = x / rms: weight * round(y) as Llama's, round(weight * y) as GPT-OSS's, round((1 + weight) * y) as Gemma's."""
MAX_SIZE = 16_384


@torch.compiler.disable(
    reason="rms_norm is a kernel, no operator; compile the module's own norm, or with fullgraph=False"
)
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, rounding: str) -> torch.Tensor:
    """x / rms(x) times the weight, statistics in float32; no gradients.

    Args:
        x: [..., D] in bfloat16, float16 or float32.
        weight: [D].
        eps: added to the mean square.
        rounding: one of ``ROUNDINGS``: where the result is rounded to the dtype of x.

    Returns:
        [..., D]: in the wider dtype of x and weight for "normalized", otherwise in that of x.
    """
    size = x.shape[-1]
    x = x.contiguous()
    rows = x.numel() // size
    dtype = torch.promote_types(x.dtype, weight.dtype) if rounding == "normalized" else x.dtype
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    block = triton.next_power_of_2(size)
    together = max(1, 1024 // block)
    launch(
        _rms_norm_kernel,
        (triton.cdiv(rows, together), 1, 1),
        x,
        weight,
        out,
        rows,
        float(eps),
        D=size,
        BLOCK=block,
        ROWS=together,
        ROUNDING=ROUNDINGS.index(rounding),
        BF16_BY_HAND=INTERPRET and torch.bfloat16 in (x.dtype, dtype),
        num_warps=4 if block <= 4096 else 8,
    )
    return out


@torch.no_grad()
def fused_rms_norm(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """A forward of a norm module by :func:`rms_norm`, or None for what is no RMSNorm; found by trying it.

    Args:
        module: on the device and in the dtype where it will run.
    """
    weight = getattr(module, "weight", None)
    eps = next((getattr(module, n) for n in ("variance_epsilon", "eps") if hasattr(module, n)), None)
    plain = isinstance(weight, torch.Tensor) and weight.dim() == 1 and len(list(module.parameters())) == 1
    if not plain or not isinstance(eps, float) or len(weight) > MAX_SIZE or weight.dtype == torch.float64:
        return None
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([[1e-3], [1.0], [30.0]])
    x = (torch.randn(3, len(weight), generator=generator) * scale).to(weight.device)
    inputs = [x.to(dtype) for dtype in {weight.dtype, torch.bfloat16}]  # the latter is what autocast's products give
    expected = [module(x) for x in inputs]
    if not all(isinstance(x, torch.Tensor) for x in expected):
        return None
    for rounding in ROUNDINGS:
        made = [rms_norm(x, weight, eps, rounding) for x in inputs]
        if all(map(_nearly_equal, inputs, made, expected)):
            return lambda x, rounding=rounding: rms_norm(x, weight, eps, rounding)
    return None


def _nearly_equal(x: torch.Tensor, made: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether both norms of x are the same within float32, or in halves but for a few elements a rounding apart."""
    if (made.shape, made.dtype) != (expected.shape, expected.dtype):
        return False
    half = x.dtype.itemsize == 2
    tolerance = 2 * torch.finfo(x.dtype).eps if half else 1e-5
    made, expected = made.double(), expected.double()
    apart = (made - expected).abs() > 1e-5 * expected.abs()
    return torch.allclose(made, expected, rtol=tolerance, atol=1e-30) and float(apart.double().mean()) < 0.02


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    rows,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ROUNDING: tl.constexpr,
    BF16_BY_HAND: tl.constexpr,
):
    """A program: ROWS rows of D elements."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (columns < D)[None]
    places = row[:, None] * D + columns[None]
    given = tl.load(x_ptr + places, mask=mask, other=0.0)
    weight = tl.load(weight_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)[None]
    x = given.to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if ROUNDING == 0:
        if BF16_BY_HAND and given.dtype == tl.bfloat16:
            x = _round_to_bf16(x)
        x = x.to(given.dtype).to(tl.float32)
    if ROUNDING == 2:
        weight += 1.0
    x *= weight
    if BF16_BY_HAND and out_ptr.dtype.element_ty == tl.bfloat16:
        x = _round_to_bf16(x)
    tl.store(out_ptr + places, x.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _round_to_bf16(x):
    """To the nearest bf16, ties to even; Triton's interpreter cuts instead."""
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return bits.to(tl.float32, bitcast=True)
