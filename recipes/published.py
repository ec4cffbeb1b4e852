"""What the recipes for published MoE models share: their options, a tiny stand-in for --tiny, and the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from running import train, use_all_cores
from tasks import Task, countdown_task, make_task, vocabulary_of
from transformers import AutoModelForCausalLM, PretrainedConfig

from grpo_moe.data import character_tokenizer
from grpo_moe.rewards import Countdown
from grpo_moe.rewards.countdown import ALPHABET
from grpo_moe.rl import GRPOConfig, GRPOTrainer, parse_args
from grpo_moe.rl.launch import start_all_processes
from grpo_moe.rl.run_folder import check_run_folder

TINY_MODEL = dict(
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=128,
    initializer_range=0.1,
)
TINY_TRAINING = dict(
    max_steps=12,
    per_device_train_batch_size=16,
    steps_per_generation=2,
    max_completion_length=24,
    learning_rate=3e-3,
)


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """What to train, on what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Local folder or hub id; the recipe's own model if unset."}
    )
    tiny: bool = field(
        default=False, metadata={"help": "A tiny random model and an easy task, offline, to see everything work."}
    )
    task: str = field(default="reasoning_gym:countdown", metadata={"help": "countdown, or reasoning_gym:<name>."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub id, file or folder with the columns prompt and answer."}
    )
    lora_r: int = field(
        default=0, metadata={"help": "Rank of LoRA on attention and experts (pip install peft); 0 trains everything."}
    )

    def __post_init__(self):
        if self.tiny and self.model_name_or_path is not None:
            raise ValueError(
                f"model_name_or_path must be left out with --tiny, got {self.model_name_or_path!r}; give one of them"
            )
        if self.lora_r < 0:
            raise ValueError(f"lora_r must be at least 0, got {self.lora_r}; 0 trains everything")


def train_published(
    model_name: str,
    tiny_config: type[PretrainedConfig],
    tiny: dict[str, Any],
    *,
    attn_implementation: str | None = None,
    **defaults: Any,
) -> None:
    """The whole recipe.

    Args:
        model_name: hub id of the model to train unless another is given.
        tiny_config: class of configuration of the stand-in.
        tiny: its fields besides those of every stand-in.
        attn_implementation: of the stand-in; what is loaded gets its own.
        defaults: of GRPOConfig.
    """
    start_all_processes()
    (recipe,) = parse_args(PublishedModel, known_only=True)
    recipe, args = parse_args(
        PublishedModel, GRPOConfig, defaults=defaults | (TINY_TRAINING if recipe.tiny else {"learning_rate": 1e-6})
    )
    check_run_folder(args.output_dir, args.resume_from_checkpoint)
    use_all_cores(args)
    if recipe.tiny:
        task, tokenizer = tiny_task(args.seed), character_tokenizer(ALPHABET)
        torch.manual_seed(args.seed)
        model = AutoModelForCausalLM.from_config(
            tiny_config(**vocabulary_of(tokenizer), **TINY_MODEL, **tiny),
            experts_implementation="grpo_moe",
            attn_implementation=attn_implementation,
        )
    else:
        task, tokenizer = make_task(recipe.task, recipe.dataset_name, Countdown(), args.seed), None
        model = recipe.model_name_or_path or model_name
    train(
        GRPOTrainer(
            model,
            task.reward,
            args,
            task.train_dataset,
            eval_dataset=task.eval_dataset,
            processing_class=tokenizer,
            peft_config=lora(recipe.lora_r) if recipe.lora_r else None,
        )
    )


def tiny_task(seed: int) -> Task:
    """Countdown's prompts, and a reward that a random model can climb: the share of characters that are digits."""
    made = countdown_task(Countdown(), seed, num_train=256, num_eval=16)

    def share_of_digits(completions, **columns):
        return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

    return Task(made.train_dataset, made.eval_dataset, share_of_digits)


def lora(rank: int):
    """LoRA on the attention and on every expert.

    Raises:
        ValueError: peft is not installed.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ValueError("lora_r must be 0 without the package peft, got more; pip install peft") from error
    return LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        lora_dropout=0.0,  # PEFT has none for target_parameters
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    )
