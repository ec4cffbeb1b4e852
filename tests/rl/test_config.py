import copy
import dataclasses
import os
import pickle

import numpy as np
import pytest
import torch
from transformers import get_scheduler

from grpo_moe.rl import GRPOConfig, parse_args
from grpo_moe.rl.config import SCHEDULES, TRL_OPTIONS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss_type": "ppo"}, "loss_type must be one of .*dapo.*got 'ppo'"),
        ({"num_generations": 1}, "num_generations must be at least 2, got 1"),
        ({"num_generations": 3}, "num_generations must be a divisor of .*= 8, got 3"),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 3}, "steps_per_generation must be a multiple of"),
        ({"top_p": 0.9}, "top_p must be 1 in training"),
        ({"top_k": 5}, "top_k must be 0 in training"),
        ({"min_p": 0.1}, "min_p must be 0 in training"),
        ({"sync_ref_model": True}, "sync_ref_model must be False without beta"),
        (
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "multi_objective_aggregation must",
        ),
        ({"reward_timeout": 0.0}, "reward_timeout must be positive"),
        ({"overlong_cache_length": 0}, "overlong_cache_length must be in 1..max_completion_length"),
        ({"overlong_cache_length": 300}, "overlong_cache_length must be in 1..max_completion_length"),
        ({"max_steps": 0}, "max_steps must be at least 1"),
        ({"max_train_seconds": 0}, "max_train_seconds must be positive"),
        ({"learning_rate": -1.0}, "learning_rate must be at least 0"),
        ({"scale_rewards": "std"}, "scale_rewards must be one of"),
        ({"loss_type": "cispo", "epsilon_high": 0.28}, "epsilon_high must be at least 1 with loss_type 'cispo'"),
        ({"temperature": 0.0}, "temperature must be"),
        ({"lr_scheduler_type": "nonsense"}, "lr_scheduler_type must be one of"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, "lr_scheduler_type must be one of"),
        ({"report_to": "nonsense"}, "report_to must be one of"),
        ({"max_steps": 3.5}, "max_steps must be int, got 3.5"),
        ({"max_steps": True}, "max_steps must be int, got True"),
        ({"num_generations": "4"}, "num_generations must be int, got '4'"),
        ({"learning_rate": None}, "learning_rate must be float, got None"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite, got nan"),
        *(
            ({name: float("inf")}, f"{name} must be finite, got inf; leave it out")
            for name in (
                "learning_rate",
                "max_grad_norm",
                "weight_decay",
                "pass_threshold",
                "adam_epsilon",
                "beta",
                "eval_temperature",
                "max_train_seconds",
                "reward_timeout",
                "router_aux_loss_coef",
            )
        ),
        ({"pass_threshold": float("-inf")}, "pass_threshold must be finite, got -inf"),
        ({"learning_rate": 10**400}, "learning_rate must be finite, got 1000"),
        ({"sampler_correction": "token_mask", "sampler_clip_min": float("inf")}, "sampler_clip_min must be finite"),
        ({"temperature": 1e-7}, "temperature must be finite and at least 1e-06, got 1e-07"),
        ({"eval_temperature": 1e-7}, "eval_temperature must be 0 or at least 1e-06, got 1e-07"),
        ({"output_dir": ""}, "output_dir must be a folder, got ''"),
        ({"scale_rewards": 1}, "scale_rewards must be str, got 1"),
        ({"scale_rewards": None}, "scale_rewards must be str, got None"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs must be a dict of arguments by name.*got '{'"),
        ({"chat_template_kwargs": "[1]"}, "chat_template_kwargs must be a dict of arguments by name"),
        ({"chat_template_kwargs": {1: 2}}, "chat_template_kwargs must be a dict of arguments by name"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs must be a dict of arguments by name"),
        ({"resume_from_checkpoint": 3}, "resume_from_checkpoint must be str or None, got 3"),
        ({"max_steps": np.float64(3)}, "max_steps must be int, got 3.0"),
        ({"max_steps": np.bool_(True)}, "max_steps must be int, got True"),
        ({"dynamic_sampling": "no"}, "dynamic_sampling must be bool"),
        ({"adam_beta1": 2.0}, "adam_beta1 must be in \\[0, 1\\)"),
        ({"seed": 2**64}, "seed must be below"),
        ({"dynamic_sampling_oversampling": 10.0}, "dynamic_sampling_oversampling must be in 1..4"),
        ({"routing_replay": "R9"}, "routing_replay must be one of none, R2, R3, got 'R9'"),
        ({"routing_replay": "R2"}, "routing_replay must be none or R3 with one update a rollout"),
    ],
)
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**options)


