"""Log-probabilities of completion tokens, and the policy loss, from logits [B, T, V] that the model already holds."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator

import torch
from torch.autograd.function import once_differentiable

from .checks import ID_DTYPES, check_loss_inputs, check_temperature, check_tensors
from .config import LossConfig
from .objective import Count, LossOutput, grpo_loss_from_logps

_CHUNK_BYTES = 64 * 2**20  # of one chunk's logits in the PyTorch path; the working set is about three times that


def logps_from_logits(
    logits: torch.Tensor,
    completion_ids: torch.Tensor,
    *,
    temperature: float = 1.0,
    completion_mask: torch.Tensor | None = None,
    inplace: bool = False,
) -> torch.Tensor:
    """log softmax(logits / temperature)[id] of each completion token, differentiable once, in the logits.

    Besides the logits it needs memory for their gradient only, in the logits' dtype; with `inplace` not even that
    (but autograd allocates the gradient of the whole where the logits are a slice of it).
    Triton kernels compute it on a GPU, and on a CPU under TRITON_INTERPRET=1; PyTorch, a chunk of rows at a time,
    elsewhere and for float64. Both are deterministic. Heads that never hold the logits: `token_logps`.

    Where the mask is False neither logits nor id are used (NaN and -100 may stand there): the log-probability and the
    gradient are 0. A row whose upstream gradient is 0 gets the gradient 0, even if its logits are NaN. A logit of -inf
    removes its token from the distribution.

    Args:
        logits: [B, T, V], floating point; a copy is made unless the last stride is 1 (slices of [B, S, V] have it).
        completion_ids: [B, T] integers, in [0, V) where the mask is True. Checked on a CPU only: on a GPU the check
            would wait for the device, and an id out of range gives NaN.
        temperature: divides the logits.
        completion_mask: [B, T], nonzero where the log-probability is wanted. None: everywhere.
        inplace: write the gradient over the logits, which the backward pass thereby destroys: nobody else may need
            them afterwards, and a second backward pass raises RuntimeError. Operations that saved the logits for
            their own backward pass raise PyTorch's error of a variable "modified by an inplace operation".

    Returns:
        [B, T] in nats, float32, or float64 for float64 logits.

    Raises:
        ValueError: a shape, a dtype, a device, an id or the temperature is not as above, or `inplace` with logits whose
            last stride is not 1 or whose rows share memory.
    """
    logps, _ = _logps_and_entropy(logits, completion_ids, completion_mask, temperature, inplace, with_entropy=False)
    return logps


def grpo_loss_from_logits(
    logits: torch.Tensor,
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    advantages: torch.Tensor,
    config: LossConfig,
    *,
    old_logps: torch.Tensor | None = None,
    ref_logps: torch.Tensor | None = None,
    sampling_logps: torch.Tensor | None = None,
    num_loss_tokens: Count | None = None,
    num_sequences: Count | None = None,
    inplace: bool = False,
) -> LossOutput:
    """`grpo_loss_from_logps` of :func:`logps_from_logits` at the config's temperature.

    The entropy is computed, in the same pass over the logits, if `config.top_entropy_quantile` needs it.

    Args:
        logits, completion_ids, completion_mask, inplace: see :func:`logps_from_logits`.
        advantages, config, old_logps, ref_logps, sampling_logps, num_loss_tokens, num_sequences: see
            `grpo_loss_from_logps`.

    Raises:
        ValueError: as both of them.
    """
    given = {"old_logps": old_logps, "ref_logps": ref_logps, "sampling_logps": sampling_logps}
    check_loss_inputs(config, "completion_ids", completion_ids, advantages, completion_mask, given)
    logps, entropy = _logps_and_entropy(
        logits,
        completion_ids,
        completion_mask,
        config.temperature,
        inplace,
        with_entropy=config.top_entropy_quantile != 1,
    )
    return grpo_loss_from_logps(
        logps,
        advantages,
        completion_mask,
        config,
        old_logps=old_logps,
        ref_logps=ref_logps,
        sampling_logps=sampling_logps,
        entropy=entropy,
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
    )


@torch.compiler.disable(
    reason="log-probabilities from logits come of kernels that are no operators; compile what is around them, with "
    "fullgraph=False"
)
def _logps_and_entropy(
    logits, completion_ids, completion_mask, temperature: float, inplace: bool, *, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """[B, T] log-probabilities, and entropies without gradient or None."""
    _check_inputs(logits, completion_ids, completion_mask, temperature)
    if inplace:
        _check_inplace(logits)
    if completion_mask is None:
        mask = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    else:
        mask = completion_mask != 0
    _check_ids(completion_ids, mask, logits.shape[2])
    if logits.stride(2) != 1:
        logits = logits.contiguous()
    return _LogpsFromLogits.apply(logits, completion_ids, mask, float(temperature), inplace, with_entropy)


class _LogpsFromLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, completion_ids, mask, temperature: float, inplace: bool, with_entropy: bool):
        compute, ctx.differentiate = _implementation(logits)
        logps, log_sums, entropy = compute(logits, completion_ids, mask, temperature, with_entropy)
        ctx.save_for_backward(logits, completion_ids, mask, log_sums)
        ctx.temperature, ctx.inplace, ctx.overwritten = temperature, inplace, False
        ctx.set_materialize_grads(False)
        if entropy is not None:
            ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, _grad_entropy):
        if grad_logps is None:
            return (None,) * 6
        if ctx.overwritten:
            raise RuntimeError(
                "inplace must be False for a second backward pass, got True; the first one wrote its gradient over "
                "the logits"
            )
        logits, completion_ids, mask, log_sums = ctx.saved_tensors
        out = logits.detach() if ctx.inplace else logits.new_empty(logits.shape)
        grad_logps = torch.where(mask, grad_logps, 0)  # not a product: 0 * NaN is NaN
        ctx.differentiate(logits, completion_ids, log_sums, grad_logps, ctx.temperature, out)
        if ctx.inplace:
            ctx.overwritten = True
            torch.autograd.graph.increment_version(out)  # of the logits too; kernels write behind autograd's back
        return out, None, None, None, None, None


def _implementation(logits: torch.Tensor) -> tuple[Callable, Callable]:
    """(forward, backward), by Triton or by PyTorch."""
    if _use_triton(logits):
        from . import logits_kernels  # Triton exists for Linux only

        return logits_kernels.logps_from_logits, logits_kernels.logits_grad
    return _logps_in_chunks, _grad_in_chunks


def _use_triton(logits: torch.Tensor) -> bool:
    if logits.dtype == torch.float64:
        return False
    if not (logits.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"):
        return False
    installed = importlib.util.find_spec("triton") is not None
    if not installed:
        warnings.warn("logps_from_logits runs in PyTorch, not in its Triton kernels; install triton", stacklevel=2)
    return installed


def _logps_in_chunks(logits, completion_ids, mask, temperature: float, with_entropy: bool):
    """As `logits_kernels.logps_from_logits`, in PyTorch."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    logps, log_sums, entropy = (
        logits.new_zeros(mask.shape, dtype=dtype) if wanted else None for wanted in (True, True, with_entropy)
    )
    for cells in _chunks(mask, logits):
        z = logits[cells].to(dtype).div_(temperature)  # [n, V]
        sums = z.logsumexp(-1)
        log_sums[cells] = sums
        logps[cells] = z.gather(-1, completion_ids[cells].long()[:, None]).squeeze(-1) - sums
        if with_entropy:
            probs = z.sub_(sums[:, None]).exp_()
            entropy[cells] = torch.special.entr(probs).sum(-1)  # entr(0) = 0, where p * log p is NaN
    return logps, log_sums, entropy


