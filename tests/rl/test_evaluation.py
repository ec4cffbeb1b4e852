"""Evaluation: unbiased pass@k, majority vote, means over prompts, the user's metrics; equal on every process."""

import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st

from grpo_moe.rewards import RewardCaller
from grpo_moe.rl import GRPOConfig
from grpo_moe.rl.collect import Collector
from grpo_moe.rl.evaluation import evaluate, majority_pass, pass_at_k
from grpo_moe.rl.metrics import PhaseTimer
from grpo_moe.types import Completion, Prompt

EXISTING = {"eval_pass_rate", "eval_greedy_pass_rate", "eval_reward", "eval_mean_length"}


class Engine:
    """Answers a prompt with the texts in its column "samples"; greedy with the first."""

    def __init__(self):
        self.calls = []

    def generate(self, prompts, sampling):
        self.calls.append((len(prompts), sampling))
        return [
            [
                Completion((5,) * n, (-1.0,) * n, "stop" if text else "length", text)
                for text in prompt.columns["samples"][: sampling.num_generations]
                for n in [min(len(text) + 1, 9)]
            ]
            for prompt in prompts
        ]


def right(prompts, completions, answer, **columns):
    return [None if "?" in c else float(c.endswith(a)) for c, a in zip(completions, answer, strict=True)]


def length(prompts, completions, **columns):
    return [0.1 * len(c) for c in completions]


def collector(rewards=right, engine=None, **options):
    return Collector(
        engine or Engine(),
        RewardCaller(rewards, [1.0, 0.0] if isinstance(rewards, list) else None),
        GRPOConfig(max_completion_length=9, eval_temperature=0.7, seed=3, **options),
        Accelerator(cpu=True),
        timer=PhaseTimer(),
        policy=torch.nn.Linear(1, 1),
    )


def prompts(*samples, answer="4"):
    return [
        Prompt((1, 2), raw="2+2=", index=i, columns={"samples": texts, "answer": answer})
        for i, texts in enumerate(samples)
    ]


# --- pass@k


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (4, 0), (4, 1), (5, 3), (6, 6)])
def test_pass_at_k_is_the_mean_over_every_choice_of_k_samples(n, c):
    passes = [True] * c + [False] * (n - c)
    for k in range(1, n + 1):
        chosen = list(itertools.combinations(passes, k))
        assert pass_at_k(n, c, k) == pytest.approx(sum(any(choice) for choice in chosen) / len(chosen), abs=1e-12)


def test_pass_at_k_is_without_bias_whatever_the_number_of_samples():
    generator = np.random.default_rng(0)
    rate, k = 0.2, 4
    truth = 1 - (1 - rate) ** k
    for n in (4, 7, 16):
        estimates = [pass_at_k(n, int(c), k) for c in generator.binomial(n, rate, 20_000)]
        assert np.mean(estimates) == pytest.approx(truth, abs=4 * np.std(estimates) / 20_000**0.5)
        plug_in = [1 - (1 - int(c) / n) ** k for c in generator.binomial(n, rate, 20_000)]
        assert abs(np.mean(plug_in) - truth) > 0.01  # what it is better than


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 300))
def test_pass_at_k_is_a_chance_that_grows_with_k(n, c, k):
    c, k = min(c, n), min(k, n)
    assert 0 <= pass_at_k(n, c, 1) == pytest.approx(c / n)
    assert pass_at_k(n, c, 1) - 1e-12 <= pass_at_k(n, c, k) <= 1


@pytest.mark.parametrize("k", [0, 5])
def test_pass_at_k_needs_k_samples(k):
    with pytest.raises(ValueError, match=f"k must be in 1..4, the samples of a prompt, got {k}"):
        pass_at_k(4, 1, k)


# --- majority


