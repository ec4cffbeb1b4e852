"""The policy losses against the published vectors, and the properties that a user relies on for every one of them."""

import dataclasses
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_moe.ops.loss import LossConfig, grpo_loss_from_logps
from grpo_moe.ops.loss.config import LOSS_TYPES

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "loss_vectors.json").read_text())

REQUIRED = {"cispo": {"epsilon_high": 5.0}, "dr_grpo": {"max_completion_length": 8}}
SEQUENCE_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo")
VARIANTS = [{"loss_type": name, **REQUIRED.get(name, {})} for name in LOSS_TYPES]
VARIANTS += [{**v, "importance_sampling_level": "sequence"} for v in VARIANTS if v["loss_type"] in SEQUENCE_TYPES]

# Options and values at which each must change loss or gradient of the batch below.
OPTIONS = [
    {"beta": 0.3, "use_bias_correction_kl": False},
    {"beta": 0.3},
    {"beta": 0.3, "kl_estimator": "k1"},
    {"beta": 0.3, "kl_estimator": "k2"},
    {"sampler_correction": "token_truncate", "sampler_clip_max": 1.1},
    {"sampler_correction": "token_mask", "sampler_clip_min": 0.8, "sampler_clip_max": 1.3},
    {"sampler_correction": "sequence_truncate", "sampler_clip_max": 1.1},
    {"sampler_correction": "sequence_mask", "sampler_clip_min": 0.5, "sampler_clip_max": 1.5},
    {"sampler_correction": "geometric_mask", "sampler_clip_min": 0.99, "sampler_clip_max": 1.1},
    {"off_policy_mask_threshold": 0.01},
    {"top_entropy_quantile": 0.5},
    {"delta": 1.25},
    {"dual_clip": 1.1},
]


def make_config(variant, option=None):
    """The config, or None where the combination is refused (which `test_config_refuses_*` covers)."""
    try:
        return LossConfig(**variant, **(option or {}))
    except ValueError:
        return None


def configs_of(variant):
    """The variant alone, and with every option it accepts."""
    return [config for option in [{}, *OPTIONS] if (config := make_config(variant, option))]


each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(map(str, v.values())))


