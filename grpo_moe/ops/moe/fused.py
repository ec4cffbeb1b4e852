"""The fused experts as a differentiable custom operator: forward, hand-written backward, shapes for torch.compile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..triton_launch import INTERPRET
from .activation_kernels import Gate, activate_backward
from .fused_kernels import gate_up
from .grouped_gemm import ExpertWeight, Rows, Tile, grouped_gemm, has_large_tiles, tma_fits
from .grouped_outer import grouped_outer, torch_grouped_outer
from .reference import first_order
from .routing import Routing, route
from .row_kernels import gather_rows, sum_by_expert, sum_over_slots

Tensor = torch.Tensor
GATHER_FROM = 64
"""Rows an expert has on average from which on rows are gathered before the GEMMs, which then load them by TMA."""


def fused_experts(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    layout: str,
    transposed: bool,
    alpha: float,
    limit: float,
    memory_efficient: bool,
    backend: str = "auto",
) -> Tensor:
    """:func:`grpo_moe.ops.moe_experts` by Triton kernels, without a host synchronisation.

    Args:
        backend: "triton", or "auto" to leave the weights' gradients to torch's grouped_mm where it is faster.
    """
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias)
    keep = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    given = [None if t is None else t.contiguous() for t in (*tensors, top_k_index)]
    options = Options(Gate(activation, layout == "interleaved", alpha, limit), transposed, backend, memory_efficient)
    if _is_traced(given):
        return _experts(*given, *options.flat(), keep)[0]
    return _Experts.apply(*given, options) if keep else _run(given, options, keep)[0]


class Options(NamedTuple):
    """What is not a tensor."""

    gate: Gate
    transposed: bool
    backend: str
    memory_efficient: bool

    @classmethod
    def from_flat(cls, activation: str, interleaved: bool, alpha: float, limit: float, *others) -> Options:
        """The inverse of :meth:`flat`."""
        return cls(Gate(activation, interleaved, alpha, limit), *others)

    def flat(self) -> tuple:
        """As the operators take them."""
        gate = self.gate
        return gate.activation, gate.interleaved, gate.alpha, gate.limit, *self[1:]


def _is_traced(tensors: list[Tensor | None]) -> bool:
    """Whether someone has to see one operator: torch.compile, export, a dispatch mode, a subclass of Tensor.

    Without them the operator's own dispatch would take longer than a small batch.
    """
    if torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return True
    return any(type(t) not in (Tensor, torch.nn.Parameter) for t in tensors if t is not None)


def _run(tensors: Sequence[Tensor | None], options: Options, keep: bool) -> tuple[Tensor, Tensor | None, Routing]:
    """Output, pre-activations (None unless kept), routing."""
    hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias, top_k_index = tensors
    experts, transposed = gate_up_proj.shape[0], options.transposed
    tile = tile_of("gate_up", top_k_index.numel() / experts, hidden_states)
    routing = route(top_k_index, experts, tile.block_m)
    rows, up = sorted_rows(hidden_states, routing), ExpertWeight(gate_up_proj, transposed)
    post, pre = gate_up(rows, up, gate_up_bias, options.gate, routing, tile, keep=keep)
    del rows
    slots = gemm(Rows(post, False), ExpertWeight(down_proj, transposed), routing)
    bias = {} if down_bias is None else {"bias": down_bias, "top_k_index": top_k_index}
    weights = top_k_weights.view(-1)
    return sum_over_slots(slots, routing, hidden_states.shape[0], weights, hidden_states.dtype, **bias), pre, routing


def _gradients(
    grad: Tensor, tensors: Sequence[Tensor | None], pre: Tensor, routing: Routing, options: Options, needed: list[bool]
) -> list[Tensor | None]:
    """The needed gradients of the six floating inputs, None for the others."""
    hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias, top_k_index = tensors
    need_hidden, need_up, need_down, need_weights, need_up_bias, need_down_bias = needed
    transposed, backend = options.transposed, options.backend
    grads: list[Tensor | None] = [None] * 6
    grad_rows, weights = sorted_rows(grad, routing), top_k_weights.view(-1)
    if need_down_bias:
        grads[5] = sum_by_expert(grad_rows, routing, down_bias.dtype, weights=weights)
    if not any(needed[:5]):
        return grads
    grad_post = gemm(grad_rows, ExpertWeight(down_proj, not transposed), routing)
    out = pre if options.memory_efficient else None
    through = activate_backward(grad_post, pre, weights, options.gate, routing, need_weighted=need_down, out=out)
    grad_pre, grad_weights, weighted = through
    del grad_post, through
    if need_weights:
        grad_weights = grad_weights.view_as(top_k_weights)
        if down_bias is not None:
            grad_weights += _bias_part(grad, down_bias, top_k_index)
        grads[3] = grad_weights.to(top_k_weights.dtype)
    if need_down:
        grads[2] = outer(grad_rows, Rows(weighted, False), transposed, routing, down_proj, backend)
    del grad_rows, weighted
    pre_rows = Rows(grad_pre, by_token=False)
    if need_up:
        grads[1] = outer(pre_rows, sorted_rows(hidden_states, routing), transposed, routing, gate_up_proj, backend)
    if need_up_bias:
        grads[4] = sum_by_expert(pre_rows, routing, gate_up_bias.dtype)
    if need_hidden:
        slots = gemm(pre_rows, ExpertWeight(gate_up_proj, not transposed), routing)
        grads[0] = sum_over_slots(slots, routing, grad.shape[0], None, hidden_states.dtype)
    return grads


class _Experts(torch.autograd.Function):
    """(seven tensors, options) -> output."""

    @staticmethod
    def forward(ctx, *inputs):
        *tensors, ctx.options = inputs
        out, pre, ctx.routing = _run(tensors, ctx.options, keep=True)
        ctx.save_for_backward(*tensors, pre)
        return out

    @staticmethod
    @first_order
    def backward(ctx, grad):
        _use_up(ctx)
        *tensors, pre = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:6])
        return *_gradients(grad.contiguous(), tensors, pre, ctx.routing, ctx.options, needed), None, None


def _use_up(ctx) -> None:
    """Raises RuntimeError for a second backward pass through a graph whose pre-activations the first overwrote."""
    if getattr(ctx, "is_used_up", False):
        raise RuntimeError(
            "memory_efficient must be False for a second backward pass through the same graph, got True; the first one "
            "overwrote the pre-activations"
        )
    ctx.is_used_up = ctx.options.memory_efficient


# the same as operators, for who has to see one: their arguments are what a schema can say


def _forward_operator(
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    top_k_index: Tensor,
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
    transposed: bool,
    backend: str,
    memory_efficient: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Output, pre-activations (empty unless kept), and the tensors of the routing."""
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias, top_k_index)
    options = Options.from_flat(activation, interleaved, alpha, limit, transposed, backend, memory_efficient)
    out, pre, routing = _run(tensors, options, keep)
    return out, hidden_states.new_empty(0) if pre is None else pre, *(x.clone() for x in routing.tensors)


