"""Log-probabilities of target tokens from hidden states and lm_head, a chunk of rows at a time: no [N, V] tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

_CHUNK_BYTES = 64 * 2**20  # of one chunk's logits; the chunk's working set is about three times that


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

    Args:
        hidden_states: [N, H], any strides, N may be 0.
        lm_head_weight: [V, H].
        target_ids: [N] integers in [0, V). Checked on a CPU only: on a GPU the check would wait for the device.
        bias: [V] or None; -inf removes a token from the distribution (unless a softcap lifts it to -softcap).
        temperature: divides the capped logits.
        logit_scale: multiplies the logits before the cap (Cohere; the reciprocal of Granite's logits_scaling).
        softcap: cap of the logits (Gemma 2), None for none.
        return_entropy: also return the entropy of the distribution.
        chunk_size: rows a chunk. None: as many as fit 64 MiB of logits.

    Returns:
        [N] log-probabilities in nats; with `return_entropy` a pair, the second the [N] entropies in nats.

    Raises:
        ValueError: a shape, a target id or an option is out of its range.
    """
    _check_inputs(hidden_states, lm_head_weight, target_ids, bias)
    _check_options(temperature, logit_scale, softcap, chunk_size)
    operand_dtype, dtype = _dtypes(hidden_states, lm_head_weight)
    if chunk_size is None:
        chunk_size = max(1, _CHUNK_BYTES // (dtype.itemsize * len(lm_head_weight)))
    head = _Head(float(temperature), float(logit_scale), softcap, chunk_size, operand_dtype, dtype)
    logps, entropy = _TokenLogps.apply(hidden_states, lm_head_weight, bias, target_ids.long(), head, return_entropy)
    return (logps, entropy) if return_entropy else logps


@torch.no_grad()
def head_logits(hidden_states: torch.Tensor, lm_head_weight: torch.Tensor) -> torch.Tensor:
    """Logits [n, V] as :func:`token_logps` forms them: operands rounded alike, float32 (or float64) sums.

    For samplers, whose log-probabilities then equal those of the training forward.
    """
    operand_dtype, dtype = _dtypes(hidden_states, lm_head_weight)
    head = _Head(1.0, 1.0, None, len(hidden_states), operand_dtype, dtype)
    with torch.autocast(hidden_states.device.type, enabled=False):
        return head.logits(head.operand(hidden_states), head.operand(lm_head_weight), None)


@dataclass(frozen=True)
class _Head:
    """How a chunk of logits is computed."""

    temperature: float
    logit_scale: float
    softcap: float | None
    chunk_size: int
    operand_dtype: torch.dtype
    dtype: torch.dtype

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """x as a factor of the products: rounded to operand_dtype; only a GPU multiplies halves into float32."""
        x = x.to(self.operand_dtype)
        return x if x.is_cuda else x.to(self.dtype)

    def matmul(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b if a.dtype == self.dtype else torch.mm(a, b, out_dtype=self.dtype)

    def add_matmul(self, total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if a.dtype == self.dtype:
            total.addmm_(a, b)
        else:
            torch.addmm(total, a, b, out_dtype=self.dtype, out=total)

    def logits(self, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[n, H] operands -> [n, V], scaled, capped and divided by the temperature."""
        logits = self.matmul(hidden, weight.T)
        if bias is not None:
            logits += bias
        if self.softcap is None:
            scale = self.logit_scale / self.temperature
            return logits if scale == 1 else logits.mul_(scale)
        return logits.mul_(self.logit_scale / self.softcap).tanh_().mul_(self.softcap / self.temperature)

    def slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Derivative of `logits` by the raw product."""
        scale = self.logit_scale / self.temperature
        if self.softcap is None:
            return scale
        return (logits * (self.temperature / self.softcap)).square_().neg_().add_(1).mul_(scale)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, lm_head_weight, bias, target_ids, head: _Head, return_entropy: bool):
        weight, cast_bias = head.operand(lm_head_weight), None if bias is None else bias.to(head.dtype)
        logps, log_sums, entropy = (
            hidden_states.new_empty(len(hidden_states), dtype=head.dtype) if wanted else None
            for wanted in (True, True, return_entropy)
        )
        with torch.autocast(hidden_states.device.type, enabled=False):
            for start in range(0, len(hidden_states), head.chunk_size):
                rows = slice(start, start + head.chunk_size)
                logits = head.logits(head.operand(hidden_states[rows]), weight, cast_bias)
                log_sums[rows] = logits.logsumexp(-1)
                logps[rows] = logits.gather(-1, target_ids[rows, None]).squeeze(-1) - log_sums[rows]
                if return_entropy:
                    probs = logits.sub_(log_sums[rows, None]).exp_()
                    entropy[rows] = torch.special.entr(probs).sum(-1)  # entr(0) = 0, where p * log p is NaN
        ctx.save_for_backward(hidden_states, lm_head_weight, bias, target_ids, log_sums, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logps, grad_entropy):
        if grad_logps is None and grad_entropy is None:
            return (None,) * 6
        hidden_states, lm_head_weight, bias, target_ids, log_sums, entropy = ctx.saved_tensors
        head, (need_hidden, need_weight, need_bias, *_) = ctx.head, ctx.needs_input_grad
        weight, cast_bias = head.operand(lm_head_weight), None if bias is None else bias.to(head.dtype)
        grad_hidden = torch.empty_like(hidden_states) if need_hidden else None
        grad_weight = lm_head_weight.new_zeros(lm_head_weight.shape, dtype=head.dtype) if need_weight else None
        grad_bias = bias.new_zeros(bias.shape, dtype=head.dtype) if need_bias else None
        idle = torch.stack([g == 0 for g in (grad_logps, grad_entropy) if g is not None]).all(0)  # [N]
        log_sums = log_sums.masked_fill(idle, torch.inf)  # probabilities 0, whatever the hidden states were
        if grad_entropy is not None:
            entropy = entropy.masked_fill(idle, 0)
        with torch.autocast(hidden_states.device.type, enabled=False):
            for start in range(0, len(hidden_states), head.chunk_size):
                rows = slice(start, start + head.chunk_size)
                hidden = head.operand(hidden_states[rows].masked_fill(idle[rows, None], 0))
                logits = head.logits(hidden, weight, cast_bias)
                slope = head.slope(logits)
                probs = logits.sub_(log_sums[rows, None]).exp_()
                grad = torch.zeros_like(probs)
                if grad_logps is not None:
                    _add_logps_grad(grad, probs, target_ids[rows, None], grad_logps[rows, None])
                if grad_entropy is not None:
                    _add_entropy_grad(grad, probs, entropy[rows, None], grad_entropy[rows, None])
                grad *= slope
                if need_bias:
                    grad_bias += grad.sum(0)
                grad = grad.to(hidden.dtype)
                if need_hidden:
                    grad_hidden[rows] = head.matmul(grad, weight)
                if need_weight:
                    head.add_matmul(grad_weight, grad.T, hidden)
        if need_weight:
            grad_weight = grad_weight.to(lm_head_weight.dtype)
        if need_bias:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _add_logps_grad(grad, probs, target_ids, grad_logps) -> None:
    """grad [n, V] += g (onehot(target) - p), the gradient by the final logits."""
    grad.addcmul_(probs, grad_logps, value=-1).scatter_add_(-1, target_ids, grad_logps)


def _add_entropy_grad(grad, probs, entropy, grad_entropy) -> None:
    """grad [n, V] += g (-p log p - p H)."""
    grad.addcmul_(torch.special.entr(probs) - probs * entropy, grad_entropy)


def _dtypes(hidden_states: torch.Tensor, lm_head_weight: torch.Tensor) -> tuple[torch.dtype, torch.dtype]:
    """(dtype to which the factors of the product are rounded, dtype of logits, results and sums)."""
    operand_dtype = torch.promote_types(hidden_states.dtype, lm_head_weight.dtype)
    dtype = torch.promote_types(operand_dtype, torch.float32)
    device = hidden_states.device.type
    if operand_dtype != torch.float64 and torch.is_autocast_enabled(device):
        operand_dtype = torch.get_autocast_dtype(device)
    return operand_dtype, dtype


def _check_inputs(hidden_states, lm_head_weight, target_ids, bias) -> None:
    if hidden_states.ndim != 2:
        raise ValueError(f"hidden_states must be [N, H], got shape {tuple(hidden_states.shape)}; flatten [B, T, H]")
    num_rows, width = hidden_states.shape
    if lm_head_weight.ndim != 2 or lm_head_weight.shape[1] != width or len(lm_head_weight) == 0:
        raise ValueError(
            f"lm_head_weight must be [V, H] with V >= 1 and H = {width} as hidden_states, "
            f"got shape {tuple(lm_head_weight.shape)}; under FSDP or ZeRO call this inside the model's forward"
        )
    vocab_size = len(lm_head_weight)
    if tuple(target_ids.shape) != (num_rows,) or target_ids.is_floating_point():
        raise ValueError(
            f"target_ids must be integers [N] with N = {num_rows} as hidden_states, "
            f"got {target_ids.dtype} of shape {tuple(target_ids.shape)}; flatten them as the hidden states"
        )
    if bias is not None and tuple(bias.shape) != (vocab_size,):
        raise ValueError(f"bias must be [V] with V = {vocab_size}, got shape {tuple(bias.shape)}; pass lm_head.bias")
    if num_rows and target_ids.device.type == "cpu":
        low, high = (int(x) for x in target_ids.aminmax())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"target_ids must be in [0, V) with V = {vocab_size}, got {low} to {high}; "
                "replace ids of ignored tokens, such as -100, by any valid one and mask their log-probabilities"
            )


def _check_options(temperature: float, logit_scale: float, softcap: float | None, chunk_size: int | None) -> None:
    options = {"temperature": temperature, "softcap": softcap, "chunk_size": chunk_size}
    for name, value in options.items():
        if value is not None and not 0 < value < math.inf:
            fix = "1.0 leaves the logits as they are" if name == "temperature" else "None leaves it out"
            raise ValueError(f"{name} must be finite and above 0, got {value}; {fix}")
    if not math.isfinite(logit_scale):
        raise ValueError(f"logit_scale must be finite, got {logit_scale}; 1.0 leaves the logits as they are")
