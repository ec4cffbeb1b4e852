"""The policy loss from hidden states and lm_head: loss and gradients in one sweep over chunks, without the logits."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from .checks import check_chunk_size, check_head_inputs, check_ids, check_loss_inputs
from .config import LossConfig
from .fused_head import HeadGradients, chunks_of, head_dtypes, open_head
from .head import HeadOptions, RunningSum
from .objective import Count, LossOutput, grpo_loss_from_logps, loss_value
from .policy import MAX_LOG_RATIO
from .schedule import SCHEDULES, choose_schedule, whole_rows, without_ratio

__all__ = ["grpo_loss"]


@torch.compiler.disable(reason="grpo_loss loops over chunks of rows; compile what is around it, with fullgraph=False")
def grpo_loss(
    hidden_states: torch.Tensor,
    lm_head_weight: torch.Tensor,
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
    bias: torch.Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    return_entropy: bool = False,
    schedule: str = "auto",
    chunk_size: int | None = None,
) -> LossOutput:
    """`grpo_loss_from_logps` on the `token_logps` of the head, with gradients made in the forward pass.

    The backward pass only scales them by the upstream gradient of the loss, so the probabilities of a chunk are used
    while they exist (those of a single chunk are kept for the weight's gradient where that takes no more memory).
    Differentiable once. Three schedules give the same loss and gradients:

    * "one-pass" (6NVH operations): a chunk's gradients follow its log-probabilities at once. For losses whose
      gradient at a token depends on that token alone, and for all others when every sequence fits a chunk.
    * "sequence-linear" (6NVH and one more float32 buffer of the weight's size): a sequence longer than a chunk whose
      tokens share one coefficient, known at its end: gradients are summed without it, then scaled by it.
    * "two-pass" (8NVH): everything else. All log-probabilities first, then the chunks again for the gradients.

    "auto" takes the first that fits. Tokens outside of the mask are dropped before any product, and so are rows that
    can carry no gradient: all advantages 0 and beta 0 (they add nothing to the loss; `stats` leaves them out and
    counts their tokens in `num_skipped_tokens`). Without any gradient to compute only the log-probabilities are made.
    Under CUDA graph capture nothing is dropped, since that takes a look at the mask on the host. Gradients of hidden
    states, weight and bias accumulate in float32 (float64 for float64 inputs); what needs none costs nothing.

    Args:
        hidden_states: [B, T, H], those that predict the completion tokens.
        lm_head_weight: [V, H].
        completion_ids: [B, T] integers; anything outside of the mask.
        completion_mask: [B, T], nonzero where a token takes part.
        advantages: [B], or [B, T].
        config: the options; its temperature divides the logits.
        old_logps, ref_logps, sampling_logps, num_sequences: as in `grpo_loss_from_logps`.
        num_loss_tokens: the same. None: the tokens of this call whose given log-probabilities are finite; one whose own
            log-probability is not (its hidden states were NaN) still counts, here and in its row's mean.
        bias, logit_scale, softcap: of the head, as in `token_logps`.
        return_entropy: also `stats["entropy"]`, the mean over the tokens that may carry gradient.
        schedule: "auto", "one-pass", "sequence-linear" or "two-pass".
        chunk_size: rows a chunk, as in `token_logps`.

    Returns:
        As `grpo_loss_from_logps`; only `loss` has a gradient, `per_token_loss` has none.

    Raises:
        ValueError: a shape or an option is out of its range, or the schedule cannot compute this loss exactly.
    """
    if not isinstance(hidden_states, torch.Tensor) or hidden_states.ndim != 3:
        got = tuple(getattr(hidden_states, "shape", ())) or type(hidden_states).__name__
        raise ValueError(f"hidden_states must be a tensor [B, T, H], got {got}; unflatten them")
    if schedule not in ("auto", *SCHEDULES):
        raise ValueError(f"schedule must be one of auto, {', '.join(SCHEDULES)}, got {schedule!r}; check the spelling")
    check_chunk_size(chunk_size)
    given = {"old_logps": old_logps, "ref_logps": ref_logps, "sampling_logps": sampling_logps}
    check_loss_inputs(config, "completion_ids", completion_ids, advantages, completion_mask, given)
    check_head_inputs(hidden_states, lm_head_weight, "completion_ids", completion_ids, bias)
    wanted = completion_mask != 0
    ids = torch.where(wanted, completion_ids, 0).long()
    check_ids("completion_ids", ids, len(lm_head_weight))

    taking_part = _carries_gradient(wanted, advantages, config)
    if num_loss_tokens is None:
        num_loss_tokens = _num_finite(wanted, config, given)
    counts = {"num_loss_tokens": num_loss_tokens, "num_sequences": len(ids) if num_sequences is None else num_sequences}
    objective = _Objective(config, advantages, taking_part, given, counts)
    options = HeadOptions(config.temperature, logit_scale, softcap)
    with_entropy = return_entropy or config.top_entropy_quantile != 1
    dtypes = head_dtypes(hidden_states, lm_head_weight)
    sweep = _Sweep(objective, ids, options, schedule, chunk_size, dtypes, with_entropy)
    if not torch.is_grad_enabled():  # needs_input_grad does not look at it
        hidden_states, lm_head_weight, bias = (
            None if x is None else x.detach() for x in (hidden_states, lm_head_weight, bias)
        )
    loss = _FusedLoss.apply(hidden_states, lm_head_weight, bias, sweep)
    skipped = (wanted & ~taking_part).sum().to(loss.dtype)
    return LossOutput(loss, sweep.output.per_token_loss, {**sweep.output.stats, "num_skipped_tokens": skipped})


@dataclass(frozen=True)
class _Objective:
    """The loss as a function of the log-probabilities of some of the rows."""

    config: LossConfig
    advantages: torch.Tensor
    mask: torch.Tensor
    given: dict[str, torch.Tensor | None]
    counts: dict[str, Count]

    def gradient(self, logps: torch.Tensor, rows: slice = slice(None), entropy: torch.Tensor | None = None):
        """d loss / d logps [b, T] of a slice of rows, given their log-probabilities."""
        with torch.enable_grad():
            leaf = logps[rows].detach().requires_grad_()
            given = {name: None if x is None else x[rows] for name, x in self.given.items()}
            loss = loss_value(
                leaf, self.advantages[rows], self.mask[rows], self.config, entropy=entropy, **given, **self.counts
            )
        return torch.autograd.grad(loss, leaf)[0]

    @torch.no_grad()
    def output(self, logps: torch.Tensor, entropy: torch.Tensor | None) -> LossOutput:
        return grpo_loss_from_logps(
            logps, self.advantages, self.mask, self.config, entropy=entropy, **self.given, **self.counts
        )


@dataclass
class _Sweep:
    """What to sweep over, and what the sweep leaves behind."""

    objective: _Objective
    ids: torch.Tensor
    options: HeadOptions
    schedule: str
    chunk_size: int | None
    dtypes: tuple[torch.dtype, torch.dtype]
    with_entropy: bool
    logps: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    output: LossOutput | None = None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, lm_head_weight, bias, sweep: _Sweep):
        needed = ctx.needs_input_grad[:3]
        with torch.autocast(hidden_states.device.type, enabled=False):
            cells, lengths = _cells(sweep.objective.mask)
            head = open_head(lm_head_weight, bias, sweep.options, sweep.dtypes, len(cells), sweep.chunk_size)
            flat = hidden_states.detach().flatten(0, 1)  # [B * T, H]
            # kept exps of n x V halves instead of a V x H sum in float32: no more memory up to n = 2H
            single = len(cells) <= min(head.chunk_size, 2 * flat.shape[1])
            grads = HeadGradients(head, flat, lm_head_weight, bias, needed, single=single)
            _Run(head, flat, grads, sweep, cells, lengths).all_chunks(any(needed))
            weight_sum = grads.sums.get("grad_weight")
            factors = None if weight_sum is None else weight_sum.factors
            ctx.save_for_backward(*(factors or (None, None)), *grads.totals(weight=factors is None))
        ctx.like = [
            None if x is None else torch.empty_like(x, device="meta") for x in (hidden_states, lm_head_weight, bias)
        ]
        ctx.head = type(head)
        sweep.output = sweep.objective.output(sweep.logps, sweep.entropy)
        return sweep.output.loss

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss):
        a, b, *totals = ctx.saved_tensors
        grads = []
        for x, like in zip(totals, ctx.like, strict=True):
            grad = None if x is None else ctx.head.scaled(x, grad_loss, like.dtype)
            grads.append(grad if grad is None or grad.shape == like.shape else grad.view(like.shape))
        if a is not None:
            with torch.autocast(a.device.type, enabled=False):
                grads[1] = ctx.head.scaled_product(a, b, grad_loss, ctx.like[1].dtype)
        return *grads, None


class _Run:
    """The sweep: chunks of token numbers through the head, by one of the schedules."""

    def __init__(self, head, hidden_states, grads: HeadGradients, sweep: _Sweep, cells: torch.Tensor, lengths: list):
        self.head, self.hidden_states, self.grads, self.sweep = head, hidden_states, grads, sweep
        self.cells, self.lengths, self.ends = cells, lengths, list(itertools.accumulate(lengths))
        self.objective, self.ids = sweep.objective, sweep.ids.flatten()
        shape = sweep.ids.shape
        sweep.logps = hidden_states.new_zeros(shape, dtype=head.dtype)
        sweep.entropy = torch.zeros_like(sweep.logps) if sweep.with_entropy else None

    def all_chunks(self, with_gradient: bool) -> None:
        chunk_size, lengths = self.head.chunk_size, self.lengths
        if not with_gradient:
            for places in chunks_of(len(self.cells), chunk_size):
                self._forward(self.cells[places])
            return
        if self.grads.hidden is not None:
            self.grads.hidden.zero_()
        given = self.objective.given["old_logps"] is not None
        per_token = self.objective.advantages.ndim == 2
        schedule = choose_schedule(
            self.objective.config, self.sweep.schedule, given, per_token, max(lengths, default=0), chunk_size
        )
        SCHEDULE_METHODS[schedule](self)

    def one_pass(self) -> None:
        """Chunks cut anywhere if the loss allows it, else between sequences."""
        config, given = self.objective.config, self.objective.given["old_logps"] is not None
        if whole_rows(config, given):
            units = _pack(self.lengths, self.head.chunk_size)
        else:
            units = chunks_of(len(self.cells), self.head.chunk_size)
        for places in units:
            self._one_chunk(places)

    def sequence_linear(self) -> None:
        """Sequences longer than a chunk by the sum of their chunks times the sequence's coefficient."""
        for places in _pack(self.lengths, self.head.chunk_size):
            if places.stop - places.start <= self.head.chunk_size:
                self._one_chunk(places)
            else:
                self._long_sequence(places)

    def two_pass(self) -> None:
        """All log-probabilities, the coefficients, then every chunk again."""
        chunks = [self.cells[places] for places in chunks_of(len(self.cells), self.head.chunk_size)]
        for cells in chunks:
            self._forward(cells)
        coefficients = self.objective.gradient(self.sweep.logps, entropy=self.sweep.entropy).flatten()
        for cells in chunks:
            self._backward(self._forward(cells), cells, coefficients[cells])

    def _one_chunk(self, places: slice) -> None:
        cells = self.cells[places]
        chunk = self._forward(cells)
        rows = self._rows(places)
        coefficients = self.objective.gradient(self.sweep.logps, rows).flatten()
        self._backward(chunk, cells, coefficients[cells - rows.start * self.sweep.ids.shape[1]])

    def _long_sequence(self, places: slice) -> None:
        cells, rows, hidden = self.cells[places], self._rows(places), []
        sums = {name: RunningSum(x.shape, x.dtype, x.device) for name, x in self.grads.sums.items()}
        for part in chunks_of(len(cells), self.head.chunk_size):
            chunk = self._forward(cells[part])
            ones = self._takes_part(cells[part], chunk.logps).to(chunk.logps.dtype)
            hidden.append(self.head.backward(chunk, ones, need_hidden=self.grads.hidden is not None, **sums))
        coefficients = self.objective.gradient(self.sweep.logps, rows).flatten()
        # equal at every token that takes part, 0 at the others
        coefficient = coefficients.gather(0, coefficients.abs().argmax()[None])[0]
        if self.grads.hidden is not None:
            self._store(cells, torch.cat(hidden).mul_(coefficient))
        for name, total in self.grads.sums.items():
            total.add(sums[name], coefficient)

    def _takes_part(self, cells: torch.Tensor, logps: torch.Tensor) -> torch.Tensor:
        """Which tokens have a gradient in a loss whose tokens share one coefficient."""
        old_logps = self.objective.given["old_logps"]
        apart = (logps - (logps if old_logps is None else old_logps.reshape(-1)[cells])).abs()
        bound = torch.inf if without_ratio(self.objective.config) else MAX_LOG_RATIO
        return self.objective.mask.flatten()[cells] & apart.isfinite() & (apart <= bound)

    def _forward(self, cells: torch.Tensor):
        chunk = self.head.forward(self.hidden_states[cells], self.ids[cells], with_entropy=self.sweep.with_entropy)
        self.sweep.logps.view(-1)[cells] = chunk.logps
        if self.sweep.with_entropy:
            self.sweep.entropy.view(-1)[cells] = chunk.entropy
        return chunk

    def _backward(self, chunk, cells: torch.Tensor, coefficients: torch.Tensor) -> None:
        hidden = self.head.backward(chunk, coefficients.contiguous(), **self.grads.needed)
        if hidden is not None:
            self._store(cells, hidden)

    def _store(self, cells: torch.Tensor, hidden: torch.Tensor) -> None:
        self.grads.hidden[cells] = hidden.to(self.grads.hidden.dtype)

    def _rows(self, places: slice) -> slice:
        """The rows that hold these tokens."""
        return slice(bisect.bisect_right(self.ends, places.start), bisect.bisect_left(self.ends, places.stop) + 1)


SCHEDULE_METHODS: dict[str, Callable[[_Run], None]] = {
    "one-pass": _Run.one_pass,
    "sequence-linear": _Run.sequence_linear,
    "two-pass": _Run.two_pass,
}


def _cells(mask: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Numbers of the tokens to compute, in order, and how many there are in each row."""
    if mask.is_cuda and torch.cuda.is_current_stream_capturing():
        return torch.arange(mask.numel(), device=mask.device), [mask.shape[1]] * len(mask)
    return mask.flatten().nonzero()[:, 0], mask.sum(1).tolist()


def _pack(lengths: list[int], chunk_size: int) -> list[slice]:
    """Whole sequences, as many as fit a chunk together; a longer one alone."""
    units, start, end = [], 0, 0
    for length in lengths:
        if end > start and end + length - start > chunk_size:
            units.append(slice(start, end))
            start = end
        end += length
    return units + [slice(start, end)] * (end > start)


def _carries_gradient(wanted: torch.Tensor, advantages: torch.Tensor, config: LossConfig) -> torch.Tensor:
    """The mask without rows whose advantages are all 0, when nothing but the advantage gives a row a gradient."""
    if config.beta != 0 or config.top_entropy_quantile != 1:  # the quantile is over all tokens
        return wanted
    if advantages.ndim == 1:
        return wanted & (advantages != 0)[:, None]
    return wanted & (wanted & (advantages != 0)).any(1, keepdim=True)


def _num_finite(wanted: torch.Tensor, config: LossConfig, given: dict[str, torch.Tensor | None]) -> torch.Tensor:
    """Tokens of the mask that nothing given drops."""
    for name in ("old_logps", "ref_logps") if config.beta else ("old_logps",):
        if given[name] is not None:
            wanted = wanted & given[name].isfinite()
    return wanted.sum()
