"""How every recipe runs: threads, the trainer, the closing lines, and exit codes a shell understands."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import torch
from accelerate import PartialState

from grpo_moe.rl import GRPOConfig, GRPOTrainer
from grpo_moe.rl.launch import runs_on_cpu
from grpo_moe.text import printable, say


def announce(text: str) -> None:
    """Says a line on the first process alone; before an accelerator exists, too."""
    if os.environ.get("RANK", "0") == "0":
        say(text)


def use_all_cores(args: GRPOConfig) -> None:
    """On a CPU, each process's share of the cores: accelerate launch would leave it one thread."""
    state = PartialState(cpu=runs_on_cpu(args.use_cpu))
    if state.device.type == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // state.num_processes))


def train(trainer: GRPOTrainer) -> None:
    """Trains and says what came of it."""
    summary = trainer.train()
    if trainer.accelerator.is_main_process:
        before, after = (summary.get(f"eval_{when}", {}) for when in ("before", "after"))
        for name in ("pass_rate", "greedy_pass_rate", "reward") if before and after else ():
            say(f"held-out {name}: {before[name]:.3f} -> {after[name]:.3f}")
        say(f"model, curves, metrics and summary in {trainer.args.output_dir}")


def run(main: Callable[[], None]) -> None:
    """Calls ``main``; wrong options exit with 2 and a line of text, an interruption with 130 and what to do next."""
    try:
        main()
    except ValueError as error:
        print(f"error: {printable(error)}", *map(printable, getattr(error, "__notes__", ())), sep="\n", file=sys.stderr)
        sys.exit(2)  # 1 is what grpo-moe doctor says of a failed check
    except KeyboardInterrupt as interrupt:
        saved = f"{interrupt}\nadd --resume_from_checkpoint to go on"  # the trainer says what it saved
        print(
            f"interrupted: {saved if str(interrupt) else 'before the first update; nothing is saved'}", file=sys.stderr
        )
        sys.exit(130)
