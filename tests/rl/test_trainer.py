"""The trainer: exact updates, resume to the bit, dynamic sampling, evaluation, and clear refusals."""

import asyncio
import gc
import json
import math
import threading
import weakref
from dataclasses import replace

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file
from tiny import prompt_rows, share_of_letter, tiny_config, tiny_model, tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig, TrainerCallback

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.data import character_tokenizer
from grpo_moe.ops import grpo_loss
from grpo_moe.rl.files import strict_json
from grpo_moe.rl.metrics import read_metrics
from grpo_moe.rl.routing import load_balancing_loss
from grpo_moe.rl.run_folder import list_checkpoints
from grpo_moe.types import Completion


def config(path, **changes):
    values = dict(
        output_dir=str(path),
        per_device_train_batch_size=4,
        num_generations=4,
        steps_per_generation=2,
        max_completion_length=8,
        learning_rate=1e-2,
        max_steps=6,
        use_cpu=True,
        show_progress=False,
        eval_on_start=False,
        log_completions=False,
    )
    return GRPOConfig(**{**values, **changes})


def trainer(path, model=None, reward=share_of_letter, rows=10, **changes):
    eval_dataset = changes.pop("eval_dataset", None)
    return GRPOTrainer(
        tiny_model() if model is None else model,
        reward,
        config(path, **changes),
        prompt_rows(rows),
        eval_dataset=eval_dataset,
        processing_class=tokenizer(),
    )


def weights(path):
    return load_file(path / "model" / "model.safetensors")


def test_training_raises_the_reward(tmp_path):
    trainer(tmp_path, per_device_train_batch_size=32, max_steps=40, rows=4).train()
    rewards = [line["reward"] for line in read_metrics(tmp_path / "metrics.jsonl") if "reward" in line]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.2


def gradient_of_one_step(path, model, **changes):
    """Gradients of the first window, before clipping and the optimiser."""
    run = trainer(path, model.double(), max_grad_norm=0.0, learning_rate=0.0, **changes)
    gradients = []
    run.optimizer.step = lambda: gradients.append([p.grad.clone() for p in run.policy.parameters()])
    run.step()
    return gradients


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "bnpo"])
def test_the_update_does_not_depend_on_the_split(tmp_path, loss_type):
    options = {"loss_type": loss_type, "epsilon_high": 5.0 if loss_type == "cispo" else None}
    splits = [(8, 1, 1), (4, 2, 2), (2, 4, 4), (1, 8, 8)]
    results = []
    for size, accumulation, per_generation in splits:
        gradients = gradient_of_one_step(
            tmp_path,
            tiny_model(),
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=per_generation,
            **options,
        )
        assert len(gradients) == 1
        results.append(gradients[0])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    assert max(g.abs().max() for g in results[0]) > 1e-6


def test_every_window_counts_its_own_tokens(tmp_path):
    run = trainer(tmp_path, steps_per_generation=4)
    seen = []
    minibatches = run.minibatches
    run.minibatches = lambda batch, rows: seen.append((batch, minibatches(batch, rows))) or seen[-1][1]
    run.step()
    ((batch, made),) = seen
    assert len(made) == 4
    for window in made:
        rows = torch.cat(window.micro_batches)
        assert window.num_loss_tokens == int(batch.completion_mask[rows].sum())
        assert window.num_sequences == len(rows) == 4


def test_the_first_update_is_on_policy_and_later_ones_are_not(tmp_path):
    run = trainer(tmp_path, num_iterations=2)
    metrics = run.step()
    assert metrics["sampling_logp_difference_max"] < 1e-5 and metrics["sampling_kl"] < 1e-9
    assert metrics["sampling_effective_size"] == pytest.approx(1) and "sampling_ratio_square_mean" not in metrics
    assert metrics["ratio_max"] > 1.001
    single = trainer(tmp_path, steps_per_generation=1).step()
    assert single["ratio_max"] == 1 and single["approx_kl"] == 0


def test_old_log_probabilities_are_those_of_the_policy_that_generated(tmp_path):
    run = trainer(tmp_path, temperature=0.7, beta=0.1)
    batches = []
    add = run.add_reference_logps
    run.add_reference_logps = lambda batch: batches.append(add(batch)) or batches[-1]
    run.step()
    (batch,) = batches
    mask = batch.completion_mask
    torch.testing.assert_close(batch.old_logps[mask], batch.sampling_logps[mask], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(batch.ref_logps, batch.old_logps)
    run.step()
    assert (batches[1].ref_logps - batches[1].old_logps).abs().max() > 1e-4  # the reference stayed


def stats_of_losses(monkeypatch):
    """The statistics of every call of the loss from here on, in order."""
    seen = []

    def watched(*args, **options):
        result = grpo_loss(*args, **options)
        seen.append({name: float(value) for name, value in result.stats.items()})
        return result

    monkeypatch.setattr("grpo_moe.rl.trainer.grpo_loss", watched)
    return seen


@pytest.mark.parametrize(
    "options", [{}, {"padding_free": True}, {"gradient_checkpointing": True}, {"routing_replay": "R3"}], ids=str
)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_at_any_temperature_the_ratio_is_one_and_the_kl_zero_before_the_first_update(
    tmp_path, monkeypatch, options, dropout
):
    """One temperature for rollout, old, reference and current log-probabilities, and no dropout in any of them."""
    seen = stats_of_losses(monkeypatch)
    shared = {"temperature": 0.7, "beta": 0.1, "gradient_accumulation_steps": 2, **options}
    for num_iterations in (1, 2):
        seen.clear()
        changes = {**shared, "num_iterations": num_iterations}
        if dropout:
            run = lora_trainer(tmp_path, qwen3_moe(attention_dropout=dropout), dropout=dropout, **changes)
        else:
            run = trainer(tmp_path, **changes)
        metrics = run.step()
        assert len(seen) == 2 * num_iterations
        for stats in seen[:2]:  # both micro-batches of the first window
            exact = 0 if num_iterations == 1 else 1e-5  # by definition, or to the rounding of another padding
            assert abs(stats["ratio_max"] - 1) <= exact and abs(stats["approx_kl"]) <= exact**2
            assert stats["sampling_logp_difference_max"] < 1e-5
            assert dropout or abs(stats["kl"]) < 1e-9  # the adapters are drawn at random, the reference is without
        assert num_iterations == 1 or seen[-1]["ratio_max"] > 1.0001
        assert metrics["entropy"] > 0


def test_resume_gives_the_uninterrupted_run_to_the_bit(tmp_path):
    options = dict(num_iterations=2, max_steps=16, rows=3, warmup_steps=5, dynamic_sampling=True)
    trainer(tmp_path / "whole", **options).train()
    for stop in (4, 12):  # in the first epoch of three prompts, and some epochs on
        path = tmp_path / f"cut{stop}"
        first = trainer(path, save_steps=4, **options)
        step = first.step

        def step_or_die(step=step, first=first, stop=stop):
            if first.state.step >= stop:
                raise SystemError("killed")
            return step()

        first.step = step_or_die
        with pytest.raises(SystemError, match="killed"):
            first.train()
        assert list_checkpoints(path)[-1].name == f"checkpoint-{stop}"
        trainer(path, model=tiny_model(seed=9), save_steps=4, **options).train(resume_from_checkpoint="latest")
        whole, resumed = weights(tmp_path / "whole"), weights(path)
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)
        metrics = [read_metrics(p / "metrics.jsonl") for p in (tmp_path / "whole", path)]
        same = [[(m["step"], m.get("reward"), m.get("learning_rate")) for m in lines] for lines in metrics]
        assert same[0] == same[1]


