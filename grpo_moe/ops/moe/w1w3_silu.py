"""The experts of GPT-OSS-Lite: one Triton launch for W1, W3, activation and product; W2 and the backward in PyTorch."""

from __future__ import annotations

from itertools import pairwise

import torch

from ..triton_launch import INTERPRET
from .activation_kernels import Gate
from .activations import gated_activation
from .fused_kernels import gate_up
from .grouped_gemm import ExpertWeight, Rows, Tile
from .reference import check_index, expert_linear, first_order, stacked_gradients
from .routing import route

MAX_WIDTH = 8192
"""Largest hidden and intermediate size, as in GPT-OSS-Lite."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@torch.compiler.disable(
    reason="experts by impl='triton_grouped' are no operator; compile with fullgraph=False, "
    "or use impl='fused' with the name of an activation"
)
def triton_grouped_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
    layout: str,
    transposed: bool,
    alpha: float,
    limit: float,
) -> torch.Tensor:
    """:func:`grpo_moe.ops.moe_experts` as GPT-OSS-Lite's "triton_grouped" computes it.

    A program of the kernel makes one tile of one expert's activations, token x ffn. W2 is a loop over the experts that
    hold tokens, which waits for the device. The backward pass differentiates a recomputation by the reference.

    Args:
        hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias: of one dtype, float32, float16 or bfloat16;
            ``top_k_weights`` may have another.

    Returns:
        [N, H] in the dtype of ``hidden_states``.

    Raises:
        ValueError: a size above 8192, another dtype, an index outside of -1..E.
        RuntimeError: the tensors are not on a CUDA GPU, and Triton does not interpret (TRITON_INTERPRET=1).

    Source: GPT-OSS-Lite, ``moe_dispatch="triton_grouped"``.
    """
    _check(hidden_states, down_proj.shape[1 if transposed else 2])
    act = gated_activation(activation, layout, alpha=alpha, limit=limit)
    check_index(top_k_index, len(gate_up_proj))
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias)
    gate = Gate(activation, layout == "interleaved", alpha, limit)
    return _TritonGrouped.apply(*tensors, top_k_index, gate, act, transposed)


class _TritonGrouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *tensors, top_k_index, gate, act, transposed = inputs
        ctx.save_for_backward(*tensors, top_k_index)
        ctx.options = {"act": act, "transposed": transposed}
        hidden, up, down, weights, up_bias, down_bias = (None if x is None else x.contiguous() for x in tensors)
        weight, tile = ExpertWeight(up, transposed), _tile(hidden)
        routing = route(top_k_index.contiguous(), len(up), tile.block_m)
        post, _ = gate_up(Rows(hidden, by_token=True), weight, up_bias, gate, routing, tile, keep=False)

        offsets, width = routing.expert_offsets.tolist(), hidden.shape[1]
        outputs = [post.new_empty(0, width)]
        for expert, (start, end) in enumerate(pairwise(offsets)):
            if start < end:
                outputs.append(expert_linear(post[start:end], down[expert], down_bias, expert, transposed))
        pairs = routing.pair_of_row[: offsets[-1]].long()
        weighted = torch.cat(outputs) * weights.view(-1)[pairs, None]
        slots = weighted.new_zeros(weights.numel(), width).index_copy_(0, pairs, weighted).view(*weights.shape, width)
        return slots.sum(1, dtype=torch.promote_types(slots.dtype, torch.float32)).to(hidden.dtype)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        *tensors, top_k_index = ctx.saved_tensors
        needed = ctx.needs_input_grad[:6]
        return *stacked_gradients(grad, tensors, top_k_index, needed, **ctx.options), *(None,) * 4


def _tile(hidden_states: torch.Tensor) -> Tile:
    """Token, ffn and k sizes of a tile; the larger one takes 72 KiB of shared memory."""
    if INTERPRET or torch.cuda.get_device_capability(hidden_states.device) < (8, 0):
        return Tile(16, 32, 32, 4, 1)
    return Tile(64, 64, 128 // hidden_states.element_size(), 4, 3)


def _check(hidden_states: torch.Tensor, intermediate: int) -> None:
    for name, size in (("hidden size", hidden_states.shape[1]), ("intermediate size", intermediate)):
        if size > MAX_WIDTH:
            raise ValueError(
                f"{name} must be at most {MAX_WIDTH} for impl='triton_grouped', got {size}; "
                "use impl='stacked' or impl='fused'"
            )
    if hidden_states.dtype not in DTYPES:
        raise ValueError(
            "hidden_states must be float32, float16 or bfloat16 for impl='triton_grouped', "
            f"got {hidden_states.dtype}; use impl='stacked'"
        )
    if not (hidden_states.is_cuda or INTERPRET):
        raise RuntimeError(
            f"hidden_states must be on a CUDA GPU for impl='triton_grouped', got {hidden_states.device}; "
            "move it there or use impl='stacked'"
        )
