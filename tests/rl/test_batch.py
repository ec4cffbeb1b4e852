import math

import pytest
import torch
from chat_templates import KINDS, chat_tokenizer
from tiny import tiny_model

from grpo_moe import GRPOConfig, GRPOTrainer
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


def test_masks_come_from_lengths_and_not_from_token_ids():
    """A row that ran out of room without EOS, padding and EOS ids inside a completion, and rows of every length."""
    pad, eos = 0, 2
    groups = [group([5, pad], [7, pad, eos, pad], [pad], [9, 9, 9, 9, 9], reasons=["stop", "stop", "length"])]
    batch = collate(groups, torch.zeros(1, 3), mask_truncated=False, device=CPU)
    assert batch.completion_mask.tolist() == [[True] * 4 + [False], [True] + [False] * 4, [True] * 5]
    assert batch.attention_mask.sum(1).tolist() == [6, 3, 7]
    for rows in ([0], [1], [2], [1, 0]):
        part = select(batch, torch.tensor(rows))
        assert part.completion_mask.sum(1).tolist() == [[4, 1, 5][row] for row in rows]
        assert part.completion_mask.shape == part.completion_ids.shape == part.sampling_logps.shape


def test_every_completion_may_be_empty():
    batch = collate([group([5, 6], [], [])], torch.zeros(1, 2), mask_truncated=False, device=CPU)
    assert batch.completion_ids.shape == batch.completion_mask.shape == batch.sampling_logps.shape == (2, 0)
    assert batch.input_ids.tolist() == [[5, 6]] * 2 and select(batch, torch.tensor([1])).attention_mask.all()


@pytest.mark.parametrize("unscored", [None, math.nan])
def test_a_token_that_the_engine_did_not_score_is_nan(unscored):
    made = [Completion((7, 8), (-1, unscored), "stop"), Completion((), (), "length")]
    batch = collate(
        [Group(Prompt((5,)), made, torch.zeros(2), torch.zeros(2), [])],
        torch.zeros(1, 2), mask_truncated=False, device=CPU,
    )  # fmt: skip
    assert batch.sampling_logps.dtype == torch.float32 and batch.sampling_logps[0, 0] == -1
    assert batch.sampling_logps[0, 1].isnan() and batch.completion_mask[0].all()


@pytest.mark.parametrize("logps", [(-1.0,), (-1.0, -1.0, -1.0), ()])
def test_other_than_one_log_probability_a_token_is_refused(logps):
    made = [Completion((7, 8), logps, "stop"), Completion((3, 3, 3), (-1.0,) * 3, "stop")]
    groups = [Group(Prompt((5,)), made, torch.zeros(2), torch.zeros(2), [])]
    with pytest.raises(ValueError, match=f"one number for each of the 2 token_ids of a completion, got {len(logps)}"):
        collate(groups, torch.zeros(1, 2), mask_truncated=False, device=CPU)


class Scripted:
    """Draws the tokens of a text one character at a time, which no tokenizer would encode so, and the EOS."""

    def __init__(self, tokenizer, text):
        self.text = text
        self.ids = [tokenizer(c, add_special_tokens=False)["input_ids"][-1] for c in text] + [tokenizer.eos_token_id]

    def generate(self, prompts, sampling):
        made = [Completion(tuple(self.ids[i:]), (-1.0,) * len(self.ids[i:]), "stop", self.text[i:]) for i in range(4)]
        return [made for _ in prompts]

    def sync_weights(self, model):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_rows_hold_the_ids_that_were_drawn_and_are_never_encoded_again(kind, tmp_path):
    """Under templates that encode an answer otherwise than it was drawn, take thoughts out, or end in a newline."""
    tokenizer = chat_tokenizer(kind)
    chat = [{"role": "user", "content": "ab"}]
    engine, said = Scripted(tokenizer, "<think>\nabc\n</think>\n\n12"), []

    def reward(prompts, completions, completion_ids, **_):
        said.extend(zip(prompts, completions, completion_ids, strict=True))
        return [float(i % 4) for i in range(len(prompts))]

    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=32,
        use_cpu=True, show_progress=False, eval_on_start=False, log_completions=False,
    )  # fmt: skip
    model = tiny_model(vocab_size=len(tokenizer), num_hidden_layers=1)
    run = GRPOTrainer(model, reward, args, [{"prompt": chat}], processing_class=tokenizer, rollout_engine=engine)
    batches, add = [], run.add_reference_logps
    run.add_reference_logps = lambda batch: batches.append(add(batch)) or batches[-1]
    said.clear()  # of the check before training
    run.step()
    ((batch,), prompt) = batches, run.source[0].input_ids
    for row in range(8):
        length, drawn = int(batch.attention_mask[row].sum()), engine.ids[row % 4 :]
        assert batch.input_ids[row, :length].tolist() == [*prompt, *drawn]
        assert batch.completion_ids[row, : len(drawn)].tolist() == drawn
        assert batch.completion_mask[row].sum() == len(drawn)
        answer = {"role": "assistant", "content": engine.text[row % 4 :]}
        assert said[row] == (chat, [answer], drawn)
        whole = tokenizer.apply_chat_template([*chat, answer], return_dict=True)["input_ids"]
        assert whole != [*prompt, *drawn]  # what encoding the conversation again would give