def test_an_interrupt_saves_and_the_run_goes_on(tmp_path):
    import os
    import signal

    run = trainer(tmp_path)
    step = run.step
    run.step = lambda: (os.kill(os.getpid(), signal.SIGINT), step())[1]
    with pytest.raises(KeyboardInterrupt, match="stopped after update 2"):
        run.train()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-2"]
    assert trainer(tmp_path).train(resume_from_checkpoint="latest")["steps"] == 6


def test_checkpoints_rotate_and_half_written_ones_are_ignored(tmp_path):
    trainer(tmp_path, save_steps=2, save_total_limit=2).train()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6"]
    (tmp_path / "checkpoint-8.tmp").mkdir()
    (tmp_path / "checkpoint-10").mkdir()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6"]


def test_the_end_of_a_run_is_saved_and_a_larger_max_steps_goes_on_from_there(tmp_path):
    trainer(tmp_path, save_steps=4).train()
    assert [p.name for p in list_checkpoints(tmp_path)] == ["checkpoint-4", "checkpoint-6"]
    run = trainer(tmp_path, save_steps=4, max_steps=8)
    assert run.train(resume_from_checkpoint="latest")["steps"] == 8 and run.state.rollouts == 4


def test_a_foreign_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match="resume_from_checkpoint must be 'latest' or a checkpoint folder"):
        trainer(tmp_path).train(resume_from_checkpoint=str(tmp_path / "nowhere"))
    trainer(tmp_path, save_steps=2).train()
    with pytest.raises(ValueError, match="num_rows must be that of the checkpoint"):
        trainer(tmp_path, rows=11).train(resume_from_checkpoint="latest")  # the second run's own, of 10 rows


def test_resuming_without_a_checkpoint_says_so_and_starts(tmp_path, capsys):
    trainer(tmp_path, max_steps=2).train(resume_from_checkpoint="latest")
    assert "training starts from the beginning" in capsys.readouterr().out


def test_dynamic_sampling_replaces_groups_without_spread(tmp_path):
    def half_informative(prompts, completions, letter, **columns):
        return [len(c) if x in "abcdefghijklm" else 0.0 for c, x in zip(completions, letter, strict=True)]

    run = trainer(
        tmp_path, reward=half_informative, rows=26, dynamic_sampling=True, per_device_train_batch_size=16,
        dynamic_sampling_max_rounds=6,
    )  # fmt: skip
    metrics = run.step()
    assert metrics["sampling/groups_kept"] == 8 and metrics["sampling/groups_generated"] > 8
    assert metrics["sampling/rounds"] > 1


def test_without_any_spread_nothing_is_learned_and_the_run_ends(tmp_path):
    run = trainer(tmp_path, reward=lambda prompts, **_: [1.0] * len(prompts), dynamic_sampling=True, max_steps=4)
    before = {n: p.clone() for n, p in run.policy.named_parameters()}
    summary = run.train()
    assert summary["skipped_updates"] == summary["steps"] == 4
    assert all(torch.equal(before[n], p) for n, p in run.policy.named_parameters())


def test_unscored_completions_take_no_part(tmp_path):
    def sometimes(prompts, completions, **columns):
        return [None if i % 4 == 0 else float(len(c)) for i, c in enumerate(completions)]

    run = trainer(tmp_path, reward=sometimes)
    batches = []
    add = run.add_reference_logps
    run.add_reference_logps = lambda batch: batches.append(batch) or add(batch)
    metrics = run.step()
    assert math.isfinite(metrics["reward"]) and metrics["grad_norm"] > 0
    assert batches[0].advantages[::4].abs().sum() == 0


def test_overlong_completions_are_punished_in_the_reward_but_not_in_the_pass_rate(tmp_path):
    reward = lambda prompts, **_: [1.0] * len(prompts)  # noqa: E731
    metrics = trainer(tmp_path, reward=reward, overlong_cache_length=7).step()
    assert metrics["reward"] < 1 and metrics["pass_rate"] == 1


