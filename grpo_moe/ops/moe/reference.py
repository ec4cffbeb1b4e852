"""The specification of the experts: a PyTorch loop over the experts that hold tokens."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from .activations import check_output


@torch.compiler.disable(
    reason="impl='stacked', which 'fused' is on a CPU and in float64, looks up on the host which experts hold tokens; "
    "compile with fullgraph=False, or use impl='fused' on a GPU"
)
def stacked_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    act: Callable[[torch.Tensor], torch.Tensor],
    transposed: bool,
) -> torch.Tensor:
    """Sorts the token-expert pairs by expert, runs one dense feed-forward an expert, and sums back over the slots.

    Arguments as in :func:`grpo_moe.ops.moe_experts`. Experts without tokens get zero gradients, not None. The sum over
    slots runs in fp32 or wider and in a fixed order, so results repeat to the bit.
    """
    (tokens, hidden), slots = hidden_states.shape, top_k_index.shape[1]
    experts = gate_up_proj.shape[0]
    flat = top_k_index.reshape(-1)
    order = flat.argsort(stable=True)
    skipped, *tokens_per_expert = _counts(flat, experts)
    pairs = order[skipped : skipped + sum(tokens_per_expert)]
    inputs = hidden_states[pairs // slots].split(tokens_per_expert)

    outputs = []
    for expert, (x, up, down) in enumerate(zip(inputs, gate_up_proj.unbind(), down_proj.unbind(), strict=True)):
        if tokens_per_expert[expert]:
            gate_up = expert_linear(x, up, gate_up_bias, expert, transposed)
            post = act(gate_up)
            check_output(post, (len(x), down.shape[0 if transposed else 1]))
            outputs.append(expert_linear(post, down, down_bias, expert, transposed))
    if not outputs:  # nothing is routed: zeros that keep every input in the graph
        unused = [gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias]
        return hidden_states * 0 + sum(t.sum() * 0 for t in unused if t is not None).to(hidden_states.dtype)

    weighted = torch.cat(outputs) * top_k_weights.reshape(-1)[pairs, None]
    summed = torch.zeros(tokens * slots, hidden, dtype=weighted.dtype, device=weighted.device)
    summed = summed.index_copy(0, pairs, weighted).view(tokens, slots, hidden)
    return summed.sum(1, dtype=torch.promote_types(weighted.dtype, torch.float32)).to(hidden_states.dtype)


def stacked_gradients(
    grad: torch.Tensor,
    tensors: Sequence[torch.Tensor | None],
    top_k_index: torch.Tensor,
    needed: Sequence[bool],
    **options,
) -> list[torch.Tensor | None]:
    """Gradients of :func:`stacked_experts`, which runs again for them.

    Args:
        grad: [N, H] of the output.
        tensors: hidden_states, gate_up_proj, down_proj, top_k_weights, gate_up_bias, down_bias.
        needed: which of their gradients; the others are None.
        options: act and transposed.
    """
    with torch.enable_grad():
        leaves = [None if x is None else x.detach().requires_grad_(n) for x, n in zip(tensors, needed, strict=True)]
        hidden, up, down, weights, up_bias, down_bias = leaves
        biases = {"gate_up_bias": up_bias, "down_bias": down_bias}
        out = stacked_experts(hidden, up, down, top_k_index, weights, **biases, **options)
    found = iter(torch.autograd.grad(out, [x for x, n in zip(leaves, needed, strict=True) if n], grad))
    return [next(found) if n else None for n in needed]


def first_order(backward: Callable) -> Callable:
    """A hand-written backward pass that raises RuntimeError, instead of a wrong result, where it is differentiated."""

    @functools.wraps(backward)
    def checked(ctx, *grads):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph must be False for experts by kernels, got True: they have no second derivative; "
                "use impl='stacked'"
            )
        return backward(ctx, *grads)

    return checked


def expert_linear(x, weight, bias, expert, transposed):
    """x [M, K] by one expert's weight [N, K] ([K, N] if transposed), plus its row of the bias [E, N]."""
    out = x @ (weight if transposed else weight.T)
    return out if bias is None else out + bias[expert]


@torch.compiler.disable(
    reason="check=True reads the indices on the host; leave it out, or compile with fullgraph=False"
)
def check_index(top_k_index: torch.Tensor, experts: int) -> None:
    """Raises ValueError for an index outside of -1..E; waits for the device."""
    if top_k_index.numel():
        low, high = (int(x) for x in top_k_index.aminmax())
        if low < -1 or high > experts:
            raise ValueError(
                f"top_k_index must be in -1..{experts} (-1 and {experts} skip the slot), got {low}..{high}; "
                "look at the router"
            )


def _counts(flat: torch.Tensor, experts: int) -> list[int]:
    """Slots at -1, then at each expert; slots at the sentinel ``experts`` sort last and are left out."""
    check_index(flat, experts)
    return torch.bincount(flat + 1, minlength=experts + 2)[: experts + 1].tolist()
