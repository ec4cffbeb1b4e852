"""Every check of the doctor passes on a sound trainer, fails on the fault it is there for, and changes nothing."""

import copy
import random
import re
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from moe_families import tiny_moe
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.ops import grpo_loss
from grpo_moe.rl.doctor import Check, doctor, doctor_table, examine, gradients, losses, rewards, run_doctor, sample

NAMES = [
    "ratio on-policy", "fused loss", "auxiliary loss", "rollout log-probs", "sinks", "gradients", "memory",
    "group alignment", "reward order", "reward failures", "reward latency",
]  # fmt: skip


def trainer(path, model=None, reward=share_of_letter, peft_config=None, **changes):
    values = dict(
        output_dir=str(path), per_device_train_batch_size=4, num_generations=4, steps_per_generation=2,
        max_completion_length=8, learning_rate=1e-2, use_cpu=True, show_progress=False,
    )  # fmt: skip
    model = tiny_model() if model is None else model
    args = GRPOConfig(**{**values, **changes})
    return GRPOTrainer(
        model, reward, args, prompt_rows(10), processing_class=tokenizer(), peft_config=peft_config
    )  # fmt: skip


def found(run):
    return {check.name: check for check in doctor(run)}


def failed(run):
    return {name for name, check in found(run).items() if check.ok is False}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_iterations": 2, "beta": 0.1, "router_aux_loss_coef": 0.01, "gradient_checkpointing": True},
        {"routing_replay": "R3", "padding_free": True, "temperature": 0.7, "mask_truncated_completions": True},
        {"routing_replay": "R2", "loss_type": "cispo", "epsilon_high": 5.0, "steps_per_generation": 4},
        {"loss_type": "dr_grpo", "sampler_correction": "token_mask", "top_entropy_quantile": 0.5},
    ],
)
def test_a_sound_trainer_has_no_fault(tmp_path, options):
    checks = doctor(trainer(tmp_path, **options))
    assert [check.name for check in checks] == NAMES
    assert not [check for check in checks if check.ok is False], doctor_table(checks)
    idle = {"memory"} | (set() if options.get("router_aux_loss_coef") else {"auxiliary loss"})
    assert {check.name for check in checks if check.ok is None} == idle


def test_models_without_sinks_or_experts_and_equal_rewards_have_no_fault(tmp_path):
    run = trainer(tmp_path, tiny_moe("qwen3_moe"), reward=lambda completions, **_: [0.0] * len(completions))
    checks = found(run)
    assert not [name for name, check in checks.items() if check.ok is False], doctor_table(list(checks.values()))
    assert checks["sinks"].ok is None and "0 with a spread" in checks["group alignment"].value


