"""The single-pass experts, the unfused ones and what the machine allows: sweeps of I/H and of tokens an expert.

    python benchmark/roofline.py --out results.jsonl [--plot roofline.png] [--ratios 1 4] [--tokens 1 16 256]

bf16 inference with the same number of tokens at each of 8 experts of hidden size 768. Copy bandwidth and bf16 matmul
rate of this machine come first; they are the roof of the plot and of bound_ms. On a GPU a time is that of 20 calls in
one CUDA graph, divided by 20, over as many weights as keep the L2 cache cold. Where Nsight Compute (ncu) works, bytes
are those that crossed to device memory; else they are counted by `hbm_bytes`. On a CPU, which takes --quick and
TRITON_INTERPRET=1, "fused" is the loop over experts and no time means anything.
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import harness
import moe
import torch
from harness import Contestant

from grpo_moe.ops.moe.grouped_gemm import ExpertWeight
from grpo_moe.ops.moe.single_pass import single_pass_experts, tile_for
from grpo_moe.ops.triton_launch import INTERPRET

HIDDEN, EXPERTS, SLOTS = 768, 8, 2
RATIOS, RATIO = (0.5, 1, 2, 4, 8), 4
TOKENS, TOKENS_AT_RATIOS = (1, 2, 4, 8, 16, 32, 64, 128, 256), 16
CALLS = 20  # in a CUDA graph: the launch of one call alone would count
MARKER = "spin_kernel"  # what torch.cuda._sleep launches


@dataclass(frozen=True)
class Point:
    """Sizes of one measurement."""

    sweep: str
    """"I/H" or "t"."""
    E: int
    H: int
    I: int  # noqa: E741 the field's name
    K: int
    t: int
    """Tokens at each expert."""

    @property
    def num_tokens(self) -> int:
        return self.E * self.t // self.K

    @property
    def flops(self) -> int:
        return 6 * self.E * self.t * self.H * self.I


def sweeps(hidden: int, experts: int, ratios: list[float], tokens: list[int]) -> list[Point]:
    """Points of both sweeps.

    Raises:
        ValueError: tokens that do not make whole tokens of 2 slots each.
    """
    if bad := [t for t in tokens if t * experts % SLOTS]:
        raise ValueError(f"tokens times experts must be a multiple of {SLOTS}, got {bad[0]} * {experts}; leave it out")
    of = partial(Point, E=experts, H=hidden, K=SLOTS)
    return [of("I/H", I=round(ratio * hidden), t=TOKENS_AT_RATIOS) for ratio in ratios] + [
        of("t", I=RATIO * hidden, t=t) for t in tokens
    ]


def make_problem(point: Point, device: torch.device) -> moe.Problem:
    """Random bf16 inputs; slots go to the experts in turns, so that each has exactly t."""
    problem = moe.make_problem(moe.Shape(point.E, point.H, point.I, point.K), point.num_tokens, device)
    slots = torch.arange(point.num_tokens * point.K, device=device)
    problem.tensors["top_k_index"] = (slots % point.E).view(-1, point.K)
    return problem


def single_pass(problem: moe.Problem) -> torch.Tensor:
    biases = {"gate_up_bias": None, "down_bias": None, "alpha": 1.702, "limit": 7.0}
    return single_pass_experts(**{**biases, **problem.tensors}, **problem.shape.options())


IMPLEMENTATIONS = {
    "single_pass": moe.Implementation(single_pass),
    "fused": moe.Implementation(partial(moe.ours, impl="fused")),
}


def hbm_bytes(point: Point, between: int) -> int:
    """Bytes to and from device memory: all weights, tokens in and out, indices and weights of the slots, each once;
    and twice the bytes ``between`` kernels, which are written and read."""
    weights = 3 * point.E * point.H * point.I * 2
    slots = point.num_tokens * point.K * (8 + 2)
    return weights + 2 * point.num_tokens * point.H * 2 + slots + 2 * between


def bytes_between(point: Point, impl: str, problem: moe.Problem) -> int:
    """Of single_pass fp32 parts [splits, rows, H]; of fused bf16 activations [rows, I] and outputs [rows, H]."""
    rows = point.E * point.t
    if impl == "fused":
        return rows * (point.I + point.H) * 2
    projections = (ExpertWeight(problem.tensors[name], False) for name in ("gate_up_proj", "down_proj"))
    return -(-point.I // tile_for(rows, *projections).block_n) * rows * point.H * 4


def measure_ceilings(device: torch.device, lines: harness.JsonLines, args, deadline: harness.Deadline) -> dict:
    """{"gb_per_s": of a large copy, read and written, "tflops": of a large bf16 matmul}; a line each."""
    numel, side = (2**16, 64) if args.quick else (2**31, 8192)
    source = torch.randn(numel, device=device, dtype=torch.bfloat16)
    target, a, b = torch.empty_like(source), *(torch.randn(2, side, side, device=device).bfloat16())
    contestants = {
        "copy": Contestant(lambda: target.copy_(source), facts={"size": f"{2 * numel} bytes"}),
        "matmul": Contestant(lambda: torch.mm(a, b), facts={"size": f"{side}^3"}),
    }
    rates = {"copy": ("gb_per_s", 4 * numel / 1e6), "matmul": ("tflops", 2 * side**3 / 1e9)}
    deadline.say("measuring the machine")
    harness.measure(contestants, device, seconds=args.seconds, deadline=harness.Deadline(60))
    ceilings = {}
    for impl, (rate, work) in rates.items():
        times = harness.summary(contestants[impl].times_ms)
        ceilings[rate] = work / times["ms"]
        record = {"op": "ceiling", "impl": impl, **contestants[impl].facts, "dtype": "bf16", **times}
        lines.write({**record, rate: round(ceilings[rate], 1)})
    return ceilings


def check(problem: moe.Problem, impl: str) -> float:
    """Relative error against float64; WrongResult if it is 1.5 times that of the loop over experts in bf16."""
    stacked = moe.Implementation(partial(moe.ours, impl="stacked"))
    wide = {n: x.detach().double() if x.is_floating_point() else x for n, x in problem.tensors.items()}
    (truth,) = moe.run(moe.Problem(wide, problem.upstream, problem.shape), stacked, "inference")
    error, eager = (
        float((moe.run(problem, x, "inference")[0].double() - truth).norm() / truth.norm())
        for x in (IMPLEMENTATIONS[impl], stacked)
    )
    factor = moe.EAGER_FACTOR * (2 if INTERPRET else 1)  # the interpreter truncates to bf16 where a GPU rounds
    harness.WrongResult.unless({"rel_err": error}, {"rel_err": factor * eager + moe.FLOOR})
    return error


def as_one_call(calls: list[Callable[[], object]], device: torch.device) -> Callable[[], object]:
    """All of them, on a GPU as a CUDA graph."""
    if device.type != "cuda":
        return lambda: [call() for call in calls]
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def run_point(point: Point, names: list[str], device: torch.device, args, measured: dict) -> dict[str, Contestant]:
    """Checks and times the implementations in turns; derived numbers are in their facts, but for what needs a time."""
    on_gpu = device.type == "cuda"
    count = CALLS if on_gpu else 1
    cache = 4 * torch.cuda.get_device_properties(device).L2_cache_size if on_gpu else 1
    problems = [make_problem(point, device) for _ in range(min(count, -(-cache // hbm_bytes(point, 0))))]
    contestants = {name: Contestant(call=dict) for name in names}
    for name, contestant in contestants.items():

        def prepare(contestant: Contestant, name: str = name) -> None:
            contestant.facts["rel_err"] = check(problems[0], name)
            counted = hbm_bytes(point, bytes_between(point, name, problems[0]))
            source = "ncu" if (name, point) in measured else "counted"
            found = {"bytes": measured.get((name, point), counted), "bytes_source": source, "bytes_counted": counted}
            contestant.facts |= found | {"intensity": round(point.flops / found["bytes"], 2)}
            chosen = (problems[i % len(problems)] for i in range(count))
            calls = [partial(moe.run, problem, IMPLEMENTATIONS[name], "inference") for problem in chosen]
            contestant.call = as_one_call(calls, device)
            contestant.call()

        harness.attempt(contestant, device, prepare)
    harness.interleave(list(contestants.values()), device, seconds=args.seconds, deadline=args.deadline)
    for contestant in contestants.values():
        contestant.times_ms = [ms / count for ms in contestant.times_ms]
    return contestants


def add_rates(contestants: dict[str, Contestant], point: Point, ceilings: dict) -> None:
    """What follows from the times: achieved GB/s, speed-up over the unfused path, and the time the machine allows."""
    medians = {n: statistics.median(x.times_ms) for n, x in contestants.items() if x.times_ms and x.error is None}
    bound_ms = max(hbm_bytes(point, 0) / ceilings["gb_per_s"] / 1e6, point.flops / ceilings["tflops"] / 1e9)
    for name, ms in medians.items():
        facts = contestants[name].facts
        facts |= {"gb_per_s": round(facts["bytes"] / ms / 1e6, 1), "bound_ms": round(bound_ms, 5)}
        if "fused" in medians:
            facts["speedup"] = round(medians["fused"] / ms, 3)


def measure_bytes(points: list[Point], names: list[str], deadline: harness.Deadline) -> dict[tuple[str, Point], int]:
    """Bytes that each implementation moves at each point, by Nsight Compute; empty, and it says why, if that fails."""
    if shutil.which("ncu") is None:
        deadline.say("ncu is not installed: bytes are counted")
        return {}
    work = [(name, point) for point in points for name in names]
    given = json.dumps([(name, asdict(point)) for name, point in work])
    code = f"import json, roofline; roofline.call_each(json.loads({given!r}))"
    ncu = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--cache-control", "none"]
    ncu += ["--profile-from-start", "off", "--metrics", "dram__bytes_read.sum,dram__bytes_write.sum"]
    path = os.pathsep.join([str(Path(__file__).parent), *map(os.path.abspath, sys.path)])
    deadline.say("measuring bytes with ncu")
    try:
        command = [*ncu, sys.executable, "-c", code]
        run = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200
        )
        found = bytes_of_calls(run.stdout)
        why = (run.stdout + run.stderr).strip()[-300:]
    except subprocess.TimeoutExpired as error:
        found, why = [], str(error)[-300:]
    if len(found) == len(work):
        return dict(zip(work, found, strict=True))
    deadline.say(f"ncu reported {len(found)} of {len(work)} calls: bytes are counted; it said: {why}")
    return {}


def call_each(work: list[tuple[str, dict]]) -> None:
    """Each call behind a marker, with a cold L2 cache, and only these between start and stop of the profiler."""
    device = torch.device("cuda")
    other = torch.zeros(2**28, device=device)
    for name, fields in work:
        problem = make_problem(Point(**fields), device)
        moe.run(problem, IMPLEMENTATIONS[name], "inference")
        other.sum()  # a write would leave lines that the measured call pushes out
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        torch.cuda._sleep(1)
        moe.run(problem, IMPLEMENTATIONS[name], "inference")
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def bytes_of_calls(report: str) -> list[int]:
    """Sums over the kernels after each marker of ncu's table."""
    rows, sums = report.splitlines(), []
    header = next((i for i, row in enumerate(rows) if row.startswith('"ID"')), len(rows))
    last_marker = None
    for row in csv.DictReader(rows[header:]):
        if not row["Metric Value"]:
            continue
        if MARKER in row["Kernel Name"]:
            if row["ID"] != last_marker:
                sums.append(0)
            last_marker = row["ID"]
        elif sums:
            sums[-1] += int(float(row["Metric Value"].replace(",", "")))
    return sums


