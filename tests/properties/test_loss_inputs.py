"""Whatever stands where the mask is False, and in whatever memory: losses and gradients are those of clean tensors."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties.effort import few

from grpo_moe.ops import LossConfig, grpo_loss, grpo_loss_from_logits, grpo_loss_from_logps

H, V = 4, 7
CONFIGS = [
    LossConfig(),
    LossConfig(loss_type="grpo", beta=0.1, delta=4.0),
    LossConfig(loss_type="dr_grpo", max_completion_length=9),
    LossConfig(loss_type="cispo", epsilon_high=2.0),
    LossConfig(loss_type="sapo", importance_sampling_level="sequence"),
    LossConfig(loss_type="vespo", sampler_correction="token_truncate"),
    LossConfig(loss_type="gmpo", sampler_correction="sequence_mask"),
    LossConfig(loss_type="dppo_kl", off_policy_mask_threshold=0.1),
    LossConfig(loss_type="luspo", importance_sampling_level="sequence", temperature=0.5),
    LossConfig(top_entropy_quantile=0.4),
]
JUNK = [math.nan, math.inf, -math.inf, 1e38, -1e38]
JUNK_IDS = [-100, -1, V, 2**31, 2**62, -(2**63)]


def batch(seed: int, rows: int, tokens: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)  # noqa: E731
    return {
        "hidden_states": normal(rows, tokens, H),
        "lm_head_weight": normal(V, H),
        "completion_ids": torch.randint(0, V, (rows, tokens), generator=g),
        "completion_mask": torch.rand(rows, tokens, generator=g) < 0.6,
        "advantages": normal(rows),
        "old_logps": -normal(rows, tokens).abs(),
        "ref_logps": -normal(rows, tokens).abs(),
        "sampling_logps": -normal(rows, tokens).abs(),
    }


def spoilt(x: dict[str, torch.Tensor], junk: float, junk_id: int, transposed: bool) -> dict[str, torch.Tensor]:
    """The same with junk in every masked cell, in memory of another order."""
    outside = ~x["completion_mask"]
    made = dict(x)
    for name in ("old_logps", "ref_logps", "sampling_logps"):
        made[name] = x[name].masked_fill(outside, junk)
    made["hidden_states"] = x["hidden_states"].masked_fill(outside[..., None], junk)
    made["completion_ids"] = x["completion_ids"].masked_fill(outside, junk_id)
    if transposed:
        made = {name: t.mT.contiguous().mT if t.ndim > 1 else t for name, t in made.items()}
    return made


def by_head(x, config):
    hidden, weight = (x[name].clone().requires_grad_() for name in ("hidden_states", "lm_head_weight"))
    out = grpo_loss(
        hidden, weight, config=config, **{k: v for k, v in x.items() if k not in ("hidden_states", "lm_head_weight")}
    )
    return out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight))


def by_logits(x, config):
    hidden, weight = (x[name].clone().requires_grad_() for name in ("hidden_states", "lm_head_weight"))
    # a product would spread the junk into the weight's gradient: that is what the fused head is for
    clean = torch.where(x["completion_mask"][..., None], hidden, 0)
    logits = torch.where(x["completion_mask"][..., None], clean @ weight.T, math.nan)
    rest = {k: v for k, v in x.items() if k not in ("hidden_states", "lm_head_weight")}
    out = grpo_loss_from_logits(logits, config=config, **rest)
    return out.loss.detach(), *torch.autograd.grad(out.loss, (hidden, weight))


@few(20)
@given(
    seed=st.integers(0, 99),
    rows=st.integers(0, 3),
    tokens=st.integers(0, 5),
    config=st.sampled_from(CONFIGS),
    junk=st.sampled_from(JUNK),
    junk_id=st.sampled_from(JUNK_IDS),
    transposed=st.booleans(),
)
def test_junk_outside_of_the_mask_changes_nothing(seed, rows, tokens, config, junk, junk_id, transposed):
    clean = batch(seed, rows, tokens)
    dirty = spoilt(clean, junk, junk_id, transposed)
    expected = by_head(clean, config)
    assert all(x.isfinite().all() for x in expected)
    for function in (by_head, by_logits):
        for a, b in zip(function(dirty, config), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.loss_type)
def test_there_is_something_to_compare(config):
    x = batch(3, 3, 5)
    logps = (x["hidden_states"] @ x["lm_head_weight"].T / config.temperature).log_softmax(-1)
    logps = logps.gather(-1, x["completion_ids"][..., None])[..., 0]
    loss, *gradients = by_head({**x, "old_logps": logps + 0.01, "sampling_logps": logps}, config)
    assert loss != 0 and all(g.count_nonzero() for g in gradients)


@few(40)
@given(
    seed=st.integers(0, 99),
    where=st.sampled_from(["logps", "old_logps", "ref_logps"]),
    junk=st.sampled_from(JUNK[:3]),
    config=st.sampled_from([c for c in CONFIGS if c.top_entropy_quantile == 1]),
)
def test_a_token_that_is_not_finite_is_dropped_as_if_masked(seed, where, junk, config):
    x = batch(seed, 3, 4)
    given = {name: x[name] for name in ("old_logps", "ref_logps", "sampling_logps")}
    logps = -torch.rand(3, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    hole = torch.zeros(3, 4, dtype=torch.bool)
    hole[1, seed % 4] = True
    if where == "ref_logps" and not config.beta:
        hole = torch.zeros_like(hole)  # nobody reads it
    results = []
    for mask, spoil in ((x["completion_mask"] & ~hole, False), (x["completion_mask"], True)):
        tensors = {"logps": logps, **given}
        if spoil:
            tensors[where] = tensors[where].clone()
            tensors[where][1, seed % 4] = junk
        leaf = tensors.pop("logps").clone().requires_grad_()
        out = grpo_loss_from_logps(leaf, x["advantages"], mask, config, **tensors)
        results.append((out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]))
    assert results[0][1].isfinite().all()
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.loss_type)
@pytest.mark.parametrize(("rows", "tokens"), [(0, 0), (0, 3), (2, 0), (2, 3)])
def test_nothing_to_learn_from_gives_a_loss_of_zero_and_no_gradient(config, rows, tokens):
    x = batch(0, rows, tokens)
    x["completion_mask"] = torch.zeros_like(x["completion_mask"])
    for function in (by_head, by_logits):
        loss, *gradients = function(spoilt(x, math.nan, -100, False), config)
        assert loss == 0 and not any(g.count_nonzero() for g in gradients)


@few(60)
@given(
    name=st.sampled_from(
        ["completion_ids", "completion_mask", "advantages", "old_logps", "ref_logps", "sampling_logps"]
    ),
    shape=st.lists(st.integers(0, 4), max_size=3),
)
def test_any_other_shape_is_named(name, shape):
    x = batch(1, 2, 3)
    dtype = x[name].dtype
    fits = [[2, 3]] + ([[2]] if name == "advantages" else [])
    changed = {**x, name: torch.zeros(shape).to(dtype)}
    if list(shape) in fits:
        assert by_head(changed, LossConfig())[0].isfinite()
        return
    with pytest.raises(ValueError, match=r"must be .+, got .+; .+"):
        by_head(changed, LossConfig())
