"""Log-probabilities of target tokens from hidden states and lm_head, a chunk of rows at a time: no [N, V] tensor."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from .checks import check_chunk_size, check_head_inputs, check_ids, check_tensors
from .head import HeadOptions, RunningSum, TorchHead


@torch.compiler.disable(reason="token_logps loops over chunks of rows; compile what is around it, with fullgraph=False")
def token_logps(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
    target_ids: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    chunk_size: int | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """log softmax(z)[target] of each row, z = cap(logit_scale * (hidden @ weight.T + bias)) / temperature.

    cap(x) = softcap * tanh(x / softcap), or x. Differentiable once, in hidden states, weight and bias, through the
    log-probabilities and the entropy. The backward pass recomputes the logits; gradients nobody needs cost nothing,
    those of weight and bias add up in the result's dtype before they are rounded to their own. A row whose upstream
    gradient is 0 adds exactly 0 to every gradient, even if its hidden states are NaN.

    Logits, results and sums are float32, or float64 if an input is; bf16 and fp16 operands are multiplied exactly.
    Under autocast the float32 operands of the product are rounded to autocast's dtype, as in `torch.nn.Linear`.
    Which code runs is said at :func:`open_head`.

    Args:
        hidden_states: [N, H], any strides, N may be 0.
        lm_head_weight: [V, H].
        target_ids: [N] integers in [0, V). Checked on a CPU only: on a GPU the check would wait for the device, and
            an id out of range gives NaN (the Triton head) or a device-side assertion.
        bias: [V] or None; -inf removes a token from the distribution (unless a softcap lifts it to -softcap).
        temperature: divides the capped logits.
        logit_scale: multiplies the logits before the cap (Cohere; the reciprocal of Granite's logits_scaling).
        softcap: cap of the logits (Gemma 2), None for none.
        return_entropy: also return the entropy of the distribution.
        chunk_size: rows a chunk. None: 4096 or 6144 with the Triton kernels, else as many as fit 64 MiB of logits
            (1 GiB on a GPU).

    Returns:
        [N] log-probabilities in nats; with `return_entropy` a pair, the second the [N] entropies in nats.

    Raises:
        ValueError: a shape, a target id or an option is out of its range.
    """
    check_tensors({"hidden_states": hidden_states})
    if hidden_states.ndim != 2:
        raise ValueError(f"hidden_states must be [N, H], got shape {tuple(hidden_states.shape)}; flatten [B, T, H]")
    check_head_inputs(hidden_states, lm_head_weight, "target_ids", target_ids, bias)
    check_ids("target_ids", target_ids, len(lm_head_weight))
    options = HeadOptions(temperature, logit_scale, softcap)
    check_chunk_size(chunk_size)
    how = (options, chunk_size, head_dtypes(hidden_states, lm_head_weight), return_entropy)
    logps, entropy = _TokenLogps.apply(hidden_states, lm_head_weight, bias, target_ids.long(), how)
    return (logps, entropy) if return_entropy else logps


@torch.no_grad()
def head_logits(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
) -> torch.Tensor:
    """Logits [n, V] as :func:`token_logps` forms them: operands rounded alike, float32 (or float64) sums.

    For samplers, whose log-probabilities then equal those of the training forward.

    Args:
        hidden_states: [n, H].
        weight, bias, logit_scale, softcap: of the head, as in :func:`token_logps`.
    """
    operand_dtype, dtype = head_dtypes(hidden_states, weight)
    with torch.autocast(hidden_states.device.type, enabled=False):
        options = HeadOptions(logit_scale=logit_scale, softcap=softcap)
        head = TorchHead(weight.detach().to(operand_dtype), bias, options, dtype)
        return head.logits(head.operand(hidden_states))


def open_head(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    options: HeadOptions,
    dtypes: tuple[torch.dtype, torch.dtype],
    num_rows: int,
    chunk_size: int | None = None,
    *,
    entropy_gradient: bool = False,
):
    """The head that computes chunks: Triton kernels and cuBLAS for bf16 operands on a Hopper or newer GPU whose rows
    of H elements start at multiples of 16 bytes, PyTorch for everything else and for gradients of the entropy.

    Args:
        weight, bias, options: of the head.
        dtypes: from :func:`head_dtypes`.
        num_rows: rows there will be in all.
        chunk_size: rows a chunk, or None.
        entropy_gradient: whether its backward pass takes one.
    """
    operand_dtype, dtype = dtypes
    weight = weight.detach().to(operand_dtype)
    bias = None if bias is None else bias.detach()
    if _triton_fits(weight) and not entropy_gradient:
        from .head_triton import TritonHead  # triton exists on Linux only

        return TritonHead(weight, bias, options, chunk_size or _triton_chunk_size(num_rows))
    head = TorchHead(weight, bias, options, dtype)
    if chunk_size is not None:
        head.chunk_size = chunk_size
    return head


def _triton_chunk_size(num_rows: int) -> int:
    """4,096 rows; 6,144 if two such chunks hold them all. More rows only take more memory, fewer waste the GEMMs."""
    return 6144 if num_rows <= 2 * 6144 else 4096


def _triton_fits(weight: torch.Tensor) -> bool:
    if not weight.is_cuda or weight.dtype != torch.bfloat16 or weight.shape[1] % 8:
        return False
    return torch.version.hip is None and torch.cuda.get_device_capability(weight.device) >= (9, 0)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, lm_head_weight, bias, target_ids, how):
        options, chunk_size, dtypes, return_entropy = how
        logps, entropy = (
            hidden_states.new_empty(len(hidden_states), dtype=dtypes[1]) if wanted else None
            for wanted in (True, return_entropy)
        )
        with torch.autocast(hidden_states.device.type, enabled=False):
            head = open_head(lm_head_weight, bias, options, dtypes, len(hidden_states), chunk_size)
            for rows in chunks_of(len(hidden_states), head.chunk_size):
                chunk = head.forward(hidden_states[rows], target_ids[rows], with_entropy=return_entropy)
                logps[rows] = chunk.logps
                if return_entropy:
                    entropy[rows] = chunk.entropy
        ctx.save_for_backward(hidden_states, lm_head_weight, bias, target_ids)
        ctx.how = how
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, grad_entropy):
        if grad_logps is None and grad_entropy is None:
            return (None,) * 5
        hidden_states, lm_head_weight, bias, target_ids = ctx.saved_tensors
        options, chunk_size, dtypes, _ = ctx.how
        if grad_logps is None:
            grad_logps = torch.zeros_like(grad_entropy)
        with torch.autocast(hidden_states.device.type, enabled=False):
            by_entropy = grad_entropy is not None
            rows_and_chunk = (len(hidden_states), chunk_size)
            head = open_head(lm_head_weight, bias, options, dtypes, *rows_and_chunk, entropy_gradient=by_entropy)
            grads = HeadGradients(head, hidden_states, lm_head_weight, bias, ctx.needs_input_grad[:3])
            for rows in chunks_of(len(hidden_states), head.chunk_size):
                chunk = head.forward(hidden_states[rows], target_ids[rows], with_entropy=by_entropy)
                upstream = {"grad_entropy": grad_entropy[rows]} if by_entropy else {}
                grad = head.backward(chunk, grad_logps[rows], **grads.needed, **upstream)
                if grad is not None:
                    grads.hidden[rows] = grad.to(grads.hidden.dtype)
            grad_hidden, grad_weight, grad_bias = grads.totals()
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_states.dtype),
            None if grad_weight is None else grad_weight.to(lm_head_weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


class HeadGradients:
    """Where chunks leave their gradients, for those of (hidden states, weight, bias) that are needed.

    Args:
        head, hidden_states, weight, bias, needed: as they say.
        single: one chunk at most will come, see :class:`RunningSum`.
    """

    def __init__(self, head, hidden_states, weight, bias, needed: tuple[bool, bool, bool], *, single: bool = False):
        need_hidden, need_weight, need_bias = needed
        # fp16 underflows before a loss scale could reach it
        dtype = head.dtype if hidden_states.dtype == torch.float16 else hidden_states.dtype
        self.hidden = torch.empty_like(hidden_states, dtype=dtype) if need_hidden else None
        self.sums: dict[str, RunningSum] = {}
        if need_weight:
            self.sums["grad_weight"] = RunningSum(weight.shape, head.dtype, weight.device, single=single)
        if need_bias:
            self.sums["grad_bias"] = RunningSum((head.bias_terms, len(weight)), head.dtype, weight.device)

    @property
    def needed(self) -> dict:
        """Arguments of a head's backward pass."""
        return {"need_hidden": self.hidden is not None, **self.sums}

    def totals(self, *, weight: bool = True) -> list[torch.Tensor | None]:
        """Of hidden states, weight (or None) and bias; the last two in the dtype of the sums."""
        weight_sum, bias_sum = (self.sums.get(name) for name in ("grad_weight", "grad_bias"))
        return [
            self.hidden,
            weight_sum.total() if weight_sum is not None and weight else None,
            None if bias_sum is None else bias_sum.total().sum(0),
        ]


def chunks_of(num_rows: int, chunk_size: int) -> list[slice]:
    """Slices of at most ``chunk_size`` rows, as equal as multiples of 128 rows allow."""
    if num_rows == 0:
        return []
    number = -(-num_rows // chunk_size)
    size = min(chunk_size, -(-num_rows // number // 128) * 128)
    return [slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]


def head_dtypes(hidden_states: torch.Tensor, lm_head_weight: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to which the factors of the product are rounded, dtype of logits, results and sums)."""
    operand_dtype = torch.promote_types(hidden_states.dtype, lm_head_weight.dtype)
    dtype = torch.promote_types(operand_dtype, torch.float32)
    device = hidden_states.device.type
    if operand_dtype != torch.float64 and torch.is_autocast_enabled(device):
        operand_dtype = torch.get_autocast_dtype(device)
    return operand_dtype, dtype
