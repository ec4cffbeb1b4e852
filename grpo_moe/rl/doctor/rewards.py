"""Checks of rows and rewards: alignment of the groups, and order, failures and latency of the reward functions."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from grpo_moe.rl.advantages import reward_spread
from grpo_moe.rl.batch import Group
from grpo_moe.types import Completion, Prompt

from .sample import Check, Sample, listed

MAX_REWARD_SECONDS = 1.0  # a completion
_GARBAGE = "\x00\x1b[2J }{](\\boxed{ 1/0 **None <|im_end|></answer> \u202e\uffff 🜚" * 3


def check_alignment(sample: Sample) -> Check:
    """Whether the rows of the batch are the completions of their groups, in order."""
    batch, wrong = sample.batch, []
    rows = [(group.prompt.input_ids, c.token_ids) for group in sample.groups for c in group.completions]
    for row, (prompt, completion) in enumerate(rows):
        sequence = batch.input_ids[row][batch.attention_mask[row]].tolist()
        tokens = batch.completion_ids[row, : len(completion)].tolist()
        if sequence != [*prompt, *completion] or tokens != list(completion) or batch.prompt_lengths[row] != len(prompt):
            wrong.append(str(row))
    spread = int((reward_spread(torch.stack([group.rewards for group in sample.groups])) > 0).sum())
    value = f"{len(rows)} rows of {len(sample.groups)} prompts, {spread} with a spread of rewards"
    return Check(
        "group alignment",
        not wrong and len(rows) == len(batch.input_ids),
        f"{value}; {listed('rows of another prompt or completion', wrong)}" if wrong else value,
        "every row its own group's prompt and completion",
        "the batch is put together wrongly: report it",
    )


class _Given:
    """An engine that answers with completions made before, so that the trainer's own path scores them."""

    def __init__(self, completions: list[list[Completion]]):
        self.completions = completions

    def generate(self, prompts, sampling):
        return self.completions


def _score(sample: Sample, prompts: list[Prompt], completions: list[list[Completion]]) -> list[Group]:
    collector = sample.trainer.collector
    engine, collector.engine = collector.engine, _Given(completions)
    try:
        return collector.generate_groups(prompts, sample.trainer.sampling)
    finally:
        collector.engine = engine


def check_rewards(sample: Sample) -> list[Check]:
    """Order, failures and latency of the reward functions."""
    prompts = [group.prompt for group in sample.groups]
    completions = [group.completions for group in sample.groups]
    started = time.perf_counter()
    again = _score(sample, prompts, completions)
    seconds = (time.perf_counter() - started) / sum(map(len, completions))
    turned = _score(sample, prompts[::-1], [group[::-1] for group in completions[::-1]])
    before, repeated, shuffled = _values(sample.groups), _values(again), _values(turned).flip(1, 2)
    names = sample.trainer.collector.rewards.names
    unstable = [name for name, a, b in zip(names, before, repeated, strict=True) if not _same(a, b)]
    moved = [name for name, a, b in zip(names, before, shuffled, strict=True) if not _same(a, b)]
    dependent = [name for name in moved if name not in unstable]
    values = [listed("other rewards in another order from", dependent)] if dependent else []
    values += [listed("other rewards on every call from", unstable)] if unstable else []
    order = Check(
        "reward order",
        False if dependent else None if unstable else True,
        "; ".join(values) or "a shuffled batch gets the same rewards",
        "the same reward for a completion wherever it stands in the batch",
        "read prompts, completions and columns by one index, and keep no state from row to row",
    )
    latency = Check(
        "reward latency",
        seconds <= MAX_REWARD_SECONDS,
        f"{seconds * 1e3:.2g} ms a completion, all functions together",
        f"at most {MAX_REWARD_SECONDS:g} s a completion",
        "batch the calls, or make the function async",
    )
    return [order, _check_reward_failures(sample), latency]


def _values(groups: Sequence[Group]) -> torch.Tensor:
    """[F, P, G] of each reward function."""
    return torch.stack([torch.tensor(group.values, dtype=torch.float64) for group in groups], dim=1)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)


def _check_reward_failures(sample: Sample) -> Check:
    ok, values = True, []
    for kind, text in (("empty", ""), ("garbage", _GARBAGE)):
        fits, shown = _answer_to(sample, text)
        ok = ok and fits
        values.append(f"{kind} completion: {shown}")
    return Check(
        "reward failures",
        ok,
        "; ".join(values),
        f"a reward below pass_threshold = {sample.trainer.args.pass_threshold:g}, or none, and no exception",
        "return 0 or None for what cannot be read; pass_threshold is the reward of a right answer",
    )


def _answer_to(sample: Sample, text: str) -> tuple[bool, str]:
    """Whether the rewards of completions with that text are as they should be, and what they are."""
    collector = sample.trainer.collector
    faults = collector.faults.copy()
    made = Completion(sample.groups[0].completions[0].token_ids[:1], (0.0,), "stop", text)
    completions = [[made] * len(group.completions) for group in sample.groups]
    try:
        groups = _score(sample, [group.prompt for group in sample.groups], completions)
    except Exception as error:  # a reward function may raise anything
        return False, f"{type(error).__name__}: {error}"
    if contained := collector.faults - faults:
        return False, f"skipped for faults of {', '.join(contained)}"
    scores = torch.stack([group.scores for group in groups])
    passes = bool((scores >= sample.trainer.args.pass_threshold).any())
    shown = "not scored" if scores.isnan().all() else f"{scores.nan_to_num(-torch.inf).amax():.3g}"
    return not passes, f"{shown}{', which passes' if passes else ''}"
