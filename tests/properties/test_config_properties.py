"""Options in any combination: they build, or one of them is named; and files and flags give what a script gives."""

import dataclasses
import itertools
import json
import math
import re
import typing
import warnings
from fractions import Fraction

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from properties.effort import few

from grpo_moe.ops import LossConfig
from grpo_moe.ops.loss.config import IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES, SAMPLER_CORRECTIONS
from grpo_moe.rl import GRPOConfig, parse_args
from grpo_moe.types import SamplingParams

KINDS = {name: typing.get_args(hint) or (hint,) for name, hint in typing.get_type_hints(GRPOConfig).items()}
CLEAR = re.compile(r"^(\w+) must be .+, got .+; .+", re.DOTALL)

numbers = st.one_of(st.sampled_from([0, 1, 2, 4, 8, 16, 0.5, 0.999, 1.0, 1.5, -1]), st.integers(), st.floats())
anything = st.one_of(
    numbers,
    st.none(),
    st.booleans(),
    st.text(max_size=4),
    st.sampled_from([*LOSS_TYPES, *SAMPLER_CORRECTIONS, "sequence", "k1", "group", "cosine", "R2", "latest", "eval_x"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


@few(200)
@given(st.dictionaries(st.sampled_from(sorted(KINDS)), anything, max_size=4))
def test_any_options_build_or_one_of_them_is_named(options):
    try:
        args = GRPOConfig(**options)
    except ValueError as error:
        named = CLEAR.match(str(error))
        assert named and named[1] in KINDS, str(error)
        # the one at fault was given, or it contradicts one that was
        assert named[1] in options or any(name in str(error) for name in options), (str(error), options)
        return
    rows = args.per_device_train_batch_size * args.steps_per_generation
    assert args.prompts_per_rollout * args.num_generations == rows and args.prompts_per_rollout >= 1
    assert args.updates_per_rollout >= 1 and args.windows_per_rollout * args.gradient_accumulation_steps == (
        args.steps_per_generation
    )
    assert dataclasses.replace(args) == args == GRPOConfig(**dataclasses.asdict(args))
    json.dumps(dataclasses.asdict(args))
    for name, kinds in KINDS.items():
        assert isinstance(getattr(args, name), (*kinds, int) if float in kinds else kinds), name


def allowed(kind: str, level: str, correction: str, cap: str | None) -> bool:
    """What the documentation of the options says of these four together."""
    if level == "sequence" and kind in ("vespo", "gmpo", "dppo_tv", "dppo_kl"):
        return False
    if kind == "vespo" and correction not in ("none", "token_truncate", "token_mask"):
        return False
    return cap is None or kind in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")


@pytest.mark.parametrize("kind", LOSS_TYPES)
def test_every_combination_of_losses_builds_or_is_refused_as_documented(kind):
    tried = 0
    for level, correction, cap, beta in itertools.product(
        IMPORTANCE_SAMPLING_LEVELS, SAMPLER_CORRECTIONS, (None, "delta", "dual_clip"), (0.0, 0.1)
    ):
        options = {"loss_type": kind, "importance_sampling_level": level, "sampler_correction": correction}
        options |= {"beta": beta, "max_completion_length": 8, "epsilon_high": 5.0 if kind == "cispo" else 0.3}
        options |= {cap: 3.0} if cap else {}
        if correction == "geometric_mask":
            options |= {"sampler_clip_min": 0.99, "sampler_clip_max": 1.01}
        for cls in (LossConfig, GRPOConfig):
            if allowed(kind, level, correction, cap):
                assert cls(**options).loss_type == kind
            else:
                with pytest.raises(ValueError, match=CLEAR):
                    cls(**options)
            tried += 1
    assert tried == 2 * 6 * 3 * 2 * 2


def valid(kinds: tuple[type, ...], name: str) -> st.SearchStrategy:
    if bool in kinds:
        return st.booleans()
    if kinds[0] is int:
        return st.integers(1, 2**31 - 1)
    return st.floats(0.001, 0.99)


FREE = (  # options that contradict no other
    "seed max_steps max_train_seconds use_cpu bf16 padding_free shuffle_dataset dynamic_sampling save_steps "
    "learning_rate "
    "dynamic_sampling_max_rounds mask_truncated_completions ref_model_mixup_alpha ref_model_sync_steps reward_timeout "
    "warmup_steps adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm freeze_router router_aux_loss_coef "
    "eval_on_start eval_steps num_generations_eval eval_temperature pass_threshold save_total_limit greater_is_better "
    "capsule_steps log_completions show_progress epsilon epsilon_high beta temperature top_entropy_quantile"
).split()
free_options = st.fixed_dictionaries({}, optional={name: valid(KINDS[name], name) for name in FREE})


@few(15)
@given(options=free_options)
def test_yaml_and_flags_give_what_a_script_gives(options, tmp_path):
    args = GRPOConfig(**options)
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(options))
    flags = [text for name, value in options.items() for text in (f"--{name}", repr(value))]
    assert parse_args(GRPOConfig, argv=["--config", str(path)]) == (args,)
    assert parse_args(GRPOConfig, argv=flags) == (args,)


def test_a_home_folder_is_meant_by_its_sign(monkeypatch):
    monkeypatch.setenv("HOME", "/home/x")
    args = GRPOConfig(output_dir="~/runs", resume_from_checkpoint="~/runs/checkpoint-3")
    assert (args.output_dir, args.resume_from_checkpoint) == ("/home/x/runs", "/home/x/runs/checkpoint-3")


REALS = [np.float16, np.float32, np.float64, np.longdouble, np.int64, Fraction]


@pytest.mark.parametrize("kind", REALS)
def test_every_kind_of_number_is_a_number_and_kept_as_pythons(kind):
    whole = kind if kind is np.int64 else int
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = [
            LossConfig(epsilon=kind(2), max_completion_length=whole(3)),
            GRPOConfig(epsilon=kind(2), max_completion_length=whole(3)),
            SamplingParams(whole(3), temperature=kind(2), top_p=kind(1), seed=whole(3)),
        ]
    assert made[0] == LossConfig(epsilon=2.0, max_completion_length=3)
    assert made[1] == GRPOConfig(epsilon=2.0, max_completion_length=3)
    assert made[2] == SamplingParams(3, temperature=2.0, seed=3)
    for options in made:
        json.dumps(dataclasses.asdict(options))
        assert all(type(value) is not np.float64 for value in vars(options).values())


@pytest.mark.parametrize(
    "value",
    [np.float16("inf"), np.float32("inf"), np.float32("-inf"), np.float32("nan"), np.float64("inf"), 10**400,
     np.longdouble("inf"), np.longdouble("1e4000"), Fraction(10**400), np.bool_(True)],
    ids=lambda value: repr(value)[:30],
)  # fmt: skip
@pytest.mark.parametrize("make", [LossConfig, GRPOConfig, lambda **options: SamplingParams(3, **options)])
def test_numbers_that_are_not_finite_are_named_whatever_their_kind(make, value):
    with warnings.catch_warnings(), pytest.raises(ValueError, match=r"^temperature must be .+, got .+; .+"):
        warnings.simplefilter("error")
        make(temperature=value)


@few(80)
@given(st.dictionaries(st.sampled_from([f.name for f in dataclasses.fields(SamplingParams)]), anything, max_size=3))
def test_any_sampling_builds_or_is_named(options):
    try:
        sampling = SamplingParams(**{"max_new_tokens": 4, **options})
    except ValueError as error:
        assert CLEAR.match(str(error))[1] in options, str(error)
        return
    assert sampling.max_new_tokens >= 1 and sampling.num_generations >= 1 and sampling.top_k >= 0
    assert 0 < sampling.top_p <= 1 and 0 <= sampling.min_p < 1 and math.isfinite(sampling.temperature)
    assert sampling.temperature == 0 or sampling.temperature >= 1e-6
