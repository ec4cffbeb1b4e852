"""The experts with a PyTorch function for activation, between grouped Triton GEMMs: no wait for the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from .activations import check_output
from .fused import gemm, outer, sorted_rows, tile_of
from .grouped_gemm import ExpertWeight, Rows
from .reference import first_order
from .routing import Routing, route
from .row_kernels import gather_rows, sum_by_expert, sum_over_slots

Tensor = torch.Tensor


@torch.compiler.disable(
    reason="experts by an activation that is a function are no operator; compile with fullgraph=False, "
    "or use impl='fused' with the name of an activation"
)
def unfused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    act: Callable[[Tensor], Tensor],
    transposed: bool,
) -> Tensor:
    """:func:`grpo_moe.ops.moe_experts` with the pre-activations in memory, for an activation that kernels do not know.

    Args:
        hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias: of one dtype, float32, float16 or bfloat16;
            ``top_k_weights`` may have another.
        act: differentiable function from gate_up [M, D] to [M, I], each row on its own, as
            :func:`~grpo_moe.ops.moe.activations.gated_activation` returns it. M is N * K, whatever the routing: rows
            for which there is no pair repeat the first one, and their gradients are zeros.

    Returns:
        [N, H] in the dtype of ``hidden_states``.

    Raises:
        ValueError: ``act`` returns another shape.
    """
    routing, live = _route(top_k_index, hidden_states, gate_up_proj.shape[0])
    gate_up = _GroupedLinear.apply(hidden_states, gate_up_proj, gate_up_bias, routing, transposed, True)
    # a real row, because an activation may have no finite value or slope at zero
    first = gate_up[:1].detach().where(live[:1], 0)
    gate_up = torch.where(live, gate_up, first)  # [N * K, 2I]
    post = act(gate_up)  # [N * K, I]
    expected = (routing.num_rows, down_proj.shape[1 if transposed else 2])
    check_output(post, expected)
    post = torch.where(live, post, 0).to(hidden_states.dtype)  # also zeroes the gradients of the other rows
    slots = _GroupedLinear.apply(post, down_proj, down_bias, routing, transposed, False)
    return _WeightedSum.apply(slots, top_k_weights, routing)


def _route(top_k_index: Tensor, hidden_states: Tensor, num_experts: int) -> tuple[Routing, Tensor]:
    """The routing with zeros for garbage, and bool [num_rows, 1]: which rows hold a pair."""
    tile = tile_of("gemm", top_k_index.numel() / num_experts, hidden_states)
    routing = route(top_k_index.contiguous(), num_experts, tile.block_m)
    live = torch.arange(routing.num_rows, device=top_k_index.device) < routing.expert_offsets[-1]
    defined = {name: getattr(routing, name).where(live, 0) for name in ("pair_of_row", "expert_of_row")}
    return replace(routing, **defined), live[:, None]


class _GroupedLinear(torch.autograd.Function):
    """[num_rows, N]: every sorted row, or row of a token, by the weight of its expert, plus its bias."""

    @staticmethod
    def forward(ctx, values, weight, bias, routing, transposed, by_token):
        values, weight = values.contiguous(), weight.contiguous()
        ctx.save_for_backward(values if ctx.needs_input_grad[1] else None, weight)
        ctx.routing, ctx.transposed, ctx.by_token, ctx.num_values = routing, transposed, by_token, len(values)
        rows = sorted_rows(values, routing) if by_token else Rows(values, by_token=False)
        out = gemm(rows, ExpertWeight(weight, transposed), routing)
        return out if bias is None else out.add_(bias.index_select(0, routing.expert_of_row))

    @staticmethod
    @first_order
    def backward(ctx, grad):
        values, weight = ctx.saved_tensors
        routing, transposed = ctx.routing, ctx.transposed
        need_values, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        grad_rows = Rows(grad, by_token=False)
        grad_values = grad_weight = grad_bias = None
        if need_values:
            grad_values = gemm(grad_rows, ExpertWeight(weight, not transposed), routing)
            if ctx.by_token:
                grad_values = sum_over_slots(grad_values, routing, ctx.num_values, None, grad.dtype)
        if need_weight:
            rows = sorted_rows(values, routing) if ctx.by_token else Rows(values, by_token=False)
            grad_weight = outer(grad_rows, rows, transposed, routing, weight)
        if need_bias:
            grad_bias = sum_by_expert(grad_rows, routing, grad.dtype)
        return grad_values, grad_weight, grad_bias, None, None, None


class _WeightedSum(torch.autograd.Function):
    """[N, H]: each token's rows of slots [num_rows, H] times top_k_weights [N, K]."""

    @staticmethod
    def forward(ctx, slots, top_k_weights, routing):
        weights = top_k_weights.contiguous()
        ctx.save_for_backward(slots if ctx.needs_input_grad[1] else None, weights)
        ctx.routing = routing
        return sum_over_slots(slots, routing, len(weights), weights.view(-1), slots.dtype)

    @staticmethod
    @first_order
    def backward(ctx, grad):
        slots, weights = ctx.saved_tensors
        routing = ctx.routing
        rows = gather_rows(grad.contiguous(), routing)
        grad_slots = grad_weights = None
        if ctx.needs_input_grad[1]:
            along = (rows.float() * slots).sum(1)  # [num_rows]
            by_pair = along[routing.row_of_pair.clamp(min=0)].where(routing.row_of_pair >= 0, 0)
            grad_weights = by_pair.view_as(weights).to(weights.dtype)
        if ctx.needs_input_grad[0]:
            grad_slots = rows.mul_(weights.view(-1)[routing.pair_of_row, None])
        return grad_slots, grad_weights, None
