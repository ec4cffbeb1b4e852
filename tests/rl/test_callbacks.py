"""Callbacks of transformers, given optimisers, the moving reference, warnings of a first rollout."""

import pytest
import torch
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer
from transformers import EarlyStoppingCallback, TrainerCallback

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.metrics import read_metrics
from grpo_moe.rl.run_folder import best_checkpoint, list_checkpoints


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


def run(
    path, model=None, callbacks=None, optimizers=(None, None), reward=share_of_letter, compute_metrics=None, **changes
):
    shared = dict(
        output_dir=str(path), per_device_train_batch_size=4, num_generations=4, steps_per_generation=2, max_steps=8,
        max_completion_length=8, learning_rate=1e-2, use_cpu=True, show_progress=False, eval_on_start=False,
        log_completions=False,
    )  # fmt: skip
    return GRPOTrainer(
        tiny_model() if model is None else model, reward, GRPOConfig(**{**shared, **changes}), prompt_rows(10),
        prompt_rows(2), tokenizer(), callbacks, optimizers, compute_metrics=compute_metrics,
    )  # fmt: skip


def test_callbacks_hear_everything_and_are_heeded(tmp_path):
    heard = Recorder(stop_at=6)
    summary = run(tmp_path, callbacks=iter([heard])).train()
    assert summary["steps"] == 6
    assert [event for event in heard.events if event[0] not in ("log",)] == [
        ("train_begin", 0), ("step_end", 2), ("evaluate", 2), ("step_end", 4), ("step_end", 6), ("evaluate", 6),
        ("train_end", 6),
    ]  # fmt: skip
    assert (tmp_path / "checkpoint-2").is_dir()


def test_what_is_no_callback_is_refused(tmp_path):
    with pytest.raises(ValueError, match="callbacks must be of transformers.TrainerCallback, got 3"):
        run(tmp_path, callbacks=[3])


class Asks(TrainerCallback):
    def __init__(self, event):
        setattr(self, f"on_{event}", self.answer)

    def answer(self, args, state, control, **given):
        control.should_training_stop = state.global_step >= 2
        return control


@pytest.mark.parametrize("event", ["log", "evaluate"])
def test_a_stop_is_heeded_whatever_event_asks_for_it(tmp_path, event):
    assert run(tmp_path, callbacks=[Asks(event)], eval_steps=2).train()["steps"] == 2


def test_early_stopping_of_transformers_works(tmp_path):
    patience = EarlyStoppingCallback(early_stopping_patience=1)
    options = {"eval_steps": 2, "metric_for_best_model": "eval_pass_rate", "learning_rate": 0.0}
    made = run(tmp_path, callbacks=patience, **options)  # nothing is learned, nothing gets better
    assert made.train()["steps"] == 4
    assert made.state.best["step"] == 2 and best_checkpoint(tmp_path).name == "checkpoint-2"


def test_what_a_callback_may_not_return_is_named(tmp_path):
    class Odd(TrainerCallback):
        def on_log(self, *args, **given):
            return 3

    with pytest.raises(ValueError, match="Odd.on_log must return the control or None, got 3") as raised:
        run(tmp_path, callbacks=[Odd()]).train()
    assert "checkpoint-2 holds the run up to update 2" in raised.value.__notes__[0]


def test_an_error_between_updates_leaves_a_checkpoint_of_what_was_learned(tmp_path):
    calls = []

    def reward(prompts, completions, **columns):
        calls.append(len(prompts))
        if len(calls) == 5:  # two are checks before training
            raise OSError("the judge is down")
        return share_of_letter(prompts, completions, **columns)

    with pytest.raises(RuntimeError, match="the judge is down") as raised:
        run(tmp_path / "broken", reward=reward).train()
    assert "checkpoint-4 holds the run up to update 4" in raised.value.__notes__[0]
    resumed = run(tmp_path / "broken", reward=reward)
    resumed.train(resume_from_checkpoint=True)
    whole = run(tmp_path / "whole", reward=reward)
    whole.train()
    for ours, expected in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(ours, expected)


def raises_at(call, error):
    """A wrapper of a function, which raises at its ``call``-th call from 1, once."""
    calls = iter(range(1, 10**6))

    def wrapped(function):
        def called(*args, **given):
            if next(calls) == call:
                raise error
            return function(*args, **given)

        return called

    return wrapped


@pytest.mark.parametrize(
    ("where", "call", "kept"),
    [
        ("loss", 5, 4),  # the first micro-batch of the third rollout, which is drawn again
        ("schedule", 4, 3),  # its first call is before training
        ("engine", 2, 4),
    ],
)
def test_an_error_around_an_update_leaves_a_checkpoint_of_the_whole_ones(tmp_path, where, call, kept):
    raises = raises_at(call, OSError("gone"))

    def with_schedule(path, factor=lambda step: 1.0):
        model = tiny_model()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return run(path, model, optimizers=(sgd, torch.optim.lr_scheduler.LambdaLR(sgd, factor)))

    made = with_schedule(tmp_path / "cut", raises(lambda step: 1.0) if where == "schedule" else lambda step: 1.0)
    if where == "loss":
        made.loss = raises(made.loss)
    elif where == "engine":
        made.collector.engine.sync_weights = raises(made.collector.engine.sync_weights)
    with pytest.raises(OSError, match="gone") as raised:
        made.train()
    assert f"checkpoint-{kept} holds the run up to update {kept}" in raised.value.__notes__[0]
    resumed, whole = with_schedule(tmp_path / "cut"), with_schedule(tmp_path / "whole")
    resumed.train(resume_from_checkpoint="latest")
    if where != "schedule":  # in the middle of a rollout, whose rest is left out
        whole.train()
        for ours, expected in zip(resumed.policy.parameters(), whole.policy.parameters(), strict=True):
            assert torch.equal(ours, expected)


