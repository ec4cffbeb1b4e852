"""Pass rate, pass@k, majority vote and rewards on held-out prompts, sampled and greedy."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from grpo_moe.rewards.answer import final_answer
from grpo_moe.types import Prompt, SamplingParams

from .batch import Group
from .collect import Collector

ComputeMetrics = Callable[[list[Group]], Mapping[str, float]]
"""A user's metrics of all sampled groups, in the order of the prompts."""


@dataclass(frozen=True)
class _Outcome:
    """What the metrics need of a prompt: small, so that all processes can have all of them."""

    passes: list[bool]
    """[n], of the sampled completions."""
    greedy_pass: bool
    answers: list[str]
    """[n] final answers."""
    score: float
    """Sum over the completions that were scored."""
    num_scored: int
    values: list[list[float]]
    """[F][n] of each reward function; NaN where it did not score."""
    num_tokens: int
    num_truncated: int


def evaluate(
    collector: Collector,
    prompts: Sequence[Prompt],
    *,
    num_generations: int = 1,
    compute_metrics: ComputeMetrics | None = None,
    answer_of: Callable[[str], str] = final_answer,
) -> tuple[dict[str, float], list[Group]]:
    """``num_generations`` sampled completions and a greedy one of each prompt, prompts shared out over the processes.

    A completion passes when its score is at least ``pass_threshold``; one that no reward function scored does not.
    Metrics, over sampled completions unless greedy is said:

    - ``eval_pass_rate``: share that passes, which is pass@1 without bias; ``eval_greedy_pass_rate``;
    - ``eval_pass_at_<k>`` for n > 1 and k = 1, 2, 4, ... below n, and n: :func:`pass_at_k`, mean over the prompts;
    - ``eval_majority_at_<n>`` for n > 1: :func:`majority_pass`, mean over the prompts;
    - ``eval_reward``: mean score of the completions that were scored, as ``reward`` in training; 0 where none was;
      ``eval_rewards/<name>``: mean of one reward function over those that it scored, absent where it scored none;
    - ``eval_mean_length`` in tokens; ``eval_clipped_ratio``: share that ended without EOS;
    - ``eval_<name>`` of ``compute_metrics``.

    Args:
        collector: draws and scores.
        prompts: at least one, the same on every process; fewer than there are processes will do.
        num_generations: sampled completions a prompt, n.
        compute_metrics: called on the main process; every process then holds all groups for the moment.
        answer_of: what of a completion's text is compared in the vote; by default what ``answer_reward`` scores,
            :func:`grpo_moe.rewards.answer.final_answer`.

    Returns:
        The metrics, equal on every process and for any number of them; and this process's sampled groups.

    Raises:
        RuntimeError: on every process, when ``compute_metrics`` raised or returned other things than numbers by names
            of its own.
    """
    args, accelerator = collector.args, collector.accelerator
    mine = prompts[accelerator.process_index :: accelerator.num_processes]
    sampled, greedy = (
        collector.generate_groups(
            mine,
            SamplingParams(args.max_completion_length, n, temperature=temperature, seed=args.seed),
            phases=("evaluation", "evaluation"),
        )
        for n, temperature in ((num_generations, args.eval_temperature), (1, 0.0))
    )
    pairs = zip(sampled, greedy, strict=True)
    outcomes = [_outcome(*pair, args.pass_threshold, answer_of) for pair in pairs]
    metrics = _metrics(_in_order(outcomes, len(prompts)), collector.rewards.names)
    if compute_metrics is not None:
        metrics |= _users_metrics(compute_metrics, _in_order(sampled, len(prompts)), metrics, accelerator)
    return metrics, sampled