def draw(lines: list[dict], ceilings: dict, path: Path) -> None:
    """The roofline: rate over FLOPs a byte, both logarithmic, under the measured ceilings."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    ridge = 1e3 * ceilings["tflops"] / ceilings["gb_per_s"]
    intensities = [line["intensity"] for line in lines] + [ridge]
    x = [min(intensities) / 2, ridge, max(intensities) * 2]
    roof = [min(ceilings["tflops"], at * ceilings["gb_per_s"] / 1e3) for at in x]
    label = f"measured: {ceilings['gb_per_s']:.4g} GB/s copy, {ceilings['tflops']:.4g} TFLOP/s matmul"
    axes.loglog(x, roof, "k-", label=label)
    for (impl, sweep), marker in zip([(i, s) for i in IMPLEMENTATIONS for s in ("I/H", "t")], "osD^", strict=True):
        mine = [line for line in lines if (line["impl"], line["sweep"]) == (impl, sweep)]
        at = [line["intensity"] for line in mine], [line["flops"] / line["ms"] / 1e9 for line in mine]
        axes.loglog(*at, marker, label=f"{impl}, {sweep} varies", fillstyle="none")
        for line, place in zip(mine, zip(*at, strict=True), strict=True):
            axes.annotate(f"{line['I'] / line['H']:g}" if sweep == "I/H" else f"{line['t']}", place, fontsize=7)
    axes.set(xlabel="FLOPs a byte of device memory", ylabel="TFLOP/s")
    axes.set_title(f"MoE experts, bf16 inference; {lines[0]['gpu'] if lines else 'no points'}", fontsize=10)
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, list(IMPLEMENTATIONS))
    parser.add_argument("--plot", type=Path, help="PNG of the roofline; default: beside --out")
    parser.add_argument("--ratios", nargs="+", type=float, help=f"I/H, at {TOKENS_AT_RATIOS} tokens an expert")
    parser.add_argument("--tokens", nargs="+", type=int, help=f"an expert, at I/H {RATIO}")
    args = parser.parse_args(argv)
    device, args.deadline = torch.device(args.device), harness.Deadline(args.max_seconds)
    environment = harness.environment(device)
    lines, names = harness.JsonLines(args.out, environment, args.resume), args.impls or list(IMPLEMENTATIONS)
    hidden, experts, ratios, tokens = (16, 2, (1, 2), (1, 2)) if args.quick else (HIDDEN, EXPERTS, RATIOS, TOKENS)
    ceilings = measure_ceilings(device, lines, args, args.deadline)
    harness.free_memory(device)
    points = sweeps(hidden, experts, args.ratios or ratios, args.tokens or tokens)
    measured = measure_bytes(points, names, args.deadline) if device.type == "cuda" else {}
    for point in points:
        if args.deadline.passed():
            break
        fields = {"op": "single_pass", **asdict(point), "dtype": "bf16", "flops": point.flops}
        wanted = [name for name in names if not lines.has(fields | {"impl": name})]
        args.deadline.say(f"{point}: {', '.join(wanted) or 'nothing to do'}")
        contestants = run_point(point, wanted, device, args, measured) if wanted else {}
        add_rates(contestants, point, ceilings)
        lines.write_point(contestants, fields, point.flops)
        harness.free_memory(device)
    here = [x for x in harness.read_lines(args.out) if x["op"] == "single_pass" and x["gpu"] == environment["gpu"]]
    latest = {tuple(line[name] for name in ("impl", "sweep", "E", "H", "I", "K", "t")): line for line in here}
    plot = args.plot or args.out.with_suffix(".png")
    draw([line for line in latest.values() if "ms" in line], ceilings, plot)
    args.deadline.say(
        f"out of time: what comes later is missing; {plot}" if args.deadline.passed() else f"done: {plot}"
    )


if __name__ == "__main__":
    main()
