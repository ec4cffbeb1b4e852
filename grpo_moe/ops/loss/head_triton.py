"""The head on a GPU in bf16: the chunk's probabilities straight out of one GEMM, gradients by two cuBLAS GEMMs."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from . import kernels, row_kernels
from .head import Chunk, HeadOptions, RunningSum, TorchHead, product

_LN2 = math.log(2.0)


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache(maxsize=1024)
def _num_parts(rows: int, width: int, vocab_size: int, multiprocessors: int) -> int:
    """Splits of the vocabulary, 1 to 4, that leave the fewest multiprocessors idle in the last wave of 128 x 256 tiles.

    3,071 rows of 2,048 columns are 192 tiles, 1.45 waves of 132 multiprocessors: a quarter of the GPU idles.
    """
    tiles = -(-rows // 128) * -(-width // 256)

    def busy(parts: int) -> float:
        return parts * tiles / (-(-parts * tiles // multiprocessors) * multiprocessors) - 0.01 * (parts - 1)

    return max((parts for parts in range(1, 5) if vocab_size % (8 * parts) == 0 or parts == 1), key=busy)


class TritonHead:
    """exp(logit - offset) of a chunk is stored once in bf16 with float32 row sums; no logit is ever rounded to bf16.

    The offset is fixed before the GEMM: bf16 has the exponent range of float32, so an estimate of the row's maximum
    within about 100 nats will do. A chunk with a row outside of it is computed again with the true maxima, decided on
    the device. Log-probabilities come from float32 sums: 1e-5 of the exact ones, where bf16 logits are off by up to
    0.3. Numerics: shared/examples/numerics/fixed_row_offset.py.

    Args:
        weight: [V, H] bf16, H a multiple of 8.
        bias: [V] or None.
        options: of the logits.
        chunk_size: most rows in a call of forward.
    """

    dtype, bias_terms = torch.float32, 8  # cuBLAS wants rows of 16 bytes

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, options: HeadOptions, chunk_size: int):
        self.weight = weight.contiguous()
        self.bias = None if bias is None else bias.float().contiguous()
        self.chunk_size = chunk_size
        slope = options.logit_scale / options.temperature
        if options.softcap is None:
            self._softcap, self._scale, self._slope = None, slope, slope
        else:  # cap / temperature * tanh(x * logit_scale / cap)
            self._softcap = options.softcap / options.temperature
            self._scale, self._slope = options.logit_scale / options.softcap, slope
        vocab_size = len(weight)
        probes = torch.arange(min(row_kernels.PROBES, vocab_size), device=weight.device)
        self._probes = probes * vocab_size // len(probes)
        self._probe_weight = self.weight[self._probes]
        self._exps: torch.Tensor | None = None

    def forward(self, hidden_states: torch.Tensor, target_ids: torch.Tensor, *, with_entropy: bool = False) -> Chunk:
        """As :meth:`TorchHead.forward`."""
        with torch.cuda.device_of(hidden_states):  # Triton launches on the current device
            return self._forward(hidden_states, target_ids, with_entropy)

    def _forward(self, hidden_states, target_ids, with_entropy: bool) -> Chunk:
        hidden_states = hidden_states.to(torch.bfloat16).contiguous()
        exps = self._buffer(len(hidden_states))
        how = (self._scale, self._softcap)
        probe_logits = self._probe_logits(hidden_states)
        target, offset = row_kernels.target_offsets(
            hidden_states, self.weight, self.bias, target_ids, probe_logits, *how
        )
        inputs = (hidden_states, self.weight, self.bias, offset, exps, *how)
        parts = kernels.exp_logits(*inputs, with_entropy=with_entropy)
        out = kernels.row_sums(*parts)
        total, moment, again = out
        maxima, _ = kernels.exp_logits(*inputs, only_if=again, maximum=True, out=(parts[0], None))
        kernels.raise_offsets(maxima, total, offset, again)
        kernels.exp_logits(*inputs, only_if=again, with_entropy=with_entropy, out=parts)
        kernels.row_sums(*parts, only_if=again, out=out)
        total.masked_fill_(~(total < kernels.MAX_SUM), torch.nan)  # the row holds NaN or +inf
        log_total = total.log()
        logps = (target - offset) * _LN2 - log_total
        entropy = log_total - moment / total * _LN2 if with_entropy else None
        kept = {"exps": exps, "target": target, "offset": offset, "total": total}
        return Chunk(hidden_states, target_ids, logps, entropy, kept)

    def backward(
        self,
        chunk: Chunk,
        grad_logps: torch.Tensor,
        *,
        need_hidden: bool = True,
        grad_weight: RunningSum | None = None,
        grad_bias: RunningSum | None = None,
    ) -> torch.Tensor | None:
        """As :meth:`TorchHead.backward`, without an upstream gradient of the entropy."""
        exps = chunk.kept["exps"]
        with torch.cuda.device_of(exps):
            factor, scaled = row_kernels.finish_rows(
                hidden=chunk.hidden_states,
                target_ids=chunk.target_ids,
                grad_logps=grad_logps,
                scale=self._slope,
                softcap=self._softcap,
                **chunk.kept,
            )
        if grad_weight is not None:
            grad_weight.add_product(exps.T, scaled)
        if grad_bias is not None:
            high = factor.to(torch.bfloat16)
            low = (factor - high.float()).to(torch.bfloat16)  # the two hold 16 bits of the factor
            parts = torch.zeros(self.bias_terms, len(factor), device=factor.device, dtype=torch.bfloat16)
            parts[0], parts[1] = high, low
            grad_bias.add_product(parts, exps)
        return self._times_weight(exps).mul_(factor[:, None]) if need_hidden else None

    def _times_weight(self, exps: torch.Tensor) -> torch.Tensor:
        """exps @ weight in float32, the vocabulary split so that the tiles of the product fill the GPU evenly."""
        (rows, vocab_size), width = exps.shape, self.weight.shape[1]
        parts = _num_parts(rows, width, vocab_size, _num_multiprocessors(exps.device))
        if parts == 1:
            return product(exps, self.weight, torch.float32)
        pieces = exps.unflatten(1, (parts, -1)).transpose(0, 1)  # [parts, n, V / parts]
        return torch.bmm(pieces, self.weight.unflatten(0, (parts, -1)), out_dtype=torch.float32).sum(0)

    scaled = staticmethod(row_kernels.scaled)
    scaled_product = staticmethod(TorchHead.scaled_product)

    def _buffer(self, rows: int) -> torch.Tensor:
        vocab_size = len(self.weight)
        if self._exps is None or len(self._exps) < rows:
            self._exps = None  # freed first
            stride = -(-vocab_size // 8) * 8  # rows start at multiples of 16 bytes
            self._exps = self.weight.new_empty(rows, stride)
        return self._exps[:rows, :vocab_size]

    def _probe_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = product(hidden_states, self._probe_weight.T, torch.float32)
        if self.bias is not None:
            logits += self.bias[self._probes]
        logits *= self._scale
        return logits if self._softcap is None else logits.tanh_().mul_(self._softcap)