@pytest.mark.curves
def test_evaluation_and_summary(tmp_path):
    run = trainer(
        tmp_path,
        eval_dataset=prompt_rows(6),
        eval_on_start=True,
        eval_steps=2,
        pass_threshold=0.3,
        log_completions=True,
    )
    summary = run.train()
    written = json.loads((tmp_path / "summary.json").read_text())
    for when in ("eval_before", "eval_after"):
        assert written[when] == summary[when]
        assert {"pass_rate", "greedy_pass_rate", "reward", "mean_length"} <= set(summary[when])
        assert 0 <= summary[when]["pass_rate"] <= 1
    assert torch.__version__.startswith(written["versions"]["torch"])
    assert {"rollout", "update", "evaluation"} <= set(written["seconds"])
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in lines if "eval_pass_rate" in m] == [0, 2, 4, 6]
    assert (tmp_path / "curves.png").stat().st_size > 1000
    assert len(list((tmp_path / "completions").glob("*.parquet"))) == 3
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.lm_head.weight, run.policy.lm_head.weight)


def test_a_transformers_moe_trains(tmp_path):
    torch.manual_seed(0)
    shape = dict(vocab_size=30, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            **shape,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=8,
            eos_token_id=2,
            pad_token_id=0,
            max_position_embeddings=64,
        )  # fmt: skip
    )
    before = model.model.layers[0].mlp.experts.gate_up_proj.clone()
    trainer(
        tmp_path, model.float(), max_steps=2, gradient_checkpointing=True, loss_type="cispo", epsilon_high=5.0
    ).train()
    assert not torch.equal(before, model.model.layers[0].mlp.experts.gate_up_proj)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    results = []
    for name, on in (("plain", False), ("checkpointed", True)):
        trainer(tmp_path / name, max_steps=4, gradient_checkpointing=on).train()
        results.append(weights(tmp_path / name))
    assert all(torch.allclose(results[0][n], results[1][n], rtol=1e-4, atol=1e-6) for n in results[0])


def qwen3_moe(**changes):
    values = dict(
        vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        eos_token_id=2, pad_token_id=0, max_position_embeddings=64, norm_topk_prob=True,
    )  # fmt: skip
    options = {name: changes.pop(name) for name in ("experts_implementation",) if name in changes}
    return AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**values, **changes}), **options)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_r2_routes_every_update_as_before_the_first(checkpointing, tmp_path, monkeypatch):
    run = trainer(
        tmp_path,
        learning_rate=0.5,
        num_iterations=2,
        max_steps=4,
        routing_replay="R2",
        gradient_checkpointing=checkpointing,
    )
    used, natural, loss = [], [], run.loss

    def watched(batch, *rest):
        replay = run.routing.replay
        with replay.record() as taken, replay.record(natural=True) as own:
            made = loss(batch, *rest)
        used.append(torch.equal(taken[0].indices, batch.routes.indices))
        natural.append(torch.equal(own[0].indices, batch.routes.indices))
        return made

    monkeypatch.setattr(run, "loss", watched)
    run.train()
    assert len(used) == 4 and all(used)
    assert natural[0] and not all(natural)  # the policy would have gone elsewhere after its updates
    line = read_metrics(tmp_path / "metrics.jsonl")[0]
    assert line["routing/max_violation"] > 0 and line["routing/dead_experts"] >= 0
    assert 0 < line["routing/flip_rate"] <= line["routing/flipped_tokens"] <= 1
    by_layer = [value for name, value in line.items() if name.startswith("routing/flip_rate_layer_")]
    assert sum(by_layer) / len(by_layer) == pytest.approx(line["routing/flip_rate"]) and len(by_layer) > 1


def test_replay_without_experts_is_refused(tmp_path):
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=30,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            eos_token_id=2,
            pad_token_id=0,
            max_position_embeddings=64,
        )
    )
    for name, value in (("routing_replay", "R3"), ("freeze_router", True), ("router_aux_loss_coef", 0.1)):
        with pytest.raises(ValueError, match=f"{name} must be .* for LlamaForCausalLM, which has no experts"):
            trainer(tmp_path, model, **{name: value})


def test_frozen_routers_stay_and_the_rest_learns(tmp_path):
    run = trainer(tmp_path, max_steps=2, freeze_router=True)
    before = {name: p.clone() for name, p in run.policy.named_parameters()}
    run.train()
    moved = {name for name, p in run.policy.named_parameters() if not torch.equal(p, before[name])}
    routers = {name for name in before if ".gate.weight" in name}
    assert routers and not routers & moved and moved


def test_a_non_finite_gradient_is_skipped_and_several_stop_the_run(tmp_path):
    run = trainer(tmp_path, max_steps=20)
    before = run.policy.lm_head.weight.clone()
    run.accelerator.clip_grad_norm_ = lambda *args: torch.tensor(math.nan)
    with pytest.raises(FloatingPointError, match="grad_norm must be finite, got nan in 3 updates in a row"):
        run.train()
    assert torch.equal(before, run.policy.lm_head.weight) and run.state.skipped_updates == 3


def test_an_update_without_any_gradient_is_made_and_does_nothing(tmp_path):
    """As where all that trains are experts without tokens: their gradients are None."""
    run = trainer(tmp_path, steps_per_generation=1, gradient_accumulation_steps=1)
    before = {name: p.clone() for name, p in run.policy.named_parameters()}
    run.accelerator.backward = lambda loss: None
    metrics = run.step()
    assert metrics["grad_norm"] == 0 and run.state.step == 1 and run.state.skipped_updates == 0
    assert all(torch.equal(before[name], p) for name, p in run.policy.named_parameters())