def make_batch(num_rows=4, num_columns=5, seed=0):
    """Random rows of different lengths; the last row has no token and the second a hole in its middle."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale):
        return scale * torch.randn(num_rows, num_columns, generator=generator, dtype=torch.float64)

    logps = -1.5 + normal(0.5)
    lengths = torch.tensor([(5, 4, 2, 0)[i % 4] for i in range(num_rows)]).clamp(max=num_columns)
    mask = torch.arange(num_columns) < lengths[:, None]
    mask[1:2, 1:2] = False
    return {
        "logps": logps,
        "old_logps": logps + normal(0.3),
        "ref_logps": logps + normal(0.3),
        "sampling_logps": logps + normal(0.3),
        "entropy": normal(1).abs(),
        "advantages": torch.tensor([(1.0, -0.8, -0.3, 0.5)[i % 4] for i in range(num_rows)], dtype=torch.float64),
        "completion_mask": mask,
    }


def run(config, batch, **counts):
    """(output, gradient by logps) of one call on copies of the batch."""
    logps = batch["logps"].clone().requires_grad_()
    output = grpo_loss_from_logps(config=config, **{**batch, "logps": logps}, **counts)
    output.loss.backward()
    return output, logps.grad


def window_counts(batch):
    return {"num_loss_tokens": int(batch["completion_mask"].sum()), "num_sequences": len(batch["logps"])}


def pick_rows(batch, rows):
    return {name: x[rows] for name, x in batch.items()}


def poisoned(batch, values=(math.nan, math.inf, -math.inf, -900.0, 200.0, 1e10, -1e10)):
    """The batch with another garbage value at every masked cell of every input, and as advantage of an empty row."""
    masked = ~batch["completion_mask"]
    filler = torch.tensor(values, dtype=torch.float64)
    result = dict(batch)
    for shift, name in enumerate(["logps", "old_logps", "ref_logps", "sampling_logps", "entropy"]):
        garbage = filler[(torch.arange(masked.numel()).view(masked.shape) + shift) % len(filler)]
        result[name] = torch.where(masked, garbage, batch[name])
    result["advantages"] = torch.where(masked.all(-1), math.nan, batch["advantages"])
    return result


# --- values ---

GRPO = {"loss_type": "grpo"}
VECTOR_CONFIGS = {
    "grpo eps.2": GRPO,
    "bnpo eps.2": {"loss_type": "bnpo"},
    "dr_grpo Lmax4": {"loss_type": "dr_grpo", "max_completion_length": 4},
    "dapo .2/.28 N=5": {"epsilon_high": 0.28},
    "dapo .2/.28 N=10": {"epsilon_high": 0.28},
    "gspo 3e-4/4e-4": {**GRPO, "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "gspo .2": {**GRPO, "importance_sampling_level": "sequence"},
    "cispo eh=5": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo eh=1.28": {"loss_type": "cispo", "epsilon_high": 1.28},
    "sapo 1/1.05": {"loss_type": "sapo"},
    "luspo 2e-3/2.5e-3": {
        "loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3,
    },
    "luspo token eps.2": {"loss_type": "luspo"},
    "vespo": {"loss_type": "vespo"},
    "gmpo .4": {"loss_type": "gmpo", "epsilon": 0.4},
    "grpo delta1.5": {**GRPO, "delta": 1.5},
    "dual-clip c1.5 (verl)": {"dual_clip": 1.5},
    "dppo_tv .1/.15 (verl)": {"loss_type": "dppo_tv", "epsilon": 0.1, "epsilon_high": 0.15},
    "dppo_kl .05 (verl)": {"loss_type": "dppo_kl", "epsilon": 0.05},
    "grpo+.04 k3": {**GRPO, "beta": 0.04, "use_bias_correction_kl": False},
    "grpo+.04 k3*ratio": {**GRPO, "beta": 0.04, "use_bias_correction_kl": True},
    "grpo TIS tok max1.05": {**GRPO, "sampler_correction": "token_truncate", "sampler_clip_max": 1.05},
    "grpo TIS seq max1.05": {**GRPO, "sampler_correction": "sequence_truncate", "sampler_clip_max": 1.05},
    "grpo IcePop .5/5": {**GRPO, "sampler_correction": "token_mask"},
    "grpo MIS seq .5/3": {**GRPO, "sampler_correction": "sequence_mask", "sampler_clip_min": 0.5},
    "grpo OPSM d.02": {**GRPO, "off_policy_mask_threshold": 0.02},
    "grpo top-entropy .2": {**GRPO, "top_entropy_quantile": 0.2},
    # KL alone: all advantages 0, beta 1, mean over the tokens
    "k1 mean": {"beta": 1.0, "kl_estimator": "k1", "use_bias_correction_kl": False},
    "k2 mean": {"beta": 1.0, "kl_estimator": "k2", "use_bias_correction_kl": False},
    "k3 mean": {"beta": 1.0, "kl_estimator": "k3", "use_bias_correction_kl": False},
    "k3*ratio mean": {"beta": 1.0, "kl_estimator": "k3", "use_bias_correction_kl": True},
}  # fmt: skip


def vector_batch():
    names = ("logps", "old_logps", "ref_logps", "sampling_logps", "entropy", "advantages", "completion_mask")
    return {name: torch.tensor(VECTORS["inputs"][name], dtype=torch.float64) for name in names}


@pytest.mark.parametrize("name", VECTORS["losses"])
def test_loss_equals_the_published_vector(name):
    batch = vector_batch()
    if "OPSM" in name:
        batch["sampling_logps"] = None  # this vector measures the distance from old_logps
    if name.startswith("k"):
        batch["advantages"] = torch.zeros(2, dtype=torch.float64)
    counts = {"num_loss_tokens": 10} if "N=10" in name else {}
    output, gradient = run(LossConfig(**VECTOR_CONFIGS[name]), batch, **counts)
    assert output.loss.item() == pytest.approx(VECTORS["losses"][name], abs=1e-6)
    if name in VECTORS["gradients"]:
        expected = torch.tensor(VECTORS["gradients"][name], dtype=torch.float64).view(2, 3)
        torch.testing.assert_close(gradient, expected, atol=2e-6, rtol=0)


def test_every_published_gradient_is_checked():
    assert set(VECTORS["gradients"]) <= set(VECTORS["losses"]) == set(VECTOR_CONFIGS)


@pytest.mark.parametrize("estimator, corrected", [("k1", True), ("k3", True), ("k2", False)])
def test_kl_gradient_is_that_of_the_true_kl(estimator, corrected):
    """Expectation over the three tokens of a softmax, on-policy: estimators that promise the KL gradient have it."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64, requires_grad=True)
    ref_logps = torch.tensor([0.9, 0.2, -0.4], dtype=torch.float64).log_softmax(0)
    logps = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((logps.exp() * (logps - ref_logps)).sum(), logits, retain_graph=True)
    config = LossConfig(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=corrected)
    tokens = grpo_loss_from_logps(
        logps[:, None], torch.zeros(3), torch.ones(3, 1), config, ref_logps=ref_logps[:, None]
    ).per_token_loss  # [3, 1]
    (gradient,) = torch.autograd.grad((logps.detach().exp() * tokens[:, 0]).sum(), logits)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("loss_type, bounds", [
    ("dppo_tv", {"epsilon": 0.1, "epsilon_high": 0.3}),  # |p - q| is .2 for both moves
    ("dppo_kl", {"epsilon": 0.05, "epsilon_high": 0.12}),  # KL is .0823 from .5 to .7, and the same to .3
])  # fmt: skip
def test_dppo_stops_only_moves_beyond_the_bound_of_their_direction(loss_type, bounds):
    """Rows A > 0 and A < 0; tokens that fell, rose and stayed. Bounds between the two moves: only A < 0 fell stops."""
    old_logps = torch.tensor(0.5, dtype=torch.float64).log().expand(2, 3)
    logps = torch.tensor([[0.3, 0.7, 0.5]] * 2, dtype=torch.float64).log()
    batch = {"logps": logps, "old_logps": old_logps, "advantages": torch.tensor([1.0, -1.0])}
    output, gradient = run(LossConfig(loss_type=loss_type, **bounds), {**batch, "completion_mask": torch.ones(2, 3)})
    expected = (logps - old_logps).exp() * torch.tensor([[-1.0], [1.0]]) / 6
    expected[1, 0] = 0
    torch.testing.assert_close(gradient, expected)
    assert output.stats["clip_ratio_low"] == pytest.approx(1 / 6) and output.stats["clip_ratio_high"] == 0
    swapped = LossConfig(loss_type=loss_type, epsilon=bounds["epsilon_high"], epsilon_high=bounds["epsilon"])
    _, gradient = run(swapped, {**batch, "completion_mask": torch.ones(2, 3)})
    assert (gradient == 0).tolist() == [[False, True, False], [False, False, False]]