_experts = torch.library.custom_op("grpo_moe::experts", _forward_operator, mutates_args=())


@_experts.register_fake
def _(hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias, top_k_index, *options):
    pairs, experts = top_k_index.numel(), gate_up_proj.shape[0]
    *_, transposed, _, _, keep = options
    twice = gate_up_proj.shape[2 if transposed else 1]
    numbers = [top_k_index.new_empty(size, dtype=torch.int32) for size in (pairs, pairs, pairs, experts + 1)]
    pre = hidden_states.new_empty((pairs, twice) if keep else (0,))
    return torch.empty_like(hidden_states), pre, *numbers


def _backward_operator(
    grad: Tensor,
    hidden_states: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    top_k_weights: Tensor,
    gate_up_bias: Tensor | None,
    down_bias: Tensor | None,
    top_k_index: Tensor,
    pre: Tensor,
    pair_of_row: Tensor,
    row_of_pair: Tensor,
    expert_of_row: Tensor,
    expert_offsets: Tensor,
    activation: str,
    interleaved: bool,
    alpha: float,
    limit: float,
    transposed: bool,
    backend: str,
    memory_efficient: bool,
    needed: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The needed gradients of the six floating inputs, an empty tensor for the others."""
    tensors = (hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias, top_k_index)
    numbers = (pair_of_row, row_of_pair, expert_of_row, expert_offsets)
    routing = Routing(*numbers, top_k_index.shape[1], gate_up_proj.shape[0])
    options = Options.from_flat(activation, interleaved, alpha, limit, transposed, backend, memory_efficient)
    grads = _gradients(grad, tensors, pre, routing, options, needed)
    return tuple(grad.new_empty(0) if x is None else x for x in grads)


def _gradients_fake(grad, hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias, *rest):
    inputs = (hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias)
    return tuple(torch.empty_like(x) if need else grad.new_empty(0) for x, need in zip(inputs, rest[-1], strict=True))


_BACKWARD = {
    memory_efficient: torch.library.custom_op(f"grpo_moe::{name}", _backward_operator, mutates_args=mutated)
    for memory_efficient, name, mutated in (
        (False, "experts_backward", ()),
        (True, "experts_backward_in_place", ("pre",)),
    )
}
for _operator in _BACKWARD.values():
    _operator.register_fake(_gradients_fake)


def _setup_context(ctx, inputs, output):
    tensors, options = inputs[:7], inputs[7:-1]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.options = Options.from_flat(*options)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, *_):
    needed = list(ctx.needs_input_grad[:6])
    if grad is None or not any(needed):
        return (None,) * 15
    _use_up(ctx)
    operator = _BACKWARD[ctx.options.memory_efficient]
    grads = operator(grad.contiguous(), *ctx.saved_tensors, *ctx.options.flat(), needed)
    return *(g if need else None for g, need in zip(grads, needed, strict=True)), *(None,) * 9


_experts.register_autograd(_backward, setup_context=_setup_context)


def outer(left: Rows, right: Rows, transposed: bool, routing: Routing, weight: Tensor, backend: str = "auto") -> Tensor:
    """Gradient of a weight [E, N, K], [E, K, N] if ``transposed``: by expert, rows of left [N] times right [K].

    Args:
        backend: "triton"; "auto" for torch's grouped_mm where that is faster: bf16 on a large GPU, many rows.
    """
    left, right = (right, left) if transposed else (left, right)
    if backend == "auto" and _torch_is_faster(left, right, weight):
        return torch_grouped_outer(left.values, right.values, routing)
    return grouped_outer(
        left, right, routing, tile_of("outer", routing.rows_an_expert, weight), torch.empty_like(weight)
    )


def _torch_is_faster(left: Rows, right: Rows, weight: Tensor) -> bool:
    gathered = not (left.by_token or right.by_token)
    aligned = all(size % 8 == 0 for size in weight.shape[1:]) and tma_fits(weight)
    return gathered and aligned and weight.dtype == torch.bfloat16 and (INTERPRET or has_large_tiles(weight.device))


def _bias_part(grad: Tensor, down_bias: Tensor, top_k_index: Tensor) -> Tensor:
    """[N, K] fp32: the output's gradient along the bias of each slot's expert; 0 for a skipped slot."""
    with torch.autocast(grad.device.type, enabled=False):
        if grad.is_cuda and grad.dtype != torch.float32:
            along = torch.mm(grad, down_bias.T, out_dtype=torch.float32)  # [N, E]
        else:
            along = grad.float() @ down_bias.float().T
    experts = len(down_bias)
    routed = (top_k_index >= 0) & (top_k_index < experts)
    return along.gather(1, top_k_index.clamp(0, experts - 1).long()).masked_fill(~routed, 0)


def sorted_rows(values: Tensor, routing: Routing) -> Rows:
    """Rows of tokens in the order of the routing: gathered once where an expert has many, else by the kernel."""
    if routing.rows_an_expert < GATHER_FROM:
        return Rows(values, by_token=True)
    return Rows(gather_rows(values, routing), by_token=False)


def gemm(rows: Rows, weight: ExpertWeight, routing: Routing) -> Tensor:
    """:func:`grouped_gemm` with the tile for the number of rows."""
    return grouped_gemm(rows, weight, routing, tile_of("gemm", routing.rows_an_expert, rows.values))


def tile_of(kind: str, rows: float, like: Tensor) -> Tile:
    """Block sizes of a GEMM for so many rows an expert; what is best was measured on an H200.

    Args:
        kind: "gate_up" (columns of the result count, half of the product's), "gemm", or "outer".
        rows: an expert has on average.
        like: device and dtype.
    """
    if INTERPRET:
        return _TINY
    if like.element_size() == 4:
        return _FLOAT32[kind == "gate_up"]
    if not has_large_tiles(like.device):
        return _PORTABLE[kind == "gate_up"]
    step = 0 if rows <= 16 else 1 if rows <= 32 else 2 if rows < GATHER_FROM else 3
    return _TILES[kind][step]


_TINY = Tile(16, 16, 16, 4, 1)
_FLOAT32 = Tile(64, 64, 32, 4, 3), Tile(64, 32, 32, 4, 3)
_PORTABLE = Tile(64, 64, 64, 4, 3), Tile(64, 32, 64, 4, 3)
_TILES = {
    "gate_up": (
        Tile(16, 64, 128, 4, 3, programs=2, tma=False),
        Tile(32, 64, 64, 4, 4, programs=2),
        Tile(64, 64, 64, 4, 4, programs=2),
        Tile(128, 128, 64, 8, 4, flatten=True),
    ),
    "gemm": (
        Tile(16, 128, 128, 4, 3, programs=2, tma=False),
        Tile(32, 128, 64, 4, 4, programs=2),
        Tile(64, 128, 64, 4, 4, programs=2),
        Tile(128, 256, 64, 8, 4, flatten=True),
    ),
    "outer": (
        Tile(128, 128, 16, 8, 2, programs=4),
        Tile(128, 128, 32, 4, 2, programs=4),
        Tile(128, 128, 32, 4, 2, programs=4),
        Tile(128, 128, 64, 8, 3, programs=2),
    ),
}
"""By GEMM, and by the rows an expert has on average: to 16, to 32, below GATHER_FROM, more."""
