"""From nothing to a reasoning policy on one GPU in ten minutes: supervised traces first, then DAPO, GSPO or CISPO.

    accelerate launch recipes/pretrain_then_dapo.py                                     # a 150M MoE, one H200
    accelerate launch recipes/pretrain_then_dapo.py --objective gspo --routing_replay R3
    accelerate launch recipes/pretrain_then_dapo.py --resume_from_checkpoint            # goes on after an interruption
    accelerate launch recipes/pretrain_then_dapo.py --preset cpu --use_cpu              # the same in minutes on a CPU

The task: reach a target from four numbers with + - *, by attempts such as `9*8=72-17=55-17=38` of which only the last
counts. Every problem is generated and every answer verified. The traces are mostly random attempts, one in twenty of
which is a solution: imitation learns to calculate, RL learns where to go and when to stop. Both parts go on where they
were interrupted: imitation from its last 100 updates, RL from its last checkpoint.
Algorithm: groups of 16, groups without reward spread replaced, no KL. DAPO (arXiv 2503.14476): clip 0.2 / 0.28 and the
mean over tokens. GSPO (arXiv 2507.18071): one length-normalised ratio a sequence, clip 3e-3 / 4e-3. CISPO (arXiv
2506.13585): clipped weights, no clipped gradients.
Writes metrics.jsonl, summary.json (pass rates on held-out problems before and after RL), curves.png and model/.
"""

from dataclasses import dataclass, field

import torch
from running import run, train, use_all_cores
from tasks import PRESETS, countdown_task, warm_started_policy, warn_without_gpu

from grpo_moe.checks import check_int, require
from grpo_moe.rl import GRPOConfig, GRPOTrainer, parse_args
from grpo_moe.rl.launch import start_all_processes
from grpo_moe.rl.run_folder import check_run_folder

OBJECTIVES = {
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-3, "epsilon_high": 4e-3},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
}


@dataclass(frozen=True, kw_only=True)
class RecipeConfig:
    """What to train, and how large."""

    objective: str = field(default="dapo", metadata={"help": f"One of {', '.join(OBJECTIVES)}."})
    preset: str = field(
        default="h200" if torch.cuda.is_available() else "cpu", metadata={"help": f"Size: {', '.join(PRESETS)}."}
    )
    warm_start_steps: int | None = field(
        default=None, metadata={"help": "Supervised updates before RL; the preset's if unset."}
    )
    cache_dir: str = field(default="runs/cache", metadata={"help": "Where the supervised policy is kept."})

    def __post_init__(self):
        for name, known in (("objective", OBJECTIVES), ("preset", PRESETS)):
            value = getattr(self, name)
            require(value in list(known), name, f"one of {', '.join(known)}", value, "check the spelling")
        if self.warm_start_steps is not None:
            check_int("warm_start_steps", self.warm_start_steps, least=1, fix="leave it out for the preset's")


def main() -> None:
    """Runs the recipe."""
    start_all_processes()
    (recipe,) = parse_args(RecipeConfig, known_only=True)
    preset = PRESETS[recipe.preset]
    defaults = {"dynamic_sampling": True, "output_dir": "runs/pretrain_then_dapo", "save_steps": 80}
    recipe, args = parse_args(
        RecipeConfig, GRPOConfig, defaults=defaults | preset.training | OBJECTIVES[recipe.objective]
    )
    check_run_folder(args.output_dir, args.resume_from_checkpoint)
    use_all_cores(args)
    warn_without_gpu(recipe.preset)
    task = countdown_task(preset.countdown, args.seed)
    model, tokenizer = warm_started_policy(preset, args, recipe.cache_dir, recipe.warm_start_steps)
    trainer = GRPOTrainer(
        model, task.reward, args, task.train_dataset, eval_dataset=task.eval_dataset, processing_class=tokenizer
    )
    train(trainer)


if __name__ == "__main__":
    run(main)
