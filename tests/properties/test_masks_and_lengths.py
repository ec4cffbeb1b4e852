"""Prompts and completions of any length keep their tokens in a batch, in any part of it, and in micro-batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from properties.effort import few

from grpo_moe.rl.batch import Group, collate, select
from grpo_moe.rl.windows import micro_batches
from grpo_moe.types import Completion, Prompt

ids = st.integers(0, 2**31 - 1)
scores = st.one_of(st.floats(-9, 0), st.none(), st.just(math.nan))


@st.composite
def completions(draw):
    tokens = draw(st.lists(ids, min_size=1, max_size=6))
    logps = draw(st.lists(scores, min_size=len(tokens), max_size=len(tokens)))
    return Completion(tuple(tokens), tuple(logps), draw(st.sampled_from(["stop", "length"])))


@st.composite
def rollouts(draw):
    generations = draw(st.integers(1, 3))
    prompts = draw(st.lists(st.lists(ids, min_size=1, max_size=6), min_size=0, max_size=4))
    return [
        Group(
            Prompt(tuple(prompt)),
            draw(st.lists(completions(), min_size=generations, max_size=generations)),
            torch.zeros(generations),
            torch.zeros(generations),
            [],
        )
        for prompt in prompts
    ]


def check_row(batch, row: int, prompt: Prompt, completion: Completion, masked: bool) -> None:
    sequence = [*prompt.input_ids, *completion.token_ids]
    length, drawn = len(prompt.input_ids), len(completion.token_ids)
    assert batch.input_ids[row][batch.attention_mask[row]].tolist() == sequence
    assert batch.attention_mask[row].long().diff().le(0).all()  # padded on the right
    assert int(batch.prompt_lengths[row]) == length
    assert batch.completion_ids[row, :drawn].tolist() == list(completion.token_ids)
    assert batch.completion_mask[row].tolist() == [
        t < drawn and not masked for t in range(batch.completion_mask.shape[1])
    ]
    for told, kept in zip(completion.sampling_logps, batch.sampling_logps[row].tolist(), strict=False):
        unknown = told is None or math.isnan(told)
        assert math.isnan(kept) if unknown else math.isclose(told, kept, rel_tol=1e-6, abs_tol=1e-30)


@few(50)
@given(groups=rollouts(), mask_truncated=st.booleans(), data=st.data())
def test_every_token_is_where_it_belongs_in_a_batch_and_in_its_parts(groups, mask_truncated, data):
    rows = [(g.prompt, c) for g in groups for c in g.completions]
    advantages = torch.arange(len(rows), dtype=torch.float32)
    batch = collate(groups, advantages, mask_truncated=mask_truncated, device=torch.device("cpu"))
    if not rows:
        assert len(batch.input_ids) == 1 and not batch.completion_mask.any()
        return
    chosen = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=5))
    part = select(batch, torch.tensor(chosen, dtype=torch.long))
    for whole, numbers in ((batch, range(len(rows))), (part, chosen)):
        for place, number in enumerate(numbers):
            prompt, completion = rows[number]
            check_row(whole, place, prompt, completion, mask_truncated and completion.finish_reason != "stop")
            assert float(whole.advantages[place]) == number
    if chosen:
        assert part.input_ids.shape[1] == max(len(rows[n][0].input_ids) + len(rows[n][1].token_ids) for n in chosen)
        assert part.completion_ids.shape[1] == max(len(rows[n][1].token_ids) for n in chosen)
    else:
        assert len(part.input_ids) == 1 and not part.completion_mask.any()


@few(30)
@given(groups=rollouts(), size=st.integers(1, 5), data=st.data())
def test_micro_batches_hold_every_row_once_and_like_lengths_together(groups, size, data):
    rows = [len(g.prompt.input_ids) + len(c.token_ids) for g in groups for c in g.completions]
    batch = collate(groups, torch.zeros(len(rows)), mask_truncated=False, device=torch.device("cpu"))
    wanted = data.draw(st.sets(st.integers(0, max(len(rows) - 1, 0)))) if rows else set()
    parts = micro_batches(batch, torch.tensor(sorted(wanted), dtype=torch.long), size)
    assert sorted(n for part in parts for n in part.tolist()) == sorted(wanted)
    assert all(len(part) <= size for part in parts)
    lengths = [rows[n] for part in parts for n in part.tolist()]
    assert lengths == sorted(lengths)


@few(30)
@given(tokens=st.integers(1, 5), logps=st.integers(0, 6))
def test_a_completion_has_one_log_probability_a_token(tokens, logps):
    group = Group(
        Prompt((1,)), [Completion((3,) * tokens, (-1.0,) * logps, "stop")], torch.zeros(1), torch.zeros(1), []
    )
    make = lambda: collate([group], torch.zeros(1), mask_truncated=False, device=torch.device("cpu"))  # noqa: E731
    if tokens == logps:
        assert make().sampling_logps.shape == (1, tokens)
        return
    with pytest.raises(
        ValueError, match=rf"sampling_logps must be one number for each of the {tokens} .*, got {logps}; "
    ):
        make()
