"""The update of a rollout does not depend on how it is split, padded or packed; every row is used as often as asked.

The policy is moved between the rollout and its updates, so that ratios, clipping and the KL term are not trivial.
"""

import itertools
from collections import Counter

import pytest
import torch
from moe_families import tiny_moe
from tiny import prompt_rows, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer

# the optimiser of these tests only looks at gradients
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
GROUP = 4
SPLITS = {  # windows of a rollout of 24 rows -> (micro-batch, accumulation, padding_free)
    1: [(24, 1, False), (1, 24, False), (2, 12, False), (3, 8, False), (8, 3, False), (24, 1, True), (3, 8, True)],
    2: [(12, 1, False), (1, 12, False), (4, 3, False), (6, 2, True)],
    3: [(8, 1, False), (1, 8, False), (2, 4, True)],
}
LOSSES = {
    "dapo": {"beta": 0.04},
    "grpo": {"loss_type": "grpo", "beta": 0.04},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.05, "beta": 0.04},
}
OTHERS = ["bnpo", "sapo", "luspo", "vespo", "gmpo", "dppo_tv", "dppo_kl"]


def by_row(prompts, completions, **columns):
    """A number of its own for almost every completion."""
    return [(7 * len(text) + sum(map(ord, text))) % 11 / 10 for text in completions]


def trainer(path, *, reward=by_row, rows=9, model=None, **changes):
    values = dict(
        output_dir=str(path), num_generations=GROUP, max_completion_length=8, learning_rate=0.0, max_grad_norm=0.0,
        use_cpu=True, show_progress=False, eval_on_start=False, log_completions=False, temperature=0.8,
    )  # fmt: skip
    args = GRPOConfig(**{**values, **changes})
    model = tiny_moe("qwen3_moe", changes={"vocab_size": 30}) if model is None else model
    return GRPOTrainer(model, reward, args, prompt_rows(rows), processing_class=tokenizer())


def gradients(path, windows, split, *, rows=24, **changes):
    """Every gradient of every window of one rollout, in float64, and the lengths of the micro-batches."""
    size, accumulation, padding_free = split
    model = tiny_moe("qwen3_moe", changes={"vocab_size": 30}, experts_implementation="grpo_moe").double()
    run = trainer(
        path, model=model, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
        steps_per_generation=windows * accumulation, padding_free=padding_free, **changes,
    )  # fmt: skip
    assert size * accumulation * windows == rows
    made, sizes, add, loss = [], [], run.add_reference_logps, run.loss

    def move_after(batch):
        batch = add(batch)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * p.std() * torch.randn(p.shape, generator=generator).double())
        return batch

    def watched(batch, *rest):
        sizes.append(tuple(batch.input_ids.shape))
        return loss(batch, *rest)

    run.add_reference_logps, run.loss = move_after, watched
    run.optimizer.step = lambda: made.append([p.grad.clone() for p in model.parameters()])
    metrics = run.step()
    return made, sizes, metrics


def assert_same(expected, other, name):
    assert len(other) == len(expected)
    for number, (one, two) in enumerate(zip(expected, other, strict=True)):
        for a, b in zip(one, two, strict=True):
            atol = 1e-6 * float(a.abs().max())
            torch.testing.assert_close(b, a, rtol=1e-6, atol=atol, msg=f"{name}, window {number}")


