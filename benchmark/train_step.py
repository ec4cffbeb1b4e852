"""A training micro-step of MoE language models: ours beside transformers' experts and TRL's head, in turns.

    python benchmark/train_step.py --out results.jsonl [--shapes qwen3 gpt_oss] [--batch 8 --length 2048 --prompt 512]

Forward, DAPO loss (beta 0, given old_logps), backward to all parameters; no optimiser. 4 layers of Qwen3-30B-A3B or
gpt-oss-20b, random bf16 weights that all share, no autocast; random tokens, no padding, prompts of one length.

* ours: our experts, the loss fused with the head, as in GRPOTrainer; SDPA, in gpt_oss FlexAttention ("grpo_moe_sinks")
* ours_padding_free: the same on one row of all sequences, FlexAttention in both shapes
* grouped_mm_full_logits: transformers' "grouped_mm" experts and default attention (SDPA, in gpt_oss eager); logits of
  all positions from the model, those of completions in float32, log_softmax and gather, the loss in plain PyTorch
* trl_fused_head: the same, but log-probabilities and entropies by TRL's `add_fused_lm_head`, as in TRL's GRPOTrainer
* *_flex: the same with transformers' FlexAttention, in gpt_oss alone

Before any timing each is compared with float32, by loss and gradients of a tiny model of the family (rel_err: largest
relative error of a kind of parameter, worst_of names it; ours may err 1.5 times as much as grouped_mm_full_logits), and
at full size with transformers' eager model, in bf16 on a sequence at a time (full_rel_err). The routes of the truth are
replayed, since rounding sends some tokens to other experts. What is wrong is refused: its line has "error" and no time.
Before each timed call the allocator's cache is emptied and the step runs once untimed: none pays for what another left.
peak_gib is beyond the weights (weights_gib), gradients included. tflops counts products with weights, of the head those
for completion tokens.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import harness
import torch
from harness import Contestant, WrongResult
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen3MoeConfig

from grpo_moe.adapters import hf_experts  # noqa: F401  registers "grpo_moe"
from grpo_moe.adapters.hf_attention import SINK_ATTENTION
from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.adapters.routing import RoutingRecord, RoutingReplay
from grpo_moe.ops import LossConfig, grpo_loss
from grpo_moe.rl.batch import batch_loss, select
from grpo_moe.types import RolloutBatch

COMMON = {"num_hidden_layers": 4, "tie_word_embeddings": False}
QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3 |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
QWEN3 |= {"norm_topk_prob": True, **COMMON}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
GPT_OSS |= {"sliding_window": 128, **COMMON}
TINY = {"hidden_size": 128, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 64, "vocab_size": 500, "num_hidden_layers": 2, "initializer_range": 0.05}
SHAPES = {
    "qwen3": Qwen3MoeConfig(**QWEN3),
    "gpt_oss": GptOssConfig(**GPT_OSS),
    "qwen3_tiny": Qwen3MoeConfig(**QWEN3 | TINY | {"moe_intermediate_size": 64, "num_experts": 16}),
    "gpt_oss_tiny": GptOssConfig(**GPT_OSS | TINY | {"intermediate_size": 64, "num_local_experts": 8}),
}
SIZES, CHECK_SIZES = (8, 2048, 512), (2, 192, 64)
"""Sequences, their tokens, those of the prompt. To check: enough for FlexAttention and for the window of 128."""
EPSILON = 0.2
CONFIG = LossConfig(loss_type="dapo", epsilon=EPSILON)
PLAIN = "grouped_mm_full_logits"
SAMPLE = 2**20  # elements of a parameter's gradient that are compared
EAGER_FACTOR, FLOOR = 1.5, 0.01
WRONG, WRONG_AT_SIZE = 0.1, 0.25  # relative errors that no rounding explains


def make_model(config, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").train()


def make_batch(vocab_size: int, sizes: tuple[int, int, int], device: torch.device) -> RolloutBatch:
    """Random tokens; its log-probabilities are filled by :func:`truth_of`."""
    rows, length, prompt = sizes
    ids = torch.randint(vocab_size, (rows, length), device=device)
    mask, logps = torch.ones_like(ids, dtype=torch.bool), torch.zeros(rows, length - prompt, device=device)
    advantages = torch.linspace(-1, 1.5, rows, device=device)
    parts = (ids[:, prompt:], mask[:, prompt:], advantages, logps)
    return RolloutBatch(ids, mask, torch.full_like(ids[:, 0], prompt), *parts, old_logps=logps)


def ours(model: PreTrainedModel, batch: RolloutBatch, padding_free: bool = False) -> torch.Tensor:
    """As GRPOTrainer.loss, metrics apart."""

    def loss_fn(hidden_states, lm_head_weight, **head):
        tokens = (batch.completion_ids, batch.completion_mask, batch.advantages)
        given = {"old_logps": batch.old_logps, "sampling_logps": batch.sampling_logps, "return_entropy": True}
        counts = {"num_loss_tokens": batch.completion_mask.numel(), "num_sequences": len(batch.advantages)}
        return grpo_loss(hidden_states, lm_head_weight, *tokens, CONFIG, **given, **counts, **head).loss

    return batch_loss(model, batch, loss_fn, padding_free=padding_free)


def full_logits_logps(model: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    ids = batch.completion_ids
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    logits = logits[:, -ids.shape[1] - 1 : -1]  # [B, T, V]
    return logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0]


def add_trl_head(model: PreTrainedModel) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))


def trl_logps(model: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    completion = batch.completion_ids.shape[1]
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    labels[:, :-completion] = -100
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return model(**inputs, labels=labels, fused_lm_head=True).log_probs[:, -completion:]


def dapo_loss(logps: torch.Tensor, old_logps: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    ratio, advantages = (logps - old_logps).exp(), advantages[:, None]
    return -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages).mean()


def plain(logps: Callable, model: PreTrainedModel, batch: RolloutBatch) -> torch.Tensor:
    return dapo_loss(logps(model, batch), batch.old_logps, batch.advantages)


@dataclass(frozen=True)
class Implementation:
    """A loss of a model and a batch, and the model's state that it wants."""

    loss: Callable[[PreTrainedModel, RolloutBatch], torch.Tensor]
    experts: str
    attention: dict[str, str]
    """By model type; it does not run those that are missing."""
    patch: Callable[[PreTrainedModel], object] = lambda model: None
    """Changes the model's forward."""
    packages: tuple[str, ...] = ("transformers",)