def test_nothing_of_a_micro_batch_outlives_it(tmp_path, monkeypatch):
    run = trainer(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4, beta=0.1,
        num_iterations=2, router_aux_loss_coef=0.1,
    )  # fmt: skip
    alive = []

    def watched(hidden_states, *args, **options):
        assert not any(reference() is not None for reference in alive)
        alive.append(weakref.ref(hidden_states))
        result = grpo_loss(hidden_states, *args, **options)
        alive.append(weakref.ref(result.loss.grad_fn))
        return result

    monkeypatch.setattr("grpo_moe.rl.trainer.grpo_loss", watched)
    gc.disable()  # by reference counts alone
    try:
        run.step()
    finally:
        gc.enable()
    assert len(alive) == 2 * 8 and not any(reference() is not None for reference in alive)


def test_steps_leave_no_tensors_behind(tmp_path):
    """A leak grows by a step's tensors; the moments of the optimiser are there from the first step on."""
    run = trainer(tmp_path, num_iterations=2, beta=0.1, log_completions=True, routing_replay="R2")
    counts = []
    for number in range(5):
        run.step()
        if number in (1, 4):
            gc.collect()
            kinds = (torch.Tensor, torch.nn.Parameter)  # not the fakes of another test's compiler
            sizes = [x.nbytes for x in gc.get_objects() if type(x) in kinds]
            counts.append((len(sizes), sum(sizes)))
    assert counts[0] == counts[1]


def test_reward_functions_that_always_fail_stop_a_run_that_skips_their_groups(tmp_path):
    calls = []

    def broken(prompts, completions, **_):
        calls.append(len(prompts))
        if len(prompts) > 2:  # not in the check before training
            raise OSError("the judge is down")
        return [0.0] * len(prompts)

    run = trainer(tmp_path, reward=broken, max_steps=50, reward_on_error="skip")
    with pytest.raises(RuntimeError, match="got faults in all 2 groups of each of 3 rollouts.*'broken/exception': 8"):
        run.train()
    assert run.state.rollouts == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_function_that_never_answers_ends_the_run_or_costs_its_groups(tmp_path, is_async):
    released = threading.Event()

    def hangs(prompts, completions, **_):
        return [0.0] * len(prompts) if len(prompts) <= 2 else released.wait()  # not in the check before training

    async def hangs_async(prompts, completions, **_):
        return [0.0] * len(prompts) if len(prompts) <= 2 else await asyncio.Event().wait()

    reward = hangs_async if is_async else hangs
    with pytest.raises(TimeoutError, match=f"'{reward.__name__}' must return within 0.1 s, got nothing for 8 complet"):
        trainer(tmp_path, reward=reward, reward_timeout=0.1).train()
    skips = trainer(tmp_path, reward=[reward, share_of_letter], reward_timeout=0.1, reward_on_error="skip")
    with pytest.raises(RuntimeError, match=f"in all 2 groups of each of 3 rollouts.*'{reward.__name__}/timeout': 8"):
        skips.train()
    released.set()


def test_logged_rewards_follow_their_weights(tmp_path):
    functions = [share_of_letter, lambda prompts, **_: [float(i) for i in range(len(prompts))]]
    run = build(
        tmp_path, reward_funcs=functions, reward_weights=[2, 0], args=config(tmp_path, log_completions=True),
        eval_dataset=prompt_rows(3),
    )  # fmt: skip
    metrics, evaluated = run.step(), run.evaluate()
    assert metrics["reward"] == pytest.approx(2 * metrics["rewards/share_of_letter"]) and metrics["reward"] > 0
    assert metrics["rewards/lambda"] == 3.5 and evaluated["eval_rewards/lambda"] == 1.0
    assert evaluated["eval_reward"] == pytest.approx(2 * evaluated["eval_rewards/share_of_letter"])
    (path,) = (tmp_path / "completions").glob("*.parquet")
    for row in datasets.load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "c"), split="train"):
        assert row["reward"] == pytest.approx(2 * row["rewards/share_of_letter"])


@pytest.mark.parametrize(
    ("reward", "error", "message"),
    [
        (lambda prompts, **_: [1.0], ValueError, "must return a list of 2 numbers, got 1"),
        (lambda prompts, **_: [math.nan] * len(prompts), ValueError, "finite"),
        (lambda prompts, **_: [math.inf] * len(prompts), ValueError, "finite"),
        (lambda prompts: [1.0] * len(prompts), ValueError, "raised TypeError"),
        ("accuracy", ValueError, "reward_funcs must be functions"),
    ],
)
def test_wrong_rewards_are_found_before_any_work(tmp_path, reward, error, message):
    with pytest.raises(error, match=message):
        trainer(tmp_path, reward=reward)


def build(tmp_path, **changes):
    values = dict(model=tiny_model(), reward_funcs=share_of_letter, args=config(tmp_path), train_dataset=prompt_rows(4))
    return GRPOTrainer(**{**values, "processing_class": tokenizer(), **changes})


def test_wrong_data_and_models_are_found_before_any_work(tmp_path):
    with pytest.raises(ValueError, match="prompt"):
        build(tmp_path, train_dataset=[{"question": "a"}])
    with pytest.raises(ValueError, match="row 1"):
        build(tmp_path, train_dataset=[{"prompt": "a", "letter": "a"}, {"prompt": "a" * 125, "letter": "a"}])
    with pytest.raises(ValueError, match="max_completion_length must leave room"):
        build(tmp_path, args=config(tmp_path, max_completion_length=200))
    with pytest.raises(ValueError, match="model_name_or_path must be in a folder or on the hub.*no such folder"):
        build(tmp_path, model=str(tmp_path / "nowhere"), processing_class=None)
    with pytest.raises(ValueError, match="processing_class must be given"):
        build(tmp_path, processing_class=None)