@pytest.mark.parametrize(
    ("loss", "windows"),
    [
        pytest.param(loss, windows, marks=[] if loss == "dapo" or windows == 1 else pytest.mark.slow)
        for loss, windows in itertools.product(LOSSES, SPLITS)
    ],
)
def test_gradients_are_the_same_for_every_split(tmp_path, loss, windows):
    splits = SPLITS[windows] if loss == "dapo" else [SPLITS[windows][i] for i in (0, 1, -1)]
    (expected, shapes, metrics), *others = [gradients(tmp_path, windows, split, **LOSSES[loss]) for split in splits]
    assert len(expected) == windows and len({shape[1] for shape in others[0][1]}) > 2  # padded to other lengths
    assert (metrics["ratio_max"] > 1.01) == (windows > 1)  # one update a rollout is on-policy by definition
    assert metrics.get("kl", 1.0) > 1e-5
    assert all(float(g.abs().max()) > 1e-6 for one in expected for g in one)
    for split, (other, _, other_metrics) in zip(splits[1:], others, strict=True):
        assert_same(expected, other, f"{loss} {split}")
        assert other_metrics["loss"] == pytest.approx(metrics["loss"], rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("loss_type", OTHERS)
def test_gradients_of_the_other_losses_are_the_same_one_by_one_and_packed(tmp_path, loss_type):
    whole, single, packed = [
        gradients(tmp_path, 1, split, rows=8, loss_type=loss_type, num_iterations=2)[0]
        for split in ((8, 1, False), (1, 8, False), (4, 2, True))
    ]
    assert max(float(g.abs().max()) for g in whole[0]) > 1e-6
    assert_same(whole, single, loss_type)
    assert_same(whole, packed, loss_type)


@pytest.mark.parametrize(
    "options",
    [
        {"mask_truncated_completions": True},
        {"sampler_correction": "token_truncate", "sampler_clip_max": 1.0},
        {"off_policy_mask_threshold": 0.001, "loss_type": "grpo", "delta": 1.3},
        {"router_aux_loss_coef": 0.1},
        {"routing_replay": "R2"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_gradients_are_the_same_with_options(tmp_path, options):
    splits = [(12, 1, False), (2, 6, False), (6, 2, True)]
    (expected, *_), *others = [gradients(tmp_path, 2, split, **options) for split in splits]
    for split, (other, *_) in zip(splits[1:], others, strict=True):
        assert_same(expected, other, f"{options} {split}")


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_gradients_are_the_same_when_windows_and_micro_batches_come_out_uneven(tmp_path, loss_type):
    """One round of dynamic sampling leaves 5 groups of 6: windows of 7, 7 and 6 rows."""

    def some(prompts, completions, letter, **columns):
        return [0.0 if x == "d" else by_row(None, [text])[0] for text, x in zip(completions, letter, strict=True)]

    options = dict(dynamic_sampling=True, dynamic_sampling_max_rounds=1, reward=some, beta=0.04, loss_type=loss_type)
    (expected, shapes, metrics), *others = [
        gradients(tmp_path, 3, split, **options) for split in ((8, 1, False), (2, 4, False), (4, 2, True))
    ]
    assert metrics["sampling/groups_kept"] == 5 and [shape[0] for shape in shapes] == [7, 7, 6]
    for other, *_ in others:
        assert_same(expected, other, loss_type)


def uses(run, steps):
    """How often the loss saw each row, by (rollout, row); and the prompt's text of each, and the groups kept."""
    seen, text, rollout, kept = Counter(), {}, [-1], []
    collect, add, loss = run.collector.collect, run.add_reference_logps, run.loss

    def collected(*args):
        kept.append(collect(*args))
        return kept[-1]

    def numbered(batch):
        rollout[0] += 1
        batch = add(batch)
        batch.sampling_logps[:] = torch.arange(len(batch.input_ids))[:, None]  # names the row in every part
        return batch

    def counted(batch, *rest):
        rows = batch.sampling_logps[:, 0].long().tolist()
        for row, ids, length, mask in zip(
            rows, batch.input_ids, batch.prompt_lengths, batch.completion_mask, strict=True
        ):
            if mask.any():
                seen[rollout[0], row] += 1
                text[rollout[0], row] = run.tokenizer.decode(ids[:length], skip_special_tokens=True)
        return loss(batch, *rest)

    run.collector.collect, run.add_reference_logps, run.loss = collected, numbered, counted
    for _ in range(steps):
        run.step()
    return seen, text, kept


@pytest.mark.parametrize(
    ("num_iterations", "size", "accumulation", "per_generation"),
    [(1, 8, 1, 3), (3, 8, 1, 3), (3, 3, 2, 8), (1, 1, 12, 24), (3, 24, 1, 1)],
)
def test_every_prompt_is_used_as_often_as_asked(tmp_path, num_iterations, size, accumulation, per_generation):
    """Two epochs of 9 prompts in rollouts of 6: one rollout takes from both."""
    run = trainer(
        tmp_path, per_device_train_batch_size=size, gradient_accumulation_steps=accumulation,
        steps_per_generation=per_generation, num_iterations=num_iterations, learning_rate=1e-3,
    )  # fmt: skip
    seen, text, _ = uses(run, 3)
    assert set(seen) == {(rollout, row) for rollout in range(3) for row in range(24)}
    assert set(seen.values()) == {num_iterations}
    by_prompt = Counter()
    for place, count in seen.items():
        by_prompt[text[place]] += count
    assert by_prompt == {row["prompt"]: 2 * GROUP * num_iterations for row in prompt_rows(9)}
    assert run.state.step == 3 * num_iterations * per_generation // accumulation


@pytest.mark.parametrize("num_iterations", [1, 3])
def test_dynamic_sampling_uses_what_it_keeps_as_often_as_asked(tmp_path, num_iterations):
    """And nothing else; the prompts it drew are the next ones of the stream, each once."""

    def some(prompts, completions, letter, **columns):
        return [by_row(None, [t])[0] if x in "bdfhi" else 0.0 for t, x in zip(completions, letter, strict=True)]

    run = trainer(
        tmp_path, reward=some, per_device_train_batch_size=3, gradient_accumulation_steps=2, steps_per_generation=8,
        num_iterations=num_iterations, dynamic_sampling=True, learning_rate=1e-3,
    )  # fmt: skip
    seen, text, collected = uses(run, 3)
    drawn = [group.prompt.index for rollout in collected for group in rollout.generated]
    assert drawn == list(range(len(drawn))) and run.source.position == len(drawn) > 3 * 6
    used = [group.prompt.raw for rollout in collected for group in rollout.kept]
    assert [text[place] for place in sorted(text)] == [prompt for prompt in used for _ in range(GROUP)]
    assert set(seen.values()) == {num_iterations} and len(seen) == GROUP * len(used) > 0