DEFAULT_ATTENTION, FLEX = {"qwen3_moe": "sdpa", "gpt_oss": "eager"}, {"gpt_oss": "flex_attention"}
FULL_LOGITS = Implementation(partial(plain, full_logits_logps), "grouped_mm", DEFAULT_ATTENTION)
TRL = replace(FULL_LOGITS, loss=partial(plain, trl_logps), patch=add_trl_head, packages=("trl", "transformers"))
OURS = Implementation(ours, "grpo_moe", {"qwen3_moe": "sdpa", "gpt_oss": SINK_ATTENTION}, add_token_logps, ())
PACKED = replace(
    OURS, loss=partial(ours, padding_free=True), attention=dict.fromkeys(DEFAULT_ATTENTION, SINK_ATTENTION)
)
IMPLEMENTATIONS = {
    "ours": OURS,
    "ours_padding_free": PACKED,
    PLAIN: FULL_LOGITS,
    f"{PLAIN}_flex": replace(FULL_LOGITS, attention=FLEX),
    "trl_fused_head": TRL,
    "trl_fused_head_flex": replace(TRL, attention=FLEX),
}
ON_CPU = ("ours", "ours_padding_free", PLAIN)  # FlexAttention has no backward pass there


@dataclass
class Step:
    """A micro-step by one implementation, on a model that others use in between."""

    name: str
    model: PreTrainedModel
    batch: RolloutBatch
    checkpointing: bool = False
    failed: bool = False

    def loss(self) -> torch.Tensor:
        return IMPLEMENTATIONS[self.name].loss(self.model, self.batch)

    def __call__(self) -> None:
        self.failed = True  # it stays so if this raises
        self.loss().backward()
        self.failed = False

    def set_up(self, checkpointing_kwargs: dict | None = None) -> None:
        """Clears gradients and what another implementation changed in the model, and makes the changes of this one."""
        model, implementation = self.model, IMPLEMENTATIONS[self.name]
        model.zero_grad(set_to_none=True)
        for patched in ("forward", "_has_token_logps"):
            vars(model).pop(patched, None)
        model.set_experts_implementation(implementation.experts)
        model.set_attn_implementation(implementation.attention[model.config.model_type])
        implementation.patch(model)
        if self.checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable(checkpointing_kwargs or {"use_reentrant": False})

    def reset(self) -> None:
        """Before a timed call: :meth:`set_up`, an empty cache, one untimed call; after a failure the first alone."""
        self.set_up()
        if not self.failed:
            harness.free_memory(self.model.device)
            self()
            self.model.zero_grad(set_to_none=True)


