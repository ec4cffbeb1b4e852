"""A training micro-step of MoE language models, ours beside transformers' experts and TRL's head, in turns.

    python benchmark/train_step.py --out results.jsonl [--shapes qwen3 gpt_oss] [--batch 8] [--length 2048] [--prompt 512]

Forward, DAPO loss (beta 0, given old_logps), backward to all parameters; no optimiser. 4 layers of Qwen3-30B-A3B or
gpt-oss-20b, random bf16 weights that all share, no autocast, random tokens, no padding, the same tokens in a prompt each.

* ours: our experts, the loss fused with the head; attention by SDPA, of gpt_oss by FlexAttention ("grpo_moe_sinks")
* ours_padding_free: the same on one row of all sequences, FlexAttention in both shapes
* grouped_mm_full_logits: transformers' "grouped_mm" experts and its default attention (SDPA; eager in gpt_oss); logits
  of all positions as the model returns them, those of the completions in float32, log_softmax and gather
* trl_fused_head: the same experts and attention, log-probabilities and entropies by TRL's `add_fused_lm_head`
* ..._flex: in gpt_oss, with transformers' FlexAttention

Before any timing each is compared with float32, by loss and gradients of a tiny model of the family (rel_err: the largest
relative error of a kind of parameter, worst_of names it; ours may err 1.5 times as much as grouped_mm_full_logits), and
at full size with grouped_mm_full_logits on a sequence at a time (full_rel_err). The routes of the truth are replayed,
since rounding sends some tokens to other experts. What is wrong is refused: its line has "error" and no time. Before each timed call the allocator's cache is emptied and
the step runs once untimed, so that none pays for what another left. peak_gib is beyond the weights (weights_gib),
gradients included; tflops counts products with weights, of the head those of completion tokens.
"""

from __future__ import annotations

import copy
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import harness
import torch
from harness import Contestant, WrongResult
from transformers import AutoModelForCausalLM, GptOssConfig, PreTrainedModel, Qwen3MoeConfig

from grpo_moe.adapters import hf_experts  # noqa: F401  registers "grpo_moe"
from grpo_moe.adapters.hf_attention import SINK_ATTENTION
from grpo_moe.adapters.hf_head import add_token_logps, completion_loss
from grpo_moe.adapters.routing import RoutingRecord, RoutingReplay
from grpo_moe.ops import LossConfig, grpo_loss

