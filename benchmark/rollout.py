"""Rollouts of MoE language models: NativeEngine beside transformers' generate and generate_batch, in turns.

    python benchmark/rollout.py --out results.jsonl [--shapes qwen3_24 qwen3_12 gptoss_lite] [--profile]
    python benchmark/rollout.py --out results.jsonl --mismatch

qwen3_24 and qwen3_12 are 24 and 12 layers of Qwen3-30B-A3B, gptoss_lite the 502M model; random bf16 weights that all
share, distinct random prompts of one length, temperature 1, no stop token: every row runs to its full length.

* native: our engine and experts, log-probabilities included; its KV cache and CUDA graphs stay between calls
* generate: transformers' `model.generate`, dynamic cache, no log-probabilities
* generate_batch: its continuous batching, a manager that stays between calls, as its graphs do; not on gptoss_lite

The peers run transformers' "grouped_mm" experts on Qwen3; on gptoss_lite all run the model's own, "fused".

Before any timing, on a tiny float32 model of the family: greedy tokens of native and generate are the most likely ones
of full forwards (greedy_gap, in nats), and the log-probabilities of native are those of the training forward
(logp_error). At full size, in bf16 on a few rows: mean_logp_error against the training forward, and for all
entropy_z, the standard errors between the samples' mean log-probability and minus the entropy. What is wrong is
refused: its line has "error" and no time.

ms_per_step is the time of a whole call less that of one with a single new token (prefill_ms), divided by the other
tokens; p20 and p80 are of the whole call, less the same. cold_ms is the first call, with compiling and capture.
floor_ms is the time in which an H200 reads the weights and the KV cache of a step once. peak_gib is of the first call,
beyond the weights (generate_batch takes a set share of what is free). The profile is of one more call of native: GPU
time of its kernels for each new token.

The mismatch is that of native's log-probabilities against the training forward, with the routes of the rollout replayed
and without: 4 layers, bf16 (float32 on a CPU). mean_abs, max_abs and kl (k3) are of training less sampling, flip_rate
is the share of the choices of a token and layer that differ without replay, flipped_tokens that of tokens with any.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import harness
import torch
from harness import Contestant, WrongResult
from torch.nn.utils.rnn import pad_sequence
from train_step import QWEN3, TINY
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from grpo_moe.adapters import hf_experts  # noqa: F401  registers "grpo_moe"
from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.adapters.routing import RoutingReplay
from grpo_moe.models.gptoss_lite import GptOssLiteConfig
from grpo_moe.rl.batch import Group, batch_logps, collate
from grpo_moe.rollout import NativeEngine
from grpo_moe.types import Completion, Prompt, RolloutBatch, SamplingParams

QWEN3_OF = {n: Qwen3MoeConfig(**QWEN3 | {"num_hidden_layers": n}) for n in (4, 12, 24)}
TINY_QWEN3 = Qwen3MoeConfig(**QWEN3 | TINY | {"moe_intermediate_size": 64, "num_experts": 16})
TINY_LITE = GptOssLiteConfig(**TINY, intermediate_size=64, sliding_window=16, moe_dispatch="fused")
SHAPES = {
    "qwen3_24": (QWEN3_OF[24], 64, 128, 128),
    "qwen3_12": (QWEN3_OF[12], 256, 128, 128),
    "gptoss_lite": (GptOssLiteConfig(moe_dispatch="fused"), 256, 128, 512),
    "qwen3_4": (QWEN3_OF[4], 16, 128, 512),
    "qwen3_tiny": (TINY_QWEN3, 4, 16, 16),
    "gptoss_lite_tiny": (TINY_LITE, 4, 16, 16),
}
"""Model, prompts, their tokens, new tokens."""
SIZES = ("batch", "prompt", "new_tokens")
SPEED = {False: ("qwen3_24", "qwen3_12", "gptoss_lite"), True: ("qwen3_tiny", "gptoss_lite_tiny")}
MISMATCH = {False: ("qwen3_4",), True: ("qwen3_tiny",)}
"""Usual shapes, by whether it is quick."""
CHECK = {"qwen3_moe": TINY_QWEN3, "gptoss_lite": TINY_LITE}
CHECK_LENGTHS, CHECK_TOKENS, CHECK_ROWS = (1, 7, 16, 24), 12, 4
OURS = {"qwen3_moe": "grpo_moe", "gptoss_lite": "fused"}
PEERS = {"qwen3_moe": "grouped_mm", "gptoss_lite": "fused"}
TRUTH = {"qwen3_moe": "eager", "gptoss_lite": "stacked"}
"""Experts of native and of the training forward, of the peers, and of the full forwards of the check."""
LIMITS = {"greedy_gap": 1e-4, "logp_error": 1e-5, "mean_logp_error": 5e-2, "entropy_z": 6.0}
"""A gap of rounding is a tie; in bf16 rounding sends some tokens to other experts than in training."""
MISMATCH_LIMITS = {
    torch.float32: {"mean_abs": 1e-5, "max_abs": 1e-5, "kl": 1e-5},
    torch.bfloat16: {"mean_abs": 5e-3, "kl": 1e-4},
}
HBM_BYTES_PER_S = {"NVIDIA H200": 4.3e12}  # a device copy, measured: kernels.md, section 0
MANAGER = {"max_memory_percent": 0.4, "allow_block_sharing": False}
"""A cache many times as large as it needs, but the others run beside it; and no prefill that an earlier call made."""
TOP_KERNELS = 15


def native(engine: NativeEngine, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
    return [completion for (completion,) in engine.generate(prompts, sampling)]


def generate(model: PreTrainedModel, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_side="left").to(model.device)
    mask = pad_sequence([torch.ones_like(x) for x in rows], batch_first=True, padding_side="left").to(model.device)
    out = model.generate(ids, attention_mask=mask, generation_config=generation_config(sampling))
    return [unscored(row) for row in out[:, ids.shape[1] :].tolist()]


def generate_batch(model: PreTrainedModel, prompts: list[list[int]], sampling: SamplingParams) -> list[Completion]:
    """Its outputs name their prompts, so these must differ.

    Raises:
        RuntimeError: its worker failed, which it does not raise itself.
    """
    given = {"generation_config": generation_config(sampling), "max_new_tokens": sampling.max_new_tokens}
    given["continuous_batching_config"] = ContinuousBatchingConfig(**MANAGER)  # the manager fills in the rest of it
    outputs = model.generate_batch(prompts, persistent_manager=True, **given)
    errors = [x.error for x in outputs.values() if x.error is not None]
    if errors or len(outputs) != len(prompts):
        raise RuntimeError(f"outputs must be {len(prompts)} without an error, got {len(outputs)}, {errors[:1]}")
    made = {tuple(x.prompt_ids): x.generated_tokens for x in outputs.values()}
    return [unscored(made[tuple(prompt)]) for prompt in prompts]


def generation_config(sampling: SamplingParams) -> GenerationConfig:
    drawn = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampling.temperature else {}
    return GenerationConfig(max_new_tokens=sampling.max_new_tokens, pad_token_id=0, do_sample=bool(drawn), **drawn)


def unscored(tokens: Sequence[int]) -> Completion:
    return Completion(tuple(tokens), (0.0,) * len(tokens), "length")


IMPLEMENTATIONS = {"native": native, "generate": generate, "generate_batch": generate_batch}
ON_CPU = ("native", "generate")
RUNS = {"qwen3_moe": tuple(IMPLEMENTATIONS), "gptoss_lite": ("native", "generate")}


def make_model(config, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A model with random weights and without stop tokens."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
    model.config.eos_token_id = None
    model.generation_config = GenerationConfig(pad_token_id=0)
    return add_token_logps(model.eval())


def make_prompts(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


@dataclass
class Rollout:
    """Rollouts by one implementation, of a model that others use in between."""

    name: str
    model: PreTrainedModel
    prompts: list[list[int]]
    source: PreTrainedModel | NativeEngine = field(init=False)
    experts: str = field(init=False)
    completions: list[Completion] = field(default_factory=list)
    """Of the last call."""
    last_ms: float = 0.0

    def __post_init__(self):
        self.source = NativeEngine(self.model, keep_graphs=True) if self.name == "native" else self.model
        self.experts = (OURS if self.name == "native" else PEERS)[self.model.config.model_type]

    def reset(self) -> None:
        self.completions = []
        self.model.set_experts_implementation(self.experts)

    def __call__(self, sampling: SamplingParams) -> None:
        begin = time.perf_counter()
        self.completions = IMPLEMENTATIONS[self.name](self.source, self.prompts, sampling)
        self.last_ms = (time.perf_counter() - begin) * 1e3  # tokens are on the host by now

    def release(self) -> None:
        if self.source is self.model:
            self.model.destroy_cached_continuous_batching_manager()  # there may be none
        else:
            self.source.release()

    def contestant(self, new_tokens: int, verify: Callable[[int], dict], **given) -> Contestant:
        call, slow = partial(self, SamplingParams(new_tokens)), self.name != "native"
        return Contestant(call, self.reset, partial(verify, new_tokens), slow=slow, **given)

    def check_lengths(self, new_tokens: int) -> dict:
        lengths = {len(x.token_ids) for x in self.completions}
        if lengths != {new_tokens} or len(self.completions) != len(self.prompts):
            raise WrongResult(f"completions must be {len(self.prompts)} of {new_tokens} tokens, got {sorted(lengths)}")
        return {}

    def verify(self, new_tokens: int) -> dict:
        """Compares a few rows of the first call with the training forward."""
        facts = {"cold_ms": round(self.last_ms, 1), **self.check_lengths(new_tokens)}
        batch = to_batch(self.prompts[:CHECK_ROWS], self.completions[:CHECK_ROWS], self.model.device)
        scored = score(self.model, batch, return_entropy=True)
        surprise = (scored.logps + scored.entropy).flatten()  # of mean zero if drawn from the model
        errors = {"entropy_z": float(surprise.mean().abs() / surprise.std() * len(surprise) ** 0.5)}
        if self.name == "native":
            errors["mean_logp_error"] = float((scored.logps - batch.sampling_logps).abs().mean())
            facts["kv_gib"] = round(self.source.kv_bytes / 2**30, 3)
        WrongResult.unless(errors, {name: LIMITS[name] for name in errors})
        return facts | errors


def to_batch(prompts: list[list[int]], completions: list[Completion], device: torch.device) -> RolloutBatch:
    """As the trainer makes it, a group of one for each prompt."""
    none = torch.zeros(1)
    groups = [Group(Prompt(tuple(p)), [c], none, none, []) for p, c in zip(prompts, completions, strict=True)]
    return collate(groups, torch.zeros(len(groups), 1), mask_truncated=False, device=device)


@torch.no_grad()
def score(model: PreTrainedModel, batch: RolloutBatch, **options):
    """Log-probabilities as the trainer computes them."""
    model.set_experts_implementation(OURS[model.config.model_type])
    return batch_logps(model, batch, **options)


@torch.no_grad()
def greedy_gap(rollout: Rollout) -> float:
    """How much less likely than the most likely token the chosen one is at worst, in nats, by full forwards."""
    rollout.model.set_experts_implementation(TRUTH[rollout.model.config.model_type])
    gaps = []
    for prompt, completion in zip(rollout.prompts, rollout.completions, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]], device=rollout.model.device)
        logits = rollout.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]  # [T, V]
        gaps.append(logits.amax(1) - logits.gather(1, ids[0, len(prompt) :, None])[:, 0])
    return float(torch.cat(gaps).max())


def check(config, names: list[str], device: torch.device) -> dict[str, Contestant]:
    """Errors of each on a tiny float32 model, in its facts; its error is set if it failed or is wrong."""
    model = make_model(CHECK[config.model_type], device, torch.float32)
    prompts = make_prompts(model.config.vocab_size, CHECK_LENGTHS)
    checked = {name: Contestant(call=dict) for name in names}

    def judge(contestant: Contestant, name: str) -> None:
        rollout, errors = Rollout(name, model, prompts), contestant.facts
        rollout.reset()
        rollout(SamplingParams(CHECK_TOKENS, temperature=0.0))
        rollout.check_lengths(CHECK_TOKENS)
        errors["greedy_gap"] = greedy_gap(rollout)
        if name == "native":
            rollout.reset()
            rollout(SamplingParams(CHECK_TOKENS))
            batch = to_batch(prompts, rollout.completions, device)
            errors["logp_error"] = float((score(model, batch).logps - batch.sampling_logps).abs().max())
            rollout.release()
        WrongResult.unless(errors, {name: LIMITS[name] for name in errors})

    for name, contestant in checked.items():
        if name != "generate_batch":  # its attention may take no float32
            harness.attempt(contestant, device, partial(judge, name=name))
    return checked


def floor_bytes(model: PreTrainedModel, batch: int, prompt: int, new_tokens: int) -> float:
    """Bytes that a step of one token a row must read, the mean over the steps after the prefill.

    All parameters once, of an input embedding that is not the head's the rows of the tokens; keys and values of the
    tokens that each layer sees.
    """
    config, embedding = model.config, model.get_input_embeddings().weight
    total = sum(x.nbytes for x in model.parameters())
    if embedding is not model.get_output_embeddings().weight:
        total += batch * embedding[0].nbytes - embedding.nbytes
    seen = torch.arange(prompt + 1, prompt + max(new_tokens, 2), dtype=torch.float64)  # [steps]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    windows = [config.sliding_window if kind == "sliding_attention" else seen.max().item() for kind in kinds]
    tokens = sum(float(seen.clamp(max=window).mean()) for window in windows)
    return total + 2 * batch * tokens * config.num_key_value_heads * config.head_dim * model.dtype.itemsize


def times_of(whole: Contestant, single: Contestant, record: dict) -> dict:
    """Fields of a line from the times of whole calls and of those with a single new token, if there were any."""
    batch, tokens, times = record["batch"], record["new_tokens"], harness.summary(whole.times_ms)
    found = {"whole_ms": times["ms"], "rounds": times["rounds"]}
    found["tokens_per_s_whole"] = round(batch * tokens / times["ms"] * 1e3, 1)
    if single.times_ms:
        prefill = harness.summary(single.times_ms)["ms"]
        per_step = {name: round((times[name] - prefill) / (tokens - 1), 4) for name in ("ms", "p20", "p80")}
        found |= {"prefill_ms": prefill, "ms_per_step": per_step.pop("ms"), **per_step}
        found["tokens_per_s"] = round(batch / found["ms_per_step"] * 1e3, 1)
        found["floor_share"] = record["floor_ms"] and round(record["floor_ms"] / found["ms_per_step"], 4)
    return found


def profile(rollout: Rollout, sampling: SamplingParams) -> dict:
    """GPU time of one whole call and of its largest kernels, for each new token."""
    rollout.reset()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        rollout(sampling)
    events = [x for x in profiler.key_averages() if x.device_type == torch.autograd.DeviceType.CUDA]
    events.sort(key=lambda x: -x.self_device_time_total)
    steps, total = sampling.max_new_tokens, sum(x.self_device_time_total for x in events)  # in microseconds
    kernels = [
        {"ms": round(x.self_device_time_total / steps / 1e3, 5), "calls": round(x.count / steps, 2), "kernel": x.key}
        for x in events[:TOP_KERNELS]
    ]
    for kernel in kernels:
        print(f"{kernel['ms']:9.4f} ms {kernel['calls']:8.1f} calls  {kernel['kernel'][:100]}")
    return {"device_ms_per_step": round(total / steps / 1e3, 4), "kernels": kernels}


def run(fields: dict, impls: list[str], *, args, bandwidth, device, deadline, lines) -> None:
    """Checks and times the implementations at a shape, and writes their lines."""
    config = SHAPES[fields["shape"]][0]
    checked = check(config, impls, device)
    deadline.say("making the model")
    model = make_model(config, device, torch.bfloat16)
    rows, prompt, tokens = (fields[x] for x in SIZES)
    prompts = make_prompts(model.config.vocab_size, [prompt] * rows)
    floor = bandwidth and round(floor_bytes(model, rows, prompt, tokens) / bandwidth * 1e3, 4)
    weights_gib = round(sum(x.nbytes for x in model.parameters()) / 2**30, 3)
    made = {impl: Rollout(impl, model, prompts) for impl in impls}
    whole, single = {}, {}
    for impl, rollout in made.items():
        facts = {"experts": rollout.experts, "weights_gib": weights_gib, "floor_ms": floor, **checked[impl].facts}
        whole[impl] = rollout.contestant(tokens, rollout.verify, facts=facts, error=checked[impl].error)
        single[impl] = rollout.contestant(1, rollout.check_lengths)
    try:
        harness.measure(whole, device, seconds=args.seconds, deadline=deadline)
        # in turns of their own: an engine may size what it keeps by the length of a call
        timed = {impl: single[impl] for impl, x in whole.items() if x.error is None and x.times_ms}
        harness.measure(timed, device, seconds=args.seconds / 5, deadline=deadline)
    finally:
        for impl, contestant in whole.items():
            record, error = fields | {"impl": impl, **contestant.facts}, contestant.error or single[impl].error
            if error is not None:
                lines.write(record | {"error": error})
            elif contestant.times_ms:
                lines.write(record | times_of(contestant, single[impl], record))
    if args.profile and "native" in timed and single["native"].error is None and not deadline.passed():
        found = profile(made["native"], SamplingParams(tokens))
        lines.write(fields | {"op": "rollout_profile", "impl": "native", **found})
    for rollout in made.values():
        rollout.release()


def run_mismatch(fields: dict, *, device, lines) -> None:
    """Writes a line for the training forward under the routes of the rollout, and one for its own."""
    model = make_model(SHAPES[fields["shape"]][0], device, getattr(torch, fields["dtype"]))
    rows, prompt, tokens = (fields[x] for x in SIZES)
    rollout = Rollout("native", model, make_prompts(model.config.vocab_size, [prompt] * rows))
    rollout.reset()
    rollout(SamplingParams(tokens, return_routes=True))
    rollout.check_lengths(tokens)
    rollout.release()
    batch = to_batch(rollout.prompts, rollout.completions, device)
    with RoutingReplay(model) as routing:
        with routing.replay(batch.routes):
            replayed = score(model, batch).logps
        with routing.record() as records:
            natural = score(model, batch).logps
    by_layer, flipped_tokens = records[0].flip_rate(batch.routes, batch.attention_mask)
    flips = {"flip_rate": float(by_layer.mean()), "flipped_tokens": float(flipped_tokens)}
    for routes, logps in (("replayed", replayed), ("natural", natural)):
        delta = (logps - batch.sampling_logps).double()
        found = {"mean_abs": delta.abs().mean(), "max_abs": delta.abs().max(), "kl": (delta.expm1() - delta).mean()}
        found = {name: float(x) for name, x in found.items()}
        limits = MISMATCH_LIMITS[model.dtype]
        within = all(found[name] <= limit for name, limit in limits.items())
        lines.write(fields | {"impl": "native", "routes": routes, **found, **flips, "within_limits": within})


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, list(IMPLEMENTATIONS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    for name in SIZES:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help="instead of the shape's own")
    parser.add_argument("--profile", action="store_true", help="also the largest kernels of a call of native (GPU)")
    parser.add_argument("--mismatch", action="store_true", help="only the mismatch with the training forward")
    args = parser.parse_args(argv)
    device, deadline = torch.device(args.device), harness.Deadline(args.max_seconds)
    if args.profile and device.type != "cuda":
        parser.error(f"--profile must go with a CUDA device, got {device}; leave it out")
    common = harness.environment(device) | {"transformers": harness.package_version("transformers")}
    lines = harness.JsonLines(args.out, common, args.resume)
    bandwidth = HBM_BYTES_PER_S.get(common["gpu"])
    op, usual = ("rollout_mismatch", MISMATCH) if args.mismatch else ("rollout", SPEED)
    dtype = "float32" if args.mismatch and device.type == "cpu" else "bfloat16"
    for name in args.shapes or usual[args.quick]:
        config, *sizes = SHAPES[name]
        fields = {"op": op, "shape": name, "layers": config.num_hidden_layers, "dtype": dtype}
        fields |= {x: getattr(args, x) or size for x, size in zip(SIZES, sizes, strict=True)}
        impls = args.impls or (IMPLEMENTATIONS if device.type == "cuda" else ON_CPU)
        impls = ["native"] if args.mismatch else [x for x in impls if x in RUNS[config.model_type]]
        impls = [x for x in impls if not lines.has(fields | {"impl": x})]
        if impls and not deadline.passed():
            deadline.say(f"{op} of {name}")
            try:
                if args.mismatch:
                    run_mismatch(fields, device=device, lines=lines)
                else:
                    run(fields, impls, args=args, bandwidth=bandwidth, device=device, deadline=deadline, lines=lines)
            except Exception as error:  # the other shapes go on
                lines.write(fields | {"impl": "all", "error": harness.describe(error)})
            harness.free_memory(device)
    deadline.say("out of time: what comes later is missing" if deadline.passed() else "done")


if __name__ == "__main__":
    main()