def test_counts_of_a_rollout():
    args = GRPOConfig(
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=6,
        num_generations=8,
        num_iterations=2,
    )
    assert (args.prompts_per_rollout, args.windows_per_rollout, args.updates_per_rollout) == (3, 3, 6)
    assert GRPOConfig(gradient_accumulation_steps=4).steps_per_generation == 4


def test_a_copy_derives_anew_what_was_not_given():
    args = GRPOConfig()
    for kept in (args, pickle.loads(pickle.dumps(args)), dataclasses.replace(args, seed=3)):
        replaced = dataclasses.replace(kept, gradient_accumulation_steps=4)
        assert replaced.steps_per_generation == 4 and replaced.updates_per_rollout == 1
    given = GRPOConfig(steps_per_generation=1)
    with pytest.raises(ValueError, match="steps_per_generation must be a multiple of gradient_accumulation_steps = 4"):
        dataclasses.replace(given, gradient_accumulation_steps=4)
    assert args == given == copy.deepcopy(args)
    assert type(dataclasses.asdict(args)["steps_per_generation"]) is int


def test_values_are_kept_in_one_form():
    kept = lambda name, value: getattr(GRPOConfig(**{name: value}), name)  # noqa: E731
    assert [kept("scale_rewards", value) for value in (True, False, "batch")] == ["group", "none", "batch"]
    assert [kept("resume_from_checkpoint", value) for value in (True, False, "x")] == ["latest", None, "x"]
    for name, value, plain in (
        ("learning_rate", np.float32(0.5), 0.5),
        ("learning_rate", np.float64(0.5), 0.5),
        ("max_steps", np.int64(3), 3),
        ("bf16", np.bool_(True), True),
        ("scale_rewards", np.bool_(False), "none"),
        ("epsilon", np.float32(0.25), 0.25),
        ("output_dir", np.str_("x"), os.path.abspath("x")),
    ):
        assert kept(name, value) == plain and type(kept(name, value)) is type(plain)
    given = {"enable_thinking": False}
    args = GRPOConfig(chat_template_kwargs=given)
    given["enable_thinking"] = True
    assert args.chat_template_kwargs == {"enable_thinking": False}


def test_values_that_have_a_meaning_though_they_are_extreme_are_kept():
    args = GRPOConfig(sampler_correction="token_mask", sampler_clip_max=float("inf"), eval_temperature=0.0)
    assert args.sampler_bounds == (0.5, float("inf")) and args.eval_temperature == 0
    assert GRPOConfig(temperature=1e-6, eval_temperature=1e-6).temperature == 1e-6


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--scale_rewards", "batch"], "scale_rewards", "batch"),
        (["--scale_rewards", "true"], "scale_rewards", "group"),
        (["--scale_rewards", "False"], "scale_rewards", "none"),
        (["--chat_template_kwargs", '{"enable_thinking": false}'], "chat_template_kwargs", {"enable_thinking": False}),
        (["--gradient_accumulation_steps", "4"], "steps_per_generation", 4),
    ],
)
def test_flags_are_read_in_the_same_way(argv, name, value):
    assert getattr(parse_args(GRPOConfig, argv=argv)[0], name) == value