def test_vespo_leaves_masked_tokens_out_of_its_weight():
    batch = vector_batch()
    batch["sampling_logps"] = batch["old_logps"].clone()
    batch["sampling_logps"][0, 2] = -100.0  # weight far above the bound: the token is masked
    output, _ = run(LossConfig(loss_type="vespo", sampler_correction="token_mask"), batch, num_loss_tokens=5)
    batch["completion_mask"][0, 2] = 0
    expected, _ = run(LossConfig(loss_type="vespo"), batch, num_loss_tokens=5)
    torch.testing.assert_close(output.loss, expected.loss)


def test_vespo_applies_the_sampler_weight_once():
    batch = vector_batch()
    batch["sampling_logps"] = batch["old_logps"] - 0.1  # each token's weight is exp(.1)
    output, _ = run(LossConfig(loss_type="vespo", sampler_correction="token_truncate"), batch)
    batch["old_logps"] = batch["old_logps"] - 0.1  # the same factor, by the ratio
    expected, _ = run(LossConfig(loss_type="vespo"), batch)
    torch.testing.assert_close(output.loss, expected.loss)


@each_variant
def test_on_policy_gradient_is_the_policy_gradient(variant):
    """Without old_logps every ratio is 1 and the loss pushes each token by minus its advantage."""
    batch = {"logps": torch.full((1, 3), -0.7, dtype=torch.float64), "advantages": torch.tensor([0.6])}
    _, gradient = run(LossConfig(**variant), {**batch, "completion_mask": torch.ones(1, 3)})
    scale = {"luspo": 1.0, "dr_grpo": 1 / 8}.get(variant["loss_type"], 1 / 3)
    torch.testing.assert_close(gradient, torch.full((1, 3), -0.6 * scale, dtype=torch.float64), rtol=1e-6, atol=0)


# --- garbage, masks, extremes ---


