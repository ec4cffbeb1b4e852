"""Trains the tiny model under torchrun; each process saves its parameters. For test_distributed.py."""

import json
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.sharding import whole_state

if __name__ == "__main__":
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    reward = share_of_letter
    if options.pop("nothing_on_the_last_rank", False) and PartialState(cpu=True).process_index:
        reward = lambda prompts, **_: [0.0] * len(prompts)  # noqa: E731
    shared = dict(
        output_dir=str(folder), num_generations=4, max_completion_length=8, learning_rate=1e-3, use_cpu=True,
        show_progress=False, eval_on_start=False, log_completions=False,
    )  # fmt: skip
    trainer = GRPOTrainer(
        tiny_model(), reward, GRPOConfig(**shared, **options), prompt_rows(10), eval_dataset=prompt_rows(1),
        processing_class=tokenizer(),
    )  # fmt: skip
    summary = trainer.train()
    rank = trainer.accelerator.process_index
    whole = whole_state(trainer.policy, trainer.accelerator)
    torch.save(
        {"parameters": whole or trainer.policy.state_dict(), "skipped": summary["skipped_updates"]},
        folder / f"{rank}.pt",
    )
