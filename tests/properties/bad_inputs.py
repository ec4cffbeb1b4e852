"""Tables of bad input: each entry is a call that must end in one clear error, and what that error has to name."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from tiny import prompt_rows, tiny_model, tokenizer

from grpo_moe import GRPOConfig
from grpo_moe.adapters.routing import RoutingRecord
from grpo_moe.data import character_tokenizer, prompt_source
from grpo_moe.ops import LossConfig, grpo_loss, grpo_loss_from_logits, grpo_loss_from_logps, moe_experts, token_logps
from grpo_moe.ops.loss.logits import logps_from_logits
from grpo_moe.rewards import RewardCaller, cosine_length_reward, format_reward
from grpo_moe.rewards.model import ModelReward
from grpo_moe.rewards.shaping import soft_overlong_penalty
from grpo_moe.rl.advantages import decoupled_advantages, group_advantages
from grpo_moe.rollout import FolderTransfer, HFEngine, NativeEngine, VLLMEngine
from grpo_moe.types import Prompt, SamplingParams

NAN, INF = math.nan, math.inf


class Bad(NamedTuple):
    """One bad input."""

    label: str
    call: Callable[[], Any]
    says: str
    """A pattern: the thing at fault, in the error's text."""


# --- options

_WRONG_KIND = {
    int: ["3", "", 2.5, True, None, [3], {}, 1j, NAN, INF, np.float64(3), np.bool_(True), b"3", range(3), int],
    float: ["0.5", "", True, None, [0.5], {}, 1j, NAN, -INF, INF, np.float32(NAN), 10**400, b"1", torch.ones(2)],
    bool: [0, 1, 1.0, "true", "False", "", None, [], np.int64(1), NAN],
    str: [3, 0.5, True, None, b"x", ["x"], {"x": 1}, NAN],
    dict: [3, [1], "{", "[1]", {1: 2}, True, NAN],
}


def _kinds(cls: type) -> dict[str, tuple[type, ...]]:
    hints = typing.get_type_hints(cls)
    return {f.name: typing.get_args(hints[f.name]) or (hints[f.name],) for f in dataclasses.fields(cls)}


def _accepts(name: str, kinds: tuple[type, ...], value: Any) -> bool:
    """Whether a value of another kind has a documented meaning."""
    if value is None:
        return type(None) in kinds
    means = {  # documented at GRPOConfig
        "scale_rewards": (True,),
        "resume_from_checkpoint": (True,),
        "sampler_clip_max": (INF,),
    }
    return any(value is known for known in means.get(name, ()))


def wrong_kinds(cls: type, **others: Any) -> Iterator[Bad]:
    """Every option of a dataclass with values of another type, NaN and infinities."""
    for name, kinds in _kinds(cls).items():
        kind = dict if dict in kinds else next(k for k in kinds if k is not type(None))
        for value in _WRONG_KIND[kind]:
            if not _accepts(name, kinds, value):
                given = {"max_new_tokens": 4} if cls is SamplingParams else {}
                call = partial(cls, **{**given, **others, name: value})
                yield Bad(f"{cls.__name__}({name}={value!r:.30})", call, name)


def out_of_range() -> Iterator[Bad]:
    """Numbers of the right type beyond the limits of their option."""
    positive = (
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation num_generations num_iterations "
        "max_steps max_completion_length dynamic_sampling_max_rounds save_total_limit eval_steps save_steps "
        "capsule_steps gradient_checkpointing_every ref_model_sync_steps num_generations_eval overlong_cache_length"
    )
    for name in positive.split():
        for value in (0, -1, -(10**30)):
            yield Bad(f"{name}={value}", partial(GRPOConfig, **{name: value}), name)
    for name in ("max_train_seconds", "reward_timeout", "temperature", "adam_epsilon", "top_entropy_quantile"):
        for value in (0.0, -0.0, -1e-9, -1e300):
            yield Bad(f"{name}={value}", partial(GRPOConfig, **{name: value}), name)
    at_least_0 = (
        "warmup_steps learning_rate max_grad_norm router_aux_loss_coef weight_decay eval_temperature epsilon "
        "epsilon_high beta off_policy_mask_threshold adam_beta1 adam_beta2 seed top_k min_p"
    )
    for name in at_least_0.split():
        value = -1 if _kinds(GRPOConfig)[name][0] is int else -1e-9
        yield Bad(f"{name}={value}", partial(GRPOConfig, **{name: value}), name)
    for name, value in (
        ("adam_beta1", 1.0),
        ("adam_beta2", 1.0),
        ("ref_model_mixup_alpha", 0.0),
        ("ref_model_mixup_alpha", 1.01),
        ("top_entropy_quantile", 1.01),
        ("dynamic_sampling_oversampling", 0.99),
        ("rollout_lag", 2),
        ("rollout_lag", -1),
        ("seed", 2**31),
        ("dual_clip", 1.0),
        ("delta", 1.2),
        ("warmup_steps", 10**400),
        *((name, 1e39) for name in ("epsilon", "epsilon_high", "delta", "dual_clip", "beta", "router_aux_loss_coef")),
        ("learning_rate", 1e300),
        ("max_grad_norm", 1e31),
        ("weight_decay", 2**200),
    ):
        yield Bad(f"{name}={value!r:.30}", partial(GRPOConfig, **{name: value}), name)


_CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    ("rollout_lag", {"rollout_lag": 1}),
    ("gradient_checkpointing_every", {"gradient_checkpointing_every": 2}),
    ("metric_for_best_model", {"metric_for_best_model": "pass_rate"}),
    ("multi_objective_aggregation", {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": False}),
    ("routing_replay", {"routing_replay": "R2", "num_iterations": 1}),
    ("overlong_cache_length", {"overlong_cache_length": 9, "max_completion_length": 8}),
    ("num_generations", {"num_generations": 6, "per_device_train_batch_size": 4}),
    ("steps_per_generation", {"gradient_accumulation_steps": 4, "steps_per_generation": 2}),
    ("delta", {"delta": 1.1, "epsilon_high": 0.2}),
    ("dual_clip", {"delta": 4.0, "dual_clip": 3.0}),
    ("sampler_clip_min", {"sampler_correction": "token_mask", "sampler_clip_min": 5.0}),
    ("sampler_clip_min", {"sampler_correction": "token_mask", "sampler_clip_min": -0.5}),
    ("sampler_clip_max", {"sampler_correction": "geometric_mask", "sampler_clip_min": 0.5}),
    *(("delta", {"loss_type": kind, "delta": 4.0, "epsilon_high": 2.0}) for kind in ("cispo", "sapo", "gmpo", "vespo")),
    *(("dual_clip", {"loss_type": kind, "dual_clip": 3.0}) for kind in ("sapo", "dppo_tv", "dppo_kl", "vespo")),
    *(
        ("importance_sampling_level", {"loss_type": kind, "importance_sampling_level": "sequence"})
        for kind in ("vespo", "gmpo", "dppo_tv", "dppo_kl")
    ),
    *(
        ("sampler_correction", {"loss_type": "vespo", "sampler_correction": kind})
        for kind in ("sequence_truncate", "sequence_mask")
    ),
    *(("sapo_temperature_pos", {"loss_type": kind, "sapo_temperature_pos": 2.0}) for kind in ("grpo", "dapo", "vespo")),
    *(("vespo_k_neg", {"loss_type": kind, "vespo_k_neg": 2.0}) for kind in ("grpo", "bnpo", "sapo")),
]

_UNKNOWN_NAMES = {
    "loss_type": ["", "ppo", "DAPO", " dapo", "dapo\n"],
    "kl_estimator": ["k0", "K3"],
    "importance_sampling_level": ["row", "Token"],
    "sampler_correction": ["tis", "None", ""],
    "lr_scheduler_type": ["Linear", "reduce_lr_on_plateau", ""],
    "routing_replay": ["r2", "R1", ""],
    "reward_on_error": ["ignore", ""],
    "multi_objective_aggregation": ["sum", ""],
    "report_to": ["wandb,tensorboard", ""],
    "scale_rewards": ["std", "", "Group"],
}


def contradictions() -> Iterator[Bad]:
    """Pairs of options that do not go together, unknown names and unknown options."""
    for name, options in _CONTRADICTIONS:
        yield Bad(f"GRPOConfig(**{options})", partial(GRPOConfig, **options), name)
    for name, values in _UNKNOWN_NAMES.items():
        for value in values:
            yield Bad(f"{name}={value!r:.30}", partial(GRPOConfig, **{name: value}), name)
    for name in ("lr", "Learning_rate", "learning-rate", "vllm_mode", "per_device_eval_batch_size", "é"):
        yield Bad(f"option {name}", partial(GRPOConfig, **{name: 1}), f"{name} must be an option of GRPOConfig")
    yield Bad("dr_grpo without a length", partial(LossConfig, loss_type="dr_grpo"), "max_completion_length")


def sampling() -> Iterator[Bad]:
    """Options of sampling, prompts by ids, and engines."""
    for name, values in {
        "max_new_tokens": (0, -1),
        "num_generations": (0, -1),
        "temperature": (-1.0, 1e-7, -0.5),
        "top_k": (-1,),
        "top_p": (0.0, 1.1, -0.1),
        "min_p": (1.0, -0.1),
    }.items():
        for value in values:
            yield Bad(f"{name}={value}", partial(SamplingParams, **{"max_new_tokens": 4, name: value}), name)
    engine = HFEngine(tiny_model(), tokenizer())
    four = SamplingParams(4)
    for prompts, says in (
        (["abc"], "prompt 0 must be .*token ids"),
        ("abc", "prompts must be"),
        (None, "prompts must be"),
        (5, "prompts must be"),
        ([5], "prompt 0 must be .*token ids"),
        ([None], "prompt 0 must be .*token ids"),
        ([[1, "2"]], "prompt 0 must be .*token ids"),
        ([[1.5, 2.5]], "prompt 0 must be .*token ids"),
        ([[True]], "prompt 0 must be .*token ids"),
        ([[[1]]], "prompt 0 must be .*token ids"),
        ([[1], []], "prompt 1 must have"),
        ([[1], [-1]], "prompt 1 must have"),
        ([[30]], "prompt 0 must have"),
        ([[2**63]], "prompt 0 must have"),
        ([[1] * 128], "prompt 0 must have"),
        ([Prompt("abc")], "prompt 0 must be .*token ids"),
        ([{"prompt": "a"}], "prompt 0 must be .*token ids"),
    ):
        yield Bad(f"generate({prompts!r:.40})", partial(engine.generate, prompts, four), says)
    yield Bad("sampling={}", partial(engine.generate, [[1]], {}), "sampling must be")
    yield Bad("sampling=None", partial(engine.generate, [[1]], None), "sampling must be")
    for make in (HFEngine, NativeEngine):
        for value in (0, -1, "8", 2.5, None, True):
            call = partial(make, tiny_model(), tokenizer(), max_rows=value)
            yield Bad(f"{make.__name__}(max_rows={value!r})", call, "max_rows")
        for value in (None, "gpt2", torch.nn.Linear(2, 2)):
            yield Bad(f"{make.__name__}({value!r:.20})", partial(make, value, tokenizer()), "model must be")
    vllm = partial(VLLMEngine, tiny_model(), tokenizer())
    for name, values in {
        "url": ("", "localhost:8000", None, 8000, b"http://x", "http://", "http://a b", "http://h:port", "http://[::1"),
        "max_requests": (0, -1, "8", 1.5, True, None),
        "timeout": (0, -1.0, NAN, INF, "60", True, None),
        "tolerance": (-0.1, NAN, INF, "0.1", True, 0.0),
        "transfer": ("nccl", 5, FolderTransfer, object()),
        "api_key": (5, b"key", "two\nlines", "schlüssel→"),
        "served_model": (5, ["x"], ""),
    }.items():
        for value in values:
            call = partial(vllm, **{"transfer": None, "url": "http://127.0.0.1:9", name: value})
            yield Bad(f"VLLMEngine({name}={value!r:.20})", call, name)
    for name, value in (("folder", None), ("folder", 5), ("folder", ""), ("folder", "a\0b")):
        yield Bad(f"FolderTransfer({value!r})", partial(FolderTransfer, value), name)
    for name, values in {"bucket_bytes": (0, -1, "1", None, 1.5, True), "dtype": ("float16", int, torch.int8)}.items():
        for value in values:
            yield Bad(f"FolderTransfer({name}={value!r})", partial(FolderTransfer, "x", **{name: value}), name)


def ends() -> Iterator[Bad]:
    """EOS ids that no token of the model has."""
    for value in ("</s>", [2, 999], -1, 30, [2.5], True, ["2"]):
        for place in ("generation_config", "config"):
            model = tiny_model(num_hidden_layers=1)
            getattr(model, place).eos_token_id = value
            call = partial(HFEngine, model, tokenizer())
            yield Bad(f"{place}.eos_token_id={value!r}", call, f"model.{place}.eos_token_id must be")


# --- data

_CHAT = (
    "{% for m in messages %}{{ m['role'] }} {{ m['content'] }}{% endfor %}{% if add_generation_prompt %} a{% endif %}"
)
_USER = {"role": "user", "content": "a"}


def _chat_tokenizer():
    made = tokenizer()
    made.chat_template = _CHAT
    return made


def _stream(*rows: Any) -> datasets.IterableDataset:
    return datasets.IterableDataset.from_generator(lambda: iter(rows))


def data() -> Iterator[Bad]:
    """Data sets, prompts and the options of their source."""
    plain, chat = tokenizer(), _chat_tokenizer()
    source = partial(prompt_source, seed=0)
    for rows, says in (
        (None, "dataset must be"),
        (5, "dataset must be"),
        ("train", "dataset must"),
        (object(), "dataset must be"),
        (list, "dataset must be"),
        (datasets.Dataset.from_dict({"prompt": []}), "dataset must hold at least one row"),
        (datasets.Dataset.from_dict({}), "dataset must hold at least one row"),
        (datasets.Dataset.from_dict({"prompt": ["a", None]}), "prompt must be .* in row 1"),
        (datasets.Dataset.from_dict({"prompt": [1, 2]}), "prompt must be .* in row 0"),
        (datasets.Dataset.from_dict({"Prompt": ["a"]}), "column 'prompt'.*Prompt"),
        (datasets.DatasetDict(train=datasets.Dataset.from_dict({"prompt": ["a"]})), "pick dataset"),
        (_stream(), "dataset must hold at least one row"),
        (_stream({"question": "a"}), "column 'prompt'"),
        (_stream({"prompt": ""}), "prompt must be .* in row 0"),
        (_stream({"prompt": None}), "prompt must be .* in row 0"),
        ([None], "dataset must hold dicts"),
        ([["a"]], "dataset must hold dicts"),
        ([{}], "column 'prompt'"),
        ([{"prompt": "a", 5: "b"}], "column.* 5 .*row 0"),
        ([{"prompt": "a", None: "b"}], "column.* None .*row 0"),
        ([{"prompt": "a", "prompts": "b"}], "prompts"),
        *(
            ([{"prompt": "a"}, {"prompt": value}], "prompt must be .* in row 1")
            for value in (0, 1.5, NAN, True, b"a", ("a",), {"role": "user"}, {}, [[]], [None], ["a"], np.array(["a"]))
        ),
    ):
        yield Bad(f"dataset {rows!r:.50}", partial(source, rows, plain), says)
    for text, says in (
        ("\ud800", "row 1"),
        ("a\x00b", "row 1"),
        ("\u202eabc", "row 1"),
        ("\x1b[2J", "row 1"),
        ("𝕏", "row 1"),
    ):  # the tokenizer of this table has letters only
        yield Bad(f"prompt {text!r}", partial(source, [{"prompt": "a"}, {"prompt": text}], plain), says)
    long = [{"prompt": "a"}, {"prompt": "ab" * 50_000}]
    yield Bad("100k tokens", partial(source, long, plain, max_prompt_tokens=99), "max_prompt_tokens.*100001 in row 1")
    for turns in (
        [{"content": "a"}],
        [{"role": None, "content": "a"}],
        [{"role": "", "content": "a"}],
        [{"role": 5, "content": "a"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": b"a"}],
        [{"role": "user", "content": {"text": "a"}}],
        [_USER, {}],
        [_USER, None],
        [_USER, "a"],
        [{"role": "assistant", "content": None, "tool_calls": None}],
        [{"role": "assistant", "content": None, "tool_calls": []}],
    ):
        rows = [{"prompt": [_USER]}, {"prompt": turns}]
        yield Bad(f"chat {turns}", partial(source, rows, chat), "prompt must be .* in row 1")
        yield Bad(f"stream of chat {turns}", partial(source, _Again(rows[::-1]), chat), "prompt must be .* in row 0")
    yield Bad("chat without a template", partial(source, [{"prompt": [_USER]}], plain), "chat template")
    chats = [{"prompt": [_USER]}]
    refusing = tokenizer()
    refusing.chat_template = "{{ raise_exception('roles\nmust alternate') }}"
    yield Bad("a template that refuses", partial(source, chats, refusing), "row 0.*must alternate")
    broken = tokenizer()
    broken.chat_template = "{% for m in %}"
    yield Bad("a template with a fault", partial(source, chats, broken), "chat template")
    empty = tokenizer()
    empty.chat_template = "{{ '' }}"
    empty.bos_token = None
    yield Bad("a template of nothing", partial(source, chats, empty), "at least one token.*row 0")
    for name, values in {
        "seed": (-1, "0", None, 1.5, True, NAN),
        "shuffle": ("yes", 1, None),
        "max_prompt_tokens": (0, -1, "5", 1.5, True, NAN),
        "chat_template_kwargs": ("{}", 5, [1], {1: 2}),
    }.items():
        for value in values:
            call = partial(prompt_source, prompt_rows(2), plain, **{"seed": 0, name: value})
            yield Bad(f"prompt_source({name}={value!r})", call, name)
    for value in (None, "gpt2", str, 5):
        yield Bad(f"tokenizer={value!r}", partial(source, prompt_rows(2), value), "tokenizer must be")
    made = source(prompt_rows(3), plain)
    for name in ("take", "first"):
        for value in (-1, "2", 1.5, True):
            yield Bad(f"{name}({value!r})", partial(getattr(made, name), value), "n must be")
    for state in (None, 5, {}, {"position": 3}, {**made.state_dict(), "position": -1}):
        yield Bad(
            f"state {state!r:.30}", partial(made.load_state_dict, state), "state must be|must be that of|position"
        )
    for position in ("3", 1.5, None, True):
        state = {**made.state_dict(), "position": position}
        yield Bad(f"position {position!r}", partial(made.load_state_dict, state), "position must be")
    for alphabet in (None, 5, "aa", [], ["ab"], {"a": 1}):
        yield Bad(f"alphabet {alphabet!r}", partial(character_tokenizer, alphabet), "alphabet must be")


class _Again:
    """Can be iterated over again, and nothing else."""

    def __init__(self, rows: list):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


# --- rewards


def _one(prompts, completions, **columns):
    return [1.0] * len(completions)


def _returning(value: Any) -> Callable:
    return lambda prompts, completions, **columns: value() if isinstance(value, types.FunctionType) else value


def _raising(error: BaseException) -> Callable:
    def function(prompts, completions, **columns):
        raise error

    return function


async def _async_words(prompts, completions, **columns):
    return "ab"


def _yields(prompts, completions, **columns):
    yield from [1.0, 2.0]


class _Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def rewards() -> Iterator[Bad]:
    """What reward functions return and raise."""

    def score(function, **options):
        return lambda: RewardCaller(function, **options)(["p", "p"], ["a", "b"], {})

    for value in (
        None, "", "ab", b"ab", {}, {"a": 1, "b": 2}, {1.0, 2.0}, 1.0, 1, True, NAN, 1j, object(), float, iter([1, 2]),
        range(2), [], [1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]], [[1.0], [2.0]], [(1.0,),
        (2.0,)], ["1", "2"], [b"1", b"2"],
        [NAN, 1.0], [INF, 1.0], [-INF, 1.0], [1.0, 10**400], [1.0, 1j], [1.0, {}], [1.0, "x"], [1.0, float],
        (lambda: (x for x in (1.0, 2.0))), (lambda: map(float, (1, 2))), np.float64(1.0), np.ones((2, 1)),
        np.array([1j, 2j]), np.array(["1", "2"]), np.array([NAN, 1.0]), np.ones(3), torch.ones(2, 1), torch.ones(3),
        torch.tensor(1.0), torch.tensor([NAN, 1.0]), torch.ones(2, dtype=torch.complex64), [torch.ones(2)] * 2,
        [np.ones(2)] * 2, [[None], None], torch.ones(2, device="meta"), datasets.Dataset.from_dict({"a": [1, 2]}),
        [np.str_("1"), 2.0], [np.bytes_("1"), 2.0], [np.complex128(1j), 1.0], [np.complex64(1), 1.0],
        [np.datetime64("2020"), 1.0], [torch.tensor(1j), 1.0], [1e308, 1.0], [-1e308, 1.0], [1.0, 1e37],
        np.array([1e308, 0.0]), torch.tensor([1e38, 0.0]),
    ):  # fmt: skip
        yield Bad(f"returned {value!r:.40}", score(_returning(value)), "reward function 'lambda' must return")
    yield Bad("a generator function", score(_yields), "reward function '_yields' must return")
    yield Bad("an async function of text", score(_async_words), "reward function '_async_words' must return")
    for error in (
        KeyError("answer"), IndexError("list index out of range"), ZeroDivisionError(), AssertionError(),
        StopIteration(),
        RecursionError("deep"), MemoryError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        OSError(2, "gone"), ValueError("two\nlines\nof text"), _Unprintable(), Exception(), TimeoutError(),
    ):  # fmt: skip
        yield Bad(f"raised {error!r:.40}", score(_raising(error)), f"'function' raised {type(error).__name__}")


def reward_callers() -> Iterator[Bad]:
    """Arguments of RewardCaller and of its calls."""
    for value in (
        None,
        [],
        (),
        5,
        "accuracy",
        ["accuracy"],
        [None],
        [_one, None],
        {},
        {"a": _one},
        torch.nn.Linear(1, 1),
    ):
        yield Bad(f"reward_funcs={value!r:.30}", partial(RewardCaller, value), "reward_funcs must")
    for value in (
        5,
        "1",
        [],
        [1, 2],
        ["1"],
        [None],
        [NAN],
        [INF],
        [1j],
        [[1]],
        [10**400],
        {"_one": 1},
        torch.ones(2),
        0.5,
    ):
        yield Bad(f"reward_weights={value!r:.30}", partial(RewardCaller, _one, value), "reward_weights must")
    for value in ("5", 0, -1, NAN, INF, True, [1], 1j):
        yield Bad(f"timeout={value!r}", partial(RewardCaller, _one, timeout=value), "timeout must be")
    for value in (None, "ignore", 0, True, ["skip"]):
        yield Bad(f"on_error={value!r}", partial(RewardCaller, _one, on_error=value), "on_error must be")
    call = RewardCaller(_one)
    for value in (0, -1, 3, "2", 1.0, True):
        yield Bad(f"group_size={value!r}", partial(call, "pp", "ab", {}, group_size=value), "group_size must")
    for columns, says in (
        (None, "columns must be"),
        ([1, 2], "columns must be"),
        ({"answer": 5}, "answer must be"),
        ({"answer": None}, "answer must be"),
        ({"answer": [1]}, "answer must be"),
        ({"answer": iter([1, 2])}, "answer must be"),
        ({"prompts": [1, 2]}, "prompts"),
        ({"completions": [1, 2]}, "completions"),
        ({5: [1, 2]}, "columns must be .* 5"),
    ):
        yield Bad(f"columns={columns!r:.30}", partial(call, ["p", "p"], ["a", "b"], columns), says)
    yield Bad("prompts too few", partial(call, ["p"], ["a", "b"], {}), "prompts must be")
    yield Bad("prompts=None", partial(call, None, ["a", "b"], {}), "prompts must be")
    yield Bad("completions=None", partial(call, ["p"], None, {}), "completions must be")


def reward_makers() -> Iterator[Bad]:
    """Options of the rewards that the library makes."""
    for value in ((), "think", ("a", "a"), ("<a>",), (5,), None, 5, ("",), [None]):
        yield Bad(f"tags={value!r}", partial(format_reward, value), "tags must be")
    yield Bad("prefill=5", partial(format_reward, prefill=5), "prefill must be")
    for name, values in {
        "scorer": (None, "x", _async_words),
        "max_completion_length": (0, -1, "5", NAN, None, True, 1.5),
        "right": (None, 5, (1.0,), (1.0, NAN), "ab", (1.0, 2.0, 3.0), (True, "x")),
        "wrong": (None, (INF, 1.0), ("0", "1")),
    }.items():
        for value in values:
            call = partial(cosine_length_reward, **{"scorer": _one, "max_completion_length": 8, name: value})
            yield Bad(f"cosine_length_reward({name}={value!r:.30})", call, name)
    for numbers in (
        (-1, 8, 4),
        (3, 8, 0),
        (3, 8, 9),
        (3, 0, 1),
        ("3", 8, 4),
        (3, "8", 4),
        (3, 8, "4"),
        (3, 8, None),
        (NAN, 8, 4),
    ):
        yield Bad(f"soft_overlong_penalty{numbers}", partial(soft_overlong_penalty, *numbers), "must be")
    for name, values in {
        "model": (None, 5, torch.nn.Linear(1, 1), "./nowhere", tiny_model()),
        "tokenizer": (None, "x", 5),
        "batch_size": (0, -1, "8", 1.5, None, True),
        "max_length": (0, -1, "8", 1.5, True),
        "device": ("gpu", 5.5, "cuda:99"),
    }.items():
        for value in values:
            call = partial(ModelReward, **{"model": _reward_model(), "tokenizer": tokenizer(), name: value})
            yield Bad(f"ModelReward({name}={value!r:.30})", call, name)


def advantages() -> Iterator[Bad]:
    """Rewards and options of advantages."""
    good = torch.tensor([[0.0, 1.0]])
    for value in (
        None,
        5,
        [[0.0, 1.0]],
        torch.ones(2),
        torch.ones(2, 1),
        torch.ones(2, 2, 2),
        torch.tensor([[INF, 0.0]]),
        torch.tensor([[1e37, 0.0]]),
        torch.tensor([[0.0, NAN, -1e308]], dtype=torch.float64),
    ):
        yield Bad(
            f"group_advantages({value!r:.30})", partial(group_advantages, value), "rewards must be|num_generations"
        )
    yield Bad("complex rewards", partial(group_advantages, good.to(torch.complex64)), "rewards must be")
    for value in ("std", None, 1, 0.5, []):
        yield Bad(f"scale={value!r}", partial(group_advantages, good, scale=value), "scale_rewards must be")
    for value in (0, -1.0, NAN, INF, "x", None, True):
        yield Bad(f"eps={value!r}", partial(group_advantages, good, eps=value), "eps must be")
    for weights in ([], [1.0, 2.0], [NAN], ["1"], None):
        call = partial(decoupled_advantages, good[None], weights)
        yield Bad(f"decoupled_advantages(weights={weights})", call, "weights must be")


def _reward_model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    sizes = dict(vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    return LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=1))


# --- losses

_B, _T, _H, _V = 2, 3, 4, 5
_IDS = torch.arange(6).view(_B, _T) % _V


def _loss_tensors() -> dict[str, torch.Tensor]:
    return {
        "logps": -torch.ones(_B, _T),
        "logits": torch.zeros(_B, _T, _V),
        "hidden_states": torch.ones(_B, _T, _H),
        "lm_head_weight": torch.ones(_V, _H),
        "completion_ids": _IDS,
        "completion_mask": torch.ones(_B, _T, dtype=torch.bool),
        "advantages": torch.tensor([1.0, -1.0]),
    }


def losses() -> Iterator[Bad]:
    """Tensors, counts and options of the losses and heads."""
    given = _loss_tensors()
    shared = ("advantages", "completion_mask")
    functions = {
        grpo_loss_from_logps: ("logps", *shared),
        grpo_loss_from_logits: ("logits", "completion_ids", *shared),
        grpo_loss: ("hidden_states", "lm_head_weight", "completion_ids", *shared),
    }
    for function, names in functions.items():
        needed = {name: given[name] for name in names} | {"config": LossConfig()}
        optional = ("old_logps", "ref_logps", "sampling_logps")
        for name in (*names, *optional):
            for label, value in _bad_tensors(name, needed.get(name, given["logps"])):
                if name in optional and value is None:
                    continue
                yield Bad(f"{function.__name__}({name}: {label})", partial(function, **{**needed, name: value}), name)
        for config in (None, {}, GRPOConfig, "dapo"):
            yield Bad(
                f"{function.__name__}(config={config!r:.20})",
                partial(function, **needed | {"config": config}),
                "config",
            )
        for name in ("num_loss_tokens", "num_sequences"):
            for value in (-1, NAN, INF, "3", [3], True, 1j, torch.ones(1), torch.ones(2, 2)):
                call = partial(function, **needed, **{name: value})
                yield Bad(f"{function.__name__}({name}={value!r:.20})", call, name)


def heads() -> Iterator[Bad]:
    """Tensors and options of the heads."""
    given = _loss_tensors()
    head = {"hidden_states": torch.ones(6, _H), "lm_head_weight": given["lm_head_weight"], "target_ids": _IDS.flatten()}
    for name, value in head.items():
        for label, bad in _bad_tensors(name, value):
            yield Bad(f"token_logps({name}: {label})", partial(token_logps, **{**head, name: bad}), name)
    names = ("hidden_states", "lm_head_weight", "completion_ids", "advantages", "completion_mask")
    loss = {name: given[name] for name in names} | {"config": LossConfig()}
    for function, needed in ((token_logps, head), (grpo_loss, loss)):
        for name, values in {
            "softcap": (0.0, -1.0, NAN, INF, "5", True, [1]),
            "logit_scale": (NAN, INF, "1", None, True),
            "chunk_size": (0, -1, 1.5, "8", True),
            "bias": (torch.ones(_V + 1), torch.ones(_V, 1), torch.ones(_V, dtype=torch.int64), [0.0] * _V, 5,
                     torch.ones(_V, device="meta"), torch.ones(_V, dtype=torch.complex64)),
        }.items():  # fmt: skip
            for value in values:
                call = partial(function, **needed, **{name: value})
                yield Bad(f"{function.__name__}({name}={value!r:.20})", call, name)
    for value in (0.0, -1.0, NAN, INF, "1", None, True, 1j, [1.0]):
        call = partial(token_logps, **head, temperature=value)
        yield Bad(f"token_logps(temperature={value!r})", call, "temperature")
        call = partial(logps_from_logits, given["logits"], _IDS, temperature=value)
        yield Bad(f"logps_from_logits(temperature={value!r})", call, "temperature")
    for value in (None, 5, "", "one_pass", ["auto"]):
        yield Bad(f"schedule={value!r}", partial(grpo_loss, **loss, schedule=value), "schedule must be")


def _bad_tensors(name: str, good: torch.Tensor) -> Iterator[tuple[str, Any]]:
    yield from (("None", None), ("list", good.tolist()), ("numpy", good.numpy()), ("text", "ids"), ("number", 1.0))
    yield from (("0-dim", good.flatten()[0]), ("1 dim more", good[None]))
    yield "flat", good.flatten()[: good.numel() - 1]
    yield "meta", good.to("meta")
    yield "complex", good.to(torch.complex64)
    yield "sparse", good.to_sparse()
    if "ids" in name:
        wide = [("negative", -100), ("V", _V), ("overflow", 2**62), ("lowest", -(2**63))]
        yield from ((label, good.clone().index_fill_(0, torch.tensor([1]), value)) for label, value in wide)
        yield from (("float", good.float()), ("bool", good.bool()))
    elif name not in ("completion_mask", "advantages"):
        yield from (("int", good.long()), ("bool", good.bool()))


# --- experts


def experts() -> Iterator[Bad]:
    """Routing patterns, weights and options of the experts, and routing records."""
    n, e, h, i, k = 3, 4, 6, 5, 2
    good: dict[str, Any] = {
        "hidden_states": torch.ones(n, h),
        "gate_up_proj": torch.ones(e, 2 * i, h),
        "down_proj": torch.ones(e, h, i),
        "top_k_index": torch.tensor([[0, 1], [2, 3], [-1, 4]]),
        "top_k_weights": torch.ones(n, k),
    }
    biases = {"gate_up_bias": torch.ones(e, 2 * i), "down_bias": torch.ones(e, h)}
    for name, tensor in {**good, **biases}.items():
        for label, value in (
            ("None", None), ("list", tensor.tolist()), ("numpy", tensor.numpy()), ("text", "x"), ("number", 1),
            ("0-dim", tensor.flatten()[0]), ("1 dim more", tensor[None]),
            ("one row more", torch.cat([tensor, tensor[:1]])),
            ("one column more", torch.cat([tensor, tensor[..., :1]], -1)), ("meta", tensor.to("meta")),
            ("complex", tensor.to(torch.complex64)), ("bool", tensor.bool()), ("int8", tensor.to(torch.int8)),
            ("sparse", tensor.to_sparse()), ("other float", tensor.to(torch.float8_e4m3fn)), ("empty", tensor[:0]),
        ):  # fmt: skip
            if name in biases and value is None:
                continue
            says = "must" if label in ("one row more", "one column more", "empty") else name
            yield Bad(f"moe_experts({name}: {label})", partial(moe_experts, **{**good, **biases, name: value}), says)
    for value in (-2, 5, 2**31, -(2**40), 2**62):
        index = good["top_k_index"].clone()
        index[1, 1] = value
        yield Bad(f"expert {value}", partial(moe_experts, **{**good, "top_k_index": index}), "top_k_index must be in")
    yield Bad("float experts", partial(moe_experts, **{**good, "top_k_index": torch.ones(n, k)}), "top_k_index must be")
    for name, values in {
        "activation": (None, "relu", 5, "", ["silu"], "SILU"),
        "layout": (None, "split", 5, "", "joint", ["concatenated"]),
        "impl": (None, "cuda", 5, "", ["fused"]),
        "alpha": (NAN, INF, "1.7", None),
        "limit": (NAN, -1.0, 0.0, "7", None),
    }.items():
        for value in values:
            activation = {"activation": "gpt_oss"} if name in ("alpha", "limit") else {}
            call = partial(moe_experts, **{**good, **activation, name: value})
            yield Bad(f"moe_experts({name}={value!r})", call, name)
    shapes = (
        lambda gate, up: gate[:, :-1],
        lambda gate, up: gate.sum(),
        lambda gate, up: None,
        lambda gate, up: [gate],
    )
    for number, function in enumerate(shapes):
        call = partial(moe_experts, **good, activation=function)
        yield Bad(f"an activation of another shape {number}", call, "activation must")
    record = {"indices": torch.zeros(1, 2, 2, 2, dtype=torch.int16), "layers": (0, 1), "num_experts": 4}
    for name, values in {
        "indices": (None, [[1]], torch.zeros(2, 2, 2, dtype=torch.int16), torch.zeros(1, 2, 2, 2),
                    torch.zeros(1, 2, 3, 2, dtype=torch.int16), torch.zeros(1, 2, 2, 2, dtype=torch.int64)),
        "layers": (None, 5, (1, 0), (0, 0), ("a", "b"), (0,), (-1, 0), (0.5, 1.5)),
        "num_experts": (None, 0, -1, "4", 1.5, True),
    }.items():  # fmt: skip
        for value in values:
            yield Bad(f"RoutingRecord({name}={value!r:.30})", partial(RoutingRecord, **{**record, name: value}), name)
    for entry in ([0, 0], [0, -1], [-2, -2], [0, 4], [32767, 0]):
        indices = torch.tensor(entry, dtype=torch.int16).expand(1, 2, 2, 2)
        call = RoutingRecord(indices, (0, 1), 4).check_entries
        yield Bad(f"routes {entry}", call, "the entry of layer 0 must be")


AREAS: dict[str, list[Callable[[], Iterator[Bad]]]] = {
    "options of a run": [partial(wrong_kinds, GRPOConfig), out_of_range, contradictions],
    "options of a loss": [partial(wrong_kinds, LossConfig)],
    "sampling and engines": [partial(wrong_kinds, SamplingParams), sampling, ends],
    "datasets": [data],
    "rewards": [rewards, reward_callers, reward_makers, advantages],
    "losses": [losses, heads],
    "experts": [experts],
}