def test_wrong_arguments_of_the_constructor_are_named(tmp_path):
    for change, message in (
        ({"model": 3}, "model must be a transformers model"),
        ({"args": None}, "args must be a GRPOConfig"),
        ({"reward_funcs": None}, "reward_funcs must hold at least one function"),
        ({"processing_class": 3}, "processing_class must be a tokenizer"),
        ({"eval_dataset": [{"prompt": "a"}]}, "raised TypeError"),
        ({"model": tiny_model(vocab_size=20)}, "processing_class must have at most the model's 20 tokens, got 30"),
        ({"model": tiny_model().requires_grad_(False)}, "model must have parameters that require gradients"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            build(tmp_path, **change)


def test_evaluate_works_before_training(tmp_path):
    assert set(trainer(tmp_path, eval_dataset=prompt_rows(3)).evaluate()) >= {"eval_pass_rate", "eval_reward"}


def test_other_options_are_refused_on_resume_and_a_longer_run_is_not(tmp_path):
    trainer(tmp_path, save_steps=2, max_steps=2).train()
    with pytest.raises(ValueError, match="got changes learning_rate: 0.01 -> 0.5"):
        trainer(tmp_path, learning_rate=0.5).train(resume_from_checkpoint=True)
    assert trainer(tmp_path, max_steps=4).train(resume_from_checkpoint=True)["steps"] == 4


def test_the_latest_checkpoint_is_one_of_the_last_run(tmp_path, capsys):
    trainer(tmp_path, save_steps=2).train()
    trainer(tmp_path, max_steps=2, save_steps=None).train()  # a fresh run that saves nothing
    assert list_checkpoints(tmp_path) == []
    trainer(tmp_path, max_steps=2).train(resume_from_checkpoint="latest")
    assert "No checkpoint of the last run" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_refused(tmp_path):
    trainer(tmp_path, save_steps=2, max_steps=2).train()
    (path,) = list_checkpoints(tmp_path)
    (path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="must be a whole checkpoint of this model"):
        trainer(tmp_path).train(resume_from_checkpoint=str(path))
    (path / "grpo_state.json").write_text("{")
    with pytest.raises(ValueError, match="must be JSON, got a damaged file"):
        trainer(tmp_path).train(resume_from_checkpoint=str(path))


def test_a_double_precision_policy_trains(tmp_path):
    assert trainer(tmp_path, tiny_model().double(), max_steps=2).train()["steps"] == 2


def test_bf16_rollouts_agree_with_training(tmp_path):
    AcceleratorState._reset_state(reset_partial_state=True)  # its precision is fixed by the first Accelerator
    try:
        metrics = trainer(tmp_path, bf16=True).step()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert metrics["sampling_logp_difference_max"] < 1e-4


def gradients_of_one_update(path, model, **changes):
    """Every gradient of the first update with nothing but the load-balancing loss, and its value."""
    run = trainer(
        path, model, reward=lambda completions, **_: [float(len(c) % 3) for c in completions],
        router_aux_loss_coef=0.5, learning_rate=0.0, max_grad_norm=0.0, epsilon=0.0, beta=0.0, **changes
    )  # fmt: skip
    kept = {}

    def keep(batch, window, metrics):
        kept.update({name: p.grad.clone() for name, p in run.policy.named_parameters() if p.grad is not None})
        return step(batch, window, metrics)

    step, run.optimizer_step = run.optimizer_step, keep
    return run.step()["aux_loss"], kept, run


@pytest.mark.parametrize("family", ["gptoss_lite", "qwen3_moe"])
def test_aux_loss_is_that_of_the_window_for_any_split_and_checkpointing(family, tmp_path):
    made = {}
    for name, changes in {
        "whole": {"per_device_train_batch_size": 8, "steps_per_generation": 1},
        "split": {"per_device_train_batch_size": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 4},
        "checkpointed": {
            "per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 2,
            "gradient_checkpointing": True,
        },
        "packed": {
            "per_device_train_batch_size": 4, "steps_per_generation": 2, "gradient_accumulation_steps": 2,
            "padding_free": True,
        },
    }.items():  # fmt: skip
        torch.manual_seed(0)
        model = (tiny_model() if family == "gptoss_lite" else qwen3_moe(experts_implementation="grpo_moe")).double()
        made[name] = gradients_of_one_update(tmp_path / name, model, **changes)
    value, expected, run = made.pop("whole")
    router = next(name for name in expected if ".gate.weight" in name or "router" in name)
    assert expected[router].abs().sum() > 0 and run.policy.config.num_experts_per_tok * 0.99 <= value
    for name, (other, gradients, _) in made.items():
        assert other == pytest.approx(value, rel=1e-6), name
        for parameter, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[parameter], rtol=1e-6, atol=1e-9, msg=f"{name} {parameter}")


def test_aux_loss_equals_that_of_transformers(tmp_path):
    """With one layer, where pooling the layers makes no difference."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    model = qwen3_moe(num_hidden_layers=1)
    seen = {}
    run = trainer(tmp_path, model, router_aux_loss_coef=0.5, learning_rate=0.0, per_device_train_batch_size=8,
                  steps_per_generation=1)  # fmt: skip
    scored = run.add_reference_logps
    run.add_reference_logps = lambda batch: seen.setdefault("batch", scored(batch))
    value, batch = run.step()["aux_loss"], seen["batch"]
    logits = run.policy(batch.input_ids, attention_mask=batch.attention_mask, output_router_logits=True).router_logits
    expected = load_balancing_loss_func(logits, model.config.num_experts, 2, batch.attention_mask.long())
    assert value == pytest.approx(float(expected), rel=1e-5)


def test_gradients_of_the_aux_loss_equal_those_of_the_plain_forward(tmp_path):
    """On the fused path, where transformers would make no router logits; of the one MoE layer between dense ones."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    made, seen = {}, {}
    for coefficient in (0.0, 1.0):
        torch.manual_seed(0)
        model = qwen3_moe(num_hidden_layers=3, mlp_only_layers=[0, 2], experts_implementation="grpo_moe").double()
        run = trainer(
            tmp_path / str(coefficient), model, router_aux_loss_coef=coefficient, learning_rate=0.0, max_grad_norm=0.0,
            per_device_train_batch_size=8, steps_per_generation=1,
        )  # fmt: skip
        scored, step = run.add_reference_logps, run.optimizer_step

        def keep(batch, window, metrics, run=run, step=step, coefficient=coefficient):
            made[coefficient] = {n: p.grad.clone() for n, p in run.policy.named_parameters() if p.grad is not None}
            return step(batch, window, metrics)

        run.optimizer_step = keep
        run.add_reference_logps = lambda batch, scored=scored: seen.update(batch=scored(batch)) or seen["batch"]
        run.step()
    batch, model = seen["batch"], run.policy  # both runs draw the same
    logits = model(batch.input_ids, attention_mask=batch.attention_mask, output_router_logits=True).router_logits
    assert len(logits) == 1
    loss = load_balancing_loss_func(logits, 4, 2, batch.attention_mask.long())
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    assert parameters.keys() == made[1.0].keys() == made[0.0].keys()
    for name, gradient in zip(parameters, expected, strict=True):
        ours = made[1.0][name] - made[0.0][name]
        assert "mlp.gate." not in name or gradient.count_nonzero()
        gradient = torch.zeros_like(ours) if gradient is None else gradient
        torch.testing.assert_close(ours, gradient, rtol=1e-5, atol=1e-8, msg=name)  # the router's softmax is in float32


def lora(dropout=0.0, **changes):
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if not dropout else None  # PEFT has none for these
    return peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, lora_dropout=dropout, **changes)