@each_variant
def test_garbage_at_masked_cells_changes_nothing(variant):
    batch = make_batch()
    for config in configs_of(variant):
        clean, clean_gradient = run(config, batch)
        dirty, dirty_gradient = run(config, poisoned(batch))
        assert torch.equal(clean.loss, dirty.loss) and torch.isfinite(clean.loss), config
        assert torch.equal(clean.per_token_loss, dirty.per_token_loss), config
        assert torch.equal(clean_gradient, dirty_gradient), config
        assert clean_gradient[~batch["completion_mask"]].count_nonzero() == 0, config
        assert clean.stats.keys() == dirty.stats.keys()
        for name, value in clean.stats.items():
            assert torch.equal(value, dirty.stats[name]) and torch.isfinite(value), (name, config)


@each_variant
def test_all_masked_batch_is_a_differentiable_zero(variant):
    batch = make_batch()
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    batch = poisoned(batch)
    for config in configs_of(variant):
        for counts in ({}, {"num_loss_tokens": torch.tensor(0), "num_sequences": 0}):
            output, gradient = run(config, batch, **counts)
            assert output.loss.item() == 0 and gradient.count_nonzero() == 0, config
            assert all(torch.isfinite(value) for value in output.stats.values()), config


@pytest.mark.parametrize("shape", [(0, 3), (2, 0)])
def test_empty_batch_is_a_differentiable_zero(shape):
    batch = {name: torch.zeros(shape) for name in ("logps", "ref_logps", "sampling_logps", "entropy")}
    batch |= {"advantages": torch.ones(shape[0]), "completion_mask": torch.ones(shape)}
    for option in [{}, *OPTIONS]:
        output, gradient = run(LossConfig(**option), batch)
        assert output.loss.item() == 0 and gradient.shape == shape, option


@each_variant
@pytest.mark.parametrize("old_logp", [-900.0, 3e38])
def test_zero_advantage_beats_an_overflowing_ratio(variant, old_logp):
    batch = {name: x.float() for name, x in make_batch().items()}
    batch |= {"advantages": torch.zeros(4), "old_logps": torch.full((4, 5), old_logp)}
    output, gradient = run(LossConfig(**variant), batch)
    assert output.loss.item() == 0 and gradient.count_nonzero() == 0


@each_variant
def test_extreme_finite_logps_stay_finite(variant):
    batch = {name: x.float() if x.is_floating_point() else x for name, x in make_batch().items()}
    for name, value in [("old_logps", -900.0), ("ref_logps", 900.0), ("sampling_logps", -1e10), ("logps", -200.0)]:
        batch[name][0, 1:3] = value
        batch[name][1, 0] = -value
    for config in configs_of(variant):
        output, gradient = run(config, batch)
        assert torch.isfinite(output.loss) and torch.isfinite(gradient).all(), config
        assert all(torch.isfinite(value) for value in output.stats.values()), config


@each_variant
def test_token_without_a_finite_logp_is_as_masked_and_counted(variant):
    config = LossConfig(**variant, beta=0.1)
    batch = make_batch()
    without = {**batch, "completion_mask": batch["completion_mask"].clone()}
    without["completion_mask"][0, 2] = False
    expected, expected_gradient = run(config, without)
    for name in ("logps", "old_logps", "ref_logps"):
        for value in (math.nan, math.inf, -math.inf):
            broken = {**batch, name: batch[name].clone()}
            broken[name][0, 2] = value
            output, gradient = run(config, broken)
            assert torch.equal(output.loss, expected.loss) and torch.equal(gradient, expected_gradient), (name, value)
            assert output.stats["num_dropped_tokens"] == 1
            assert output.stats["num_tokens"] == expected.stats["num_tokens"]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("option", [o for o in OPTIONS if "sampler_correction" in o], ids=lambda o: str(o))
def test_unscorable_sampling_logp_has_weight_one(option, value):
    batch = make_batch()
    broken = {**batch, "sampling_logps": batch["sampling_logps"].clone()}
    broken["sampling_logps"][0, 2] = value
    output, gradient = run(LossConfig(**option), broken)
    batch["sampling_logps"][0, 2] = batch["old_logps"][0, 2]
    expected, expected_gradient = run(LossConfig(**option), batch)
    torch.testing.assert_close(output.loss, expected.loss)
    torch.testing.assert_close(gradient, expected_gradient)
    assert output.stats["num_unscored_tokens"] == 1


