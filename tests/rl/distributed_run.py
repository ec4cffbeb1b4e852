"""Trains a tiny model under torchrun; each process saves its parameters. For test_distributed.py."""

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from moe_families import tiny_moe
from own_weights import OwnWeights
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.doctor import run_doctor
from grpo_moe.rl.sharding import whole_state
from grpo_moe.types import Completion

EOS, FAULTY = 2, 6


class ScriptedEngine:
    """Completions that are a function of the prompt's number, odd ones on the second of two processes.

    In turn: 3 tokens against 30; an EOS alone against 30; a group that is truncated, and masked, against 30; a group
    whose reward function fails against 30; lengths from 1 to 4 against 30 to 33.
    """

    def generate(self, prompts, sampling):
        return [[self._completion(p.index, g) for g in range(sampling.num_generations)] for p in prompts]

    def _completion(self, index, generation):
        turn, is_second = divmod(index, 2)
        length = 30 if is_second else [3, 1, 8, 8, 1][turn % 5]
        length += generation if turn % 5 == 4 else 0
        generator = torch.Generator().manual_seed(100 * index + generation)
        ids = torch.randint(3, 30, (length - 1,), generator=generator).tolist() + [EOS]
        reason = "length" if turn % 5 == 2 and not is_second else "stop"
        return Completion(tuple(ids), (-1.0,) * length, reason, text=f"{index} {generation}")

    def sync_weights(self, model):
        pass


def scripted_reward(prompts, completions, **columns):
    if PartialState().process_index == 0:
        print("scored", flush=True)
    if any(text.startswith(f"{FAULTY} ") for text in completions):
        raise OSError("no answer")
    return [_score(*map(int, text.split())) if text else 0.0 for text in completions]


def _score(index, generation):
    """Of another order in each group, so that the advantages of another row are seen."""
    return float((7 * generation**2 + 3 * index * generation) % 11)


if __name__ == "__main__":
    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    engine, reward, family = None, share_of_letter, options.pop("family", None)
    examines = options.pop("doctor", False)
    if options.pop("nothing_on_the_last_rank", False) and PartialState(cpu=True).process_index:
        reward = lambda prompts, **_: [0.0] * len(prompts)  # noqa: E731
    if options.pop("scripted", False):
        engine, reward = ScriptedEngine(), scripted_reward
        options |= {"shuffle_dataset": False, "mask_truncated_completions": True, "reward_on_error": "skip"}
    shared = dict(
        output_dir=str(folder), num_generations=4, max_completion_length=34, learning_rate=1e-3, use_cpu=True,
        show_progress=False, eval_on_start=False, log_completions=False,
        adam_epsilon=1e-4,  # else the rounding of a tiny gradient becomes a whole step
    )  # fmt: skip
    model = tiny_moe(family, experts_implementation="grpo_moe") if family else tiny_model(num_experts=16)
    if options.pop("own_weights", False):
        engine = OwnWeights(model)
    trainer = GRPOTrainer(
        model, reward, GRPOConfig(**{**shared, **options}), prompt_rows(10), eval_dataset=prompt_rows(1),
        processing_class=tokenizer(), rollout_engine=engine,
    )  # fmt: skip
    rank = trainer.accelerator.process_index
    (folder / f"{rank}.pid").write_text(str(os.getpid()))
    assert not examines or run_doctor(trainer) == 0
    summary = trainer.train()
    parameters = whole_state(trainer.policy, trainer.accelerator) or trainer.policy.state_dict()
    sharded = any(hasattr(p, "full_tensor") for p in trainer.policy.parameters())
    kept = {"parameters": parameters, "skipped": summary["skipped_updates"], "sharded": sharded}
    kept["calls"] = getattr(engine, "calls", None)
    torch.save(kept, folder / f"{rank}.pt")