def test_every_option_has_help(capsys):
    assert [f.name for f in dataclasses.fields(GRPOConfig) if not f.metadata.get("help")] == []
    with pytest.raises(SystemExit):
        parse_args(GRPOConfig, argv=["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Weight of the KL term to the reference policy. (default: 0.0)" in shown
    assert "all those of the last rollout are made, even beyond this number" in shown


def test_flags_override_the_yaml_file_and_that_the_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 0.5\nmax_steps: 7\ndynamic_sampling: true\n")
    (args,) = parse_args(
        GRPOConfig,
        argv=["--config", str(path), "--max_steps", "9"],
        defaults={"learning_rate": 0.1, "max_steps": 1, "warmup_steps": 3},
    )
    assert (args.learning_rate, args.max_steps, args.warmup_steps, args.dynamic_sampling) == (0.5, 9, 3, True)


def test_unknown_options_are_refused(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rte: 0.5\n")
    with pytest.raises(ValueError, match="must be known, got learning_rte"):
        parse_args(GRPOConfig, argv=["--config", str(path)])
    for content, message in (
        (b"- a\n- b\n", "of 'option: value' lines, got list"),
        (b"[]", "got list"),
        (b"0", "got int"),
        (b"1: 2\nseed: 3\n", "got int in"),
        (b"null: 2", "got NoneType"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "got .*run.yaml: 'utf-8' codec"),
        (b"\x00\x01", "got .*run.yaml: unacceptable character"),
        (b"a: [1\nb: 2\n", "got .*run.yaml: while parsing"),
        (b"a: 2024-13-45", "got .*run.yaml: month"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"--config must be a YAML file.*{message}") as caught:
            parse_args(GRPOConfig, argv=["--config", str(path)])
        assert "\n" not in str(caught.value) and not isinstance(caught.value, UnicodeDecodeError)
    path.write_text("")
    assert parse_args(GRPOConfig, argv=["--config", str(path)]) == (GRPOConfig(),)
    with pytest.raises(SystemExit):
        parse_args(GRPOConfig, argv=["--learning_rte", "0.5"])


def test_resume_without_a_value_means_the_latest():
    read = lambda *argv: parse_args(GRPOConfig, argv=list(argv))[0].resume_from_checkpoint  # noqa: E731
    assert read() is None
    assert read("--resume_from_checkpoint") == "latest"
    assert read("--resume_from_checkpoint", "runs/x/checkpoint-4") == "runs/x/checkpoint-4"


def test_yaml_may_hold_booleans_and_dicts(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("resume_from_checkpoint: true\nscale_rewards: no\nchat_template_kwargs: {enable_thinking: false}\n")
    (args,) = parse_args(GRPOConfig, argv=["--config", str(path)])
    kept = (args.resume_from_checkpoint, args.scale_rewards, args.chat_template_kwargs)
    assert kept == ("latest", "none", {"enable_thinking": False})


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("use_vllm", "pass rollout_engine=VLLMEngine"),
        ("num_train_epochs", "set max_steps"),
        ("num_generation", "did you mean num_generations\\?"),
        ("zzz", "see the help of GRPOConfig"),
    ],
)
def test_unknown_options_are_named_with_what_to_do(option, fix):
    with pytest.raises(ValueError, match=f"{option} must be an option of GRPOConfig, got 1; .*{fix}"):
        GRPOConfig(**{option: 1})


def test_every_hint_is_for_an_option_that_we_lack():
    assert not set(TRL_OPTIONS) & {f.name for f in dataclasses.fields(GRPOConfig)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_of_the_learning_rate_runs(name):
    assert GRPOConfig(lr_scheduler_type=name).lr_scheduler_type == name
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule, rates = get_scheduler(name, optimizer, 0 if name == "constant" else 2, 6), []
    for _ in range(6):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert all(0 <= rate <= 1 for rate in rates) and max(rates) == 1