@pytest.mark.parametrize(
    ("answers", "passes", "expected"),
    [
        (["4", "4", "5"], [True, True, False], 1),
        (["4", "5", "5"], [True, False, False], 0),
        (["4", "5"], [True, False], 0.5),  # drawn
        (["4", "5", "6", "5", "4"], [True, False, False, False, True], 0.5),
        (["", "", "", "4"], [False, False, False, True], 1),  # no answer, no vote
        (["", ""], [False, False], 0),
        (["4", "4", "4", "5"], [True, True, False, False], 2 / 3),  # another reward had a say
    ],
)
def test_majority_pass(answers, passes, expected):
    assert majority_pass(answers, passes) == pytest.approx(expected)
    order = random.Random(0).sample(range(len(answers)), len(answers))
    assert majority_pass([answers[i] for i in order], [passes[i] for i in order]) == pytest.approx(expected)


# --- evaluate


def test_one_sample_a_prompt_gives_rates_rewards_and_lengths():
    engine = Engine()
    asked = prompts(["4"], ["35"], [""], ["?"])
    metrics, groups = evaluate(collector([right, length], engine), asked)
    assert metrics == pytest.approx(
        {
            "eval_pass_rate": 1 / 4, "eval_greedy_pass_rate": 1 / 4, "eval_reward": 1 / 4,
            "eval_mean_length": (2 + 3 + 1 + 2) / 4, "eval_clipped_ratio": 1 / 4,
            "eval_rewards/right": 1 / 3, "eval_rewards/length": (0.1 + 0.2 + 0 + 0.1) / 4,
        }
    )  # fmt: skip
    assert [g.prompt for g in groups] == asked
    (sampled, greedy) = (sampling for _, sampling in engine.calls)
    assert (sampled.temperature, sampled.num_generations, sampled.seed, sampled.max_new_tokens) == (0.7, 1, 3, 9)
    assert (greedy.temperature, greedy.num_generations) == (0, 1)


def test_several_samples_give_pass_at_k_and_the_majority():
    samples = (["5", "4", "4", "4", "5"], ["4", "5", "6", "6", "6"], ["1", "1", "1", "2", "2"])
    metrics, _ = evaluate(collector(), prompts(*samples), num_generations=5)
    passes = (3, 1, 0)
    assert {name for name in metrics if "_at_" in name} == {
        "eval_pass_at_1", "eval_pass_at_2", "eval_pass_at_4", "eval_pass_at_5", "eval_majority_at_5",
    }  # fmt: skip
    for k in (1, 2, 4, 5):
        assert metrics[f"eval_pass_at_{k}"] == pytest.approx(sum(pass_at_k(5, c, k) for c in passes) / 3)
    assert metrics["eval_pass_rate"] == metrics["eval_pass_at_1"] == pytest.approx(4 / 15)
    assert metrics["eval_majority_at_5"] == pytest.approx(1 / 3)
    assert metrics["eval_greedy_pass_rate"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("n", "ks"), [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])]
)
def test_pass_at_k_is_given_for_the_powers_of_two_and_for_all_samples(n, ks):
    metrics, _ = evaluate(collector(), prompts(["4"] * n), num_generations=n)
    assert [name for name in metrics if "pass_at" in name] == [f"eval_pass_at_{k}" for k in ks]


def test_the_reward_is_the_mean_over_the_completions_that_were_scored():
    metrics, groups = evaluate(collector(), prompts(["4", "?"], ["5", "?"], ["?", "?"], ["4", "4"]), num_generations=2)
    assert metrics["eval_reward"] == 3 / 4 == float(torch.stack([g.scores for g in groups]).nanmean())
    assert metrics["eval_pass_rate"] == 3 / 8


def test_answers_are_those_that_answer_reward_scores_or_the_users():
    texts = [r"so \boxed{4}", "I say\n<answer>4</answer>", "7", "8"]
    asked = prompts(texts)
    right_if_four = lambda prompts, completions, **_: [float("4" in c) for c in completions]  # noqa: E731
    vote = {}
    for name, options in (("default", {}), ("length", {"answer_of": lambda text: str(len(text))})):
        vote[name] = evaluate(collector(right_if_four), asked, num_generations=4, **options)[0]["eval_majority_at_4"]
    assert vote == {"default": 1.0, "length": 0.0}