def lora_trainer(path, model, dropout=0.0, **changes):
    return GRPOTrainer(
        model, share_of_letter, config(path, max_steps=4, **changes), prompt_rows(10), processing_class=tokenizer(),
        peft_config=lora(dropout, init_lora_weights=not dropout),
    )  # fmt: skip


def test_adapters_train_and_nothing_else(tmp_path, capsys):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = qwen3_moe(experts_implementation="grpo_moe")
    start = {name: p.clone() for name, p in model.named_parameters()}
    run = lora_trainer(tmp_path, model, beta=0.1, gradient_accumulation_steps=2, gradient_checkpointing=True)
    assert "LoRA" in capsys.readouterr().out
    run.train()
    moved = {n for n, p in run.policy.named_parameters() if ".lora_B" in n and p.count_nonzero()}
    assert len(moved) == 6  # q_proj and two experts' matrices of two layers
    for name, p in run.policy.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(p, start[name.replace(".base_layer", "")]), name
    metrics = read_metrics(tmp_path / "metrics.jsonl")
    assert metrics[0]["kl"] < 1e-9 < 1e-6 < metrics[-1]["kl"]  # the reference is the model without adapters
    base = qwen3_moe(experts_implementation="grpo_moe")
    base.load_state_dict(start)
    again, ids = peft.PeftModel.from_pretrained(base, tmp_path / "model"), torch.arange(9)[None]
    torch.testing.assert_close(again(ids).logits, run.policy.eval()(ids).logits)


def test_an_adapter_without_gradient_is_an_error_at_step_one(tmp_path):
    run = lora_trainer(tmp_path, qwen3_moe())
    next(p for n, p in run.policy.named_parameters() if "1.self_attn.q_proj.lora_B" in n).register_hook(
        torch.zeros_like
    )
    with pytest.raises(ValueError, match="none at model.layers.1.self_attn.q_proj .1 in all."):
        run.train()
    assert run.state.step == 0


def test_r3_routes_updates_as_the_rollout_did(tmp_path):
    run = trainer(tmp_path, routing_replay="R3", max_steps=4, num_iterations=2, learning_rate=0.5)
    used, loss = [], run.loss

    def watched(batch, *rest):
        with run.routing.replay.record() as taken:
            made = loss(batch, *rest)
        known = batch.routes.indices >= 0
        used.append(bool(known.any()) and torch.equal(taken[0].indices[known], batch.routes.indices[known]))
        return made

    run.loss = watched
    run.train()
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert used and all(used)
    assert lines[0]["routing/flip_rate"] < lines[-1]["routing/flip_rate"] or lines[-1]["routing/flip_rate"] > 0


def test_a_model_trains_again_whatever_an_earlier_trainer_or_user_switched_on(tmp_path):
    model = qwen3_moe(experts_implementation="grpo_moe")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    changes = ({}, {"routing_replay": "R3"}, {"beta": 0.1}, {"gradient_checkpointing": True, "num_iterations": 2})
    for number, change in enumerate(changes):
        trainer(tmp_path / str(number), model, max_steps=2, **change).train()
    hooks = [h for m in model.modules() for h in m._forward_hooks.values() if "RoutingReplay" in repr(h)]
    assert len(hooks) == 3  # of the base model and two routers, by the last trainer alone
    model(torch.arange(5)[None], labels=torch.arange(5)[None]).loss.backward()


def test_r3_needs_an_engine_that_returns_routes(tmp_path):
    run = trainer(tmp_path, routing_replay="R3")
    generate = run.collector.engine.generate
    run.collector.engine.generate = lambda prompts, sampling: generate(prompts, replace(sampling, return_routes=False))
    with pytest.raises(ValueError, match="rollout_engine must return routes .* got none from NativeEngine"):
        run.step()


def test_a_run_with_other_adapters_is_not_resumed(tmp_path):
    lora_trainer(tmp_path, qwen3_moe(), save_steps=2).train()
    changed = GRPOTrainer(
        qwen3_moe(), share_of_letter, config(tmp_path, max_steps=4, save_steps=2), prompt_rows(10),
        processing_class=tokenizer(), peft_config=lora(lora_alpha=99),
    )  # fmt: skip
    with pytest.raises(ValueError, match="got changes peft_config: .*lora_alpha"):
        changed.train("latest")


