"""Tasks of the recipes, and the embedded default: a small policy, its tokenizer and its warm start for Countdown."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from datasets import Dataset, load_dataset
from running import announce

from grpo_moe import GptOssLiteConfig, GptOssLiteForCausalLM
from grpo_moe.data import character_tokenizer
from grpo_moe.rewards import Countdown, answer_reward, countdown_reward
from grpo_moe.rewards.countdown import ALPHABET
from grpo_moe.rl import GRPOConfig
from grpo_moe.rl.warm_start import WarmStart, warm_start

EVAL_SEED = 1_000_007  # held-out problems are the same for every seed of a run


@dataclass(frozen=True)
class Task:
    """What a recipe trains on."""

    train_dataset: Any
    eval_dataset: Any
    reward: Callable


@dataclass(frozen=True)
class Preset:
    """A size of the embedded default."""

    countdown: Countdown
    model: dict[str, Any]
    """Fields of GptOssLiteConfig."""
    warm_start: WarmStart
    warm_start_batch_size: int = 32
    curriculum_share: float = 0.9
    """First part of the warm start, whose demonstrations always go on to the last attempt: more sums a sequence."""
    training: dict[str, Any] = field(default_factory=dict)
    """Defaults of GRPOConfig."""


PRESETS = {
    "cpu": Preset(  # 0.54M parameters, 0.21M active: three and a half minutes on two cores
        countdown=Countdown(continue_probability=0.15),
        model=dict(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            sliding_window=32,
            rope_theta=100.0,
            yarn_scale_factor=1.0,
            max_position_embeddings=256,
            initializer_range=0.05,
            tie_word_embeddings=False,
        ),
        warm_start=WarmStart(steps=800),
        training=dict(
            max_completion_length=60,
            per_device_train_batch_size=64,
            steps_per_generation=4,
            learning_rate=3e-4,
            lr_scheduler_type="linear",
            adam_beta2=0.95,
            warmup_steps=8,
            dynamic_sampling_oversampling=2.0,
            max_steps=272,
            max_train_seconds=115.0,
        ),
    ),
    "gpu": Preset(  # 50M parameters, 19M active, and four larger numbers
        countdown=Countdown(num_numbers=4, max_number=20, continue_probability=0.5),
        model=dict(
            hidden_size=384,
            intermediate_size=768,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=48,
            sliding_window=128,
            rope_theta=1000.0,
            yarn_scale_factor=1.0,
            max_position_embeddings=512,
            initializer_range=0.04,
            moe_dispatch="fused",
        ),
        warm_start=WarmStart(steps=600, learning_rate=1e-3),
        warm_start_batch_size=256,
        training=dict(
            max_completion_length=105,
            per_device_train_batch_size=256,
            steps_per_generation=2,
            num_generations=16,
            learning_rate=1e-4,
            adam_beta2=0.95,
            warmup_steps=6,
            max_steps=400,
            max_train_seconds=300.0,
        ),
    ),
    "h200": Preset(  # 150M parameters, 56M active, and multiplications: pretrain_then_dapo.py, ten minutes of one H200
        countdown=Countdown(
            num_numbers=4,
            max_number=30,
            operators="+-*",
            max_attempts=8,
            continue_probability=0.5,
            aim_probability=0.05,
        ),
        model=dict(
            hidden_size=512,
            intermediate_size=1024,
            num_hidden_layers=10,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
            sliding_window=128,
            rope_theta=1000.0,
            yarn_scale_factor=1.0,
            max_position_embeddings=512,
            initializer_range=0.03,
            moe_dispatch="fused",
        ),
        warm_start=WarmStart(steps=500, learning_rate=6e-4, bf16=True, save_every=100),
        warm_start_batch_size=256,
        training=dict(
            bf16=True,
            max_completion_length=168,
            per_device_train_batch_size=256,
            steps_per_generation=4,
            num_generations=16,
            learning_rate=8e-5,
            lr_scheduler_type="linear",
            adam_beta2=0.95,
            warmup_steps=8,
            max_steps=600,
            max_train_seconds=200.0,
        ),
    ),
}


def default_preset() -> str:
    """The preset for this machine."""
    return "gpu" if torch.cuda.is_available() else "cpu"


def warn_without_gpu(preset: str) -> None:
    """Says in a line that a preset for GPUs is about to run on a CPU; after ``use_all_cores``."""
    if preset != "cpu" and PartialState().device.type == "cpu":
        announce(f"warning: preset {preset} is made for a GPU: hours on a CPU, as here; --preset cpu takes minutes")


def make_task(name: str, dataset_name: str | None, countdown: Countdown, seed: int) -> Task:
    """The task of a recipe's ``--task`` and ``--dataset_name``.

    Raises:
        ValueError: an unknown name.
    """
    kind, _, rest = name.partition(":")
    if dataset_name is not None:
        return dataset_task(dataset_name)
    if kind == "countdown":
        return countdown_task(countdown, seed)
    if kind == "reasoning_gym" and rest:
        return reasoning_gym_task(rest, seed)
    raise ValueError(f"task must be countdown or reasoning_gym:<name>, got {name!r}; or give --dataset_name")


def countdown_task(countdown: Countdown, seed: int, *, num_train: int = 20_000, num_eval: int = 500) -> Task:
    """Countdown with held-out problems; the training problems depend on the seed, the evaluation does not."""
    return Task(
        Dataset.from_list(countdown.rows(num_train, seed, "train")),
        Dataset.from_list(countdown.rows(num_eval, EVAL_SEED, "test")),
        countdown_reward,
    )


def reasoning_gym_task(name: str, seed: int, *, num_train: int = 2000, num_eval: int = 200) -> Task:
    """A task of the reasoning-gym package, scored by its own ``score_answer``.

    Some of its problems take 10 ms (countdown) or even 300 (knight_swap) to make, and a short run uses some hundreds.

    Raises:
        ValueError: the package is missing, or has no such task.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(f"task reasoning_gym:{name} must have its package; pip install reasoning-gym") from error
    if name not in reasoning_gym.factory.DATASETS:
        raise ValueError(
            f"task reasoning_gym:{name} must be one of {', '.join(sorted(reasoning_gym.factory.DATASETS))}"
        )
    announce(f"making {num_train + num_eval} problems of reasoning_gym:{name}, which may take a while")
    sets = {
        s: reasoning_gym.create_dataset(name, seed=s, size=n) for s, n in ((seed, num_train), (EVAL_SEED, num_eval))
    }

    def score_answer(prompts, completions, source, row, **columns):
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [
            float(sets[s].score_answer(answer=text.strip(), entry=sets[s][r]))
            for text, s, r in zip(texts, source, row, strict=True)
        ]

    def rows(source):
        questions = ([{"role": "user", "content": entry["question"]}] for entry in sets[source])
        return Dataset.from_list([{"prompt": q, "source": source, "row": r} for r, q in enumerate(questions)])

    return Task(rows(seed), rows(EVAL_SEED), score_answer)


