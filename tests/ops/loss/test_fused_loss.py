"""`grpo_loss` against the loss on full logits in float64: every loss, option and schedule; then its Triton head."""

import dataclasses
import itertools
import math
import random
import re

import pytest
import torch
from numerics import assert_no_worse_than
from test_objective import OPTIONS, REQUIRED, VARIANTS, configs_of, each_variant, make_config

from grpo_moe.ops.loss import LossConfig, fused_loss, grpo_loss, grpo_loss_from_logits, grpo_loss_from_logps, head
from grpo_moe.ops.loss.config import IMPORTANCE_SAMPLING_LEVELS, KL_ESTIMATORS, LOSS_TYPES, SAMPLER_CORRECTIONS
from grpo_moe.ops.loss.reference import token_logps_reference
from grpo_moe.ops.loss.schedule import SCHEDULES, choose_schedule, is_linear, whole_rows

H, V = 5, 13
GSPO = LossConfig(loss_type="grpo", importance_sampling_level="sequence")


def make_batch(rows=4, width=7, dtype=torch.float64, hidden=H, vocab=V, seed=0, noise=0.15, std=1.0):
    """Inputs of grpo_loss: rows of different lengths, one with a hole, one without a token, one of advantage 0."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    lengths = torch.tensor([(7, 5, 0, 4, 6)[i % 5] for i in range(rows)]).clamp(max=width)
    mask = torch.arange(width) < lengths[:, None]
    mask[1:2, 1:2] = False
    states, weight = normal(rows, width, hidden).to(dtype), (std * normal(vocab, hidden)).to(dtype)
    ids = torch.randint(vocab, (rows, width), generator=generator)
    logps = token_logps_reference(states.double().flatten(0, 1), weight.double(), ids.flatten()).view(rows, width)
    return {
        "hidden_states": states,
        "lm_head_weight": weight,
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": torch.tensor([(1.0, -0.8, 0.4, 0.0, -0.3)[i % 5] for i in range(rows)], dtype=torch.float64),
        **{name: logps + noise * normal(rows, width) for name in ("old_logps", "ref_logps", "sampling_logps")},
    }


def reference(config, batch, *, bias=None, logit_scale=1.0, softcap=None, **counts):
    """The output of the loss on the full logits, in the dtype of the batch."""
    batch = dict(batch)
    hidden, weight, ids = (batch.pop(name) for name in ("hidden_states", "lm_head_weight", "completion_ids"))
    options = {"bias": bias, "temperature": config.temperature, "logit_scale": logit_scale, "softcap": softcap}
    safe_ids = torch.where(batch["completion_mask"], ids, 0)
    both = token_logps_reference(hidden.flatten(0, 1), weight, safe_ids.flatten(), return_entropy=True, **options)
    logps, entropy = (x.view(ids.shape) for x in both)
    entropy = entropy if config.top_entropy_quantile != 1 else None
    return grpo_loss_from_logps(logps, config=config, entropy=entropy, **batch, **counts)


def outcome(function, config, batch, needed=("hidden_states", "lm_head_weight"), **options):
    """(output, gradients of the needed inputs; those of the bias last if it has one)."""
    leaves = {name: batch[name].clone().requires_grad_() for name in needed}
    if options.get("bias") is not None:
        options["bias"] = options["bias"].clone().requires_grad_()
    if function is reference:
        options.pop("schedule", None), options.pop("chunk_size", None)
        output = reference(config, {**batch, **leaves}, **options)
    else:
        output = grpo_loss(config=config, **{**batch, **leaves}, **options)
    output.loss.backward()
    sources = [*leaves.values(), options.get("bias")]
    return output, [leaf.grad for leaf in sources if leaf is not None]


def assert_same(actual, expected, **tolerance):
    tolerance = tolerance or {"rtol": 1e-9, "atol": 1e-11}
    torch.testing.assert_close(actual[0].loss, expected[0].loss, **tolerance)
    for a, b in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def schedules_of(config, batch, chunk_size):
    """The schedules that are exact for the batch."""
    longest = int(batch["completion_mask"].sum(1).max())
    for schedule in SCHEDULES:
        try:
            yield choose_schedule(config, schedule, batch["old_logps"] is not None, False, longest, chunk_size)
        except ValueError:
            pass


@each_variant
@pytest.mark.parametrize("on_policy", [False, True])
def test_every_schedule_equals_the_full_logits(variant, on_policy):
    batch = make_batch()
    if on_policy:
        batch["old_logps"] = None
    tried = set()
    for config, chunk_size in itertools.product(configs_of(variant), (3, 100)):
        expected = outcome(reference, config, batch)
        assert any(g.abs().max() > 1e-4 for g in expected[1])
        for schedule in ("auto", *schedules_of(config, batch, chunk_size)):
            actual = outcome(grpo_loss, config, batch, schedule=schedule, chunk_size=chunk_size)
            assert_same(actual, expected)
            tried.add(schedule)
    assert {"auto", "one-pass", "two-pass"} <= tried


def test_sequence_linear_is_exact_where_it_is_chosen():
    batch, chosen = make_batch(), set()
    for variant in VARIANTS:
        for config in configs_of(variant):
            if choose_schedule(config, "auto", True, False, 7, 3) == "sequence-linear":
                chosen.add(config.loss_type)
                actual = outcome(grpo_loss, config, batch, schedule="sequence-linear", chunk_size=3)
                assert_same(actual, outcome(reference, config, batch))
    assert {"grpo", "dapo", "dr_grpo", "luspo", "vespo"} <= chosen


@each_variant
@pytest.mark.parametrize("value", [math.nan, -60.0])
def test_schedules_agree_on_tokens_that_are_dropped_or_cut(variant, value):
    config, batch = make_config(variant), make_batch()
    batch["old_logps"][0, 4] = batch["old_logps"][1, 2] = value
    for chunk_size in (3, 100):
        assert_same(outcome(grpo_loss, config, batch, chunk_size=chunk_size), outcome(reference, config, batch))


@each_variant
def test_advantage_a_token_equals_the_full_logits(variant):
    config, batch = make_config(variant), make_batch()
    batch["advantages"] = batch["advantages"][:, None] + torch.linspace(-0.5, 0.5, 7, dtype=torch.float64)
    for chunk_size in (3, 100):
        assert_same(outcome(grpo_loss, config, batch, chunk_size=chunk_size), outcome(reference, config, batch))


@pytest.mark.parametrize("config", [LossConfig(), GSPO, LossConfig(loss_type="vespo")])
def test_capture_masks_what_it_cannot_drop(config, monkeypatch):
    batch = make_batch()
    expected = outcome(reference, config, batch)
    monkeypatch.setattr(fused_loss, "_cells", lambda m: (torch.arange(m.numel()), [m.shape[1]] * len(m)))
    for chunk_size in (3, 100):
        assert_same(outcome(grpo_loss, config, batch, chunk_size=chunk_size), expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_only_log_probabilities_are_made(mode, monkeypatch):
    monkeypatch.setattr(head.TorchHead, "backward", None)
    batch = make_batch()
    weight = torch.nn.Parameter(batch["lm_head_weight"])
    with mode():
        loss = grpo_loss(config=LossConfig(), **{**batch, "lm_head_weight": weight}).loss
    torch.testing.assert_close(loss, reference(LossConfig(), batch).loss)


def test_fp16_gradients_survive_a_small_loss_and_a_large_scale():
    batch = make_batch(dtype=torch.float16)
    counts = {"num_loss_tokens": 2**20}
    leaves = {n: batch[n].clone().requires_grad_() for n in ("hidden_states", "lm_head_weight")}
    (grpo_loss(config=LossConfig(), **{**batch, **leaves}, **counts, chunk_size=3).loss * 2**20).backward()
    wide = {n: x.double() if n in leaves else x for n, x in batch.items()}
    truth = outcome(reference, LossConfig(), wide, num_loss_tokens=1)
    for leaf, t in zip(leaves.values(), truth[1], strict=True):
        assert (leaf.grad - t).norm() < 2e-3 * t.norm()


@pytest.mark.parametrize(
    ("config", "old_given", "longest", "schedule"),
    [
        (LossConfig(), True, 100, "one-pass"),
        (LossConfig(beta=0.1), True, 100, "one-pass"),
        (GSPO, True, 8, "one-pass"),
        (GSPO, True, 9, "sequence-linear"),
        (GSPO, False, 9, "one-pass"),
        (LossConfig(loss_type="vespo"), True, 9, "sequence-linear"),
        (LossConfig(loss_type="gmpo"), True, 9, "two-pass"),
        (LossConfig(loss_type="grpo", importance_sampling_level="sequence", beta=0.1), True, 9, "two-pass"),
        (LossConfig(off_policy_mask_threshold=0.1), True, 9, "two-pass"),
        (LossConfig(top_entropy_quantile=0.5), True, 1, "two-pass"),
    ],
)
def test_auto_takes_the_cheapest_exact_schedule(config, old_given, longest, schedule):
    assert choose_schedule(config, "auto", old_given, False, longest, 8) == schedule


def test_linear_losses_depend_on_the_row():
    for variant in VARIANTS:
        for config in configs_of(variant):
            assert whole_rows(config, True) or not is_linear(config, False)


@pytest.mark.parametrize(
    "options",
    [
        {"bias": torch.linspace(-1, 1, V, dtype=torch.float64)},
        {"logit_scale": 0.3},
        {"softcap": 2.0},
        {"bias": torch.linspace(-1, 1, V, dtype=torch.float64), "softcap": 3.0, "logit_scale": 1.7},
    ],
)
@pytest.mark.parametrize("config", [LossConfig(temperature=0.7), GSPO])
def test_head_options_equal_the_full_logits(config, options):
    batch = make_batch()
    for chunk_size in (3, 100):
        actual = outcome(grpo_loss, config, batch, chunk_size=chunk_size, **options)
        assert_same(actual, outcome(reference, config, batch, **options))


@pytest.mark.parametrize("needed", [("hidden_states",), ("lm_head_weight",)])
@pytest.mark.parametrize("config", [LossConfig(), GSPO])
def test_only_the_needed_gradient_is_computed(needed, config, monkeypatch):
    seen = []
    backward = head.TorchHead.backward

    def watched(self, *args, **grads):
        seen.append(frozenset(name for name, x in grads.items() if x))
        return backward(self, *args, **grads)

    monkeypatch.setattr(head.TorchHead, "backward", watched)
    batch = make_batch()
    actual = outcome(grpo_loss, config, batch, needed, chunk_size=3)
    assert_same(actual, outcome(reference, config, batch, needed))
    (names,) = set(seen)
    assert names == {{"hidden_states": "need_hidden", "lm_head_weight": "grad_weight"}[needed[0]]}


def test_rows_that_carry_no_gradient_are_dropped_before_any_product(monkeypatch):
    rows = []
    logits = head.TorchHead.logits
    monkeypatch.setattr(head.TorchHead, "logits", lambda self, x: rows.append(len(x)) or logits(self, x))
    batch = make_batch()  # lengths 7, 4 (a hole), 0, 4; the last has advantage 0
    output, _ = outcome(grpo_loss, LossConfig(), batch)
    assert sum(rows) == 11 and output.stats["num_skipped_tokens"] == 4 and output.stats["num_tokens"] == 11
    rows.clear()
    output, _ = outcome(grpo_loss, LossConfig(beta=0.1), batch)
    assert sum(rows) == 15 and output.stats["num_skipped_tokens"] == 0
    rows.clear()
    with torch.no_grad():
        grpo_loss(config=LossConfig(), **batch)
    assert sum(rows) == 11


@each_variant
def test_garbage_outside_the_mask_changes_nothing(variant):
    config, batch = make_config(variant), make_batch()
    masked = ~batch["completion_mask"]
    poisoned = dict(batch)
    for name, value in {"old_logps": math.nan, "ref_logps": math.inf, "sampling_logps": -math.inf}.items():
        poisoned[name] = batch[name].masked_fill(masked, value)
    poisoned["hidden_states"] = batch["hidden_states"].masked_fill(masked[..., None], math.nan)
    poisoned["completion_ids"] = batch["completion_ids"].masked_fill(masked, -100)
    for schedule, chunk_size in [("auto", 3), ("two-pass", 3), ("auto", 100)]:
        clean, dirty = (
            outcome(grpo_loss, config, b, schedule=schedule, chunk_size=chunk_size) for b in (batch, poisoned)
        )
        assert_same(dirty, clean, rtol=0, atol=0)
        assert dirty[0].stats.keys() == clean[0].stats.keys()
        assert all(torch.equal(dirty[0].stats[name], x) for name, x in clean[0].stats.items())


@each_variant
def test_token_with_hidden_states_of_nan_is_dropped_and_counted(variant):
    config, batch = make_config(variant), make_batch()
    broken = dict(batch, hidden_states=batch["hidden_states"].clone(), completion_mask=batch["completion_mask"].clone())
    broken["hidden_states"][0, 6] = math.nan
    output, gradients = outcome(grpo_loss, config, broken, chunk_size=100)
    broken["completion_mask"][0, 6] = False
    assert output.stats["num_dropped_tokens"] == 1
    num_loss_tokens = int(batch["completion_mask"].sum())
    without = outcome(grpo_loss, config, broken, chunk_size=100, num_loss_tokens=num_loss_tokens)
    assert_same((output, gradients), without)


@each_variant
def test_micro_batches_add_up(variant):
    config, batch = make_config(variant), make_batch(rows=9)
    counts = {"num_loss_tokens": int(batch["completion_mask"].sum()), "num_sequences": 9}
    whole = outcome(grpo_loss, config, batch, chunk_size=4, **counts)
    loss, total = 0, [torch.zeros_like(g) for g in whole[1]]
    order = torch.randperm(9)
    for rows in order.split([2, 3, 1, 3]):
        part = {n: x if n == "lm_head_weight" else x[rows] for n, x in batch.items()}
        output, (hidden, weight) = outcome(grpo_loss, config, part, chunk_size=3, **counts)
        loss += output.loss
        total[0][rows] += hidden
        total[1] += weight
    torch.testing.assert_close(loss, whole[0].loss, rtol=1e-9, atol=1e-12)
    for a, b in zip(total, whole[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-12)


@each_variant
def test_batch_without_a_token_gives_a_differentiable_zero(variant):
    batch = make_batch()
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    output, gradients = outcome(grpo_loss, make_config(variant), batch)
    assert output.loss == 0 and all(torch.count_nonzero(g) == 0 for g in gradients)


def test_stats_and_token_losses_equal_those_of_the_full_logits():
    batch = make_batch()
    batch["advantages"] = batch["advantages"] + 0.1  # nothing is skipped
    config = LossConfig(beta=0.1, sampler_correction="token_mask")
    actual, expected = outcome(grpo_loss, config, batch, chunk_size=3)[0], outcome(reference, config, batch)[0]
    torch.testing.assert_close(actual.per_token_loss, expected.per_token_loss.detach(), rtol=1e-9, atol=1e-12)
    assert not actual.per_token_loss.requires_grad
    for name, value in expected.stats.items():
        torch.testing.assert_close(actual.stats[name], value, rtol=1e-9, atol=1e-12)


def test_upstream_gradient_retained_graph_and_tied_weight():
    batch = make_batch()
    hidden, weight = (batch[n].clone().requires_grad_() for n in ("hidden_states", "lm_head_weight"))
    loss = grpo_loss(config=LossConfig(), **{**batch, "hidden_states": hidden, "lm_head_weight": weight}).loss
    once = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    scaled = torch.autograd.grad(loss * -0.3, (hidden, weight), retain_graph=True)
    again = torch.autograd.grad(loss, (hidden, weight))
    for a, b, c in zip(once, scaled, again, strict=True):
        torch.testing.assert_close(b, a * -0.3)
        assert torch.equal(a, c)
    tied = batch["lm_head_weight"].clone().requires_grad_()
    tied_batch = {**batch, "hidden_states": tied[batch["completion_ids"]], "lm_head_weight": tied}
    ours = torch.autograd.grad(grpo_loss(config=LossConfig(), **tied_batch).loss, tied, retain_graph=True)
    torch.testing.assert_close(ours, torch.autograd.grad(reference(LossConfig(), tied_batch).loss, tied))


def test_non_contiguous_inputs():
    batch = make_batch()
    strided = dict(batch)
    strided["hidden_states"] = batch["hidden_states"].transpose(0, 1).contiguous().transpose(0, 1)
    strided["lm_head_weight"] = batch["lm_head_weight"].T.contiguous().T
    strided["old_logps"] = batch["old_logps"].T.contiguous().T
    assert not strided["hidden_states"].is_contiguous()
    config = LossConfig()
    actual = grpo_loss(config=config, **{**strided, "hidden_states": (h := strided["hidden_states"].requires_grad_())})
    actual.loss.backward()
    expected = outcome(grpo_loss, config, batch)
    assert actual.loss == expected[0].loss
    torch.testing.assert_close(h.grad, expected[1][0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_no_worse_than_eager(dtype):
    batch = make_batch(rows=8, width=7, dtype=dtype, hidden=32, vocab=127)
    wide = {n: x.double() if n in ("hidden_states", "lm_head_weight") else x for n, x in batch.items()}
    truth, eager = outcome(reference, LossConfig(), wide), outcome(reference, LossConfig(), batch)
    actual = outcome(grpo_loss, LossConfig(), batch, chunk_size=9)
    for e, a, t in zip(eager[1], actual[1], truth[1], strict=True):
        assert a.dtype == dtype
        assert_no_worse_than(e, a, t)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_states": torch.zeros(4, H)}, r"hidden_states must be a tensor \[B, T, H\]"),
        ({"hidden_states": torch.zeros(4, 7, H, dtype=torch.long)}, "hidden_states must be floating point"),
        (
            {"completion_ids": torch.zeros(4, 6, dtype=torch.long)},
            r"completion_mask must be \[B, T\] = \(4, 6\) as completion_ids",
        ),
        ({"completion_ids": torch.zeros(4, 7)}, "completion_ids must be integers"),
        ({"lm_head_weight": torch.zeros(V, H, device="meta")}, "lm_head_weight must be on cpu"),
        ({"config": {}}, "config must be a LossConfig, got dict"),
        ({"advantages": None}, "advantages must be a tensor, got NoneType"),
        ({"completion_mask": None}, "completion_mask must be a tensor, got NoneType"),
        ({"num_loss_tokens": -5}, "num_loss_tokens must be an int of at least 0"),
        ({"softcap": "3"}, "softcap must be finite and above 0"),
        ({"completion_mask": torch.ones(4, 6)}, "completion_mask must be"),
        ({"completion_ids": torch.full((4, 7), V)}, r"completion_ids must be in \[0, V\)"),
        ({"lm_head_weight": torch.zeros(V, H + 1)}, "lm_head_weight must be"),
        ({"schedule": "three-pass"}, "schedule must be one of auto, one-pass, sequence-linear, two-pass"),
        ({"chunk_size": 0}, "chunk_size must be an integer of at least 1"),
        ({"softcap": -1.0}, "softcap must be finite and above 0"),
        ({"advantages": torch.zeros(3)}, "advantages must be"),
        ({"config": GSPO, "schedule": "one-pass", "chunk_size": 3}, "schedule must be exact for loss_type 'grpo'"),
        ({"schedule": "sequence-linear"}, "schedule must be exact for loss_type 'dapo'"),
        ({"config": LossConfig(beta=0.1), "ref_logps": None}, "ref_logps must be given"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    batch = make_batch()
    batch["hidden_states"].requires_grad_()
    with pytest.raises(ValueError, match=message):
        grpo_loss(**{**batch, "config": LossConfig(), **change})


# --- what users of other libraries reported, on every path from logits to the loss ---

GARBAGE = torch.tensor([math.nan, math.inf, -math.inf, 1e10, -1e10, 200.0, -900.0], dtype=torch.float64)
BY_TOKEN = ("hidden_states", "completion_ids", "completion_mask", "old_logps", "ref_logps", "sampling_logps")
ADVANTAGES = torch.tensor([1.0, -0.8, 0.4, -0.3], dtype=torch.float64)  # no row is skipped


def live_batch(**kind):
    return {**make_batch(**kind), "advantages": ADVANTAGES}


def from_logits(config, batch, **options):
    """(output, gradients of hidden states and weight) of `grpo_loss_from_logits`; masked hidden states make no NaN."""
    batch = dict(batch)
    hidden, weight = batch.pop("hidden_states"), batch.pop("lm_head_weight")
    logits = (hidden @ weight.T).requires_grad_()
    output = grpo_loss_from_logits(logits, config=config, **batch, **options)
    (grad,) = torch.autograd.grad(output.loss, logits)
    kept = hidden.masked_fill(~batch["completion_mask"][..., None], 0)
    return output, [grad @ weight, grad.flatten(0, 1).T @ kept.flatten(0, 1)]


PATHS = {
    "logps": lambda config, batch, **options: outcome(reference, config, clean_hidden(batch), **options),
    "logits": from_logits,
    "fused": lambda config, batch, **options: outcome(grpo_loss, config, batch, chunk_size=3, **options),
    "fused whole": lambda config, batch, **options: outcome(grpo_loss, config, batch, chunk_size=100, **options),
}
each_path = pytest.mark.parametrize("path", PATHS)


def clean_hidden(batch):
    """For autograd's own matmul, of which we promise nothing: 0 in place of masked hidden states."""
    masked = ~batch["completion_mask"][..., None]
    return {**batch, "hidden_states": batch["hidden_states"].masked_fill(masked, 0)}