def test_unscorable_sampling_logp_is_no_off_policy_evidence():
    batch = vector_batch()
    batch["sampling_logps"] = batch["logps"].clone()
    batch["sampling_logps"][1, 0] = math.nan  # old - logps is .6 there: enough to drop the row if it were used
    output, _ = run(LossConfig(off_policy_mask_threshold=0.02), batch)
    assert output.stats["off_policy_masked"] == 0


def test_off_policy_mask_keeps_rows_of_positive_advantage():
    batch = {**vector_batch(), "sampling_logps": vector_batch()["logps"] + 1.0}  # both rows are far off
    output, gradient = run(LossConfig(off_policy_mask_threshold=0.5), batch)
    assert gradient[0].count_nonzero() and gradient[1].count_nonzero() == 0
    assert output.stats["off_policy_masked"] == pytest.approx(0.4)


def test_entropy_ties_at_the_quantile_are_kept():
    batch = {**vector_batch(), "entropy": torch.full((2, 3), 0.7, dtype=torch.float64)}
    tied, _ = run(LossConfig(top_entropy_quantile=0.2), batch)
    assert tied.stats["entropy_masked"] == 0


def test_mismatch_beyond_exp_range_masks_the_token():
    batch = {name: x.float() for name, x in vector_batch().items()}
    batch["sampling_logps"][0, 0] = -100.0
    output, gradient = run(LossConfig(sampler_correction="token_mask"), batch)
    assert torch.isfinite(output.loss) and gradient[0, 0] == 0 and output.stats["sampler_masked"] == pytest.approx(0.4)


# --- invariances ---


def assert_split_adds_up(config, batch, parts, counts):
    whole, whole_gradient = run(config, batch)
    loss, gradient = 0.0, torch.zeros_like(whole_gradient)
    for rows in parts:
        output, part_gradient = run(config, pick_rows(batch, rows), **counts)
        loss = loss + output.loss.detach()
        gradient[rows] = part_gradient
    torch.testing.assert_close(loss, whole.loss.detach(), atol=1e-9, rtol=0)
    torch.testing.assert_close(gradient, whole_gradient, atol=1e-9, rtol=0)
    return whole_gradient


def padded(batch, columns=3):
    """The batch with masked columns of NaN at its end."""
    num_rows = len(batch["logps"])
    wide = {"advantages": batch["advantages"]}
    for name in batch.keys() - wide.keys():
        filler = False if name == "completion_mask" else math.nan
        wide[name] = torch.cat([batch[name], batch[name].new_full((num_rows, columns), filler)], 1)
    return wide


