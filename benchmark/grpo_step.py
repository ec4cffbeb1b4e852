"""Whole steps of GRPOTrainer on published shapes with random weights: seconds by phase and peak memory, on 1..n GPUs.

    python benchmark/grpo_step.py --out results.jsonl [--shapes qwen3 gptoss_lite] [--every 0 3 1]
    python benchmark/grpo_step.py --out FILE --shapes qwen3-30b-a3b gpt-oss-20b --completion 1024 --every 1 --lora 16 \
        --lora_experts --weights bf16 --build_on_gpu
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml --num_processes 2 benchmark/grpo_step.py --out FILE

Every process takes the same number of prompts however many there are (weak scaling): the efficiency of n GPUs is the
seconds of one over those of n. Completions run to their full length, since random weights hardly ever sample EOS.
Rollout (NativeEngine), old log-probabilities, update with AdamW on fp32 master weights and clipping, in bf16 autocast
or FSDP2's bf16 parameters. seconds_* are medians over the steps after the first, peak_gib the most that the allocator
held in each phase on the main process, all weights included; planned_gib_* is what grpo_moe.planning expects of it.
gradient_checkpointing is the period of the wrapped blocks, 0 without. Models with sinks run "grpo_moe_sinks"
(FlexAttention). The shapes have 4 layers unless their name says more; published names (qwen3-30b-a3b, ...) are whole.
mfu_* are shares of the peak. --random_rollouts leaves the engine out: random tokens instead, for the update alone.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import shutil
import statistics
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import harness
import torch
from train_step import SHAPES as PUBLISHED
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from grpo_moe import GptOssLiteConfig, GRPOConfig, GRPOTrainer, planning
from grpo_moe.data import character_tokenizer
from grpo_moe.rl.metrics import PhaseTimer
from grpo_moe.types import Completion

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LITE = {"moe_dispatch": "fused", "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPES = {
    **PUBLISHED,
    **{name: planning.preset_config(name) for name in planning.PRESETS},
    "qwen3_24": Qwen3MoeConfig(**{**PUBLISHED["qwen3"].to_dict(), "num_hidden_layers": 24}),
    "gptoss_lite": GptOssLiteConfig(**LITE),
    "gptoss_lite_tiny": GptOssLiteConfig(
        **LITE,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    ),  # fmt: skip
}
PHASES = ("rollout", "logps", "update")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PeakTimer(PhaseTimer):
    """Also keeps the most bytes that the allocator held in each phase."""

    def __init__(self) -> None:
        super().__init__(synchronize_cuda=True)
        self.peak_bytes: dict[str, int] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        with super().__call__(phase):
            yield
        if torch.cuda.is_available():
            self.peak_bytes[phase] = max(self.peak_bytes.get(phase, 0), torch.cuda.max_memory_allocated())


class RandomEngine:
    """Random tokens of full length, at once."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def generate(self, prompts, sampling):
        length = sampling.max_new_tokens
        shape = (len(prompts), sampling.num_generations, length)
        ids = torch.randint(3, self.vocab_size, shape).tolist()
        return [[Completion(tuple(row), (-10.0,) * length, "length") for row in group] for group in ids]

    def sync_weights(self, model):
        pass


def reward(prompts, completions, completion_ids, **columns):
    """Anything with a spread in each group."""
    return [float(zlib.crc32(repr(ids).encode()) % 2) for ids in completion_ids]