def test_the_tiny_config_is_valid():
    assert tiny_config().num_experts == 4


@pytest.mark.parametrize(("accumulation", "per_generation"), [(1, 1), (2, 2), (2, 4)])
@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo", "vespo"])
def test_every_window_sums_to_the_mean_over_its_own_tokens(tmp_path, loss_type, accumulation, per_generation):
    """With all ratios and advantages 1 that is -1, or for a loss on log-probabilities minus their mean."""
    run = trainer(
        tmp_path, loss_type=loss_type, epsilon_high=5.0 if loss_type == "cispo" else None, learning_rate=0.0,
        gradient_accumulation_steps=accumulation, steps_per_generation=per_generation,
    )  # fmt: skip
    run.collector.advantages = lambda groups: torch.ones(len(groups), 4)
    sums, loss = {}, run.loss

    def watched(batch, window, metrics):
        made = loss(batch, window, metrics)
        part = sums.setdefault(id(window), [0.0, 0.0, 0, window.num_loss_tokens])
        for place, value in enumerate((made, batch.sampling_logps[batch.completion_mask].sum(), 1)):
            part[place] += value
        return made

    run.loss = watched
    run.step()
    assert len(sums) == per_generation // accumulation
    for total, logps, count, tokens in sums.values():
        assert count == accumulation
        expected = logps / tokens if loss_type in ("cispo", "vespo") else torch.tensor(1.0)
        torch.testing.assert_close(total, -expected, rtol=1e-4, atol=1e-5)


def test_a_rollout_of_part_of_a_window_is_refused(tmp_path):
    with pytest.raises(ValueError, match="steps_per_generation must be a multiple of gradient_accumulation_steps = 4"):
        trainer(tmp_path, gradient_accumulation_steps=4, steps_per_generation=2)


class ScriptedEngine:
    """Completions of the given lengths in each group, without EOS, the log-probability of their second token given."""

    def __init__(self, lengths, second=-1.0):
        self.lengths, self.second = lengths, second

    def generate(self, prompts, sampling):
        return [[self._completion(n) for n in self.lengths[: sampling.num_generations]] for _ in prompts]

    def _completion(self, length):
        logps = [-1.0, self.second, *[-1.0] * length][:length]
        return Completion(tuple(range(3, 3 + length)), tuple(logps), "length", text="a" * length)

    def sync_weights(self, model):
        pass


def scripted(path, lengths, second=-1.0, **changes):
    return GRPOTrainer(
        tiny_model(), lambda completions, **_: [float(len(c)) for c in completions],
        config(path, mask_truncated_completions=second == -1.0, **changes), prompt_rows(4),
        eval_dataset=prompt_rows(2), processing_class=tokenizer(), rollout_engine=ScriptedEngine(lengths, second),
    )  # fmt: skip


EVERYTHING = {
    "beta": 0.1, "num_iterations": 2, "sampler_correction": "token_mask", "off_policy_mask_threshold": 0.1,
    "top_entropy_quantile": 0.5, "router_aux_loss_coef": 0.1, "routing_replay": "R2",
}  # fmt: skip
PACKED = {"padding_free": True, "loss_type": "grpo", "importance_sampling_level": "sequence", "num_iterations": 2}


@pytest.mark.parametrize("options", [{}, EVERYTHING, PACKED], ids=["plain", "everything", "packed"])
@pytest.mark.parametrize(
    "lengths", [(8, 8, 7, 8), (0, 5, 8, 8), (0, 0, 0, 0)], ids=["all truncated", "one", "all empty"]
)
def test_a_rollout_without_a_token_to_learn_from_changes_nothing_and_logs_no_nan(tmp_path, lengths, options):
    run = scripted(tmp_path, lengths, **options)
    before = {name: p.clone() for name, p in run.policy.named_parameters()}
    metrics = run.step()
    assert metrics["num_tokens"] == 0 and metrics["loss"] == metrics["grad_norm"] == 0
    assert run.state.skipped_updates == run.state.step > 0
    assert all(torch.equal(p, before[name]) for name, p in run.policy.named_parameters())
    for line in (metrics, run.evaluate()):
        assert line and all(math.isfinite(value) for value in line.values()), line
        assert json.loads(strict_json(line)) == line


@pytest.mark.parametrize("lengths", [(0, 5, 8, 3), (0, 0, 0, 1)])
@pytest.mark.parametrize("second", [None, math.nan, -math.inf])
@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
def test_empty_completions_and_tokens_that_the_engine_did_not_score_are_learned_from(
    tmp_path, correction, second, lengths
):
    run = scripted(
        tmp_path, lengths, second, sampler_correction=correction, sampler_clip_max=1e9, off_policy_mask_threshold=9.0,
        num_iterations=2,
    )  # fmt: skip
    metrics = run.step()
    assert metrics["num_tokens"] == 2 * 2 * sum(lengths) and metrics["grad_norm"] > 0
    assert metrics["num_unscored_tokens"] == 2 * 2 * sum(n > 1 for n in lengths)
    assert metrics["num_dropped_tokens"] == metrics["num_sampler_masked_tokens"] == 0
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("replay", ["R3", "none"])
def test_expert_load_counts_what_was_routed(tmp_path, replay):
    """A rollout never forwards its last token, which has no route in R3; the training forward routes all tokens."""
    run = trainer(tmp_path, routing_replay=replay, steps_per_generation=1, log_completions=False)
    batches, loads, add, finish = [], [], run.add_reference_logps, run.routing.finish
    run.add_reference_logps = lambda batch: batches.append(add(batch)) or batches[-1]
    run.routing.finish = lambda metrics: loads.append(finish(metrics)) or loads[-1]
    run.step()
    (batch,), (load,) = batches, loads
    tokens = int(batch.attention_mask.sum()) - (len(batch.input_ids) if replay == "R3" else 0)
    assert len(load) == 4 and {sum(of_layer) for of_layer in load.values()} == {2 * tokens}


