"""Whether an engine holds the weights of the model, by its log-probabilities of fixed random tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch

from grpo_moe.adapters.hf_head import completion_logps

from .base import context_length, rollout_mode

ROWS, TOKENS = 8, 64  # 512 tokens: each of 128 experts, 8 chosen a token, gets 32 of them on average

MAX_TOLERANCE, MIN_TOLERANCE = 0.05, 1e-4
"""In nats, of a measured tolerance: stale weights move the mean further, kernels of float32 less."""


class Probe:
    """Fixed token sequences, and their log-probabilities at the last check.

    Args:
        model: prepared by :func:`grpo_moe.adapters.hf_head.add_token_logps`.
        context: longest sequence in tokens that the other engine takes.
        tolerance: mean difference in nats over the tokens.
    """

    def __init__(self, model, context: int, tolerance: float):
        generator = torch.Generator().manual_seed(0)
        length = min(TOKENS + 1, context - 1, context_length(model))
        self.ids = torch.randint(model.config.get_text_config().vocab_size, (ROWS, length), generator=generator)
        self.tolerance = tolerance
        self.difference = 0.0
        """Mean difference in nats at the last check."""
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None

    def check(self, model, score: Callable[[list[int]], list[float]], name: str) -> None:
        """Compares them, and how far both moved since the last check.

        Args:
            model: with the weights that the engine should hold.
            score: log-probabilities of the tokens after the first, by the engine.
            name: of the engine, for the errors.

        Raises:
            RuntimeError: they differ by more than the tolerance, or moved with the model's by less than a tenth.
        """
        noise = max(self.difference, MIN_TOLERANCE)
        expected, got = self._compare(model, score)
        differences = (expected - got).abs()
        if not self.difference <= self.tolerance:  # NaN too
            raise RuntimeError(
                f"log-probabilities of {got.numel()} probe tokens at {name} must be within {self.tolerance} nats of "
                f"the model's on average, got mean {self.difference:.2e}, max {float(differences.max()):.2e}; "
                "its weights are stale, incomplete or wrongly mapped: do not train on its rollouts"
            )
        if self._last is not None:
            pairs = zip((expected, got), self._last, strict=True)
            moved, followed = (float((now - before).abs().mean()) for now, before in pairs)
            if moved > noise and followed < moved / 10:
                raise RuntimeError(
                    f"log-probabilities of the probe tokens at {name} must move with the model's, by {moved:.2e} nats "
                    f"on average, got {followed:.2e}; its weights are stale: do not train on its rollouts"
                )
        self._last = expected, got

    def calibrate(self, model, score: Callable[[list[int]], list[float]]) -> None:
        """Sets the tolerance to twice the difference now, within bounds: what an engine that loaded the model has."""
        self._compare(model, score)
        self.tolerance = min(max(2 * self.difference, MIN_TOLERANCE), MAX_TOLERANCE)

    def _compare(self, model, score) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities by the model and by the engine."""
        expected = model_logps(model, self.ids)
        got = torch.tensor([score(row) for row in self.ids.tolist()])
        self.difference = float((expected - got).abs().mean())
        return expected, got


def model_logps(model, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [B, S - 1] of ids [B, S] after the first of each row, on the CPU."""
    ids = ids.to(model.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    with rollout_mode(model):
        scored = completion_logps(
            model,
            input_ids=ids,
            attention_mask=mask,
            prompt_lengths=mask.new_ones(len(ids), dtype=torch.long),
            completion_ids=ids[:, 1:],
            completion_mask=mask[:, 1:],
        )
    return scored.logps.cpu()