def make_trainer(name: str, options, folder: str) -> GRPOTrainer:
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    config = copy.deepcopy(SHAPES[name])
    config.grad_ckpt_every = max(options.every, 1)
    with torch.device("cuda" if on_gpu and options.build_on_gpu else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.weights])
    if hasattr(model, "set_experts_implementation") and "lite" not in name:
        model.set_experts_implementation("grpo_moe")
    if "gpt" in name and on_gpu:  # those with sinks
        model.set_attn_implementation("grpo_moe_sinks")
    args = GRPOConfig(
        output_dir=folder, max_steps=options.steps, bf16=on_gpu, use_cpu=not on_gpu, save_steps=None,
        eval_on_start=False, per_device_train_batch_size=options.micro_batch, num_generations=options.generations,
        gradient_accumulation_steps=options.prompts * options.generations // options.micro_batch,
        num_iterations=1, max_completion_length=options.completion, learning_rate=1e-6, log_completions=False,
        show_progress=False, gradient_checkpointing=options.gradient_checkpointing, beta=0.0,
        padding_free=options.padding_free, loss_type="dapo", sampler_correction="token_truncate",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(26, (64, options.prompt), generator=generator).tolist()
    rows = [{"prompt": "".join(LETTERS[i] for i in pick)} for pick in picks]
    peft_config = None
    if options.lora:
        from peft import LoraConfig

        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if options.lora_experts else None
        modules = ["q_proj", "k_proj", "v_proj", "o_proj"]
        peft_config = LoraConfig(r=options.lora, target_modules=modules, target_parameters=experts)
    engine = RandomEngine(config.vocab_size) if options.random_rollouts else None
    tokenizer = character_tokenizer(LETTERS + " ")
    trainer = GRPOTrainer(
        model, reward, args, rows, processing_class=tokenizer, peft_config=peft_config, rollout_engine=engine
    )
    trainer.timer = trainer.collector.timer = PeakTimer()
    return trainer


def measure(name: str, options) -> dict:
    """The fields of a line, on every process."""
    folder = tempfile.mkdtemp()
    try:
        trainer = make_trainer(name, options, folder)
        trainer.record.start("benchmark", last_step=-1)
        lines = [trainer.step() for _ in range(options.steps)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = {f"seconds_{p}": statistics.median(x.get(f"seconds/{p}", 0.0) for x in lines[1:]) for p in PHASES}
    seconds["seconds_step"] = sum(seconds.values())
    mfu = {f"mfu_{p}": statistics.median(x.get(f"mfu/{p}", 0.0) for x in lines[1:]) for p in ("rollout", "update")}
    tokens = options.prompts * options.generations * options.completion
    accelerator = trainer.accelerator
    kind = "fsdp2" if accelerator.is_fsdp2 else "ddp" if accelerator.num_processes > 1 else "single"
    peaks = {f"peak_gib_{p}": round(b / 2**30, 3) for p, b in trainer.timer.peak_bytes.items() if p in PHASES}
    return {
        "op": "grpo_step", "impl": kind, "shape": name, "world": accelerator.num_processes, **seconds, **peaks,
        "completion_tokens_per_process": tokens, "rollout_tokens_per_s": tokens / seconds["seconds_rollout"],
        "step_tokens_per_s": tokens / seconds["seconds_step"], **mfu,
        "micro_batch": options.micro_batch, "prompt": options.prompt, "completion": options.completion,
        "gradient_checkpointing": options.every, "lora": options.lora, "lora_experts": options.lora_experts,
        "weights": options.weights,
        "padding_free": options.padding_free, "grad_norm": lines[-1]["grad_norm"],
        "sampling_logp_difference_mean": lines[-1].get("sampling_logp_difference_mean"),
        "parameters": sum(p.numel() for p in trainer.policy.parameters()),
        **planned(name, options, accelerator.num_processes, kind), "random_rollouts": options.random_rollouts,
    }  # fmt: skip


def planned(name: str, options, world: int, sharding: str) -> dict[str, float]:
    """The planner's peaks, as the allocator counts; of the update, those of its passes and of the optimiser's step."""
    rows = options.prompts * options.generations
    run = planning.RunShape(
        micro_batch=options.micro_batch, prompt_tokens=options.prompt, completion_tokens=options.completion,
        prompts_per_rollout=options.prompts, num_generations=options.generations,
        accumulates=rows > options.micro_batch, checkpoint_period=options.every or None, lora_rank=options.lora,
        lora_experts=options.lora_experts, weight_bytes=DTYPES[options.weights].itemsize,
        padding_free=options.padding_free, padded=False, attention="flex" if "gpt" in name else None,
    )  # fmt: skip
    sharding = {"single": "none"}.get(sharding, sharding)
    plan = planning.plan_memory(SHAPES[name], run, planning.GPUS["H200"], world, sharding)
    gib = {phase: plan.allocated_bytes(phase) / 2**30 for phase in plan.phases}
    update = max(gib["forward_backward"], gib["optimizer_step"])
    return {"planned_gib_rollout": round(gib["rollout"], 3), "planned_gib_update": round(update, 3)}


def runs_of(options) -> list[tuple[str, argparse.Namespace]]:
    """Shape and options of each line: every period of --every for each shape, lengths and micro-batch."""
    runs = []
    for name in options.shapes:
        for completion, every in itertools.product(options.completion, options.every):
            changed = {"completion": completion, "every": every, "gradient_checkpointing": every > 0}
            runs.append((name, argparse.Namespace(**{**vars(options), **changed})))
    return runs


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, ["ours"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gptoss_lite", "qwen3"])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8, help="of a rollout on each process")
    parser.add_argument("--generations", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--completion", type=int, nargs="+", default=[512])
    parser.add_argument("--micro_batch", type=int, default=8)
    parser.add_argument("--lora", type=int, default=0, help="rank of LoRA on attention; 0 trains all")
    parser.add_argument("--lora_experts", action="store_true", help="LoRA of that rank on every expert too")
    parser.add_argument("--weights", choices=DTYPES, default="fp32", help="dtype of the weights; bf16 for LoRA alone")
    parser.add_argument("--every", type=int, nargs="+", default=[0], help="checkpoint every n-th block; 0 for none")
    parser.add_argument("--padding_free", action="store_true")
    parser.add_argument("--random_rollouts", action="store_true")
    parser.add_argument("--build_on_gpu", action="store_true", help="where the model fits one GPU in float32")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = harness.JsonLines(options.out, harness.environment(device))
    for name, run in runs_of(options):
        try:
            line = measure(name, run)
        except (torch.cuda.OutOfMemoryError, RuntimeError) as error:
            line = {"op": "grpo_step", "shape": name, "error": harness.describe(error), **vars(run), "out": None}
        if "RANK" not in os.environ or os.environ["RANK"] == "0":
            out.write(line)
        harness.free_memory(device)


if __name__ == "__main__":
    main()