@each_variant
def test_micro_batches_of_any_split_order_and_padding_add_up(variant):
    batch = make_batch()
    wide, counts = padded(batch), window_counts(batch)
    as_tensors = {name: torch.tensor(count) for name, count in counts.items()}
    for config in configs_of(variant):
        (whole, gradient), (whole_wide, gradient_wide) = run(config, batch), run(config, wide)
        torch.testing.assert_close(whole_wide.loss, whole.loss, atol=1e-12, rtol=0)
        torch.testing.assert_close(gradient_wide[:, :5], gradient, atol=1e-12, rtol=0)
        if config.top_entropy_quantile == 1:  # its threshold is of the call, as documented
            assert assert_split_adds_up(config, batch, [[0], [1], [2], [3]], counts).count_nonzero(), config
            assert_split_adds_up(config, wide, [[3, 1], [2, 0]], as_tensors)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    variant=st.sampled_from(VARIANTS),
    order=st.permutations(range(6)),
    cuts=st.sets(st.integers(1, 5), max_size=4),
    columns=st.integers(1, 6),
    seed=st.integers(0, 99),
)
def test_any_partition_of_any_batch_adds_up(variant, order, cuts, columns, seed):
    batch = poisoned(make_batch(6, columns, seed))
    edges = [0, *sorted(cuts), 6]
    parts = [list(order[a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    assert_split_adds_up(LossConfig(**variant), batch, parts, window_counts(batch))


def test_stats_of_micro_batches_combine_as_documented():
    config = LossConfig(beta=0.1, sampler_correction="token_mask", off_policy_mask_threshold=0.01)
    batch = make_batch()
    whole = run(config, batch)[0].stats
    parts = [run(config, pick_rows(batch, rows))[0].stats for rows in ([0], [1, 3], [2])]
    for name, value in whole.items():
        column = torch.stack([part[name] for part in parts])
        weights = torch.stack([part["num_tokens"] for part in parts])
        if name.startswith("num_"):
            combined = column.sum()
        elif name.endswith("_max"):
            combined = column.max()
        else:
            combined = (column * weights).sum() / weights.sum()
        torch.testing.assert_close(combined, value, msg=name)


@each_variant
def test_every_token_with_an_advantage_counts_once(variant):
    batch = make_batch()
    batch["advantages"] = batch["advantages"].clone()
    batch["advantages"][0] = 0
    for name, row in (("old_logps", 0), ("logps", 1)):
        batch[name][row, 0] = math.nan  # dropped; only that of row 1 has an advantage
    wanted = ((batch["completion_mask"] != 0) & (batch["advantages"] != 0)[:, None]).sum()
    fates = [f"num_{name}_tokens" for name in (
        "not_finite", "sampler_masked", "off_policy_masked", "entropy_masked", "clipped", "gradient")]  # fmt: skip
    for config in configs_of(variant):
        stats = run(config, batch)[0].stats
        assert sum(stats.get(name, 0) for name in fates) == wanted, config
        assert stats["num_not_finite_tokens"] == 1 and stats["num_dropped_tokens"] == 2


def test_clipping_takes_what_no_mask_took_and_only_where_it_stops_the_gradient():
    clipped, capped = (
        run(LossConfig(loss_type=name, epsilon=0.0, epsilon_high=high, sampler_correction="token_mask"), vector_batch())
        for name, high in (("dapo", 0.0), ("cispo", 1.0))
    )
    for output, gradient in (clipped, capped):
        assert output.stats["num_gradient_tokens"] == gradient.count_nonzero()
        assert output.stats["num_sampler_masked_tokens"] == 1
    assert clipped[0].stats["num_clipped_tokens"] > 0 == capped[0].stats["num_clipped_tokens"]
    assert capped[0].stats["clip_ratio"] > 0


def test_stats_of_the_vector_batch():
    stats = run(LossConfig(sampler_correction="token_mask"), vector_batch())[0].stats
    expected = {"num_tokens": 5, "clip_ratio": 0.4, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "entropy": 0.84,
                "ratio_max": math.exp(0.5), "sampling_logp_difference_max": 0.9, "sampler_masked": 0.2}  # fmt: skip
    assert {name: stats[name].item() for name in expected} == pytest.approx(expected)
    assert not any(value.requires_grad or value.ndim for value in stats.values())


def test_stats_of_the_gap_between_engine_and_trainer_by_hand():
    old = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -1.0, 0.0]])
    gap = torch.tensor([[0.2, -0.4, 0.0], [1.0, math.nan, 9.0]])  # one is not scored, one is masked
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    stats = grpo_loss_from_logps(
        old, torch.ones(2), mask, LossConfig(), old_logps=old, sampling_logps=old - gap
    ).stats  # fmt: skip
    gaps = torch.tensor([0.2, -0.4, 0.0, 1.0, 0.0])
    assert stats["sampling_kl"].item() == pytest.approx((gaps.exp() - 1 - gaps).mean().item())
    assert stats["sampling_ratio_mean"].item() == pytest.approx(gaps.exp().mean().item())
    assert stats["sampling_ratio_square_mean"].item() == pytest.approx((2 * gaps).exp().mean().item())
    assert stats["num_unscored_tokens"] == 1


# --- options, inputs, errors ---


PARAMETERS = [
    {"epsilon": 0.05},
    {"epsilon_high": 0.05},
    {"epsilon_high": 1.1},
    {"sapo_temperature_pos": 2.0},
    {"sapo_temperature_neg": 2.0},
    {"vespo_k_pos": 1.0},
    {"vespo_lambda_pos": 1.0},
    {"vespo_k_neg": 1.0},
    {"vespo_lambda_neg": 1.0},
    {"importance_sampling_level": "sequence"},
]


def bound_without_clip(loss_type, option):
    """A clipping bound may stay set when the loss type changes to one that clips nothing by it."""
    unread = {"cispo": {"epsilon"}, "sapo": {"epsilon", "epsilon_high"}, "vespo": {"epsilon", "epsilon_high"}}
    return option.keys() <= unread.get(loss_type, set())


