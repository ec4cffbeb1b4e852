"""DAPO on GPT-OSS-Lite: from nothing to a policy that searches, in minutes on two CPU cores; larger by arguments.

    accelerate launch recipes/dapo_gptoss.py                                   # the embedded default: Countdown
    accelerate launch recipes/dapo_gptoss.py --preset gpu --bf16               # larger policy, harder Countdown
    accelerate launch --cpu --num_processes 2 recipes/dapo_gptoss.py           # two processes
    accelerate launch recipes/dapo_gptoss.py --model_name_or_path allenai/OLMoE-1B-7B-0924-Instruct \
        --task reasoning_gym:countdown --bf16 --learning_rate 1e-6
    accelerate launch recipes/dapo_gptoss.py --resume_from_checkpoint          # goes on after an interruption

Algorithm (DAPO, arXiv 2503.14476): clip-higher 0.2 / 0.28, token-mean loss over the exact count of each update, groups
without reward spread replaced by others (at most 3 rounds), no KL; with --overlong_cache_length N its soft punishment.
The default warms the policy up on random attempts, then RL finds the search: only the last attempt earns reward.
Writes metrics.jsonl, summary.json, curves.png, completions/*.parquet and model/ into --output_dir.
"""

from dataclasses import dataclass, field

from running import run, train, use_all_cores
from tasks import PRESETS, default_preset, make_task, warm_started_policy, warn_without_gpu

from grpo_moe.checks import check_int, require
from grpo_moe.rl import GRPOConfig, GRPOTrainer, parse_args
from grpo_moe.rl.launch import start_all_processes
from grpo_moe.rl.run_folder import check_run_folder


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What to train, on what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Local folder or hub id of a causal LM; the embedded policy if unset."}
    )
    task: str = field(default="countdown", metadata={"help": "countdown, or reasoning_gym:<name>."})
    dataset_name: str | None = field(
        default=None, metadata={"help": "Hub id, file or folder with the columns prompt and answer."}
    )
    preset: str = field(default=default_preset(), metadata={"help": f"Size of the default: {', '.join(PRESETS)}."})
    warm_start_steps: int | None = field(
        default=None, metadata={"help": "Supervised updates of the embedded policy before RL; the preset's if unset."}
    )
    cache_dir: str = field(default="runs/cache", metadata={"help": "Where the warm start is kept."})

    def __post_init__(self):
        rule = f"one of {', '.join(PRESETS)}"
        require(self.preset in list(PRESETS), "preset", rule, self.preset, "check the spelling")
        if self.warm_start_steps is not None:
            check_int("warm_start_steps", self.warm_start_steps, least=1, fix="leave it out for the preset's")
        if self.dataset_name is not None and self.task != "countdown":
            raise ValueError(f"task must be left out when dataset_name is given, got {self.task!r}; give one of them")
        if self.model_name_or_path is None and (self.task != "countdown" or self.dataset_name is not None):
            raise ValueError(
                "model_name_or_path must be set with another task or dataset, got None; the embedded policy only knows "
                "Countdown"
            )


def main() -> None:
    """Runs the recipe."""
    start_all_processes()
    (recipe,) = parse_args(RecipeConfig, known_only=True)
    preset, own_policy = PRESETS[recipe.preset], recipe.model_name_or_path is None
    dapo = {"dynamic_sampling": True, "epsilon_high": 0.28, "output_dir": "runs/dapo_gptoss", "save_steps": 20}
    recipe, args = parse_args(RecipeConfig, GRPOConfig, defaults=dapo | (preset.training if own_policy else {}))
    task = make_task(recipe.task, recipe.dataset_name, preset.countdown, args.seed)

    check_run_folder(args.output_dir, args.resume_from_checkpoint)
    use_all_cores(args)
    model, tokenizer = recipe.model_name_or_path, None
    if own_policy:
        warn_without_gpu(recipe.preset)
        model, tokenizer = warm_started_policy(preset, args, recipe.cache_dir, recipe.warm_start_steps)
    trainer = GRPOTrainer(
        model, task.reward, args, task.train_dataset, eval_dataset=task.eval_dataset, processing_class=tokenizer
    )
    train(trainer)


if __name__ == "__main__":
    run(main)
