import pytest
import torch

from grpo_moe.rl.batch import Group, collate, select
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


@pytest.mark.parametrize("reasons", [["stop", "stop"], ["length", "length"]])
def test_mask_truncated_handles_rows_that_are_all_alike(reasons):
    batch = collate([group([1], [2], [3], reasons=reasons)], torch.zeros(1, 2), mask_truncated=True, device=CPU)
    assert batch.completion_mask.sum() == (2 if reasons[0] == "stop" else 0)