def pass_at_k(num_samples: int, num_passes: int, k: int) -> float:
    """Chance that at least one of k samples passes, without bias, from ``num_samples`` of which some pass.

    Source: Chen et al., Evaluating Large Language Models Trained on Code (arXiv 2107.03374), section 2.1:
    1 - C(n - c, k) / C(n, k).
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k must be in 1..{num_samples}, the samples of a prompt, got {k}; draw more of them")
    return 1 - math.comb(num_samples - num_passes, k) / math.comb(num_samples, k)


def majority_pass(answers: Sequence[str], passes: Sequence[bool]) -> float:
    """Chance that the most frequent answer passes: the share of passing completions among those that gave it.

    This is 0 or 1 where passing is a matter of the answer alone. Of several most frequent answers one is drawn; an
    empty answer has no vote, and without any vote nothing passes.

    Source: Wang et al., Self-Consistency (arXiv 2203.11171), section 2.
    """
    votes = Counter(answer for answer in answers if answer)
    if not votes:
        return 0.0
    most = max(votes.values())
    winning = [passed for answer, passed in zip(answers, passes, strict=True) if votes[answer] == most]
    return sum(winning) / len(winning)


def _outcome(sampled: Group, greedy: Group, threshold: float, answer_of: Callable[[str], str]) -> _Outcome:
    return _Outcome(
        passes=(sampled.scores >= threshold).tolist(),  # NaN compares false
        greedy_pass=bool(greedy.scores[0] >= threshold),
        answers=[answer_of(c.text) for c in sampled.completions],
        score=float(sampled.scores.nansum()),
        num_scored=int((~sampled.scores.isnan()).sum()),
        values=sampled.values,
        num_tokens=sum(len(c.token_ids) for c in sampled.completions),
        num_truncated=sum(c.finish_reason == "length" for c in sampled.completions),
    )


def _in_order(mine: list[Any], num_prompts: int) -> list[Any]:
    """One item a prompt, of every process, in the order of the prompts."""
    by_process = gather_object([mine])
    return [by_process[i % len(by_process)][i // len(by_process)] for i in range(num_prompts)]


def _metrics(outcomes: Sequence[_Outcome], names: Sequence[str]) -> dict[str, float]:
    n = len(outcomes[0].passes)
    num_completions = n * len(outcomes)
    metrics = {
        "eval_pass_rate": sum(sum(o.passes) for o in outcomes) / num_completions,
        "eval_greedy_pass_rate": sum(o.greedy_pass for o in outcomes) / len(outcomes),
        "eval_reward": sum(o.score for o in outcomes) / max(sum(o.num_scored for o in outcomes), 1),
        "eval_mean_length": sum(o.num_tokens for o in outcomes) / num_completions,
        "eval_clipped_ratio": sum(o.num_truncated for o in outcomes) / num_completions,
    }
    for number, name in enumerate(names):
        scored = [value for o in outcomes for value in o.values[number] if not math.isnan(value)]
        if scored:
            metrics[f"eval_rewards/{name}"] = sum(scored) / len(scored)
    if n > 1:
        for k in (*(2**i for i in range((n - 1).bit_length())), n):
            metrics[f"eval_pass_at_{k}"] = sum(pass_at_k(n, sum(o.passes), k) for o in outcomes) / len(outcomes)
        metrics[f"eval_majority_at_{n}"] = sum(majority_pass(o.answers, o.passes) for o in outcomes) / len(outcomes)
    return metrics


def _users_metrics(
    compute_metrics: ComputeMetrics, groups: list[Group], known: Mapping[str, float], accelerator: Accelerator
) -> dict[str, float]:
    """Computed on the main process and equal on all, its failure too."""
    result = error = None
    if accelerator.is_main_process:
        try:
            result = _checked(compute_metrics(groups), known)
        except Exception as caught:  # the other processes wait for the result
            error = caught
    result, problem = broadcast_object_list([result, f"{type(error).__name__}: {error}"])
    if result is None:
        raise RuntimeError(f"compute_metrics must return numbers by name, got {problem}") from error
    return result


def _checked(returned: Any, known: Mapping[str, float]) -> dict[str, float]:
    if not isinstance(returned, Mapping):
        raise TypeError(f"{type(returned).__name__} instead of a dict")
    metrics = {}
    for name, value in returned.items():
        full_name = f"eval_{str(name).removeprefix('eval_')}"
        if full_name in known:
            raise ValueError(f"{name!r} is the name of another metric; choose another one")
        value = value.item() if hasattr(value, "item") else value  # of numpy or torch
        if not isinstance(value, Real):
            raise TypeError(f"{value!r} instead of a number for {name!r}")
        metrics[full_name] = float(value)
    return metrics