def test_nothing_is_left_changed(tmp_path):
    def drawing(completions, **columns):
        return [random.random() + np.random.rand() + float(torch.rand(())) for _ in completions]

    run = trainer(tmp_path, reward=drawing, num_iterations=2, router_aux_loss_coef=0.01)
    run.step()
    run.policy.lm_head.eval()
    for p in run.policy.parameters():
        p.grad = torch.ones_like(p)

    def state():
        return copy.deepcopy(
            {
                "weights": run.policy.state_dict(),
                "gradients": [p.grad for p in run.policy.parameters()],
                "optimiser": run.optimizer.state_dict(),
                "flags": [m.training for m in run.policy.modules()],
                "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),
                "trainer": (run.source.state_dict(), run.state, run.timer.totals, run.timer.step_seconds()),
            }
        )

    run.timer.step_seconds()
    before = state()
    doctor(run)
    after = state()
    assert before.pop("trainer") == after.pop("trainer") and before["flags"] == after["flags"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert run.routing._load is None


def test_a_step_after_it_is_the_step_without_it(tmp_path):
    steps = []
    for examined in (False, True):
        run = trainer(tmp_path, routing_replay="R3", router_aux_loss_coef=0.01)
        if examined:
            doctor(run)
        steps.append({name: value for name, value in run.step().items() if not name.startswith("seconds/")})
    assert steps[0] == steps[1]


def test_a_forward_that_changes_from_call_to_call_fails_the_ratio(tmp_path):
    run = trainer(tmp_path)
    run.policy.model.norm.register_forward_hook(lambda module, args, out: out + 0.01 * torch.randn_like(out))
    assert "ratio on-policy" in failed(run)


def test_a_dropout_fails_the_ratio(tmp_path):
    run = trainer(tmp_path, tiny_moe("qwen3_moe", attn_implementation="eager"), num_iterations=2)
    run.policy.model.layers[0].self_attn.attention_dropout = 0.2  # after the trainer had switched it off
    run.policy.train()
    run.add_reference_logps, add = lambda batch: in_evaluation(run, add, batch), run.add_reference_logps
    assert "ratio on-policy" in failed(run)


def in_evaluation(run, function, batch):
    run.policy.eval()
    made = function(batch)
    run.policy.train()
    return made


@pytest.mark.parametrize("change", [{"logit_scale": 1.01}, {"softcap": 3.0}])
def test_another_head_fails_the_fused_loss(tmp_path, monkeypatch, change):
    run = trainer(tmp_path)
    monkeypatch.setattr(losses, "grpo_loss", lambda *args, **given: grpo_loss(*args, **{**given, **change}))
    assert "fused loss" in failed(run)


@pytest.mark.parametrize(("factor", "shown"), [(0.01, "1.0e-02"), (float("nan"), "nan")])
def test_a_wrong_gradient_alone_fails_the_fused_loss(tmp_path, monkeypatch, factor, shown):
    def scaled(hidden_states, lm_head_weight, *args, **given):
        if torch.is_grad_enabled():
            lm_head_weight = lm_head_weight.clone()
            lm_head_weight.register_hook(lambda gradient: gradient * (1 + factor))
        return grpo_loss(hidden_states, lm_head_weight, *args, **given)

    run = trainer(tmp_path)
    monkeypatch.setattr(losses, "grpo_loss", scaled)
    check = found(run)["fused loss"]
    errors = re.fullmatch(
        r"relative errors: loss (.+), gradient of hidden states (.+), gradient of head (.+)", check.value
    )
    assert check.ok is False and errors[3] == shown and float(errors[1]) < 1e-5 and float(errors[2]) < 1e-5


def answers(run, change):
    """Makes the engine change every completion."""
    generate = run.collector.engine.generate
    run.collector.engine.generate = lambda prompts, sampling: [
        [change(completion) for completion in group] for group in generate(prompts, sampling)
    ]


@pytest.mark.parametrize("wrong", [0.01, float("nan")])
def test_wrong_log_probabilities_of_the_engine_fail_the_rollout(tmp_path, wrong):
    run = trainer(tmp_path)
    answers(run, lambda c: replace(c, sampling_logps=tuple(x + wrong for x in c.sampling_logps)))
    assert failed(run) == {"rollout log-probs"}


@pytest.mark.parametrize("replays", [False, True])
def test_wrong_routes_fail_the_rollout_where_they_are_replayed(tmp_path, replays):
    run = trainer(tmp_path, routing_replay="R3" if replays else "none")

    def turn(completion):
        indices = completion.routes.indices
        turned = torch.where(indices >= 0, (indices + 1) % 4, indices)
        return replace(completion, routes=replace(completion.routes, indices=turned))

    answers(run, turn)
    check = found(run)["rollout log-probs"]
    assert check.ok is not replays and "with the rollout's routes mean" in check.value


def test_an_engine_without_routes_is_a_fault_of_r3_alone(tmp_path):
    for replays in ("none", "R3"):
        run = trainer(tmp_path, routing_replay=replays)
        answers(run, lambda c: replace(c, routes=None))
        assert ("rollout log-probs" in failed(run)) == (replays == "R3")
    run, asked = trainer(tmp_path), []
    generate = run.collector.engine.generate

    def refusing(prompts, sampling):
        asked.append(sampling.return_routes)
        if sampling.return_routes:
            raise ValueError("return_routes must be False")
        return generate(prompts, sampling)

    run.collector.engine.generate = refusing
    check = found(run)["rollout log-probs"]
    assert asked == [True, False] and check.ok and "routes" not in check.value


def test_an_attention_without_sinks_fails(tmp_path):
    run = trainer(tmp_path, tiny_moe("gpt_oss", attn_implementation="eager"))
    assert not failed(run)
    run.policy.config._attn_implementation_internal = "sdpa"
    assert "sinks" in failed(run)


def test_a_detached_parameter_is_named(tmp_path):
    run = trainer(tmp_path)
    projection = run.policy.model.layers[1].self_attn.o_proj
    projection.forward = lambda x: torch.nn.functional.linear(x, projection.weight.detach())
    check = found(run)["gradients"]
    assert check.ok is False and "no gradient: model.layers.1.self_attn.o_proj.weight" in check.value


def test_parameters_unfrozen_too_late_and_infinite_gradients_are_named(tmp_path):
    model = tiny_model()
    late = model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    run = trainer(tmp_path, model)
    assert "gradients" not in failed(run)
    late.requires_grad_(True)
    model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    value = found(run)["gradients"].value
    assert (
        "not in the optimiser: model.layers.0.self_attn.q_proj.weight" in value
        and "not finite: model.norm.weight" in value
    )
    assert failed(run) == {"gradients"}


def test_a_frozen_parameter_with_a_gradient_is_named(tmp_path):
    run = trainer(tmp_path)
    loss, weight = run.loss, run.policy.model.norm.weight

    def leaking(*args):
        made = loss(*args)
        weight.requires_grad_(False)
        weight.grad = torch.ones_like(weight)
        return made.detach() + 0 * sum(p.sum() for p in run.policy.parameters())

    run.loss = leaking
    assert "gradient, but frozen: model.norm.weight" in found(run)["gradients"].value


def test_long_lists_of_names_are_cut(tmp_path):
    run = trainer(tmp_path)
    loss = run.loss
    run.loss = lambda *args: loss(*args) * 0
    assert "(50 in all)" in found(run)["gradients"].value


def test_an_adapter_that_nothing_reaches_is_named(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
    run = trainer(tmp_path, tiny_moe("qwen3_moe", experts_implementation="grpo_moe"), peft_config=lora)
    assert not failed(run)
    adapter = next(p for n, p in run.policy.named_parameters() if "1.self_attn.q_proj.lora_B" in n)
    adapter.register_hook(torch.zeros_like)
    check = found(run)["gradients"]
    assert check.ok is False and "no gradient: model.layers.1.self_attn.q_proj" in check.value


def test_experts_without_a_token_are_listed_apart_from_those_without_a_gradient(tmp_path):
    run = trainer(tmp_path, tiny_model(num_experts=32, num_experts_per_tok=1))
    check = found(run)["gradients"]
    assert check.ok and "no token at (not a fault): layer 0 expert" in check.value
    run = trainer(tmp_path)
    run.policy.model.layers[2].mlp.experts.down_proj.register_hook(
        lambda gradient: gradient * torch.tensor([1.0, 0.0, 1.0, 1.0])[:, None, None]
    )
    check = found(run)["gradients"]
    assert check.ok is False
    assert "no gradient at experts with tokens: model.layers.2.mlp.experts.down_proj[1]" in check.value


def test_an_auxiliary_loss_that_drowns_the_rewards_fails(tmp_path):
    assert failed(trainer(tmp_path, router_aux_loss_coef=100.0)) == {"auxiliary loss"}


@pytest.mark.parametrize("name", ["input_ids", "completion_ids", "prompt_lengths"])
def test_rows_of_another_group_fail_the_alignment(tmp_path, monkeypatch, name):
    def rolled(*args, collate=sample.collate, **options):
        batch = collate(*args, **options)
        return replace(batch, **{name: getattr(batch, name).roll(4, 0)})

    run = trainer(tmp_path)
    monkeypatch.setattr(sample, "collate", rolled)
    check = found(run)["group alignment"]
    assert check.ok is False and "rows of another prompt or completion: 0" in check.value


def first_row(completions, **columns):
    return [float(row == 0) / 2 for row in range(len(completions))]


def first_column(completions, letter, **columns):
    return [text.count(letter[0]) / 100 for text in completions]


def sorted_by_accident(completions, **columns):
    return sorted(len(set(text)) / 100 for text in completions)


@pytest.mark.parametrize("reward", [first_row, first_column, sorted_by_accident])
def test_rewards_that_depend_on_the_order_fail(tmp_path, reward):
    run = trainer(tmp_path, reward=[share_of_letter, reward])
    check = found(run)["reward order"]
    assert check.ok is False and check.value == f"other rewards in another order from: {reward.__name__}"


def test_rewards_that_change_from_call_to_call_are_said_and_no_fault(tmp_path):
    def judged(completions, **columns):
        return [random.random() / 2 for _ in completions]

    check = found(trainer(tmp_path, reward=judged))["reward order"]
    assert check.ok is None and "on every call from: judged" in check.value


def passing(completions, **columns):
    return [1.0 if not text else 0.0 for text in completions]


def refusing(completions, **columns):
    if any("\x00" in text for text in completions):
        raise KeyError("boxed\x1b[2J")
    return [None] * len(completions)


def test_rewards_that_raise_or_pass_on_nonsense_fail(tmp_path):
    check = found(trainer(tmp_path, reward=passing))["reward failures"]
    assert check.ok is False and check.value.startswith("empty completion: 1, which passes; garbage completion: 0")
    run = trainer(tmp_path, reward=refusing)
    check = found(run)["reward failures"]
    assert check.ok is False and "empty completion: not scored; garbage completion: RuntimeError" in check.value
    assert "KeyError" in check.value and "\x1b" not in doctor_table([check])
    run = trainer(tmp_path, reward=refusing, reward_on_error="skip")
    check = found(run)["reward failures"]
    assert check.ok is False and "skipped for faults of refusing/" in check.value and not run.collector.faults


def test_slow_rewards_fail(tmp_path, monkeypatch):
    def slow(completions, **columns):
        time.sleep(0.01)
        return share_of_letter([], completions, columns["letter"])

    run = trainer(tmp_path, reward=slow)
    assert not failed(run)
    monkeypatch.setattr(rewards, "MAX_REWARD_SECONDS", 0.001)
    assert failed(run) == {"reward latency"}


def test_the_table_names_what_to_do_and_the_exit_code_follows(tmp_path, capsys):
    run = trainer(tmp_path)
    assert run_doctor(run) == 0
    out = capsys.readouterr().out
    assert "no check failed" in out and "fix:" not in out
    answers(run, lambda c: replace(c, sampling_logps=tuple(x - 1 for x in c.sampling_logps)))
    assert run_doctor(run) == 1
    out = capsys.readouterr().out
    assert "FAIL rollout log-probs" in out and "must be mean |difference|" in out and "1 of 11 checks failed" in out


def test_a_fault_of_another_process_is_shown_and_counts(tmp_path, capsys, monkeypatch):
    run, fault = trainer(tmp_path), Check("sinks", False, "none", "some", "add them")
    fine = replace(fault, name="memory", ok=True)
    monkeypatch.setattr(examine, "doctor", lambda trainer: [replace(fault, ok=None), fine])
    monkeypatch.setattr(examine, "gather_object", lambda mine: [*mine, [fault, fine]])
    assert run_doctor(run) == 1
    out = capsys.readouterr().out
    assert "FAIL sinks               process 1: none" in out and "ok   memory" in out


@pytest.mark.gpu
def test_memory_is_measured_on_a_gpu(tmp_path, monkeypatch):
    run = trainer(tmp_path, use_cpu=False)
    assert found(run)["memory"].ok is True
    monkeypatch.setattr(gradients, "MAX_MEMORY_SHARE", 0.0)
    assert failed(run) == {"memory"}


@pytest.mark.parametrize("second", [None, float("nan")])
def test_tokens_that_the_engine_did_not_score_are_no_fault_and_none_scored_is_one(tmp_path, second):
    run = trainer(tmp_path)
    generate = run.collector.engine.generate

    def unscored(keep):
        def generated(prompts, sampling):
            cut = lambda c: (*c.sampling_logps[:keep], *[second] * len(c.token_ids))[: len(c.token_ids)]  # noqa: E731
            return [[replace(c, sampling_logps=cut(c)) for c in group] for group in generate(prompts, sampling)]

        return generated

    run.collector.engine.generate = unscored(1)
    assert failed(run) == set()
    run.collector.engine.generate = unscored(0)
    assert failed(run) == {"rollout log-probs"}
