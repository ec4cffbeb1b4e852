"""The same GRPO run by our trainer and by TRL's: seconds of a step by phase, peak memory, reward against wall time.

    python benchmark/trl_step.py --out results.jsonl [--shapes qwen3 qwen3_tiny] [--steps 8 --completion 256]

Both get the same model (random fp32 weights, bf16 autocast on a GPU), prompts, batch, learning rate and options (DAPO,
clip 0.2 / 0.28, AdamW, no KL, no load-balancing loss, gradients accumulated over micro-batches) and otherwise their
defaults: ours NativeEngine and our kernels, TRL's generate of transformers, its experts (grouped_mm) and TRL's fused
head. The reward is the share of a completion's tokens in the lower half of the vocabulary, which random weights learn
at once. seconds_* are medians over the steps after the first, which compiles; rollout is generation alone, rest is
everything else. peak_gib is the most that the allocator held. rewards and elapsed seconds since the start are by step.
"""

from __future__ import annotations

import copy
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable

import harness
import torch
from grpo_step import LETTERS
from train_step import SHAPES
from transformers import AutoModelForCausalLM, TrainerCallback

import grpo_moe
from grpo_moe.data import character_tokenizer

IMPLEMENTATIONS = ["ours", "trl"]


def reward(vocab_size: int) -> Callable[..., list[float]]:
    """Share of the tokens of each completion below half the vocabulary; both libraries pass ``completion_ids``."""

    def lower_half(completion_ids, **columns):
        return [sum(i < vocab_size // 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]

    return lower_half


def make_model(name: str, device: torch.device):
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(copy.deepcopy(SHAPES[name]), dtype=torch.float32)


def settings(options, folder: str, on_gpu: bool) -> dict:
    """What both configurations are given."""
    rows = options.prompts * options.generations
    return dict(
        output_dir=folder, max_steps=options.steps, bf16=on_gpu, use_cpu=not on_gpu, beta=0.0, loss_type="dapo",
        epsilon=0.2, epsilon_high=0.28, learning_rate=options.learning_rate, lr_scheduler_type="constant",
        per_device_train_batch_size=options.micro_batch, gradient_accumulation_steps=rows // options.micro_batch,
        num_generations=options.generations, max_completion_length=options.completion, temperature=1.0,
        seed=options.seed,
        log_completions=False, router_aux_loss_coef=0.0, gradient_checkpointing=False, max_grad_norm=1.0,
    )  # fmt: skip


def run_ours(model, rows, tokenizer, given: dict, score) -> list[dict]:
    """A line for each step: rollout, step and elapsed seconds, reward."""
    model.set_experts_implementation("grpo_moe")
    args = grpo_moe.GRPOConfig(**given, save_steps=None, eval_on_start=False, show_progress=False)
    trainer = grpo_moe.GRPOTrainer(model, score, args, rows, processing_class=tokenizer)
    trainer.record.start("benchmark", last_step=-1)
    made, started = [], time.perf_counter()
    for _ in range(args.max_steps):
        before = time.perf_counter()
        line = trainer.step()
        synchronize()
        now = time.perf_counter()
        made.append(
            {
                "rollout": line["seconds/rollout"],
                "step": now - before,
                "elapsed": now - started,
                "reward": line["reward"],
            }
        )
    return made


def run_trl(model, rows, tokenizer, given: dict, score) -> list[dict]:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Timed(GRPOTrainer):
        rollout = 0.0

        def _generate(self, prompts):
            synchronize()
            before = time.perf_counter()
            result = super()._generate(prompts)
            synchronize()
            self.rollout += time.perf_counter() - before
            return result

    made: list[dict] = []

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            self.started = self.before = time.perf_counter()

        def on_log(self, args, state, control, logs=None, **kwargs):
            if "reward" not in logs:
                return
            synchronize()
            now = time.perf_counter()
            seconds = {"rollout": trainer.rollout, "step": now - self.before, "elapsed": now - self.started}
            made.append({**seconds, "reward": logs["reward"]})
            self.before, trainer.rollout = now, 0.0

    args = GRPOConfig(**given, save_strategy="no", report_to="none", logging_steps=1, disable_tqdm=True)
    trainer = Timed(
        model=model, reward_funcs=score, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return made


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(impl: str, name: str, options, device: torch.device) -> dict:
    """The fields of a line."""
    folder = tempfile.mkdtemp()
    model = make_model(name, device)
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(26, (options.prompts * options.steps, options.prompt), generator=generator).tolist()
    rows = [{"prompt": "".join(LETTERS[i] for i in pick)} for pick in picks]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    try:
        run = {"ours": run_ours, "trl": run_trl}[impl]
        given = settings(options, folder, device.type == "cuda")
        made = run(model, rows, character_tokenizer(LETTERS + " "), given, reward(model.config.vocab_size))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    step, rollout = (statistics.median(x[key] for x in made[1:]) for key in ("step", "rollout"))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    return {
        "op": "trl_step", "impl": impl, "shape": name, "seconds_step": step, "seconds_rollout": rollout,
        "seconds_rest": step - rollout, "peak_gib": peak, "rewards": [round(x["reward"], 4) for x in made],
        "elapsed": [round(x["elapsed"], 2) for x in made], "first_step_seconds": made[0]["step"],
        "prompts": options.prompts, "generations": options.generations, "prompt": options.prompt,
        "completion": options.completion, "micro_batch": options.micro_batch,
        "learning_rate": options.learning_rate, "seed": options.seed,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, IMPLEMENTATIONS)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["qwen3"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--completion", type=int, default=256)
    parser.add_argument("--micro_batch", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=2e-5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    versions = {name: harness.package_version(name) for name in ("trl", "transformers", "accelerate")}
    out = harness.JsonLines(options.out, harness.environment(device) | versions)
    for name in options.shapes:
        for impl in options.impls or IMPLEMENTATIONS:
            try:
                line = measure(impl, name, options, device)
            except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
                line = {"op": "trl_step", "impl": impl, "shape": name, "error": harness.describe(error)}
            out.write(line)
            harness.free_memory(device)


if __name__ == "__main__":
    main()