@each_variant
def test_every_option_changes_the_result_or_is_refused(variant):
    batch = make_batch()
    steps = torch.tensor([0.9, -1.0, 0.1, 0.5, -0.5], dtype=torch.float64)  # ratios on both sides of every bound
    likely = (batch["logps"] + 1).clamp(max=-0.05)  # for dppo, whose bounds are on probabilities
    for name in ("ref_logps", "sampling_logps", "logps"):
        batch[name] = batch[name] + likely - batch["logps"]
    batch["old_logps"] = batch["logps"] - steps - 0.2 * batch["advantages"].sign()[:, None]
    plain, plain_gradient = run(LossConfig(**variant), batch)
    for option in [*OPTIONS, *PARAMETERS]:
        config = make_config({**variant, **option})
        if config and not option.items() <= variant.items():
            changed, changed_gradient = run(config, batch)
            same = torch.equal(plain.loss, changed.loss) and torch.equal(plain_gradient, changed_gradient)
            assert same == bound_without_clip(config.loss_type, option), option


@pytest.mark.parametrize("option", [*OPTIONS, *PARAMETERS], ids=str)
def test_every_option_is_accepted_by_some_loss(option):
    assert any(make_config({**variant, **option}) for variant in VARIANTS)


@pytest.mark.parametrize("options, named", [
    ({"loss_type": "ppo"}, ["loss_type", "dapo", "dppo_kl", "'ppo'"]),
    ({"kl_estimator": "k4"}, ["kl_estimator", "k1, k2, k3"]),
    ({"importance_sampling_level": "row"}, ["importance_sampling_level", "token, sequence"]),
    ({"sampler_correction": "tis"}, ["sampler_correction", "token_truncate"]),
    ({"loss_type": "cispo"}, ["epsilon_high", "cispo"]),
    ({"loss_type": "cispo", "epsilon_high": 0.28}, ["epsilon_high", "cispo", "0.28"]),
    ({"loss_type": "dr_grpo"}, ["max_completion_length", "dr_grpo"]),
    ({"loss_type": "vespo", "delta": 4.0}, ["delta", "vespo"]),
    ({"loss_type": "dapo", "vespo_k_pos": 1.0}, ["vespo_k_pos", "dapo"]),
    ({"loss_type": "gmpo", "importance_sampling_level": "sequence"}, ["importance_sampling_level", "gmpo"]),
    ({"loss_type": "vespo", "sampler_correction": "sequence_mask"}, ["sampler_correction", "vespo"]),
    ({"epsilon_high": 0.28, "delta": 1.28}, ["delta", "epsilon_high", "1.28"]),
    ({"delta": 4.0, "dual_clip": 3.0}, ["delta", "dual_clip"]),
    ({"dual_clip": 1.0}, ["dual_clip"]),
    ({"sampler_clip_max": 2.0}, ["sampler_clip_max", "sampler_correction"]),
    ({"sampler_correction": "geometric_mask", "sampler_clip_min": 0.9}, ["sampler_clip_max", "geometric_mask"]),
    ({"sampler_correction": "token_mask", "sampler_clip_max": 0.4}, ["sampler_clip_min", "sampler_clip_max"]),
    ({"epsilon": -0.1}, ["epsilon", "-0.1"]),
    ({"beta": math.nan}, ["beta", "nan"]),
    ({"temperature": 0.0}, ["temperature"]),
    ({"loss_type": "sapo", "sapo_temperature_neg": 0.0}, ["sapo_temperature_neg"]),
    ({"top_entropy_quantile": 0.0}, ["top_entropy_quantile"]),
    ({"max_completion_length": 0}, ["max_completion_length"]),
], ids=str)  # fmt: skip
def test_config_refuses_what_makes_no_sense(options, named):
    with pytest.raises(ValueError) as error:
        LossConfig(**options)
    message = str(error.value)
    assert " must be " in message and ", got " in message and "; " in message
    assert all(name in message for name in named), message


def test_config_is_frozen_and_defaults_are_valid():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LossConfig().beta = 1.0


@pytest.mark.parametrize("option, missing", [
    ({"beta": 0.1}, "ref_logps"),
    ({"sampler_correction": "token_truncate"}, "sampling_logps"),
    ({"top_entropy_quantile": 0.2}, "entropy"),
], ids=str)  # fmt: skip
def test_missing_input_is_named(option, missing):
    with pytest.raises(ValueError, match=f"{missing} must be given with {next(iter(option))}"):
        run(LossConfig(**option), {**make_batch(), missing: None})


