"""Fused MoE experts against Liger's and a torch grouped_mm pipeline, in turns.

    python benchmark/moe.py --out results.jsonl [--shapes qwen3 gpt_oss ...] [--tokens 32768 8192] [--modes full]

bf16, leaf weights, gradients of all inputs unless frozen. Modes: full (forward and backward), forward (keeps what
backward needs), inference (no gradients), replayed (inference from a CUDA graph, few tokens only). Starts: queued (the
device is busy until the host has launched, as in a model: the device's time alone), idle (from an idle device, launches
included). ours_triton has no grouped_mm inside. read_weights is no implementation of the experts: it reads all their
weights once.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import harness
import torch
from harness import Contestant
from torch.nn import functional as F

from grpo_moe.ops import moe_experts
from grpo_moe.ops.moe.fused import fused_experts

TOKENS = (32768, 8192, 1024, 128, 64, 16, 1)
MODES = ("full", "forward", "inference", "replayed")
STARTS = ("queued", "idle")
MOST_REPLAYED = 1024
"""Tokens up to which a CUDA graph is worth a line: above, launches hide behind the work."""
CHECK_ROWS = (12, 80)
"""Rows an expert of the checks: below and above where rows are gathered and tiles grow."""
EAGER_FACTOR, FLOOR = 1.5, 1e-4


@dataclass(frozen=True)
class Shape:
    """Experts of a model."""

    experts: int
    hidden: int
    width: int
    slots: int
    activation: str = "silu"
    layout: str = "concatenated"
    transposed: bool = False
    bias: bool = False

    def options(self) -> dict:
        return {"activation": self.activation, "layout": self.layout, "transposed": self.transposed}


SHAPES = {
    "qwen3": Shape(128, 2048, 768, 8),
    "gpt_oss": Shape(32, 2880, 2880, 4, "gpt_oss", "interleaved", True, True),
    "mixtral": Shape(8, 4096, 14336, 2),
    "gptoss_lite": Shape(8, 768, 1536, 2),
    "tiny": Shape(4, 64, 32, 2),
}


@dataclass
class Problem:
    """Inputs of moe_experts and an upstream gradient."""

    tensors: dict[str, torch.Tensor]
    upstream: torch.Tensor
    shape: Shape

    @functools.cached_property
    def top_k_index_int32(self) -> torch.Tensor:
        """As Liger takes it."""
        return self.tensors["top_k_index"].int()

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [x for x in self.tensors.values() if x.requires_grad]


def make_problem(
    shape: Shape, tokens: int, device: torch.device, *, zipf: bool = False, frozen: bool = False
) -> Problem:
    """Random inputs; routing by uniform scores, or skewed like 1 / rank of the expert."""

    def new(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, device=device) * scale).bfloat16()

    up, down = (2 * shape.width, shape.hidden), (shape.hidden, shape.width)
    if shape.transposed:
        up, down = up[::-1], down[::-1]
    scores = torch.rand(tokens, shape.experts, device=device).log().neg().log().neg()  # Gumbel
    if zipf:
        scores -= torch.arange(1, shape.experts + 1, device=device).log()
    weights = torch.rand(tokens, shape.slots, device=device)
    tensors = {
        "hidden_states": new(tokens, shape.hidden),
        "gate_up_proj": new(shape.experts, *up, scale=shape.hidden**-0.5),
        "down_proj": new(shape.experts, *down, scale=shape.width**-0.5),
        "top_k_index": scores.topk(shape.slots).indices,
        "top_k_weights": (weights / weights.sum(-1, keepdim=True)).bfloat16(),
    }
    if shape.bias:
        tensors |= {"gate_up_bias": new(shape.experts, 2 * shape.width), "down_bias": new(shape.experts, shape.hidden)}
    for name, x in tensors.items():
        if x.is_floating_point() and not (frozen and name.endswith(("proj", "bias"))):
            x.requires_grad_()
    return Problem(tensors, new(tokens, shape.hidden), shape)


def ours(problem: Problem, **options) -> torch.Tensor:
    return moe_experts(**problem.tensors, **problem.shape.options(), **options)


def ours_triton(problem: Problem) -> torch.Tensor:
    biases = {"gate_up_bias": None, "down_bias": None, "alpha": 1.702, "limit": 7.0, "memory_efficient": False}
    return fused_experts(**{**biases, **problem.tensors}, **problem.shape.options(), backend="triton")


def liger(problem: Problem) -> torch.Tensor:
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    t = problem.tensors
    given = (t["gate_up_proj"], t["down_proj"], problem.top_k_index_int32, t["top_k_weights"])
    return LigerFusedMoEFunction.apply(t["hidden_states"], *given)


def grouped_mm(problem: Problem) -> torch.Tensor:
    """Argsort, gather, grouped_mm, SwiGLU, grouped_mm, weighted sum; plain SwiGLU whatever the shape's activation."""
    t, slots = problem.tensors, problem.shape.slots
    up, down = t["gate_up_proj"], t["down_proj"]
    if not problem.shape.transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    flat = t["top_k_index"].flatten()
    ordered, order = flat.sort(stable=True)
    experts = torch.arange(problem.shape.experts, device=flat.device)
    ends = torch.searchsorted(ordered, experts, right=True).int()
    gate, value = torch._grouped_mm(t["hidden_states"][order // slots], up, offs=ends).chunk(2, -1)
    out = torch._grouped_mm(F.silu(gate) * value, down, offs=ends)
    weighted = out * t["top_k_weights"].flatten()[order, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return weighted[back].view(-1, slots, weighted.shape[-1]).sum(1)


def read_weights(problem: Problem) -> torch.Tensor:
    return sum(problem.tensors[n].detach().view(torch.int64).sum() for n in ("gate_up_proj", "down_proj"))


@dataclass(frozen=True)
class Implementation:
    """How to run it."""

    forward: Callable[[Problem], torch.Tensor]
    package: str | None = None
    plain_only: bool = False
    """Whether it knows bias-free [gate; up] SwiGLU alone."""
    checked: bool = True
    """Whether it computes the shape's own activation."""
    modes: tuple[str, ...] = MODES


IMPLEMENTATIONS = {
    "ours": Implementation(ours),
    "ours_triton": Implementation(ours_triton),
    "ours_memory_efficient": Implementation(partial(ours, memory_efficient=True)),
    "liger": Implementation(liger, "liger-kernel", plain_only=True),
    "grouped_mm": Implementation(grouped_mm),
    "read_weights": Implementation(read_weights, checked=False, modes=("inference", "replayed")),
}


def run(problem: Problem, implementation: Implementation, mode: str) -> list[torch.Tensor]:
    """The output and, in mode "full", the gradients of the leaves."""
    if mode in ("inference", "replayed"):
        with torch.no_grad():
            return [implementation.forward(problem)]
    out = implementation.forward(problem)
    if mode != "full":
        return [out]
    # the pipeline without biases leaves theirs unused
    return [out, *torch.autograd.grad(out, problem.leaves, problem.upstream, allow_unused=True)]


def check(shape: Shape, names: list[str], device: torch.device) -> dict[str, Contestant]:
    """Largest relative error of output and gradients against float64, in each one's facts; refuses a wrong one."""
    checked = {name: Contestant(call=dict) for name in names}
    for rows in CHECK_ROWS:
        problem = make_problem(shape, rows * shape.experts // shape.slots, device)
        stacked = Implementation(partial(ours, impl="stacked"))
        wide = {
            n: x.detach().double().requires_grad_() if x.is_floating_point() else x for n, x in problem.tensors.items()
        }
        truth = run(Problem(wide, problem.upstream.double(), shape), stacked, "full")

        def errors(implementation: Implementation, problem: Problem = problem, truth: list = truth) -> list[float]:
            pairs = zip(run(problem, implementation, "full"), truth, strict=True)
            return [float((a.detach().double() - t.detach()).norm() / t.detach().norm()) for a, t in pairs]

        eager = errors(stacked)
        for name in names:
            if not IMPLEMENTATIONS[name].checked or (name == "grouped_mm" and shape.activation != "silu"):
                continue

            def judge(contestant: Contestant, name: str = name, errors=errors, eager: list = eager) -> None:
                found = dict(zip(map(str, range(len(eager))), errors(IMPLEMENTATIONS[name]), strict=True))
                contestant.facts["rel_err"] = max(*found.values(), contestant.facts.get("rel_err", 0))
                limits = {n: EAGER_FACTOR * e + FLOOR for n, e in zip(found, eager, strict=True)}
                harness.WrongResult.unless(found, limits if name.startswith("ours") else dict.fromkeys(found, 0.05))

            if checked[name].error is None:
                harness.attempt(checked[name], device, judge)
    return checked


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, list(IMPLEMENTATIONS))
    parser.add_argument("--shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=STARTS)
    parser.add_argument("--zipf", action="store_true", help="skewed routing")
    parser.add_argument("--frozen", action="store_true", help="no gradients of the experts")
    args = parser.parse_args(argv)
    device, deadline = torch.device(args.device), harness.Deadline(args.max_seconds)
    lines = harness.JsonLines(args.out, harness.environment(device), args.resume)
    names = args.impls or (list(IMPLEMENTATIONS) if device.type == "cuda" else ["ours"])
    kind = {"routing": "zipf" if args.zipf else "uniform", "frozen": args.frozen}
    for shape_name in args.shapes or (["tiny"] if args.quick else ["qwen3", "gpt_oss", "gptoss_lite", "mixtral"]):
        shape = SHAPES[shape_name]
        fitting = [n for n in names if not (IMPLEMENTATIONS[n].plain_only and shape.activation != "silu")]
        deadline.say(f"checking {shape_name}")
        checked = check(shape, fitting, device)
        for tokens in args.tokens or ((8,) if args.quick else TOKENS):
            if deadline.passed():
                break
            problem = make_problem(shape, tokens, device, zipf=args.zipf, frozen=args.frozen)
            for mode, start in itertools.product(args.modes, args.starts):
                fields = {"op": "moe_experts", "shape": shape_name, "T": tokens, "mode": mode, "start": start, **kind}
                if mode == "replayed" and (device.type != "cuda" or tokens > MOST_REPLAYED):
                    continue
                able = [n for n in fitting if mode in IMPLEMENTATIONS[n].modes]
                wanted = [n for n in able if not lines.has(fields | {"impl": n})]
                contestants = {n: contestant(problem, n, mode, start, checked[n]) for n in wanted}
                harness.measure(contestants, device, seconds=args.seconds, deadline=deadline)
                flops = (6 if mode != "full" else 12 if args.frozen else 18) * shape.hidden * shape.width
                lines.write_point(contestants, fields, flops * tokens * shape.slots)
            del problem
            harness.free_memory(device)
    deadline.say("out of time: what comes later is missing" if deadline.passed() else "done")


def contestant(problem: Problem, name: str, mode: str, start: str, checked: Contestant) -> Contestant:
    """An implementation at a point, with what the check found."""
    package = IMPLEMENTATIONS[name].package
    peer = {} if package is None else {"peer_version": f"{package} {harness.package_version(package)}"}
    call = partial(run, problem, IMPLEMENTATIONS[name], mode)
    made = replace(Contestant(call=call, queued=start == "queued"), facts=peer | checked.facts, error=checked.error)
    if mode == "replayed" and made.error is None:
        harness.attempt(made, problem.upstream.device, capture)
    return made


def capture(contestant: Contestant) -> None:
    """Its call becomes the replay of a CUDA graph of it."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        contestant.call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        contestant.call()
    contestant.call = graph.replay


if __name__ == "__main__":
    main()
