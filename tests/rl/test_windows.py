"""Windows and micro-batches: every row once, like lengths together, counts that say what the divisors are."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from hypothesis import given, settings
from hypothesis import strategies as st
from threads import in_processes
from tiny import prompt_rows, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.batch import Group, collate
from grpo_moe.rl.windows import deal_windows, micro_batches
from grpo_moe.types import Completion, Prompt


def batch_of(lengths, reasons=None, mask_truncated=False):
    reasons = reasons or ["stop"] * len(lengths)
    made = [Completion((1,) * n, (-0.1,) * n, reason) for n, reason in zip(lengths, reasons, strict=True)]
    zeros = torch.zeros(1)
    groups = [Group(Prompt((1,)), [completion], zeros, zeros, []) for completion in made]
    return collate(groups, torch.zeros(len(made), 1), mask_truncated=mask_truncated, device=torch.device("cpu"))


def deal(batch, parts, size, seed=0):
    args = SimpleNamespace(windows_per_rollout=parts, per_device_train_batch_size=size)
    counts = lambda batch, rows: (0, 0)  # noqa: E731
    return deal_windows(
        batch, len(batch.input_ids), args, Accelerator(cpu=True), seed=seed, routing_counts=counts
    )  # fmt: skip


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 40), parts=st.integers(1, 6), size=st.integers(1, 9), seed=st.integers(0, 9))
def test_every_row_is_in_exactly_one_micro_batch(rows, parts, size, seed):
    batch = batch_of([1 + i % 5 for i in range(rows)])
    made = deal(batch, parts, size, seed)
    counts = [window.num_sequences for window in made]
    assert len(made) == parts and max(counts) - min(counts) <= 1
    assert all(window.micro_batches and all(len(m) <= size for m in window.micro_batches) for window in made)
    assert sorted(int(r) for window in made for m in window.micro_batches for r in m) == list(range(rows))
    for window in made:
        rows_of = torch.cat(window.micro_batches)
        assert window.num_sequences == len(rows_of)
        assert window.num_loss_tokens == int(batch.completion_mask[rows_of].sum())


@pytest.mark.parametrize(
    ("rows", "parts", "size"),
    [
        ([4, 4, 4, 4], 1, 2),  # 8 micro-batches over 4 processes: none is made up
        ([4, 4, 4, 4], 1, 4),
        ([5, 4, 4, 4], 1, 2),
        ([8, 0, 1, 3], 2, 2),
        ([0, 0, 0, 0], 2, 2),
    ],
)
def test_processes_have_as_many_micro_batches_and_none_too_many(rows, parts, size, monkeypatch):
    batches = [batch_of([1 + i % 5 for i in range(max(n, 1))]) for n in rows]
    args = SimpleNamespace(windows_per_rollout=parts, per_device_train_batch_size=size)

    def work(accelerator):
        rank = accelerator.process_index
        counts = lambda batch, rows: (0, 0)  # noqa: E731
        return deal_windows(batches[rank], rows[rank], args, accelerator, seed=1, routing_counts=counts)

    dealt = in_processes(4, work, monkeypatch, ["grpo_moe.rl.windows"])
    for number, windows in enumerate(zip(*dealt, strict=True)):
        full = [sum(len(m) > 0 for m in window.micro_batches) for window in windows]
        assert {len(window.micro_batches) for window in windows} == {max(1, *full)}, number  # one at least
        tokens = sum(
            int(batch.completion_mask[torch.cat([*w.micro_batches, torch.zeros(0, dtype=torch.long)])].sum())
            for batch, w in zip(batches, windows, strict=True)
        )
        assert {(w.num_loss_tokens, w.num_sequences) for w in windows} == {
            (tokens, sum(len(m) for w in windows for m in w.micro_batches))
        }
    for n, made in zip(rows, dealt, strict=True):
        assert sorted(int(r) for window in made for m in window.micro_batches for r in m) == list(range(n))


def test_micro_batches_put_like_lengths_together():
    batch = batch_of([9, 1, 8, 2])
    assert [m.tolist() for m in micro_batches(batch, torch.arange(4), 2)] == [[1, 3], [2, 0]]


def test_windows_repeat_under_a_seed():
    batch = batch_of([1] * 10)
    dealt = lambda seed: [torch.cat(w.micro_batches).tolist() for w in deal(batch, 3, 2, seed)]  # noqa: E731
    assert dealt(1) == dealt(1) and dealt(1) != dealt(2)


def test_truncated_rows_leave_the_count_of_tokens_and_stay_in_that_of_rows():
    batch = batch_of([3, 8, 8, 8], ["stop", "length", "length", "length"], mask_truncated=True)
    (window,) = deal(batch, 1, 2)
    assert (window.num_loss_tokens, window.num_sequences) == (3, 4)


def test_skipped_groups_count_in_no_window_and_unscored_rows_count_without_an_advantage(tmp_path):
    def reward(prompts, completions, letter, **_):
        if len(completions) > 2 and "c" in letter:
            raise OSError("cannot judge a c")
        return [None if i % 4 == 1 else float(i % 4) for i in range(len(completions))]

    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, steps_per_generation=2,
        max_completion_length=8, use_cpu=True, show_progress=False, loss_type="grpo", reward_on_error="skip",
        shuffle_dataset=False,
    )  # fmt: skip
    run = GRPOTrainer(tiny_model(), reward, args, prompt_rows(4), processing_class=tokenizer())
    seen, minibatches = [], run.minibatches
    run.minibatches = lambda batch, rows: seen.append((batch, minibatches(batch, rows))) or seen[-1][1]
    metrics = run.step()
    ((batch, made),) = seen
    assert metrics["sampling/groups_skipped"] == 1 and len(batch.input_ids) == 3 * 4
    assert sum(window.num_sequences for window in made) == 3 * 4
    assert sum(window.num_loss_tokens for window in made) == int(batch.completion_mask.sum())
    assert (batch.advantages[1::4] == 0).all() and batch.completion_mask[1::4].any()
    assert metrics["num_skipped_tokens"] >= metrics["waterfall/unscored"] == int(batch.completion_mask[1::4].sum())
