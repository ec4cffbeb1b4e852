"""The planner's numbers in a run: forecasts, messages when memory ends, utilisation, every n-th block recomputed."""

import pytest
import torch
from moe_families import tiny_moe
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl import forecast
from grpo_moe.rl.forecast import Utilization, forecast_in_words, memory_forecast, run_shape
from grpo_moe.rl.guards import out_of_memory_explained, rehearse

GIB = 2**30


def made(path, model=None, **changes):
    args = GRPOConfig(
        output_dir=str(path), per_device_train_batch_size=4, num_generations=4, max_completion_length=8, use_cpu=True,
        show_progress=False, log_completions=False, eval_on_start=False, **{"max_steps": 2, **changes},
    )  # fmt: skip
    model = tiny_model() if model is None else model
    return GRPOTrainer(model, share_of_letter, args, prompt_rows(10), processing_class=tokenizer())


def test_the_forecast_is_that_of_the_options_and_the_model(tmp_path):
    run = made(tmp_path, beta=0.1, num_iterations=2, gradient_checkpointing=True, gradient_checkpointing_every=2)
    plan = memory_forecast(run, 8 * GIB)
    assert plan.fits and plan.capacity_bytes <= 8 * GIB and "old_logps" in plan.phases
    assert plan.phases["forward_backward"]["reference"] == 4 * run.policy.num_parameters()
    shape = run_shape(run.args, run.policy.config, prompt_tokens=run.source.longest())
    assert shape.checkpoint_period == 2 and shape.reference and shape.old_logps and shape.prompt_tokens == 6
    assert forecast_in_words(run, 8 * GIB).startswith("forecast: rollout 0.")
    assert not memory_forecast(run, GIB // 4).fits


def test_an_error_of_memory_comes_with_the_planners_numbers(tmp_path, monkeypatch):
    run = made(tmp_path)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 4 * GIB))
    with pytest.raises(
        RuntimeError, match=r"4 GiB, got 3.0 GiB .*\(forecast: rollout .*of 4.0 GiB\); lower per_device"
    ):
        with out_of_memory_explained(run.args, lambda memory: forecast_in_words(run, memory)):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("family", [None, "qwen3_moe"])
@pytest.mark.parametrize(("period", "wrapped"), [(None, 4), (1, 4), (2, 2), (3, 2)])
def test_every_nth_block_is_recomputed(tmp_path, monkeypatch, family, period, wrapped):
    model = tiny_moe(family, changes={"num_hidden_layers": 4}) if family else tiny_model(grad_ckpt_every=1)
    run = made(tmp_path, model, gradient_checkpointing=True, gradient_checkpointing_every=period)
    counted = []
    for module in run.policy.modules():
        if hasattr(module, "_gradient_checkpointing_func"):
            function = module._gradient_checkpointing_func
            module._gradient_checkpointing_func = lambda *a, f=function, **k: (counted.append(1), f(*a, **k))[1]
    run.step()
    assert len(counted) == wrapped * run.args.gradient_accumulation_steps


def test_the_period_changes_no_gradient(tmp_path):
    norms = []
    for period in (None, 1, 2):
        options = {"gradient_checkpointing": period is not None, "gradient_checkpointing_every": period}
        norms.append(made(tmp_path, **options).step()["grad_norm"])
    assert norms[1] == pytest.approx(norms[0], rel=1e-6) and norms[2] == pytest.approx(norms[0], rel=1e-6)
    with pytest.raises(ValueError, match="gradient_checkpointing_every must be unset without gradient_checkpointing"):
        GRPOConfig(gradient_checkpointing_every=2)


def test_utilisation_is_flops_over_seconds_and_peak(tmp_path, monkeypatch):
    run = made(tmp_path)
    rollout = run.collector.collect(run.source, run.sampling)
    assert Utilization(run.policy.config, run.args, trains_all=True).metrics(rollout, {"update": 1.0}) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    used = Utilization(run.policy.config, run.args, trains_all=True)
    half = used.metrics(rollout, {"rollout": 2.0, "update": 2.0})
    whole = used.metrics(rollout, {"rollout": 1.0, "update": 1.0, "reward": 1.0})
    assert set(whole) == {"mfu/rollout", "mfu/update"} and 0 < whole["mfu/rollout"] < whole["mfu/update"] < 1
    assert half["mfu/update"] == pytest.approx(whole["mfu/update"] / 2)
    frozen = Utilization(run.policy.config, run.args, trains_all=False).metrics(rollout, {"update": 1.0})
    assert frozen["mfu/update"] < whole["mfu/update"]


def test_models_that_the_planner_does_not_know_go_without(tmp_path, monkeypatch):
    run = made(tmp_path)

    def unknown(config):
        raise ValueError("config must be known")

    monkeypatch.setattr(forecast.planning.ModelShape, "from_config", unknown)
    assert memory_forecast(run, GIB) is None and "no forecast" in forecast_in_words(run, GIB)


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.1},
        {"router_aux_loss_coef": 0.1},
        {"num_iterations": 2, "routing_replay": "R2"},
        {"routing_replay": "R3"},
        {"padding_free": True, "gradient_checkpointing": True},
        {"gradient_accumulation_steps": 2, "importance_sampling_level": "sequence"},
    ],
)
def test_a_rehearsal_runs_the_longest_rows_and_teaches_nothing(tmp_path, monkeypatch, options):
    run, twin = made(tmp_path / "a", **options), made(tmp_path / "b", **options)
    shapes, loss = [], run.loss
    monkeypatch.setattr(run, "loss", lambda batch, *rest: (shapes.append(batch.input_ids.shape), loss(batch, *rest))[1])
    for trainer in (run, twin):
        trainer.step()
    monkeypatch.setattr(type(run.accelerator), "device", property(lambda self: FakeDevice()))
    rehearse(run)
    monkeypatch.undo()
    assert shapes[-1] == (4, run.source.longest() + 8)
    for trainer in (run, twin):
        trainer.step()
    assert all(torch.equal(a, b) for a, b in zip(run.policy.parameters(), twin.policy.parameters(), strict=True))


class FakeDevice(str):
    """The CPU, which says that it is a GPU."""

    type = "cuda"

    def __new__(cls):
        return super().__new__(cls, "cpu")
