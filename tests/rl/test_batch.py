import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_moe.rl.batch import Group, collate, micro_batches, select, windows
from grpo_moe.types import Completion, Prompt

CPU = torch.device("cpu")


def group(prompt_ids, *completions, reasons=None):
    reasons = reasons or ["stop"] * len(completions)
    made = [Completion(tuple(c), tuple(-0.1 * t for t in c), r) for c, r in zip(completions, reasons, strict=True)]
    zeros = torch.zeros(len(completions))
    return Group(Prompt(tuple(prompt_ids)), made, zeros, zeros, [])


def example(mask_truncated=False):
    groups = [group([5, 6], [7, 8, 9], [3]), group([4], [2, 2], [9, 9, 9, 9], reasons=["stop", "length"])]
    return collate(groups, torch.tensor([[1.0, -1.0], [0.5, -0.5]]), mask_truncated=mask_truncated, device=CPU)


def test_collate_aligns_prompt_completion_and_log_probabilities():
    batch = example()
    assert batch.input_ids.tolist() == [[5, 6, 7, 8, 9], [5, 6, 3, 0, 0], [4, 2, 2, 0, 0], [4, 9, 9, 9, 9]]
    assert batch.attention_mask.sum(1).tolist() == [5, 3, 3, 5]
    assert batch.completion_ids.tolist() == [[7, 8, 9, 0], [3, 0, 0, 0], [2, 2, 0, 0], [9, 9, 9, 9]]
    assert batch.completion_mask.sum(1).tolist() == [3, 1, 2, 4]
    assert batch.prompt_lengths.tolist() == [2, 2, 1, 1]
    assert batch.advantages.tolist() == [1.0, -1.0, 0.5, -0.5]
    torch.testing.assert_close(batch.sampling_logps[0], torch.tensor([-0.7, -0.8, -0.9, 0.0]))
    for row in range(4):
        start, n = int(batch.prompt_lengths[row]), int(batch.completion_mask[row].sum())
        assert torch.equal(batch.input_ids[row, start : start + n], batch.completion_ids[row, :n])


def test_truncated_completions_leave_the_loss_when_asked():
    assert example(mask_truncated=True).completion_mask.sum(1).tolist() == [3, 1, 2, 0]


def test_an_empty_rollout_gives_one_masked_row():
    batch = collate([], torch.zeros(0, 2), mask_truncated=False, device=CPU)
    assert batch.input_ids.shape == (1, 2) and not batch.completion_mask.any()


def test_an_empty_completion_is_a_masked_row():
    batch = collate([group([5, 6], [], [3])], torch.zeros(1, 2), mask_truncated=True, device=CPU)
    assert batch.completion_mask.sum(1).tolist() == [0, 1]
    assert select(batch, torch.tensor([0])).completion_ids.shape == (1, 0)


def test_select_cuts_to_the_longest_row_of_the_choice():
    part = select(example(), torch.tensor([2, 1]))
    assert part.input_ids.tolist() == [[4, 2, 2], [5, 6, 3]]
    assert part.completion_ids.tolist() == [[2, 2], [3, 0]]
    assert part.advantages.tolist() == [0.5, -1.0]
    nothing = select(example(), torch.zeros(0, dtype=torch.long))
    assert len(nothing.input_ids) == 1 and not nothing.completion_mask.any()


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(0, 40), parts=st.integers(1, 6), size=st.integers(1, 9), seed=st.integers(0, 9))
def test_every_row_is_in_exactly_one_micro_batch(rows, parts, size, seed):
    groups = [group([1], [1] * (1 + i % 5)) for i in range(rows)]
    batch = collate(groups, torch.zeros(rows, 1), mask_truncated=False, device=CPU)
    dealt = windows(rows, parts, torch.Generator().manual_seed(seed))
    assert len(dealt) == parts and max(map(len, dealt)) - min(map(len, dealt)) <= 1
    seen = []
    for window in dealt:
        made = micro_batches(batch, window, size)
        assert made and all(len(m) <= size for m in made)
        seen += [int(r) for m in made for r in m]
    assert sorted(seen) == list(range(rows))


def test_micro_batches_put_like_lengths_together():
    groups = [group([1], [1] * n) for n in (9, 1, 8, 2)]
    batch = collate(groups, torch.zeros(4, 1), mask_truncated=False, device=CPU)
    assert [m.tolist() for m in micro_batches(batch, torch.arange(4), 2)] == [[1, 3], [2, 0]]


def test_windows_repeat_under_a_seed():
    deal = lambda seed: [w.tolist() for w in windows(10, 3, torch.Generator().manual_seed(seed))]  # noqa: E731
    assert deal(1) == deal(1) and deal(1) != deal(2)


@pytest.mark.parametrize("reasons", [["stop", "stop"], ["length", "length"]])
def test_mask_truncated_handles_rows_that_are_all_alike(reasons):
    batch = collate([group([1], [2], [3], reasons=reasons)], torch.zeros(1, 2), mask_truncated=True, device=CPU)
    assert batch.completion_mask.sum() == (2 if reasons[0] == "stop" else 0)