def grads_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients by kind of parameter, layers together; the first elements of large ones."""
    grads: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        grads.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(parameter.grad.flatten()[:SAMPLE].float())
    return {name: torch.cat(parts) for name, parts in grads.items()}


def truth_of(model: PreTrainedModel, batch: RolloutBatch) -> tuple[dict[str, torch.Tensor], RoutingRecord]:
    """Loss and gradients of the eager model with full logits, a sequence at a time, and its routes; fills old_logps.

    A fifth of them is far enough from the log-probabilities to be clipped, the others are clear of the bounds.
    """
    model.set_experts_implementation("eager")
    model.set_attn_implementation("eager")
    rows, loss = len(batch.input_ids), 0
    with RoutingReplay(model) as routing, routing.record() as records:
        for row in range(rows):
            part = select(batch, torch.tensor([row]))
            logps = full_logits_logps(model, part)
            step = 0.05 * torch.randn_like(logps)
            step += torch.where(torch.rand_like(step) < 0.2, 0.5 * step.sign(), 0)
            batch.old_logps[row] = (logps.detach() - step)[0]
            share = dapo_loss(logps, batch.old_logps[row : row + 1], part.advantages) / rows
            share.backward()
            loss += share.detach()
    return {"loss": loss[None], **grads_of(model)}, RoutingRecord.concat_rows(records)


def errors_of(step: Step, truth: dict[str, torch.Tensor], record: RoutingRecord) -> dict[str, float]:
    """Relative errors (Frobenius norms) of loss and gradients of a call that takes the recorded routes."""
    with RoutingReplay(step.model) as routing:
        step.set_up(routing.checkpointing_kwargs)
        packed = step.name == "ours_padding_free"
        with routing.replay(record.pack(step.batch.attention_mask) if packed else record):
            loss = step.loss()
        loss.backward()
    found = {"loss": loss.detach()[None], **grads_of(step.model)}
    return {kind: float((found[kind] - true).norm() / true.norm()) for kind, true in truth.items()}


def check(config, names: list[str], device: torch.device) -> dict[str, Contestant]:
    """Errors of each on a tiny model against float32, in its facts; its error is set if it failed or is wrong."""
    model, batch = make_model(config, device), make_batch(config.vocab_size, CHECK_SIZES, device)
    truth, record = truth_of(copy.deepcopy(model).float(), batch)
    checked = {name: Contestant(call=dict) for name in dict.fromkeys((PLAIN, *names))}
    bar: dict[str, float] = {}

    def judge(contestant: Contestant, name: str) -> None:
        errors = errors_of(Step(name, model, batch), truth, record)
        worst = max(errors, key=errors.get)
        contestant.facts.update(rel_err=errors[worst], worst_of=worst)
        WrongResult.unless(errors, dict.fromkeys(errors, WRONG))
        if name == PLAIN:
            bar.update({kind: EAGER_FACTOR * x + FLOOR for kind, x in errors.items()})
        elif name.startswith("ours"):  # an empty bar if the plain one failed
            WrongResult.unless(errors, bar)

    for name, contestant in checked.items():
        print(f"          {name}", flush=True)
        harness.attempt(contestant, device, partial(judge, name=name))
    return checked


def verify(step: Step, truth: dict[str, torch.Tensor], record: RoutingRecord) -> dict:
    step.failed = True  # a wrong one is not called again
    errors = errors_of(step, truth, record)
    WrongResult.unless(errors, dict.fromkeys(errors, WRONG_AT_SIZE))
    step.failed = False
    return {"full_rel_err": max(errors.values())}


def phases_ms(step: Step, device: torch.device) -> dict[str, float]:
    """Median times up to the end of the layers, from there to the loss, and of the backward pass."""
    rounds, marks = [], []

    def mark(*hooked) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        marks.append(time.perf_counter())

    for _ in range(3):
        step.reset()
        marks.clear()
        mark()
        handle = step.model.base_model.register_forward_hook(mark)
        loss = step.loss()
        handle.remove()
        mark()
        loss.backward()
        mark()
        rounds.append(torch.tensor(marks, dtype=torch.float64).diff() * 1e3)
    times = [round(x, 3) for x in torch.stack(rounds).median(0).values.tolist()]
    return dict(zip(("layers_ms", "head_ms", "backward_ms"), times, strict=True))


def flops_of(model: PreTrainedModel, batch: RolloutBatch) -> float:
    """Of products with weights, forward and backward; of the experts, those that a token has."""
    config, active = model.config, 0.0
    for name, x in model.base_model.layers.named_parameters():
        active += x.numel() * (config.num_experts_per_tok / len(x) if ".experts." in name else 1)
    head = config.hidden_size * config.vocab_size * batch.completion_ids.numel()
    return 6 * (active * batch.input_ids.numel() + head)


def run(shape: str, names: list[str], sizes: tuple, fields: dict, *, args, device, deadline, lines) -> None:
    """Checks and times the implementations at a shape, and writes their lines."""
    deadline.say(f"checking {shape}")
    checked = check(SHAPES[f"{shape.removesuffix('_tiny')}_tiny"], names, device)
    # FlexAttention is compiled for the first sizes it sees, then for any (that of ours_padding_free, after ours)
    torch.compiler.reset()
    deadline.say(f"making {shape}")
    model, batch = make_model(SHAPES[shape], device), make_batch(SHAPES[shape].vocab_size, sizes, device)
    truth, record = truth_of(model, batch)
    weights_gib = round(sum(x.nbytes for x in model.parameters()) / 2**30, 3)
    contestants = {}
    for name in names:
        step = Step(name, model, batch, args.checkpointing)
        versions = [f"{x} {harness.package_version(x)}" for x in IMPLEMENTATIONS[name].packages]
        facts = checked[name].facts | {"weights_gib": weights_gib, "peer_version": ", ".join(versions) or None}
        made = Contestant(step, step.reset, partial(verify, step, truth, record), facts=facts)
        contestants[name] = replace(made, error=checked[name].error)
    try:
        harness.measure(contestants, device, seconds=args.seconds, deadline=deadline)
        timed = [x for x in contestants.values() if x.error is None and x.times_ms]
        for contestant in timed:
            seconds = harness.summary(contestant.times_ms)["ms"] / 1e3
            contestant.facts["tokens_per_s"] = round(batch.input_ids.numel() / seconds)
        for contestant in timed if args.phases else ():
            if not deadline.passed():
                contestant.facts |= phases_ms(contestant.call, device)
    finally:
        lines.write_point(contestants, fields, flops_of(model, batch))


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, list(IMPLEMENTATIONS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    for name, text in (("batch", "sequences (8)"), ("length", "tokens of each (2048)"), ("prompt", "of these (512)")):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--checkpointing", action="store_true", help="recompute layers in the backward pass")
    parser.add_argument("--phases", action="store_true", help="also layers_ms, head_ms and backward_ms")
    args = parser.parse_args(argv)
    device, deadline = torch.device(args.device), harness.Deadline(args.max_seconds)
    common = harness.environment(device) | {"transformers": harness.package_version("transformers")}
    lines = harness.JsonLines(args.out, common, args.resume)
    given, usual = (args.batch, args.length, args.prompt), CHECK_SIZES if args.quick else SIZES
    sizes = tuple(x or y for x, y in zip(given, usual, strict=True))
    for shape in args.shapes or [x for x in SHAPES if x.endswith("_tiny") == args.quick]:
        config = SHAPES[shape]
        fields = {"op": "train_step", "shape": shape, "layers": config.num_hidden_layers, "dtype": "bfloat16"}
        fields |= {"B": sizes[0], "T": sizes[1], "completion": sizes[1] - sizes[2], "checkpointing": args.checkpointing}
        names = args.impls or (IMPLEMENTATIONS if device.type == "cuda" else ON_CPU)
        names = [x for x in names if config.model_type in IMPLEMENTATIONS[x].attention]
        names = [x for x in names if not lines.has(fields | {"impl": x})]
        if names and not deadline.passed():
            try:
                run(shape, names, sizes, fields, args=args, device=device, deadline=deadline, lines=lines)
            except Exception as error:  # the other shape goes on
                lines.write(fields | {"impl": "all", "error": harness.describe(error)})
            harness.free_memory(device)
    deadline.say("out of time: what comes later is missing" if deadline.passed() else "done")


if __name__ == "__main__":
    main()
