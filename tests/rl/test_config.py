import dataclasses

import pytest

from grpo_moe.rl import GRPOConfig, parse_args
from grpo_moe.rl.config import TRL_OPTIONS


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
        ({"learning_rate": float("nan")}, "learning_rate must be a number"),
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


def test_every_own_option_has_help():
    own = set(GRPOConfig.__annotations__)
    assert all(f.metadata.get("help") for f in dataclasses.fields(GRPOConfig) if f.name in own)


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
    path.write_text("- a\n- b\n")
    with pytest.raises(ValueError, match="must be a YAML file"):
        parse_args(GRPOConfig, argv=["--config", str(path)])
    with pytest.raises(SystemExit):
        parse_args(GRPOConfig, argv=["--learning_rte", "0.5"])


def test_resume_without_a_value_means_the_latest():
    read = lambda *argv: parse_args(GRPOConfig, argv=list(argv))[0].resume_from_checkpoint  # noqa: E731
    assert read() is None
    assert read("--resume_from_checkpoint") == "latest"
    assert read("--resume_from_checkpoint", "runs/x/checkpoint-4") == "runs/x/checkpoint-4"


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
