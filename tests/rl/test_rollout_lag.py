"""Rollouts one step ahead of the update: what is generated, by which policy, and where a run goes on."""

import shutil
from pathlib import Path

import pytest
import torch
from own_weights import OwnWeights
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.metrics import read_metrics
from grpo_moe.rollout.native import NativeEngine


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """They are most of the time of a run as short as these."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).touch())


def run(path, lag, engine_of=OwnWeights, **changes):
    model = tiny_model()
    engine = engine_of(model)
    shared = dict(
        output_dir=str(path), per_device_train_batch_size=8, num_generations=4, max_steps=5, max_completion_length=8,
        learning_rate=1e-2, use_cpu=True, show_progress=False, log_completions=False, rollout_lag=lag,
        sampler_correction="token_truncate", shuffle_dataset=False,
    )  # fmt: skip
    args = GRPOConfig(**{**shared, **changes})
    made = GRPOTrainer(
        model, share_of_letter, args, prompt_rows(40), processing_class=tokenizer(), rollout_engine=engine
    )
    return made, engine


def test_the_next_rollout_is_generated_by_the_policy_before_the_update(tmp_path):
    made, engine = run(tmp_path, lag=1)
    made.train()
    prompts, seeds, sent, in_thread = zip(*engine.calls, strict=True)
    assert prompts == tuple([2 * i, 2 * i + 1] for i in range(5))  # each once, in order, and none too many
    assert seeds == tuple(range(5)) and in_thread == (False, True, True, True, True)
    assert sent == (0, 0, 1, 2, 3)
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [line["sampling/lag"] for line in lines] == [0, 1, 1, 1, 1]
    gaps = [line["sampling_logp_difference_mean"] for line in lines]
    assert gaps[0] < 1e-5 and min(gaps[1:]) > 1e-4  # which the correction is for


def test_without_lag_every_rollout_has_the_newest_weights(tmp_path):
    made, engine = run(tmp_path, lag=0)
    made.train()
    assert [call[2:] for call in engine.calls] == [(i, False) for i in range(5)]
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert max(line["sampling_logp_difference_mean"] for line in lines) < 1e-5
    assert {line["sampling/lag"] for line in lines} == {0}


def test_a_run_goes_on_without_losing_or_repeating_the_prompts_that_were_ahead(tmp_path):
    """From every update: a checkpoint is written while the rollout of the next update is being made."""
    made, engine = run(tmp_path / "whole", lag=1, save_steps=1, save_total_limit=9, shuffle_dataset=True)
    made.train()
    whole = [call[0] for call in engine.calls]
    texts = [made.source._prompt(made.source._row(index), index).raw for rollout in whole for index in rollout]
    assert len(whole) == 5 and len(set(texts)) > 5
    for done in range(1, 5):
        folder = tmp_path / str(done)
        shutil.copytree(tmp_path / "whole", folder)
        resumed, engine = run(
            folder, lag=1, shuffle_dataset=True, resume_from_checkpoint=str(folder / f"checkpoint-{done}")
        )  # fmt: skip
        seen, take = [], resumed.source.take
        resumed.source.take = lambda n, take=take, seen=seen: seen.append(take(n)) or seen[-1]
        resumed.train()
        assert [call[0] for call in engine.calls] == whole[done:]
        assert [prompt.raw for prompts in seen for prompt in prompts] == texts[2 * done :]
        assert [line["step"] for line in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_fault_of_the_engine_ends_the_run_where_it_can_go_on(tmp_path):
    made, engine = run(tmp_path, lag=1)
    engine.fails_at = 3
    with pytest.raises(ConnectionError, match="the server is gone") as raised:
        made.train()
    assert "checkpoint-2 holds the run up to update 2" in raised.value.__notes__[0]
    resumed, engine = run(tmp_path, lag=1, resume_from_checkpoint="latest")
    resumed.train()
    assert [call[0] for call in engine.calls] == [[4, 5], [6, 7], [8, 9]]


def test_dynamic_sampling_fills_up_after_the_first_round(tmp_path):
    made, engine = run(tmp_path, lag=1, dynamic_sampling=True, max_steps=3)
    made.rewards.functions[0] = lambda prompts, completions, **_: [0.0] * len(prompts)
    made.train()
    assert [call[3] for call in engine.calls] == [False, False, False, True, False, False, True, False, False]
    assert sorted(i for call in engine.calls for i in call[0]) == list(range(sum(len(c[0]) for c in engine.calls)))


def test_what_cannot_run_ahead_is_refused(tmp_path):
    with pytest.raises(ValueError, match="rollout_lag must be 0 with NativeEngine, got 1: it reads the weights"):
        run(tmp_path, lag=1, engine_of=lambda model: NativeEngine(model, tokenizer()))
    with pytest.raises(ValueError, match="rollout_lag must be 0 without sampler_correction, got 1"):
        GRPOConfig(rollout_lag=1)
    with pytest.raises(ValueError, match="rollout_lag must be 0 or 1, got 2"):
        GRPOConfig(rollout_lag=2, sampler_correction="token_truncate")


def test_two_runs_with_lag_are_equal(tmp_path):
    parameters = []
    for name in "ab":
        made, _ = run(tmp_path / name, lag=1)
        made.train()
        parameters.append([p.detach().clone() for p in made.policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))