@pytest.mark.parametrize("name, shape", [
    ("logps", (4, 5, 1)), ("advantages", (5,)), ("advantages", (4, 1)), ("completion_mask", (5, 4)),
    ("old_logps", (4, 6)), ("ref_logps", (4,)), ("sampling_logps", (4, 4)), ("entropy", (1, 5)),
])  # fmt: skip
def test_wrong_shape_is_named(name, shape):
    with pytest.raises(ValueError, match=f"{name} must be"):
        run(LossConfig(), {**make_batch(), name: torch.zeros(shape)})


def test_count_with_dimensions_is_refused():
    with pytest.raises(ValueError, match="num_loss_tokens must be an int or a 0-dim tensor"):
        run(LossConfig(), make_batch(), num_loss_tokens=torch.tensor([5]))


@each_variant
def test_inputs_are_left_unchanged(variant):
    batch = poisoned(make_batch())
    before = {name: x.clone() for name, x in batch.items()}
    for config in configs_of(variant):
        run(config, batch)
    for name, value in before.items():
        torch.testing.assert_close(batch[name], value, rtol=0, atol=0, equal_nan=True)


@each_variant
def test_advantage_a_token_equals_advantage_a_row(variant):
    batch = make_batch()
    wide = {**batch, "advantages": batch["advantages"][:, None].expand(4, 5)}
    rows, tokens = run(LossConfig(**variant), batch), run(LossConfig(**variant), wide)
    assert torch.equal(rows[0].loss, tokens[0].loss) and torch.equal(rows[1], tokens[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_logps_are_computed_in_fp32(dtype):
    batch = {name: x.to(dtype) if x.is_floating_point() else x.int() for name, x in make_batch().items()}
    output, gradient = run(LossConfig(), batch)
    truth, _ = run(LossConfig(), {name: x.double() for name, x in batch.items()})
    assert output.loss.dtype == torch.float32 and gradient.dtype == dtype
    torch.testing.assert_close(output.loss.double(), truth.loss, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v["loss_type"] != "vespo"], ids=str)
@pytest.mark.parametrize("correction", ["token_truncate", "geometric_mask", "sequence_truncate"])
def test_a_constant_sampler_weight_multiplies_the_policy_term_once(variant, correction):
    """And the KL term not at all. vespo's own weight: test_vespo_applies_the_sampler_weight_once."""
    options = {"sampler_correction": correction, "sampler_clip_min": 0.0, "sampler_clip_max": 9.0}
    batch = make_batch()
    lengths = batch["completion_mask"].sum(1, keepdim=True).clamp(min=1)
    share = lengths if correction == "sequence_truncate" else 1
    batch["sampling_logps"] = batch["old_logps"] - math.log(0.9) / share
    weight = 1.0 if correction == "geometric_mask" else 0.9
    for beta in (0.0, 0.3):
        plain, corrected, kl = (
            run(LossConfig(**variant, beta=b, **o), x)[0].loss
            for b, o, x in (
                (0.0, {}, batch), (beta, options, batch),
                (beta, {}, {**batch, "advantages": torch.zeros(4)}),
            )
        )  # fmt: skip
        torch.testing.assert_close(corrected, weight * plain + kl)


def test_the_logged_kl_is_the_estimate_whatever_the_loss_makes_of_it():
    """Before beta and ratio, over the tokens of the mask alone."""
    batch = make_batch()
    mask, difference = batch["completion_mask"], batch["logps"] - batch["ref_logps"]
    estimates = {"k1": difference, "k2": difference.square() / 2, "k3": (-difference).exp() + difference - 1}
    for name, expected in estimates.items():
        for corrected in (False, True):
            config = LossConfig(beta=7.0, kl_estimator=name, use_bias_correction_kl=corrected)
            stats = run(config, poisoned(batch))[0].stats
            torch.testing.assert_close(stats["kl"], expected[mask].mean())


@pytest.mark.parametrize("kind", [np.int64, np.float32, Fraction])
def test_every_kind_of_number_is_an_option_and_a_count(kind):
    batch = make_batch()
    made = [run(LossConfig(beta=x(1), epsilon_high=x(2)), batch, num_loss_tokens=x(7)) for x in (kind, float)]
    assert torch.equal(made[0][0].loss, made[1][0].loss) and torch.equal(made[0][1], made[1][1])
