"""Scaling laws and rules of thumb, against values worked out by hand and numeric minimisation."""

import math

import pytest
import torch

from grpo_moe import GptOssLiteConfig
from grpo_moe.planning import (
    BESIROGLU_2024,
    HOFFMANN_2022,
    ModelShape,
    active_parameters,
    attainable_flops,
    checkpoint_peak_blocks,
    checkpoint_step_factor,
    compute_optimal,
    effective_parameters,
    optimal_checkpoint_period,
    ratio_optimal,
    tile_intensity,
    tile_traffic_reduction,
    training_flops,
    wrapped_blocks,
)

CHINCHILLA = training_flops(70e9, 1.4e12)


@pytest.mark.parametrize("fit", [HOFFMANN_2022, BESIROGLU_2024])
@pytest.mark.parametrize("flops", [1e18, CHINCHILLA, 1e26])
def test_compute_optimal_is_the_numeric_minimum(fit, flops):
    optimum = compute_optimal(flops, fit)
    assert training_flops(optimum.parameters, optimum.tokens) == pytest.approx(flops, rel=1e-12)
    grid = torch.linspace(math.log(1e6), math.log(1e14), 200_001, dtype=torch.float64).exp()
    best = float(grid[fit.loss(grid, flops / (6 * grid)).argmin()])
    assert optimum.parameters == pytest.approx(best, rel=2e-4)  # the grid's step is 9e-5
    marginal = [
        fit.alpha * fit.parameter_scale / optimum.parameters**fit.alpha,
        fit.beta * fit.token_scale / optimum.tokens**fit.beta,
    ]
    assert marginal[0] == pytest.approx(marginal[1], rel=1e-9)


def test_fits_give_the_losses_and_ratios_of_their_papers():
    assert HOFFMANN_2022.loss(70e9, 1.4e12) == pytest.approx(1.69 + 0.0837 + 0.1633, abs=2e-3)
    old, new = (compute_optimal(CHINCHILLA, fit) for fit in (HOFFMANN_2022, BESIROGLU_2024))
    # C/6 = 9.8e22: 1.3448 * 9.8e22^0.45161 and 0.11963 * 9.8e22^0.51261
    assert old.parameters == pytest.approx(3.249e10, rel=1e-3) and new.parameters == pytest.approx(7.302e10, rel=1e-3)
    assert old.tokens / old.parameters == pytest.approx(93, abs=0.5)
    assert new.tokens / new.parameters == pytest.approx(18.4, abs=0.1)


def test_ratio_optimal_of_chinchilla_is_chinchilla():
    allocation = ratio_optimal(CHINCHILLA)
    assert allocation.parameters == pytest.approx(70e9) and allocation.tokens == pytest.approx(1.4e12)
    assert ratio_optimal(6 * 5.0 * 4, 5.0).parameters == pytest.approx(2)


def test_active_parameters_of_gpt_oss_lite():
    shape = ModelShape.from_config(GptOssLiteConfig())
    routed = 12 * 8 * 3 * 768 * 1536
    shared = 501_836_640 - routed
    active = active_parameters(routed, shared, num_experts=8, top_k=2)
    assert active == 247_032_672 == shape.active_parameters and routed == shape.parameters["experts"]
    assert round(501_836_640 / 1e6, 1) == 501.8 and round(active / 1e6, 1) == 247.0
    assert active_parameters(routed, shared, num_experts=8, top_k=8) == shape.total_parameters
    with pytest.raises(ValueError, match=r"top_k must be in 1..num_experts=8, got 9;"):
        active_parameters(1, 1, num_experts=8, top_k=9)


def test_effective_parameters_lie_between_active_and_total():
    assert effective_parameters(3.0, 48.0, gamma=0) == 3 and effective_parameters(3.0, 48.0, gamma=1) == 48
    assert effective_parameters(3.0, 48.0, gamma=0.5) == pytest.approx(12)
    assert effective_parameters(3.0, 48.0, gamma=0.25) == pytest.approx(6)
    with pytest.raises(ValueError, match="gamma must be in 0..1, got 1.5;"):
        effective_parameters(3.0, 48.0, gamma=1.5)


