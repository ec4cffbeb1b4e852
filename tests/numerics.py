"""Tolerances of the numerical tests: an implementation is as good as eager PyTorch in the same dtype, or better."""

from __future__ import annotations

import torch


def max_error(actual: torch.Tensor, truth: torch.Tensor) -> float:
    """Largest absolute error relative to the largest true value, in float64."""
    truth = truth.detach().double()
    return float((actual.detach().double() - truth).abs().max() / truth.abs().max())


def assert_no_worse_than(
    eager: torch.Tensor, actual: torch.Tensor, truth: torch.Tensor, *, factor: float = 1.5, floor: float = 1e-7
) -> None:
    """The error of `actual` against `truth` is at most factor * the error of `eager`, plus `floor`; prints both."""
    assert torch.count_nonzero(truth), "the truth is all zeros: any tolerance would pass"
    error, allowed = max_error(actual, truth), factor * max_error(eager, truth) + floor
    print(f"error {error:.2e}, allowed {allowed:.2e}")
    assert error <= allowed, f"error {error:.3e} exceeds {allowed:.3e}"