def with_garbage(batch, columns=5):
    """The batch with so many masked columns more, and garbage in every masked cell and every row without a token."""
    wide = {"lm_head_weight": batch["lm_head_weight"], "advantages": batch["advantages"]}
    for name in batch.keys() - wide.keys():
        x = batch[name]
        wide[name] = torch.cat([x, x.new_zeros(x.shape[0], columns, *x.shape[2:])], 1)
    mask = wide["completion_mask"]
    for shift, name in enumerate(("old_logps", "ref_logps", "sampling_logps")):
        filler = GARBAGE[(torch.arange(mask.numel()).view(mask.shape) + shift) % len(GARBAGE)]
        wide[name] = torch.where(mask, wide[name], filler)
    filler = GARBAGE[torch.arange(mask.numel()).view(mask.shape) % len(GARBAGE)][..., None]
    wide["hidden_states"] = torch.where(mask[..., None], wide["hidden_states"], filler)
    wide["completion_ids"] = wide["completion_ids"].masked_fill(~mask, -100)
    wide["advantages"] = torch.where(mask.any(1), batch["advantages"], math.nan)
    return wide


@each_path
@each_variant
def test_garbage_in_masked_cells_and_more_padding_change_nothing_on_any_path(variant, path):
    """NaN, infinities, 1e10 and ratios beyond exp's range: loss, gradients and statistics are those of the batch."""
    batch = live_batch()
    wide = with_garbage(batch)
    for config in configs_of(variant):
        clean, dirty = (PATHS[path](config, b) for b in (batch, wide))
        torch.testing.assert_close(dirty[0].loss, clean[0].loss, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(dirty[1][0][:, :7], clean[1][0], rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(dirty[1][1], clean[1][1], rtol=1e-9, atol=1e-13)
        assert clean[1][0].count_nonzero() and dirty[1][0][:, 7:].count_nonzero() == 0
        torch.testing.assert_close(dirty[0].stats, clean[0].stats, rtol=1e-12, atol=1e-14)
        assert all(x.isfinite() for x in clean[0].stats.values())


@each_variant
def test_options_together_give_one_loss_on_every_path(variant):
    """Pairs of options, and as many together as the loss takes: no path drops one of them."""
    drawn, batch, tried = random.Random(str(variant)), live_batch(noise=0.3), 0
    pairs = drawn.sample(list(itertools.combinations(OPTIONS, 2)), 9)
    for chosen in (*pairs, drawn.sample(OPTIONS, len(OPTIONS))):
        options = {}
        for option in chosen:
            options = {**options, **option} if make_config(variant, {**options, **option}) else options
        config = make_config({**variant, "temperature": 0.8}, options)
        expected = PATHS["logps"](config, batch)
        for path in ("logits", "fused", "fused whole"):
            assert_same(PATHS[path](config, batch), expected)
        tried += len(options) > 1
    assert tried > 5


@each_path
@each_variant
def test_counts_of_nothing_one_and_a_hundred_divide(variant, path):
    config, batch = make_config(variant), live_batch()

    def run(count):
        return PATHS[path](config, batch, num_loss_tokens=count, num_sequences=count)

    one = run(1)
    for count, divisor in ((0, 1), (torch.tensor(0), 1), (100, 100), (torch.tensor(100.0), 100)):
        output, gradients = run(count)
        torch.testing.assert_close(output.loss * divisor, one[0].loss)
        torch.testing.assert_close([g * divisor for g in gradients], one[1])
    assert one[0].loss != 0 and one[0].loss.isfinite()


@each_path
@each_variant
def test_doubling_all_lengths_leaves_means_over_tokens(variant, path):
    """On-policy, so that vespo's weight of a row is 1 whatever its length. luspo and dr_grpo sum over a row."""
    config, batch = make_config(variant), {**live_batch(), "old_logps": None}
    long = {n: torch.cat([x, x], 1) if n in BY_TOKEN and x is not None else x for n, x in batch.items()}
    once, twice = PATHS[path](config, batch), PATHS[path](config, long)
    factor = 2 if config.loss_type in ("luspo", "dr_grpo") else 1
    torch.testing.assert_close(twice[0].loss, factor * once[0].loss)
    torch.testing.assert_close(twice[1][1], factor * once[1][1])


@each_path
@each_variant
def test_masked_tokens_in_the_middle_count_as_if_they_were_not_there(variant, path):
    """As the output of a tool between two turns: every mean is over the tokens of the mask, not over the length."""
    batch = live_batch()
    rows = [[1, 1, 0, 0, 1, 1, 1], [1, 0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0, 1]]
    mask = batch["completion_mask"] = torch.tensor(rows).bool()
    order = torch.arange(4)[:, None], (~mask).int().argsort(dim=1, stable=True)  # the tokens of the mask first
    short = {n: x[order] if n in BY_TOKEN else x for n, x in batch.items()}
    for config in configs_of(variant):
        apart, together = PATHS[path](config, batch), PATHS[path](config, short)
        torch.testing.assert_close(apart[0].loss, together[0].loss)
        torch.testing.assert_close(apart[1][1], together[1][1], rtol=1e-9, atol=1e-13)
        torch.testing.assert_close(apart[0].stats, together[0].stats)


@each_path
@pytest.mark.parametrize("rows, width", [(3, 3), (2, 3)])
@each_variant
def test_an_advantage_belongs_to_its_row_also_in_a_square(variant, rows, width, path):
    config, batch = make_config(variant), make_batch(rows, width)
    batch["completion_mask"] = torch.ones(rows, width, dtype=torch.bool)
    batch["advantages"] = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)[:rows]
    by_row = PATHS[path](config, batch)
    by_token = PATHS[path](config, {**batch, "advantages": batch["advantages"][:, None].expand(rows, width)})
    assert_same(by_row, by_token)
    alone = sum(
        PATHS[path](
            config,
            {n: x if n == "lm_head_weight" else x[[row]] for n, x in batch.items()},
            num_loss_tokens=rows * width, num_sequences=rows,
        )[0].loss
        for row in range(rows)
    )  # fmt: skip
    torch.testing.assert_close(alone, by_row[0].loss)


NAMES = {
    "loss_type": LOSS_TYPES, "kl_estimator": KL_ESTIMATORS, "sampler_correction": SAMPLER_CORRECTIONS,
    "importance_sampling_level": IMPORTANCE_SAMPLING_LEVELS,
}  # fmt: skip


@each_path
@pytest.mark.parametrize("option, value", [(option, value) for option, values in NAMES.items() for value in values])
def test_every_documented_name_is_documented_and_runs(option, value, path):
    text = {f.name: f.metadata["help"] for f in dataclasses.fields(LossConfig)}[option]
    words = set(re.findall(r"\w+", text.replace("*", "")))
    named = value == "none" or value in words or any(w.endswith("_") and value.startswith(w) for w in words)
    assert named, text
    own = {"sampler_clip_min": 0.5, "sampler_clip_max": 2.0} if value == "geometric_mask" else REQUIRED.get(value, {})
    output, gradients = PATHS[path](LossConfig(**{option: value, "beta": 0.1, **own}), live_batch())
    assert output.loss.isfinite() and all(g.isfinite().all() and g.count_nonzero() for g in gradients)


def kl_gradient(path, config, logits, old_logits, ref_logits):
    """Expectation over the tokens drawn from the old policy of the gradient of the KL term in the logits [V]."""
    vocabulary = len(logits)
    old_logps, ref_logps = (x.log_softmax(0) for x in (old_logits, ref_logits))
    total = torch.zeros_like(logits)
    for token in range(vocabulary):
        batch = {
            "hidden_states": logits.view(1, 1, -1), "lm_head_weight": torch.eye(vocabulary, dtype=torch.float64),
            "completion_ids": torch.tensor([[token]]), "completion_mask": torch.ones(1, 1, dtype=torch.bool),
            "advantages": torch.zeros(1), "ref_logps": ref_logps[token].view(1, 1), "sampling_logps": None,
            "old_logps": old_logps[token].view(1, 1),
        }  # fmt: skip
        total += old_logps[token].exp() * PATHS[path](config, batch)[1][0].flatten()
    return total


def finite_differences(function, x, step=1e-6):
    return torch.stack([(function(x + e) - function(x - e)) / (2 * step) for e in step * torch.eye(len(x)).to(x)])


@each_path
@pytest.mark.parametrize(
    "estimator, corrected, off_policy",
    [("k1", True, False), ("k1", True, True), ("k3", True, False), ("k3", True, True), ("k2", False, False)],
)
def test_expected_kl_gradient_equals_finite_differences(path, estimator, corrected, off_policy):
    """Weighted by the ratio the estimate is without bias for samples of an older policy too; k2 is on-policy only."""
    logits = torch.tensor([0.3, -0.5, 1.1], dtype=torch.float64)
    ref_logits = torch.tensor([0.9, 0.2, -0.4], dtype=torch.float64)
    old_logits = logits + off_policy * torch.tensor([0.2, -0.3, 0.4], dtype=torch.float64)

    def kl(x):
        logps = x.log_softmax(0)
        return (logps.exp() * (logps - ref_logits.log_softmax(0))).sum()

    config = LossConfig(beta=1.0, kl_estimator=estimator, use_bias_correction_kl=corrected)
    actual = kl_gradient(path, config, logits, old_logits, ref_logits)
    torch.testing.assert_close(actual, finite_differences(kl, logits), rtol=1e-6, atol=1e-8)


@each_path
def test_the_cut_of_the_kl_leaves_its_score_function(path):
    """The reference gives token 0 the probability exp(-30): its estimate is cut, and still pulls with that weight."""
    logits = torch.zeros(3, dtype=torch.float64)
    ref_logits = torch.tensor([-30.0, 0.0, 0.0], dtype=torch.float64)
    (truth,) = torch.autograd.functional.jacobian(
        lambda x: (x.softmax(0) * (x.log_softmax(0) - ref_logits.log_softmax(0))).sum(), (logits,)
    )
    for estimator in ("k1", "k3"):
        actual = kl_gradient(path, LossConfig(beta=1.0, kl_estimator=estimator), logits, logits, ref_logits)
        assert (actual / truth).min() > 0.6 and (actual / truth).max() < 1.01


@each_path
@each_variant
def test_inputs_are_left_as_they_are_on_every_path(variant, path):
    batch = with_garbage(live_batch())
    before = {name: x.clone() for name, x in batch.items()}
    for config in configs_of(variant):
        PATHS[path](config, batch)
    for name, x in before.items():
        torch.testing.assert_close(batch[name], x, rtol=0, atol=0, equal_nan=True)


MASKING = [
    {"sampler_correction": "token_mask"},
    {"sampler_correction": "sequence_mask"},
    {"sampler_correction": "geometric_mask", "sampler_clip_min": 0.5, "sampler_clip_max": 2.0},
]


@each_path
@pytest.mark.parametrize("option", MASKING, ids=lambda o: o["sampler_correction"])
@pytest.mark.parametrize("old_given", [False, True])
@pytest.mark.parametrize("loss_type", [t for t in LOSS_TYPES if t != "vespo"])
def test_a_mismatch_beyond_the_range_of_exp_masks_and_makes_no_nan(loss_type, old_given, option, path):
    """One token of row 0 was all but impossible to the sampler: exp(9999) times a mask of 0 must not be NaN.

    Not for vespo, whose weight of the row leaves such a token out: test_vespo_leaves_masked_tokens_out_of_its_weight.
    """
    config = LossConfig(**{"loss_type": loss_type, **REQUIRED.get(loss_type, {})}, **option)
    batch = live_batch()
    batch["sampling_logps"] = batch["old_logps"].clone()  # no other mismatch
    if not old_given:
        states = batch["hidden_states"].flatten(0, 1)
        logps = token_logps_reference(states, batch["lm_head_weight"], batch["completion_ids"].flatten())
        batch["old_logps"], batch["sampling_logps"] = None, logps.view(4, 7)
    batch["sampling_logps"][0, 2] = -1e4
    output, gradients = PATHS[path](config, batch)
    assert output.loss.isfinite() and all(g.isfinite().all() for g in gradients)
    assert all(x.isfinite() for x in output.stats.values())
    stopped = gradients[0][0, 2] if option["sampler_correction"] == "token_mask" else gradients[0][0]
    # a token of gmpo stands in the losses of its row's other tokens too
    assert stopped.count_nonzero() == 0 or (loss_type == "gmpo" and option["sampler_correction"] == "token_mask")
    assert gradients[0][1].count_nonzero()


@each_path
@each_variant
def test_a_token_that_the_engine_did_not_score_has_weight_one_and_is_no_evidence(variant, path):
    batch = live_batch()
    batch["sampling_logps"] = batch["old_logps"] + 0.05
    broken, as_old, as_now = ({**batch, "sampling_logps": batch["sampling_logps"].clone()} for _ in range(3))
    states, ids = batch["hidden_states"][1, 2:5], batch["completion_ids"][1, 2:5]
    broken["sampling_logps"][1, 2:5] = torch.tensor([math.nan, -math.inf, math.inf])
    as_old["sampling_logps"][1, 2:5] = batch["old_logps"][1, 2:5]
    as_now["sampling_logps"][1, 2:5] = token_logps_reference(states, batch["lm_head_weight"], ids)
    corrections = [(option, as_old) for option in OPTIONS if "sampler_correction" in option]
    for option, expected in (*corrections, ({"off_policy_mask_threshold": 0.5}, as_now)):
        if config := make_config(variant, option):
            actual = PATHS[path](config, broken)
            assert_same(actual, PATHS[path](config, expected))
            assert actual[0].stats["num_unscored_tokens"] == 3
            assert actual[0].stats.get("off_policy_masked", 0) == 0


@each_path
@each_variant
def test_batch_without_a_token_has_finite_statistics_on_every_path(variant, path):
    batch = live_batch()
    batch["completion_mask"] = torch.zeros_like(batch["completion_mask"])
    batch = with_garbage(batch, columns=1)
    for config in configs_of(variant):
        output, gradients = PATHS[path](config, batch)
        assert output.loss == 0 and not any(g.count_nonzero() for g in gradients)
        assert all(x.isfinite() for x in output.stats.values())


def test_removed_tokens_add_nothing_to_the_entropy_of_the_loss():
    """Logits 0, 1, -inf: .5822 nats, by the head and from logits, and gradients are finite."""
    ids, mask, advantages = torch.tensor([[1]]), torch.ones(1, 1), torch.ones(1)
    weight = torch.tensor([[0.0], [1.0], [5.0]], requires_grad=True)
    bias = torch.tensor([0.0, 0.0, -math.inf])
    hidden = torch.ones(1, 1, 1, requires_grad=True)
    fused = grpo_loss(hidden, weight, ids, mask, advantages, LossConfig(), bias=bias, return_entropy=True)
    fused.loss.backward()
    logits = torch.tensor([[[0.0, 1.0, -math.inf]]], requires_grad=True)
    plain = grpo_loss_from_logits(logits, ids, mask, advantages, LossConfig(top_entropy_quantile=0.5))
    plain.loss.backward()
    for output in (fused, plain):
        assert output.stats["entropy"].item() == pytest.approx(0.5822, abs=1e-4)
    assert all(g.isfinite().all() and g.count_nonzero() for g in (hidden.grad, weight.grad, logits.grad))