def test_optimal_checkpoint_period_of_twelve_blocks():
    best = optimal_checkpoint_period(12)
    assert best == pytest.approx(3.4641, abs=1e-4)
    assert checkpoint_peak_blocks(12, best) == pytest.approx(6.9282, abs=1e-4)
    assert [checkpoint_peak_blocks(12, g) for g in (1, 2, 3, 4, 6, 12)] == [13, 8, 7, 7, 8, 13]
    assert all(checkpoint_peak_blocks(12, best) <= checkpoint_peak_blocks(12, g / 100) for g in range(100, 1200))


def test_checkpoint_step_factor_of_twelve_blocks():
    assert wrapped_blocks(12, 3) == 4 and wrapped_blocks(12, 5) == 3 and wrapped_blocks(12, 1) == 12
    assert checkpoint_step_factor(12, 3) == pytest.approx(1 + 1 / 9)  # 11 % more
    assert checkpoint_step_factor(12, 1) == pytest.approx(4 / 3)
    assert checkpoint_step_factor(12, 5) == pytest.approx(1 + 3 / 36)  # not 1/15: 0, 5 and 10 are three blocks
    for arguments, name in (((12, 0), "period"), ((0, 1), "num_blocks")):
        with pytest.raises(ValueError, match=f"{name} must be"):
            checkpoint_step_factor(*arguments)


def test_wrapped_blocks_are_those_that_gpt_oss_lite_wraps():
    for period in (1, 2, 3, 5, 12):
        assert wrapped_blocks(12, period) == sum(layer % period == 0 for layer in range(12))


def test_tiles_of_the_fused_gate_and_up_launch():
    assert tile_traffic_reduction(16, 32) == pytest.approx(12.8)
    assert tile_intensity(16, 32) == pytest.approx(12.8)
    assert tile_intensity(64, 64) == pytest.approx(42.7, abs=0.05)
    assert tile_intensity(64, 64, element_bytes=4) == pytest.approx(64 / 3)
    assert tile_intensity(16, 32, num_weights=1) == pytest.approx(32 / 3)
    assert tile_traffic_reduction(1, 1, num_weights=1) == 0.5  # a tile of one element reads both operands


def test_tile_traffic_by_counting_reads():
    rows, columns, depth, block_m, block_n = 64, 96, 7, 16, 32
    tiles = (rows // block_m) * (columns // block_n)
    tiled = tiles * depth * (block_m + 2 * block_n)
    untiled = rows * depth * 2 * columns
    assert tile_traffic_reduction(block_m, block_n) == pytest.approx(untiled / tiled)
    assert tile_intensity(block_m, block_n) == pytest.approx(2 * rows * 2 * columns * depth / (2 * tiled))


def test_attainable_flops_bends_at_the_ridge():
    ridge = 989e12 / 4.8e12
    below, above = (attainable_flops(x * ridge, peak_flops=989e12, bytes_per_second=4.8e12) for x in (0.5, 2))
    assert below == pytest.approx(989e12 / 2) and above == 989e12
    assert attainable_flops(12.8, peak_flops=989e12, bytes_per_second=4.8e12) == pytest.approx(61.44e12)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: compute_optimal(0), "flops"),
        (lambda: ratio_optimal(1e20, 0), "tokens_per_parameter"),
        (lambda: optimal_checkpoint_period(0), "num_blocks"),
        (lambda: checkpoint_peak_blocks(12, 0), "run_length"),
        (lambda: tile_traffic_reduction(16, 0), "block_n"),
        (lambda: tile_intensity(16, 32, element_bytes=0), "element_bytes"),
    ],
)
def test_sizes_must_be_positive(call, name):
    with pytest.raises(ValueError, match=rf"{name} must be positive, got 0; pass a size"):
        call()