def _grad_in_chunks(logits, completion_ids, log_sums, grad_logps, temperature: float, out) -> None:
    """As `logits_kernels.logits_grad`, in PyTorch."""
    live = grad_logps != 0
    for cells in _chunks(live, logits):
        z = logits[cells].to(log_sums.dtype).div_(temperature)  # [n, V]
        scale = grad_logps[cells][:, None] / temperature
        grad = z.sub_(log_sums[cells][:, None]).exp_().mul_(-scale)
        grad.scatter_add_(-1, completion_ids[cells].long()[:, None], scale)
        out[cells] = grad.to(out.dtype)
    out.masked_fill_(~live[..., None], 0)


def _chunks(wanted: torch.Tensor, logits: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Indices (b, t) of the wanted cells [B, T], as many at a time as fit 64 MiB of logits in the sums' dtype."""
    row_bytes = logits.shape[2] * max(logits.dtype.itemsize, torch.float32.itemsize)
    num_rows = max(1, _CHUNK_BYTES // row_bytes)
    return zip(*(index.split(num_rows) for index in wanted.nonzero(as_tuple=True)), strict=True)


def _check_inputs(logits, completion_ids, completion_mask, temperature: float) -> None:
    tensors = {"logits": logits, "completion_ids": completion_ids, "completion_mask": completion_mask}
    check_tensors({name: x for name, x in tensors.items() if x is not None or name != "completion_mask"})
    if logits.ndim != 3 or logits.shape[2] == 0 or not logits.is_floating_point():
        raise ValueError(
            f"logits must be floating point [B, T, V] with V >= 1, got {logits.dtype} of shape {tuple(logits.shape)}; "
            "pass those of the completion tokens"
        )
    shape = tuple(logits.shape[:2])
    if tuple(completion_ids.shape) != shape or completion_ids.dtype not in ID_DTYPES:
        raise ValueError(
            f"completion_ids must be integers [B, T] = {shape} as logits, got {completion_ids.dtype} of shape "
            f"{tuple(completion_ids.shape)}; logits at position t are those that predict token t"
        )
    if completion_mask is not None and tuple(completion_mask.shape) != shape:
        raise ValueError(
            f"completion_mask must be [B, T] = {shape} as logits, got shape {tuple(completion_mask.shape)}; "
            "align them first"
        )
    for name, x in {"completion_ids": completion_ids, "completion_mask": completion_mask}.items():
        if x is not None and x.device != logits.device:  # a kernel would read another device's addresses
            raise ValueError(f"{name} must be on {logits.device} as logits, got {x.device}; move it there")
    check_temperature(temperature)


def _check_ids(completion_ids: torch.Tensor, mask: torch.Tensor, vocab_size: int) -> None:
    if completion_ids.device.type != "cpu":
        return
    wanted = completion_ids[mask]
    if wanted.numel() == 0:
        return
    low, high = (int(x) for x in wanted.aminmax())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"completion_ids must be in [0, V) with V = {vocab_size} where completion_mask is True, got {low} to "
            f"{high}; mask ids to ignore, such as -100"
        )


def _check_inplace(logits: torch.Tensor) -> None:
    fix = "pass contiguous logits or leave it False"
    extent = logits.shape[2]
    if logits.stride(2) != 1:
        raise ValueError(f"inplace must be False unless the logits' last stride is 1, got {logits.stride(2)}; {fix}")
    for stride, size in sorted(zip(logits.stride()[:2], logits.shape[:2], strict=True)):
        if size > 1 and stride < extent:
            raise ValueError(f"inplace must be False if rows share memory, got strides {logits.stride()}; {fix}")
        extent += (size - 1) * stride
