"""Callbacks of transformers, given optimisers, the moving reference, warnings of a first rollout, the waterfall."""

import pytest
import torch
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer
from transformers import TrainerCallback

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.metrics import read_metrics


class Recorder(TrainerCallback):
    def __init__(self, stop_at=None):
        self.events, self.stop_at = [], stop_at

    def _heard(self, event, state, given):
        assert {"model", "processing_class", "optimizer", "lr_scheduler"} <= given.keys()
        self.events.append((event, state.global_step))

    def on_train_begin(self, args, state, control, **given):
        self._heard("train_begin", state, given)

    def on_step_end(self, args, state, control, metrics=None, **given):
        self._heard("step_end", state, given)
        assert "reward" in metrics
        control.should_training_stop = state.global_step == self.stop_at
        control.should_save = control.should_evaluate = state.global_step == 2
        return control

    def on_log(self, args, state, control, logs=None, **given):
        self._heard("log", state, given)
        assert logs

    def on_evaluate(self, args, state, control, metrics=None, **given):
        self._heard("evaluate", state, given)
        assert "eval_pass_rate" in metrics

    def on_train_end(self, args, state, control, **given):
        self._heard("train_end", state, given)


def run(path, model=None, callbacks=None, optimizers=(None, None), reward=share_of_letter, **changes):
    shared = dict(
        output_dir=str(path), per_device_train_batch_size=4, num_generations=4, steps_per_generation=2, max_steps=8,
        max_completion_length=8, learning_rate=1e-2, use_cpu=True, show_progress=False, eval_on_start=False,
        log_completions=False,
    )  # fmt: skip
    return GRPOTrainer(
        tiny_model() if model is None else model, reward, GRPOConfig(**{**shared, **changes}), prompt_rows(10),
        prompt_rows(2), tokenizer(), callbacks, optimizers,
    )  # fmt: skip


def test_callbacks_hear_everything_and_are_heeded(tmp_path):
    heard = Recorder(stop_at=6)
    summary = run(tmp_path, callbacks=[heard]).train()
    assert summary["steps"] == 6
    assert [event for event in heard.events if event[0] not in ("log",)] == [
        ("train_begin", 0), ("step_end", 2), ("evaluate", 2), ("step_end", 4), ("step_end", 6), ("evaluate", 6),
        ("train_end", 6),
    ]  # fmt: skip
    assert (tmp_path / "checkpoint-2").is_dir()


def test_what_is_no_callback_is_refused(tmp_path):
    with pytest.raises(ValueError, match="callbacks must be of transformers.TrainerCallback, got 3"):
        run(tmp_path, callbacks=[3])


def test_given_optimisers_are_used(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25**step)
    made = run(tmp_path, model, optimizers=(optimizer, schedule))
    made.step()
    assert made.optimizer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.25**2)


def test_the_reference_moves_toward_the_policy_and_survives_a_resume(tmp_path):
    options = dict(beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.6, ref_model_sync_steps=2, save_steps=4)
    made = run(tmp_path / "whole", max_steps=8, **options)
    before = [p.clone() for p in made.reference.parameters()]
    made.step()
    for old, moved, policy in zip(before, made.reference.parameters(), made.policy.parameters(), strict=True):
        torch.testing.assert_close(moved, 0.6 * policy.detach() + 0.4 * old)
    whole = run(tmp_path / "whole2", max_steps=8, **options)
    whole.train()
    run(tmp_path / "cut", max_steps=4, **options).train()
    rest = run(tmp_path / "cut", max_steps=8, **options)
    rest.train(resume_from_checkpoint=True)
    for a, b in zip(whole.reference.parameters(), rest.reference.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(whole.policy.parameters(), rest.policy.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("reward", "options", "warning"),
    [
        (lambda prompts, **_: [0.0] * len(prompts), {}, "every reward is 0"),
        (lambda prompts, **_: [None] * len(prompts), {}, "no reward function scored any completion"),
        (lambda prompts, **_: [2.0] * len(prompts), {}, "all completions of each prompt have the same reward"),
        (share_of_letter, {"max_completion_length": 1}, "were cut at max_completion_length = 1"),
    ],
)
def test_a_first_rollout_that_cannot_teach_is_warned_of_once(tmp_path, capsys, reward, options, warning):
    made = run(tmp_path, reward=reward, max_steps=4, show_progress=True, **options)
    made.policy.lm_head.weight.data[2] = -100.0  # no EOS
    made.train()
    assert capsys.readouterr().out.count(warning) == 1


@pytest.mark.parametrize("options", [{}, {"dynamic_sampling": True}, {"mask_truncated_completions": True}])
def test_the_waterfall_adds_up(tmp_path, options):
    def reward(prompts, completions, **_):
        return [float(len(text) > 5) for text in completions]

    made = run(tmp_path, reward=reward, epsilon=1e-4, num_iterations=2, learning_rate=0.1, max_steps=4, **options)
    made.train()
    lines = [line for line in read_metrics(tmp_path / "metrics.jsonl") if "waterfall/groups" in line]
    assert len(lines) == 1
    fall = {name.removeprefix("waterfall/"): x for name, x in lines[0].items() if name.startswith("waterfall/")}
    assert fall["clipped"] > 0 and fall["tokens_with_gradient"] > 0
    taken = fall["zero_spread"] + fall["unused"] + fall["truncated"] + fall["tokens_with_gradient"]
    assert fall["groups"] - fall["clipped"] <= taken <= fall["groups"]


def test_gdpo_scales_each_reward_by_its_own_spread(tmp_path):
    def short(prompts, completions, **_):
        return [-1000.0 * len(text) for text in completions]

    made = run(tmp_path, reward=[share_of_letter, short], multi_objective_aggregation="normalize_then_sum")
    rollout = made.collector.collect(made.source, made.sampling)
    advantages = made.collector.advantages(rollout.kept)
    values = torch.tensor([g.values for g in rollout.kept]).transpose(0, 1)  # [F, P, G]
    scaled = [(v - v.mean(1, True)) / (v.std(1, keepdim=True) + 1e-4) for v in values.double()]
    total = sum(scaled)
    torch.testing.assert_close(advantages.double(), (total - total.mean()) / (total.std() + 1e-4), rtol=1e-5, atol=1e-6)


def test_groups_that_a_reward_function_fails_on_are_dropped_and_counted(tmp_path):
    def fails(prompts, completions, **_):
        if any("a" in text for text in completions):
            raise KeyError("a")
        return [float(len(text)) for text in completions]

    made = run(tmp_path, reward=fails, reward_on_error="skip")
    metrics = made.step()
    assert 0 < metrics["sampling/groups_skipped"] < metrics["sampling/groups_generated"]
    assert metrics["sampling/groups_kept"] == metrics["sampling/groups_generated"] - metrics["sampling/groups_skipped"]
    assert metrics["reward_faults/fails/exception"] == 4 * metrics["sampling/groups_skipped"]
    with pytest.raises(RuntimeError, match="fails"):
        run(tmp_path, reward=fails).step()