def test_a_reward_that_scored_nothing_is_absent_and_nothing_passes():
    metrics, _ = evaluate(collector(), prompts(["?"], ["?"]))
    assert "eval_rewards/right" not in metrics and metrics["eval_pass_rate"] == metrics["eval_reward"] == 0
    assert not any(math.isnan(value) for value in metrics.values()) and set(metrics) >= EXISTING


def test_the_pass_rate_leaves_shaping_out():
    metrics, _ = evaluate(collector(overlong_cache_length=9), prompts(["1234"]))
    assert metrics["eval_pass_rate"] == metrics["eval_reward"] == 1


def test_seconds_count_as_evaluation():
    used = collector()
    evaluate(used, prompts(["4"]))
    assert set(used.timer.totals) == {"evaluation"}


# --- compute_metrics


def test_the_users_metrics_are_added_with_a_prefix():
    def compute_metrics(groups):
        assert [g.prompt.index for g in groups] == [0, 1, 2]
        return {"longest": np.int64(max(len(c.text) for g in groups for c in g.completions)),
                "eval_mean": torch.tensor(0.5), "yes": True}  # fmt: skip

    metrics, _ = evaluate(collector(), prompts(["4"], ["333"], ["22"]), compute_metrics=compute_metrics)
    added = {name: metrics[name] for name in ("eval_longest", "eval_mean", "eval_yes")}
    assert added == {"eval_longest": 3.0, "eval_mean": 0.5, "eval_yes": 1.0}
    assert all(type(value) is float for value in added.values()) and set(metrics) > EXISTING


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "got TypeError: NoneType instead of a dict"),
        ({"a": "b"}, "got TypeError: 'b' instead of a number for 'a'"),
        ({"reward": 1.0}, "got ValueError: 'reward' is the name of another metric"),
        ({"a": np.ones(3)}, "got ValueError"),
    ],
)
def test_wrong_metrics_of_the_user_are_named(returned, message):
    with pytest.raises(RuntimeError, match=f"compute_metrics must return numbers by name, {message}"):
        evaluate(collector(), prompts(["4"]), compute_metrics=lambda groups: returned)


def test_a_fault_of_compute_metrics_is_the_cause():
    with pytest.raises(RuntimeError, match="got ZeroDivisionError: division by zero") as caught:
        evaluate(collector(), prompts(["4"]), compute_metrics=lambda groups: {"a": 1 / 0})
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


# --- processes


def three_samples(n):
    generator = random.Random(5)
    return prompts(*[["".join(generator.choices("45?", k=generator.randrange(4))) for _ in range(3)] for _ in range(n)])


def users_metrics(groups):
    return {"order": sum(i * g.prompt.index for i, g in enumerate(groups, start=1)), "pid": float(os.getpid())}


def run_evaluations():
    """Of 5 prompts, of 1, and of what the user's function raises."""
    results = [
        evaluate(collector(), three_samples(n), num_generations=3, compute_metrics=users_metrics)[0] for n in (5, 1)
    ]
    with pytest.raises(RuntimeError) as caught:
        evaluate(collector(), three_samples(3), compute_metrics=lambda groups: {}[0])
    return [*results, str(caught.value)]


@pytest.mark.slow
def test_two_processes_agree_with_each_other_and_with_one(tmp_path):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", __file__, str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, *command], env=environment, timeout=240, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second  # the process number too: computed once
    alone = run_evaluations()
    for result in (*first[:2], *alone[:2]):
        del result["eval_pid"]
    assert first == alone and alone[0]["eval_order"] == 40 and 0 < alone[0]["eval_pass_rate"] < 1
    assert alone[2] == "compute_metrics must return numbers by name, got KeyError: 0"


if __name__ == "__main__":
    results, accelerator = run_evaluations(), Accelerator(cpu=True)
    (Path(sys.argv[1]) / f"{accelerator.process_index}.json").write_text(json.dumps(results))
    accelerator.end_training()  # gloo may abort at the exit of a process that leaves its group open
