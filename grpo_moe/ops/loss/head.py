"""One chunk of rows through the language-model head: log-probabilities, then gradients; plain PyTorch on any device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from grpo_moe.checks import is_finite, keep_plain

from .checks import check_temperature

_CHUNK_BYTES = {"cpu": 64 * 2**20}  # of one chunk's logits; the chunk's working set is about three times that
_CHUNK_BYTES_ON_DEVICES = 2**30  # small products waste a GPU
_WHOLE_SUMS = 2**24  # elements of a product from which on its tiles alone fill a GPU


@dataclass(frozen=True)
class HeadOptions:
    """From the raw product to the logits: cap(logit_scale * (x + bias)) / temperature."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self):
        check_temperature(self.temperature)
        if self.softcap is not None and not (is_finite(self.softcap) and self.softcap > 0):
            raise ValueError(f"softcap must be finite and above 0, got {self.softcap}; None leaves it out")
        if not is_finite(self.logit_scale):
            raise ValueError(f"logit_scale must be finite, got {self.logit_scale}; 1.0 leaves the logits as they are")
        keep_plain(self)  # kernels take no other numbers


@dataclass
class Chunk:
    """What the forward pass of a chunk leaves for its backward pass."""

    hidden_states: torch.Tensor
    """[n, H] as a factor of the products."""
    target_ids: torch.Tensor
    """[n]."""
    logps: torch.Tensor
    """[n] in nats."""
    entropy: torch.Tensor | None
    """[n] in nats."""
    kept: dict[str, torch.Tensor] = field(default_factory=dict)
    """Whatever else the head needs; the next forward pass may overwrite it."""


class RunningSum:
    """A sum of matrix products in float32 or wider, without a memset for its first term.

    Args:
        shape, dtype, device: of the sum.
        single: there will be at most one product; its factors are kept, for whoever multiplies them later.
    """

    def __init__(self, shape, dtype: torch.dtype, device: torch.device, *, single: bool = False):
        self.shape, self.dtype, self.device, self.single = torch.Size(shape), dtype, device, single
        self.value: torch.Tensor | None = None
        self.factors: tuple[torch.Tensor, torch.Tensor] | None = None

    def add_product(self, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor | None = None) -> None:
        """+= a @ b (times a scalar), halves multiplied exactly."""
        if scale is not None:
            term = product(a, b, self.dtype).mul_(scale)
            self.value = term if self.value is None else self.value.add_(term)
        elif self.single:
            assert self.factors is None, "a second product"
            self.factors = a, b
        elif self.value is None:
            self.value = product(a, b, self.dtype)
        elif a.is_cuda and a.dtype != self.dtype:
            torch.addmm(self.value, a, b, out_dtype=self.dtype, out=self.value)
        else:
            self.value.addmm_(a.to(self.dtype), b.to(self.dtype))

    def add(self, term: RunningSum, scale: torch.Tensor) -> None:
        """+= scale * term."""
        if self.value is None:
            self.value = term.total() * scale
        else:
            self.value.addcmul_(term.total(), scale)

    def total(self) -> torch.Tensor:
        """The sum; zeros without a term."""
        if self.factors is not None:
            return product(*self.factors, self.dtype)
        return torch.zeros(self.shape, dtype=self.dtype, device=self.device) if self.value is None else self.value


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """a @ b in ``dtype``, that of the factors or wider; only a GPU multiplies halves into float32 by itself."""
    if a.is_cuda and a.dtype != dtype:
        return torch.mm(a, b, out_dtype=dtype) if out is None else torch.mm(a, b, out_dtype=dtype, out=out)
    return torch.mm(a.to(dtype), b.to(dtype), out=out)