def dataset_task(name: str) -> Task:
    """A dataset of the hub, a file or a folder with the columns prompt and answer, scored by the final answer.

    Its test split (at most 500 rows) is for evaluation, or a tenth of the rows when there is none.

    Raises:
        ValueError: nothing is found there.
    """
    kind = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}.get(Path(name).suffix)
    if (kind or name.startswith((".", "/", "~"))) and not Path(name).exists():  # the hub would be asked, for long
        raise ValueError(
            f"dataset_name must be a hub dataset, a folder, or a jsonl, csv or parquet file, got {name!r}, which is "
            f"not there (from {Path.cwd()}); check the path"
        )
    try:
        data = load_dataset(kind, data_files=name) if kind and Path(name).is_file() else load_dataset(name)
        train = data["train"]
    except Exception as error:  # of many kinds: no files, no network, damaged rows, no such split
        raise ValueError(
            f"dataset_name must be a hub dataset, a folder, or a jsonl, csv or parquet file, got {name!r}: {error}; "
            "mend it or give another one"
        ) from error
    missing = [column for column in ("prompt", "answer") if column not in train.column_names]
    if missing or len(train) < 2:
        raise ValueError(
            f"dataset_name must have two or more rows with the columns prompt and answer, got {len(train)} rows with "
            f"{', '.join(train.column_names)} in {name!r}; rename its columns"
        )
    if "test" in data:
        return Task(train, data["test"].select(range(min(500, len(data["test"])))), answer_reward)
    held_out = train.train_test_split(test_size=max(1, min(500, len(train) // 10)), seed=0)
    return Task(held_out["train"], held_out["test"], answer_reward)


def vocabulary_of(tokenizer) -> dict[str, int]:
    """Fields of a model's configuration that its tokenizer decides: vocab_size and the special tokens' ids."""
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    return {"vocab_size": len(tokenizer), **special}


def warm_started_policy(preset: Preset, args: GRPOConfig, cache_dir: str | Path, steps: int | None = None):
    """The embedded default's policy and tokenizer after the warm start, which is cached by its settings.

    Args:
        preset: the size.
        args: of the training that follows; its seed is that of the weights and the demonstrations.
        cache_dir: folder of the cache.
        steps: updates, instead of the preset's.

    Raises:
        ValueError: completions would not fit the policy's context.
    """
    seed, room = args.seed, preset.model["max_position_embeddings"]
    if args.max_completion_length >= room // 2:
        raise ValueError(
            f"max_completion_length must be below {room // 2} with the embedded policy, whose context is {room}, "
            f"got {args.max_completion_length}; lower it"
        )
    options = preset.warm_start if steps is None else replace(preset.warm_start, steps=steps)
    tokenizer = character_tokenizer(ALPHABET)
    torch.manual_seed(seed)
    model = GptOssLiteForCausalLM(GptOssLiteConfig(**vocabulary_of(tokenizer), **preset.model))
    millions = model.num_parameters() / 1e6
    announce(f"a GPT-OSS-Lite of {millions:.1f}M parameters, kept in {cache_dir} after imitation")
    always_on = replace(preset.countdown, continue_probability=1.0)

    def demonstrations(step: int) -> list[tuple[str, str]]:
        rng = random.Random(f"warm start {seed} {step}")
        in_curriculum = step <= preset.curriculum_share * options.steps
        task = always_on if in_curriculum else preset.countdown
        problems = [task.problem(rng) for _ in range(preset.warm_start_batch_size)]
        return [(p["prompt"], task.demonstration(rng, p["numbers"], p["target"])) for p in problems]

    key = {
        "seed": seed,
        "countdown": asdict(preset.countdown),
        "batch_size": preset.warm_start_batch_size,
        "curriculum_share": preset.curriculum_share,
    }
    warm_start(model, tokenizer, demonstrations, options, cache_dir=cache_dir, cache_key=key)
    return model, tokenizer