def test_the_gradient_of_the_load_balancing_loss_does_not_grow_with_the_tokens():
    hidden, router = torch.randn(6, 5), torch.randn(4, 5)
    gradients = []
    for states in (hidden, hidden.repeat(7, 1)):
        weight = router.clone().requires_grad_()
        probabilities = (states @ weight.T).softmax(-1)
        load = torch.zeros(4).scatter_add_(0, probabilities.topk(2).indices.flatten(), torch.ones(2 * len(states)))
        value = load_balancing_loss(probabilities.sum(0)[None], load[None], len(states))
        gradients.append((value.detach(), *torch.autograd.grad(value, weight)))
    torch.testing.assert_close(gradients[0], gradients[1])
    assert gradients[0][1].abs().max() > 1e-3
    nothing = load_balancing_loss(torch.zeros(1, 4, requires_grad=True), torch.zeros(1, 4), 0)
    assert nothing == 0 and nothing.requires_grad


def test_another_model_or_tokenizer_is_refused_on_resume(tmp_path):
    trainer(tmp_path, max_steps=4, save_steps=2).train()
    with pytest.raises(ValueError, match="must be those of the checkpoint .*model_config"):
        trainer(tmp_path, tiny_model(num_experts_per_tok=1)).train(resume_from_checkpoint="latest")
    other = GRPOTrainer(
        tiny_model(), share_of_letter, config(tmp_path), prompt_rows(10),
        processing_class=character_tokenizer("zyxwvutsrqponmlkjihgfedcba "),
    )  # fmt: skip
    with pytest.raises(ValueError, match="must be those of the checkpoint .*vocabulary"):
        other.train(resume_from_checkpoint="latest")


def test_a_second_call_of_train_leaves_the_run_where_it_is(tmp_path):
    run = trainer(tmp_path, max_steps=4, save_steps=2)
    run.train()
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "reward" in line]
    run.train()
    assert not (tmp_path / "earlier-1").exists() and list_checkpoints(tmp_path)
    assert steps == [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "reward" in line]


@pytest.mark.parametrize("error", [OSError("quota"), SystemExit(3)])
def test_a_model_that_cannot_be_saved_leaves_a_checkpoint(tmp_path, monkeypatch, error):
    run = trainer(tmp_path, max_steps=4)

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(run.policy, "save_pretrained", refuse)
    with pytest.raises(type(error)):
        run.train()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-4"]


def test_checkpoints_of_broken_weights_do_not_push_out_good_ones(tmp_path):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            if state.global_step == 4:
                next(model.parameters()).data.mul_(math.inf)

    run = GRPOTrainer(
        tiny_model(), share_of_letter, config(tmp_path, max_steps=20, save_steps=2, save_total_limit=2),
        prompt_rows(10), processing_class=tokenizer(), callbacks=[Breaks()],
    )  # fmt: skip
    with pytest.raises((FloatingPointError, ValueError)):
        run.train()
    left = [load_file(path / "model.safetensors") for path in list_checkpoints(tmp_path)]
    good = [all(x.isfinite().all() for x in weights.values()) for weights in left]
    assert good == [True, False]  # of update 2, and of update 4 whose gradient was still finite


def test_an_old_checkpoint_that_cannot_go_stays_with_a_warning(tmp_path, caplog):
    trainer(tmp_path, max_steps=4, save_steps=2, save_total_limit=2).train()
    (tmp_path / "checkpoint-2").rename(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-2").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "checkpoint-9.tmp").write_text("a file")
    trainer(tmp_path, max_steps=8, save_steps=2, save_total_limit=2).train(resume_from_checkpoint="latest")
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-6", "checkpoint-8"]
    assert (tmp_path / "elsewhere" / "grpo_state.json").exists() and not list(tmp_path.glob("*.tmp"))


def test_half_precision_is_not_trained(tmp_path):
    with pytest.raises(
        ValueError, match="parameters that train must be float32 .*got float16 in .*dtype=torch.float32"
    ):
        trainer(tmp_path, tiny_model().half())


def test_a_reward_function_that_leaves_gradients_off_does_not_stop_the_update(tmp_path):
    def careless(prompts, completions, **columns):
        torch.set_grad_enabled(False)
        return share_of_letter(prompts, completions, **columns)

    try:
        trainer(tmp_path, reward=careless, max_steps=4).train()
    finally:
        torch.set_grad_enabled(True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda group: group[1:], "must return 4 completions a prompt, got 3"),
        (lambda group: [replace(c, token_ids=(99,) * len(c.token_ids)) for c in group], "token ids from 0 to 30 - 1"),
        (lambda group: [replace(c, finish_reason="abort") for c in group], "finish_reason .*got 'abort'"),
        (lambda group: [replace(c, sampling_logps=(5.0,) * len(c.token_ids)) for c in group], "at most 0, got 5.0"),
        (lambda group: [None] * 4, "Completion objects, got NoneType"),
        (lambda group: None, "must return 4 completions a prompt, got NoneType"),
    ],
)
def test_what_an_engine_must_not_return_is_named(tmp_path, change, message):
    run = trainer(tmp_path)
    generate = run.collector.engine.generate
    run.collector.engine.generate = lambda prompts, sampling: [change(g) for g in generate(prompts, sampling)]
    with pytest.raises(ValueError, match=message):
        run.step()


def test_a_run_says_which_limit_ended_it(tmp_path, capsys):
    run = trainer(tmp_path, max_steps=50, max_train_seconds=1e-6, show_progress=True)
    run.train()
    assert "stopped after update 2 of 50: max_train_seconds 1e-06 is over; raise it" in capsys.readouterr().out
    run.train()
    assert "nothing to train: stopped after update 2 of 50" in capsys.readouterr().out