class TorchHead:
    """The head in PyTorch: logits of a chunk in float32 or wider.

    Both heads have this interface, and ``dtype``, ``chunk_size`` and ``bias_terms``.

    Args:
        weight: [V, H], a factor of the products as it is.
        bias: [V] or None.
        options: of the logits.
        dtype: of logits, results and sums: float32 or float64.
    """

    bias_terms = 1
    """Rows in the sum of the bias gradient."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, options: HeadOptions, dtype: torch.dtype):
        self._operand_dtype = weight.dtype
        self.weight = weight if weight.is_cuda else weight.to(dtype)  # once, not at every product
        self.bias = None if bias is None else bias.to(dtype)
        self.options, self.dtype = options, dtype
        limit = _CHUNK_BYTES.get(weight.device.type, _CHUNK_BYTES_ON_DEVICES)
        self.chunk_size = max(1, limit // (dtype.itemsize * len(weight)))

    def forward(self, hidden_states: torch.Tensor, target_ids: torch.Tensor, *, with_entropy: bool = False) -> Chunk:
        """hidden_states [n, H] and target_ids [n] -> their log-probabilities."""
        hidden_states = self.operand(hidden_states)
        logits = self.logits(hidden_states)  # [n, V]
        log_sums = logits.logsumexp(-1, keepdim=True)
        logps = (logits.gather(-1, target_ids[:, None]) - log_sums)[:, 0]
        entropy = None
        if with_entropy:
            entropy = torch.special.entr((logits - log_sums).exp_()).sum(-1)  # entr(0) = 0, where p * log p is NaN
        return Chunk(hidden_states, target_ids, logps, entropy, {"logits": logits, "log_sums": log_sums})

    def backward(
        self,
        chunk: Chunk,
        grad_logps: torch.Tensor,
        *,
        grad_entropy: torch.Tensor | None = None,
        need_hidden: bool = True,
        grad_weight: RunningSum | None = None,
        grad_bias: RunningSum | None = None,
    ) -> torch.Tensor | None:
        """The chunk's gradients; a row with upstream gradient 0 adds exactly 0, even if its hidden states are NaN.

        Args:
            chunk: of the last forward pass; it is used up.
            grad_logps, grad_entropy: [n] upstream gradients.
            need_hidden: whether to compute the gradient of the hidden states.
            grad_weight: sum [V, H], or None.
            grad_bias: sum [bias_terms, V], or None.

        Returns:
            [n, H] gradient of the hidden states in the head's dtype, or None.
        """
        logits, log_sums = chunk.kept["logits"], chunk.kept["log_sums"]
        idle = grad_logps == 0 if grad_entropy is None else (grad_logps == 0) & (grad_entropy == 0)
        idle = idle[:, None]
        slope = self._slope(logits)
        probs = logits.sub_(log_sums).exp_()
        upstream = grad_logps.to(self.dtype)[:, None]
        grad = (probs * -upstream).scatter_add_(-1, chunk.target_ids[:, None], upstream)
        if grad_entropy is not None:  # -p (log p + H)
            entropy = chunk.entropy.to(self.dtype)[:, None]
            grad.addcmul_(torch.special.entr(probs) - probs * entropy, grad_entropy.to(self.dtype)[:, None])
        grad = grad.mul_(slope).masked_fill_(idle, 0)
        if grad_bias is not None:
            grad_bias.add_product(grad.new_ones(1, len(grad)), grad)
        scale = None
        if self.weight.dtype == torch.float16:  # its smallest number is 6e-8: a power of two brings the slopes near 1
            largest = grad.abs().amax().clamp(min=torch.finfo(self.dtype).tiny)
            scale = torch.exp2(largest.log2().ceil())
            grad = grad / scale
        grad = grad.to(self.weight.dtype)
        if grad_weight is not None:
            grad_weight.add_product(grad.T, chunk.hidden_states.masked_fill(idle, 0), scale)
        if not need_hidden:
            return None
        grad_hidden = product(grad, self.weight, self.dtype)
        return grad_hidden if scale is None else grad_hidden.mul_(scale)

    @staticmethod
    def scaled(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """scale * x rounded once to ``dtype``; the scale is a scalar in its own precision."""
        return torch.mul(x, scale.view([1] * x.ndim), out=torch.empty_like(x, dtype=dtype))

    @staticmethod
    def scaled_product(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """scale * a @ b rounded to ``dtype``, summed in float32 or wider; b is the smaller factor.

        A large product of halves comes straight out of the GEMM: cuBLAS splits the sums of small ones only.
        """
        b = torch.mul(b, scale.view(1, 1)).to(b.dtype)
        if a.is_cuda and dtype == a.dtype and a.shape[0] * b.shape[1] >= _WHOLE_SUMS:
            return a @ b
        return product(a, b, torch.promote_types(a.dtype, torch.float32)).to(dtype)

    def operand(self, x: torch.Tensor) -> torch.Tensor:
        """x as a factor of the products, rounded as the weight was."""
        return x.to(self._operand_dtype).to(self.weight.dtype)

    def logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] operand -> [n, V], scaled, capped and divided by the temperature."""
        options = self.options
        logits = product(hidden_states, self.weight.T, self.dtype)
        if self.bias is not None:
            logits += self.bias
        if options.softcap is None:
            scale = options.logit_scale / options.temperature
            return logits if scale == 1 else logits.mul_(scale)
        return logits.mul_(options.logit_scale / options.softcap).tanh_().mul_(options.softcap / options.temperature)

    def _slope(self, logits: torch.Tensor) -> torch.Tensor | float:
        """Derivative of the logits by the raw product."""
        options = self.options
        scale = options.logit_scale / options.temperature
        if options.softcap is None:
            return scale
        return (logits * (options.temperature / options.softcap)).square_().neg_().add_(1).mul_(scale)