def test_half_an_update_is_not_saved(tmp_path):
    made = run(tmp_path, save_steps=2)
    made.optimizer.step = raises_at(3, OSError("gone"))(made.optimizer.step)
    with pytest.raises(OSError, match="gone") as raised:
        made.train()
    (note,) = raised.value.__notes__
    assert (
        note.startswith("update 3 is not saved")
        and f"resume_from_checkpoint='{tmp_path}/checkpoint-2' goes on before it" in note
    )
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-2"]


@pytest.mark.parametrize("where", ["reward", "callback"])
def test_a_keyboard_interrupt_that_user_code_raises_saves(tmp_path, where):
    class Stops(TrainerCallback):
        def on_step_end(self, args, state, control, **given):
            if where == "callback" and state.global_step == 4:
                raise KeyboardInterrupt

    reward = raises_at(5, KeyboardInterrupt())(share_of_letter) if where == "reward" else share_of_letter
    with pytest.raises(KeyboardInterrupt, match="checkpoint-4 holds the run up to update 4"):
        run(tmp_path, callbacks=[Stops()], reward=reward).train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-4"]


def test_a_resume_from_another_folder_goes_on_in_its_own(tmp_path):
    run(tmp_path / "a", max_steps=4, save_steps=2).train()
    options = {"resume_from_checkpoint": str(tmp_path / "a" / "checkpoint-2"), "save_steps": 2, "save_total_limit": 2}
    run(tmp_path / "b", **options).train()
    assert [path.name for path in list_checkpoints(tmp_path / "b")] == ["checkpoint-6", "checkpoint-8"]
    run(tmp_path / "a", max_steps=2, save_steps=2).train()  # a fresh run, which puts the first one aside
    options["resume_from_checkpoint"] = str(tmp_path / "a" / "earlier-1" / "checkpoint-2")
    run(tmp_path / "a", **options).train()
    assert [line["step"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl") if "reward" in line] == [4, 6, 8]
    assert (tmp_path / "a" / "earlier-2" / "checkpoint-2").is_dir()
    assert [path.name for path in list_checkpoints(tmp_path / "a")] == ["checkpoint-6", "checkpoint-8"]


def test_the_first_and_last_evaluation_can_be_the_best(tmp_path):
    values = iter([0.1, 0.9, 0.2, 0.3])
    options = {"metric_for_best_model": "eval_mine", "eval_steps": 4, "eval_on_start": True}
    made = run(tmp_path, compute_metrics=lambda groups: {"mine": next(values)}, **options)
    made.train()
    assert made.state.best == {"step": 4, "value": 0.9}
    values = iter([0.5, 0.1, 0.9])
    made = run(tmp_path, compute_metrics=lambda groups: {"mine": next(values)}, **options)
    made.train()
    assert made.state.best == {"step": 8, "value": 0.9} and best_checkpoint(tmp_path).name == "checkpoint-8"


def test_foreign_optimisers_and_schedules_are_refused(tmp_path):
    model, other = tiny_model(), torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(model.parameters(), lr=1)
    for optimizers, message in (
        ((torch.optim.SGD(other.parameters(), lr=1), None), "optimizers must hold every parameter .*got none of"),
        ((None, torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(other.parameters(), lr=1))), "schedule of their"),
        (("adam", None), "torch.optim.Optimizer or None first, got 'adam'"),
        (None, "optimizers must be an optimiser and a schedule, each may be None, got None"),
        ((torch.optim.LBFGS(model.parameters()), None), "without arguments, got LBFGS, whose step needs closure; use"),
        (
            (sgd, torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)),
            "got ReduceLROnPlateau, whose step needs metrics; use",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            run(tmp_path, model, optimizers=optimizers)


def test_another_precision_than_that_of_the_process_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(ValueError, match="bf16 and use_cpu must be those of the first trainer"):
        run(tmp_path, bf16=True)


def test_wrong_arguments_are_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="compute_metrics must be a function of groups, got 'acc'"):
        run(tmp_path, compute_metrics="acc")
    with pytest.raises(ValueError, match="report_to must be a tracker that is installed, got 'comet_ml'"):
        run(tmp_path, report_to="comet_ml")
    (tmp_path / "model").write_text("a file")
    with pytest.raises(ValueError, match="output_dir must be a folder that can be written, .*model in it is a file"):
        run(tmp_path)


def test_given_optimisers_are_used(tmp_path):
    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.25**step)
    made = run(tmp_path, model, optimizers=(optimizer, schedule))
    made.step()
    assert made.optimizer.optimizer is optimizer
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.25**2)


def test_a_resume_under_another_schedule_is_refused(tmp_path):
    run(tmp_path, max_steps=2, save_steps=2).train()
    model = tiny_model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 3)
    with pytest.raises(ValueError, match="changes lr_scheduler: 'LambdaLR' -> 'CosineAnnealingLR'; drop them or"):
        run(tmp_path, model, optimizers=(adam, cosine)).train(resume_from_checkpoint="latest")


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