QWEN3 = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3 |= {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4}
GPT_OSS |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
TINY = {"hidden_size": 128, "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"head_dim": 64, "vocab_size": 500, "num_hidden_layers": 2, "initializer_range": 0.05}
COMMON = {"num_hidden_layers": 4, "tie_word_embeddings": False}
SHAPES = {
    "qwen3": Qwen3MoeConfig(**COMMON, **QWEN3, norm_topk_prob=True),
    "gpt_oss": GptOssConfig(**COMMON, **GPT_OSS, sliding_window=128),
    "qwen3_tiny": Qwen3MoeConfig(
        **COMMON | QWEN3 | TINY | {"moe_intermediate_size": 64, "num_experts": 16}, norm_topk_prob=True
    ),
    "gpt_oss_tiny": GptOssConfig(**COMMON | GPT_OSS | TINY | {"intermediate_size": 64, "num_local_experts": 8}),
}
SIZES, CHECK_SIZES = (8, 2048, 512), (2, 192, 64)
"""Sequences, their tokens, those of the prompt. To check: enough for FlexAttention and for the window of 128."""
EPSILON = 0.2
CONFIG = LossConfig(loss_type="dapo", epsilon=EPSILON)
PLAIN = "grouped_mm_full_logits"
SAMPLE = 2**20  # elements of a parameter's gradient that are compared
EAGER_FACTOR, FLOOR = 1.5, 0.01
WRONG, WRONG_AT_SIZE = 0.1, 0.5


@dataclass(frozen=True)
class Batch:
    """Sequences of one length, a prompt of one length in each."""

    input_ids: torch.Tensor  # [B, S]
    advantages: torch.Tensor  # [B]
    old_logps: torch.Tensor  # [B, T]
    prompt: int
    num_loss_tokens: int
    """Of the whole batch this may be a part of."""

    @property
    def attention_mask(self) -> torch.Tensor:
        return torch.ones_like(self.input_ids, dtype=torch.bool)

    @property
    def completion_ids(self) -> torch.Tensor:
        return self.input_ids[:, self.prompt :]

    def rows(self) -> Iterator[Batch]:
        """Each sequence as a batch, of the same memory."""
        for row in range(len(self.input_ids)):
            given = {n: getattr(self, n)[row : row + 1] for n in ("input_ids", "advantages", "old_logps")}
            yield replace(self, **given)


def make_batch(vocab_size: int, sizes: tuple[int, int, int], device: torch.device) -> Batch:
    """Random tokens; old_logps are filled by :func:`truth_of`."""
    sequences, length, prompt = sizes
    ids = torch.randint(vocab_size, (sequences, length), device=device)
    completion = length - prompt
    old_logps = torch.zeros(sequences, completion, device=device)
    return Batch(ids, torch.linspace(-1, 1.5, sequences, device=device), old_logps, prompt, sequences * completion)


def make_model(config, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").train()


def ours(model: PreTrainedModel, batch: Batch, padding_free: bool = False) -> torch.Tensor:
    """As GRPOTrainer.loss, metrics of its routing apart."""

    def loss_fn(hidden_states, lm_head_weight, **head):
        ids, mask = batch.completion_ids, torch.ones_like(batch.completion_ids, dtype=torch.bool)
        given = {"old_logps": batch.old_logps, "num_loss_tokens": batch.num_loss_tokens, "return_entropy": True}
        return grpo_loss(hidden_states, lm_head_weight, ids, mask, batch.advantages, CONFIG, **given, **head).loss

    prompt_lengths = torch.full_like(batch.input_ids[:, 0], batch.prompt)
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask, "prompt_lengths": prompt_lengths}
    length = batch.completion_ids.shape[1]
    return completion_loss(model, loss_fn, **inputs, completion_length=length, padding_free=padding_free)


def full_logits_logps(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    outputs = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False)
    logits = outputs.logits[:, batch.prompt - 1 : -1]  # [B, T, V]
    return logits.float().log_softmax(-1).gather(-1, batch.completion_ids[..., None])[..., 0]


def add_trl_head(model: PreTrainedModel) -> None:
    from trl.trainer.utils import add_fused_lm_head

    add_fused_lm_head(model, temperature=1.0, outputs=("log_probs", "entropy"))


def trl_logps(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    """As GRPOTrainer._get_per_token_logps_and_entropies of TRL."""
    completion = batch.completion_ids.shape[1]
    labels = batch.input_ids.masked_fill(batch.attention_mask == 0, -100)
    labels[:, :-completion] = -100
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
    return model(**inputs, labels=labels, fused_lm_head=True).log_probs[:, -completion:]


def dapo_loss(logps: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The loss in plain PyTorch."""
    ratio, advantages = (logps - batch.old_logps).exp(), batch.advantages[:, None]
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    return loss.sum() / batch.num_loss_tokens


@dataclass(frozen=True)
class Implementation:
    """A loss of a model and a batch, and the state of the model that it wants."""

    loss: Callable[[PreTrainedModel, Batch], torch.Tensor]
    experts: str
    attention: dict[str, str]
    """By model type; one that is missing is left out."""
    patch: Callable[[PreTrainedModel], object] = lambda model: None
    """Changes the model's forward."""
    packages: tuple[str, ...] = ("transformers",)

    def peer(self) -> dict[str, str]:
        """The fact of a peer's versions."""
        versions = [f"{name} {harness.package_version(name)}" for name in self.packages]
        return {"peer_version": ", ".join(versions)} if versions else {}


def plain(logps: Callable, model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    return dapo_loss(logps(model, batch), batch)


DEFAULT_ATTENTION = {"qwen3_moe": "sdpa", "gpt_oss": "eager"}
FLEX = {"gpt_oss": "flex_attention"}
FULL_LOGITS = Implementation(partial(plain, full_logits_logps), "grouped_mm", DEFAULT_ATTENTION)
TRL = Implementation(
    partial(plain, trl_logps), "grouped_mm", DEFAULT_ATTENTION, add_trl_head, packages=("trl", "transformers")
)
OURS = Implementation(ours, "grpo_moe", DEFAULT_ATTENTION | {"gpt_oss": SINK_ATTENTION}, add_token_logps, packages=())
IMPLEMENTATIONS = {
    "ours": OURS,
    "ours_padding_free": replace(
        OURS, loss=partial(ours, padding_free=True), attention=dict.fromkeys(DEFAULT_ATTENTION, SINK_ATTENTION)
    ),
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
    batch: Batch
    failed: bool = False

    def loss(self) -> torch.Tensor:
        return IMPLEMENTATIONS[self.name].loss(self.model, self.batch)

    def __call__(self) -> None:
        self.loss().backward()

    def set_up(self) -> None:
        """Clears gradients and what another implementation changed in the model, and makes the changes of this one."""
        self.model.zero_grad(set_to_none=True)
        for patched in ("forward", "_has_token_logps"):
            vars(self.model).pop(patched, None)
        implementation = IMPLEMENTATIONS[self.name]
        self.model.set_experts_implementation(implementation.experts)
        self.model.set_attn_implementation(implementation.attention[self.model.config.model_type])
        implementation.patch(self.model)

    def reset(self) -> None:
        """Before a timed call: :meth:`set_up`, an empty cache, one untimed call; without it after a failure."""
        self.set_up()
        if not self.failed:
            self.failed = True  # if the call raises
            harness.free_memory(self.model.device)
            self()
            self.model.zero_grad(set_to_none=True)
            self.failed = False


def grads_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Gradients by kind of parameter, layers together; the first elements of large ones."""
    grads: dict[str, list[torch.Tensor]] = {}
    for name, parameter in model.named_parameters():
        grads.setdefault(re.sub(r"\.\d+\.", ".", name), []).append(parameter.grad.flatten()[:SAMPLE].float())
    return {name: torch.cat(parts) for name, parts in grads.items()}


def truth_of(model: PreTrainedModel, batch: Batch) -> tuple[dict[str, torch.Tensor], RoutingRecord]:
    """Loss and gradients from full logits, a sequence at a time, and the routes; fills the old_logps.

    They are moved away from the log-probabilities, a fifth of them beyond the clipping bounds, the others clear of them.
    """
    loss = 0
    with RoutingReplay(model) as routing, routing.record() as records:
        for row in batch.rows():
            logps = full_logits_logps(model, row)
            step = 0.05 * torch.randn_like(logps)
            step += torch.where(torch.rand_like(step) < 0.2, 0.5 * step.sign(), 0)
            row.old_logps.copy_(logps.detach() - step)
            part = dapo_loss(logps, row)
            part.backward()
            loss += part.detach()
    return {"loss": loss.float()[None], **grads_of(model)}, RoutingRecord.concat_rows(records)


def errors_of(step: Step, truth: dict[str, torch.Tensor], record: RoutingRecord) -> dict[str, float]:
    """Relative errors (Frobenius norms) of loss and gradients of a call that takes the recorded routes."""
    step.set_up()
    record = record.pack(step.batch.attention_mask) if step.name == "ours_padding_free" else record
    with RoutingReplay(step.model) as routing:
        if step.model.is_gradient_checkpointing:
            step.model.gradient_checkpointing_enable(routing.checkpointing_kwargs)
        with routing.replay(record):
            loss = step.loss()
        loss.backward()
    found = {"loss": loss.detach().float()[None], **grads_of(step.model)}
    return {kind: float((found[kind] - true).norm() / true.norm()) for kind, true in truth.items()}


def check(config, names: list[str], device: torch.device) -> dict[str, Contestant]:
    """Errors of each on a tiny model against float32, in its facts; its error is set if it failed or is wrong."""
    model, batch = make_model(config, device), make_batch(config.vocab_size, CHECK_SIZES, device)
    reference = copy.deepcopy(model).float()
    reference.set_experts_implementation("eager")
    truth, record = truth_of(reference, batch)
    checked = {name: Contestant(call=dict) for name in dict.fromkeys((PLAIN, *names))}
    plain_errors: dict[str, float] = {}

    def judge(contestant: Contestant, name: str) -> None:
        errors = errors_of(Step(name, model, batch), truth, record)
        worst = max(errors, key=errors.get)
        contestant.facts.update(rel_err=errors[worst], worst_of=worst)
        WrongResult.unless(errors, dict.fromkeys(errors, WRONG))
        if name == PLAIN:
            plain_errors.update(errors)
        elif name.startswith("ours"):  # without the plain one there is no bar to pass
            WrongResult.unless(errors, {kind: EAGER_FACTOR * x + FLOOR for kind, x in plain_errors.items()})

    for name, contestant in checked.items():
        print(f"          {name}", flush=True)
        harness.attempt(contestant, device, partial(judge, name=name))
    return checked


def verify(step: Step, truth: dict[str, torch.Tensor], record: RoutingRecord) -> dict:
    """Largest error at full size."""
    errors = errors_of(step, truth, record)
    WrongResult.unless(errors, dict.fromkeys(errors, WRONG_AT_SIZE))
    return {"full_rel_err": max(errors.values())}


def phases_ms(step: Step, device: torch.device) -> dict[str, float]:
    """Median times up to the end of the layers, from there to the loss, and of the backward pass."""
    rounds = []
    for _ in range(3):
        step.reset()
        marks: list[float] = []

        def mark(*hooked, marks: list[float] = marks) -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            marks.append(time.perf_counter())

        mark()
        handle = step.model.base_model.register_forward_hook(mark)
        loss = step.loss()
        mark()
        handle.remove()
        loss.backward()
        mark()
        rounds.append(torch.tensor(marks, dtype=torch.float64).diff())
    layers, head, backward = (torch.stack(rounds).median(0).values * 1e3).tolist()
    return {"layers_ms": round(layers, 3), "head_ms": round(head, 3), "backward_ms": round(backward, 3)}


def flops_of(model: PreTrainedModel, batch: Batch) -> float:
    """Of products with weights, forward and backward: those of the experts that a token has."""
    config, tokens, active = model.config, batch.input_ids.numel(), 0.0
    for name, x in model.base_model.layers.named_parameters():
        active += x.numel() * (config.num_experts_per_tok / len(x) if ".experts." in name else 1)
    return 6 * (active * tokens + config.hidden_size * config.vocab_size * batch.num_loss_tokens)


def contestants_of(model: PreTrainedModel, batch: Batch, checked: dict[str, Contestant]) -> dict[str, Contestant]:
    """Each on the model to time, with what the check found."""
    Step(PLAIN, model, batch).set_up()
    truth, record = truth_of(model, batch)
    weights = {"weights_gib": round(sum(x.nbytes for x in model.parameters()) / 2**30, 3)}
    made = {}
    for name, found in checked.items():
        step = Step(name, model, batch)
        facts = IMPLEMENTATIONS[name].peer() | found.facts | weights
        made[name] = Contestant(step, step.reset, partial(verify, step, truth, record), facts=facts, error=found.error)
    return made


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, list(IMPLEMENTATIONS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    for name, text in (("batch", "sequences (8)"), ("length", "tokens of each (2048)"), ("prompt", "of them (512)")):
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
        fields = {"op": "train_step", "shape": shape, "layers": SHAPES[shape].num_hidden_layers, "dtype": "bfloat16"}
        fields |= {"B": sizes[0], "T": sizes[1], "completion": sizes[1] - sizes[2], "checkpointing": args.checkpointing}
        fitting = args.impls or (IMPLEMENTATIONS if device.type == "cuda" else ON_CPU)
        fitting = [x for x in fitting if SHAPES[shape].model_type in IMPLEMENTATIONS[x].attention]
        names = [x for x in fitting if not lines.has(fields | {"impl": x})]
        if names and not deadline.passed():
            try:
                run(shape, names, sizes, fields, args=args, device=device, deadline=deadline, lines=lines)
            except Exception as error:  # the other shape goes on
                lines.write(fields | {"impl": "all", "error": harness.describe(error)})
            harness.free_memory(device)
    deadline.say("out of time: what comes later is missing" if deadline.passed() else "done")


def run(shape: str, names: list[str], sizes: tuple, fields: dict, *, args, device, deadline, lines) -> None:
    """Checks and times the implementations at a shape, and writes their lines."""
    deadline.say(f"checking {shape}")
    found = check(SHAPES[f"{shape.removesuffix('_tiny')}_tiny"], names, device)
    torch.compiler.reset()  # so that FlexAttention is compiled for the sizes to time, not for any
    deadline.say(f"making {shape}")
    model, batch = make_model(SHAPES[shape], device), make_batch(SHAPES[shape].vocab_size, sizes, device)
    if args.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    contestants = contestants_of(model, batch, {name: found[name] for name in names})
    harness.measure(contestants, device, seconds=args.seconds, deadline=deadline)
    for contestant in contestants.values():
        if contestant.error is None and contestant.times_ms:
            seconds = harness.summary(contestant.times_ms)["ms"] / 1e3
            contestant.facts["tokens_per_s"] = round(batch.input_ids.numel() / seconds)
            if args.phases and not deadline.passed():
                harness.attempt(contestant, device, lambda c: c.facts.update(phases_ms(c.call, device)))
    lines.write_point(contestants, fields, flops_of(model, batch))


if __name__ == "__main__":
    main()
