"""Triton kernels from logits [B, T, V] to the log-probabilities of the tokens, and back; one row of V a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK_V = 4096  # most columns a step: 16 a thread, few enough registers for four programs on a multiprocessor


def logps_from_logits(
    logits: torch.Tensor, completion_ids: torch.Tensor, mask: torch.Tensor, temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature) at the ids, in one pass over the logits.

    Args:
        logits: [B, T, V] bf16, fp16 or fp32, last stride 1 and any others.
        completion_ids: [B, T] integers; an id outside [0, V) gives NaN.
        mask: [B, T] bool; where False nothing is read and every result is 0.
        temperature: divides the logits.
        with_entropy: also compute the entropies.

    Returns:
        fp32 [B, T] each, in nats: log-probabilities, log-sum-exp of the divided logits, entropies or None.
    """
    shape, vocab_size = logits.shape[:2], logits.shape[2]
    logps, log_sums = (torch.empty(shape, device=logits.device, dtype=torch.float32) for _ in range(2))
    entropy = torch.empty_like(logps) if with_entropy else None
    with torch.cuda.device_of(logits):
        _logps_from_logits_kernel[(shape.numel(),)](
            logits,
            completion_ids.contiguous(),
            mask.contiguous(),
            logps,
            log_sums,
            logps if entropy is None else entropy,
            logits.stride(0),
            logits.stride(1),
            shape[1],
            1 / temperature,
            V=vocab_size,
            BLOCK_V=_block(vocab_size),
            ENTROPY=with_entropy,
            num_warps=8,
        )
    return logps, log_sums, entropy


def logits_grad(
    logits: torch.Tensor,
    completion_ids: torch.Tensor,
    log_sums: torch.Tensor,
    grad_logps: torch.Tensor,
    temperature: float,
    out: torch.Tensor,
) -> None:
    """Gradient of the log-probabilities by the logits, into ``out``.

    Args:
        logits, completion_ids, temperature: as in :func:`logps_from_logits`.
        log_sums: [B, T] fp32, its second result.
        grad_logps: [B, T] fp32; where it is 0 no logit is read and 0 is written.
        out: [B, T, V], last stride 1; may be ``logits`` itself.
    """
    shape, vocab_size = logits.shape[:2], logits.shape[2]
    with torch.cuda.device_of(logits):
        _logits_grad_kernel[(shape.numel(),)](
            logits,
            completion_ids.contiguous(),
            log_sums,
            grad_logps.contiguous(),
            out,
            logits.stride(0),
            logits.stride(1),
            out.stride(0),
            out.stride(1),
            shape[1],
            1 / temperature,
            V=vocab_size,
            BLOCK_V=_block(vocab_size),
            num_warps=8,
        )


def _block(vocab_size: int) -> int:
    return min(BLOCK_V, triton.next_power_of_2(vocab_size))


# V is a constexpr: a model has one, and under numpy >= 2.4 the interpreter of Triton 3.6 takes no other loop bound
@triton.jit(do_not_specialize=["T"])
def _logps_from_logits_kernel(
    logits_ptr,
    ids_ptr,
    mask_ptr,
    logps_ptr,
    log_sums_ptr,
    entropy_ptr,
    stride_b,
    stride_t,
    T,
    inverse_temperature,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    ENTROPY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(mask_ptr + row) == 0:
        tl.store(logps_ptr + row, 0.0)
        tl.store(log_sums_ptr + row, 0.0)
        if ENTROPY:
            tl.store(entropy_ptr + row, 0.0)
        return
    logits_ptr += (row // T) * stride_b + (row % T) * stride_t
    row_max = float("-inf")
    sums = tl.zeros((BLOCK_V,), tl.float32)  # of exp(z - row_max), one a lane: a single reduction, after the loop
    moments = tl.zeros((BLOCK_V,), tl.float32)  # of exp(z - row_max) * (z - row_max)
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        z = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32) * inverse_temperature
        new_max = tl.maximum(row_max, tl.max(z, 0))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)  # -inf - -inf is NaN
        scale = tl.exp(row_max - shift)
        terms = tl.exp(z - shift)
        if ENTROPY:
            moved = tl.where(row_max == float("-inf"), 0.0, row_max - shift)
            moments = scale * (moments + moved * sums) + terms * tl.where(terms > 0, z - shift, 0.0)
        sums = scale * sums + terms
        row_max = new_max
    total = tl.sum(sums, 0)
    log_total = tl.log(total)
    token = tl.load(ids_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < V)
    target = tl.load(logits_ptr + token, mask=known, other=float("nan")).to(tl.float32) * inverse_temperature
    tl.store(logps_ptr + row, target - row_max - log_total)
    tl.store(log_sums_ptr + row, row_max + log_total)
    if ENTROPY:
        tl.store(entropy_ptr + row, log_total - tl.sum(moments, 0) / total)


@triton.jit(do_not_specialize=["T"])
def _logits_grad_kernel(
    logits_ptr,
    ids_ptr,
    log_sums_ptr,
    grad_logps_ptr,
    out_ptr,
    stride_b,
    stride_t,
    stride_ob,
    stride_ot,
    T,
    inverse_temperature,
    V: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    out_ptr += (row // T) * stride_ob + (row % T) * stride_ot
    grad = tl.load(grad_logps_ptr + row) * inverse_temperature
    if grad == 0:
        for first in range(0, V, BLOCK_V):
            columns = first + tl.arange(0, BLOCK_V)
            tl.store(out_ptr + columns, tl.zeros((BLOCK_V,), out_ptr.dtype.element_ty), mask=columns < V)
        return
    logits_ptr += (row // T) * stride_b + (row % T) * stride_t
    token = tl.load(ids_ptr + row).to(tl.int64)
    log_sum = tl.load(log_sums_ptr + row)
    for first in range(0, V, BLOCK_V):
        columns = first + tl.arange(0, BLOCK_V)
        z = tl.load(logits_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32) * inverse_temperature
        change = grad * (tl.where(columns == token, 1.0, 0.0) - tl.exp(z - log_sum))
        tl.store(out_ptr + columns, change.to(out_ptr.dtype.element_ty), mask=columns < V)
