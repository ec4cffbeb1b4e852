"""Attention with learned sinks by FlexAttention: no matrix of scores, and no work where no query sees a key."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention

SINK_ATTENTION = "grpo_moe_sinks"
"""For transformers' ``attn_implementation``, which dispatches on parts of names: it must hold no name of another."""

# Inductor sends fewer queries to another kernel, for decoding, compiled anew for each batch size; so few queries have a
# small dense mask, which needs no compilation.
MIN_QUERIES = 128
# Kinds of mask, times padding or none, gradients or none, one row or several, one length or any: more than Dynamo's 8.
MAX_GRAPHS = 64


def flex_sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    block_mask: BlockMask,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """:func:`~grpo_moe.ops.sink_attention` under a block mask, with all its gradients; on the CPU without gradients.

    A sink multiplies the output by ``exp(lse - logaddexp(lse, sink))``, where ``lse`` is the logsumexp of the scores in
    fp32. On a GPU the first call for a kind of mask takes seconds to compile.

    Args:
        query: [B, heads, T, D].
        key, value: [B, kv_heads, S, D]; head h reads kv head ``h // (heads // kv_heads)``.
        block_mask: [B or 1, heads or 1, T, S]; a query that sees no key gives zeros and no gradient.
        sinks: [heads] logits, or None.
        scale: multiplies the scores; 1/sqrt(D) by default.

    Returns:
        [B, heads, T, D] in the query's dtype, or in autocast's where that is on.

    Raises:
        torch._dynamo.exc.FailOnRecompileLimitHit: 64 graphs were compiled before and none fits.

    Source: gpt-oss model card (attention sinks), arXiv 2412.05496 (FlexAttention).
    """
    if torch.is_autocast_enabled(query.device.type):
        # here, since the kernel of PyTorch 2.11 does not fix the memory layout of inputs made in its own graph
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    attend, rescale = flex_attention, _rescale  # two graphs for the same reason: the gradient of `out` is an input
    if query.is_cuda and not torch.compiler.is_compiling():
        attend, rescale = _compiled(attend), _compiled(rescale)
    with room_for_graphs():
        out, aux = attend(
            query, key, value, block_mask=block_mask, scale=scale, enable_gqa=True, return_aux=AuxRequest(lse=True)
        )
        return out if sinks is None else rescale(out, aux.lse, sinks)


def block_mask(visible: Callable, batch: int, queries: int, keys: int, device: torch.device) -> BlockMask:
    """The block mask [B, 1, T, S] of ``visible(b, h, q, k)``; built by a compiled function of its kind on a GPU."""
    with room_for_graphs(any_size=True):
        return create_block_mask(visible, batch, None, queries, keys, device=device, _compile=device.type == "cuda")


def supports_flex(query: torch.Tensor) -> bool:
    """Whether :func:`flex_sink_attention` has kernels, forward and backward, for a query [B, heads, T, D]."""
    _, _, queries, dim = query.shape
    return query.is_cuda and query.dtype != torch.float64 and queries >= MIN_QUERIES and dim >= 16


def dense_mask(block_mask: BlockMask) -> torch.Tensor:
    """The block mask as bool [B or 1, heads or 1, T, S], True where a query sees a key."""
    return create_mask(block_mask.mask_mod, *block_mask.shape, device=block_mask.kv_indices.device)


def room_for_graphs(*, any_size: bool = False) -> AbstractContextManager:
    """Within it Dynamo compiles up to 64 graphs of a function before it refuses, or leaves it uncompiled.

    Args:
        any_size: for sizes of any value at once. To build block masks: for a fixed size Inductor sorts the blocks of a
            row in a Triton kernel, which took more than two minutes to compile for the 128 blocks of 16,384 tokens.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    sizes = {"assume_static_by_default": False} if any_size else {}
    return torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS, **sizes)


@functools.cache
def _compiled(function: Callable) -> Callable:
    # dynamic=None: batches of one length keep kernels without bounds checks; the second length compiles once more, for
    # all lengths. fullgraph: at the limit an error, rather than uncompiled FlexAttention, which makes all the scores.
    return torch.compile(function, fullgraph=True)


def _rescale(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    # sigmoid(lse - sink) is the factor; where no key is seen, lse is -inf and its derivative 0, not NaN
    kept = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])  # [B, heads, T]
    return (out * kept[..., None]).to(out.dtype)
