"""The GRPO loss from hidden states and lm_head, forward and backward: ours beside its peers, one JSON line a point.

    python benchmark/loss_head_to_head.py --out benchmark/results/h200.jsonl

DAPO normaliser, beta 0, epsilon 0.2, temperature 1, ratio by token or by sequence; bf16 hidden states [4, L, H] and
weight [V, H], gradients to both; sequences of L, .83 L, .67 L and .5 L tokens, the rest masked.

* ours: `grpo_moe.ops.grpo_loss`, other options at their defaults
* liger_chunked: `LigerFusedLinearGRPOLoss` without reference model, other options at their defaults
* liger_triton: logits of L + 1 positions by cuBLAS, `triton_grpo_loss(reduce=True)` on them
* trl_head: the head of TRL's `GRPOTrainer` on the tokens of the mask, then the loss in plain PyTorch
* eager: all logits in bf16, log_softmax in float32, then the loss in plain PyTorch
* floor: 6 N V H operations at the rate of cuBLAS for the three products of 4,096 rows

Before any timing each is compared with float64, on a small problem of the same H and V and on sampled rows of its
gradients at full size. What is wrong is refused: its line has "error" and no time.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import harness
import torch
import torch.nn.functional as F
from harness import Contestant, WrongResult

from grpo_moe.ops import LossConfig, grpo_loss, token_logps

Shape = tuple[int, int, int]  # H, V, L
SHAPES = [(2048, 248320, 16384), (2880, 201088, 16384), (2048, 151936, 16384)]  # the most telling first
SHAPES += [(2048, 248320, length) for length in (1024, 4096, 32768, 65536)]
QUICK_SHAPES = [(64, 500, 192)]
LEVELS = ("token", "sequence")
LONGEST_BY_SEQUENCE = 32768
CHECK_LENGTH, CHECK_CHUNK = 192, 128  # 575 tokens; ours also in chunks shorter than a sequence
SAMPLES = 256  # rows of a gradient at full size
GEMM_ROWS = 4096
EPSILON = 0.2
ERRORS = ("logp_error", "grad_hidden_error", "grad_weight_error")
SAMPLED_ERRORS = ("sampled_hidden_error", "sampled_weight_error")
MAX_LOGP_ERROR, EAGER_FACTOR = 1e-4, 1.5  # what ours may be off: log-probabilities, and gradients beside eager's
WRONG = 0.1  # relative error of a gradient that no rounding explains


@dataclass
class Problem:
    """Inputs of the loss; hidden states and weight are leaves."""

    hidden: torch.Tensor  # [B, L, H]
    weight: torch.Tensor  # [V, H]
    ids: torch.Tensor  # [B, L]
    mask: torch.Tensor
    advantages: torch.Tensor  # [B]
    logps: torch.Tensor  # by ours; 0 outside of the mask
    old_logps: torch.Tensor
    num_tokens: torch.Tensor  # 0-dim, on the device


def make_problem(shape: Shape, device: torch.device, noise: Callable) -> Problem:
    """Random, the same for a shape every time; old_logps are `noise` of their shape away from the true ones."""
    width, vocab_size, length = shape
    torch.manual_seed(0)
    lengths = torch.tensor([int(share * length) for share in (1, 0.83, 0.67, 0.5)], device=device)
    mask = torch.arange(length, device=device) < lengths[:, None]
    hidden = torch.randn(len(lengths), length, width, device=device, dtype=torch.bfloat16).requires_grad_()
    weight = torch.randn(vocab_size, width, device=device, dtype=torch.bfloat16).mul_(width**-0.5).requires_grad_()
    ids = torch.randint(vocab_size, mask.shape, device=device)
    problem = Problem(hidden, weight, ids, mask, torch.randn(len(lengths), device=device), None, None, mask.sum())
    with torch.no_grad():
        problem.logps = ours_logps(hidden, problem)
    problem.old_logps = problem.logps + torch.where(mask, noise(problem.logps), 0)
    return problem


def small_steps(like: torch.Tensor) -> torch.Tensor:
    return 0.05 * torch.randn_like(like)


def decided_steps(like: torch.Tensor) -> torch.Tensor:
    """A fifth leaves the clipping bounds, none ends so near to one that the rounding of a logit decides."""
    noise = 0.2 * torch.randn_like(like)
    return torch.where((noise.abs() > 0.15) & (noise.abs() < 0.25), noise / 2, noise)


def dapo_loss(logps: torch.Tensor, problem: Problem, level: str) -> torch.Tensor:
    """The loss in plain PyTorch."""
    log_ratio = logps - problem.old_logps
    if level == "sequence":
        log_ratio = ((log_ratio * problem.mask).sum(-1) / problem.mask.sum(-1))[:, None]
    ratio, advantages = log_ratio.exp(), problem.advantages[:, None]
    loss = -torch.min(ratio * advantages, ratio.clamp(1 - EPSILON, 1 + EPSILON) * advantages)
    return (loss * problem.mask).sum() / problem.num_tokens


def spread(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """[N] -> [B, L], 0 outside of the mask."""
    return x.new_zeros(mask.shape).masked_scatter(mask, x)


def ours_logps(hidden, problem):
    return spread(token_logps(hidden[problem.mask], problem.weight, problem.ids[problem.mask]), problem.mask)


def ours_loss(hidden, problem, level, chunk_size=None):
    config = LossConfig(loss_type="dapo", epsilon=EPSILON, importance_sampling_level=level)
    inputs = (hidden, problem.weight, problem.ids, problem.mask, problem.advantages, config)
    given = {"old_logps": problem.old_logps, "num_loss_tokens": problem.num_tokens}
    return grpo_loss(*inputs, **given, chunk_size=chunk_size).loss


def eager_logps(hidden, problem):
    logits = hidden @ problem.weight.T  # [B, L, V]
    return logits.float().log_softmax(-1).gather(-1, problem.ids[..., None])[..., 0]


@cache
def trl_function() -> type[torch.autograd.Function]:
    from trl.kernels import ChunkedLogProbFunction

    # the backward pass takes a context from here that does nothing without DeepSpeed; the real module needs datasets
    utils = sys.modules.setdefault("trl.trainer.utils", types.ModuleType("trl.trainer.utils"))
    vars(utils).setdefault("maybe_gather_lm_head_ctx", lambda *parameters: contextlib.nullcontext())
    return ChunkedLogProbFunction


def trl_logps(hidden, problem):
    """As `add_fused_lm_head` of trl/trainer/utils.py calls it, but for the entropy, which the loss does not need."""
    rows = (hidden[problem.mask], problem.weight, None, problem.ids[problem.mask])
    return spread(trl_function().apply(*rows, 1.0, 32768, None, 1.0, ("log_probs",))[0], problem.mask)


def liger_chunked_logps(hidden, problem):
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOFunction

    return LigerFusedLinearGRPOFunction.chunk_forward(hidden, problem.weight, problem.ids)


def liger_chunked_loss(hidden, problem, level):
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    options = {"epsilon_low": EPSILON, "epsilon_high": EPSILON, "temperature": 1.0, "importance_sampling_level": level}
    head = LigerFusedLinearGRPOLoss(beta=0.0, use_ref_model=False, loss_type="dapo", **options)
    inputs = (hidden, problem.weight, problem.ids, problem.mask.int(), problem.advantages)
    return head(*inputs, old_per_token_logps=problem.old_logps, num_items_in_batch=problem.num_tokens)[0]


def liger_triton_logps(hidden, problem):
    from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

    return fused_selective_log_softmax(hidden @ problem.weight.T, problem.ids, 1.0, problem.mask.int())


def liger_triton_loss(hidden, problem, level):
    from liger_kernel.transformers.grpo_loss import triton_grpo_loss

    inputs = (problem.old_logps, None, problem.ids, problem.advantages, problem.mask.int())
    options = {"eps_low": EPSILON, "eps_high": EPSILON, "importance_sampling_level": level}
    options |= {"temperature": 1.0, "beta": 0.0, "loss_type": "dapo", "reduce": True}
    logits = hidden @ problem.weight.T  # [B, L + 1, V]
    return triton_grpo_loss(logits, *inputs, **options, num_items_in_batch=problem.num_tokens)[0]


def plain_loss(logps: Callable, hidden, problem, level):
    return dapo_loss(logps(hidden, problem), problem, level)


@dataclass(frozen=True)
class Implementation:
    logps: Callable
    loss: Callable
    package: str | None = None
    longest: int = 65536  # L, by memory or by time
    extra: int = 0  # positions beyond L that it wants
    slow: bool = False

    def peer(self) -> dict[str, str]:
        """The fact of a peer's version."""
        name = self.package
        return {} if name is None else {"peer_version": f"{name} {harness.package_version(name)}"}


IMPLEMENTATIONS = {
    "ours": Implementation(ours_logps, ours_loss),
    "liger_triton": Implementation(liger_triton_logps, liger_triton_loss, "liger-kernel", 32768, extra=1),
    "trl_head": Implementation(trl_logps, partial(plain_loss, trl_logps), "trl", 32768),
    "eager": Implementation(eager_logps, partial(plain_loss, eager_logps), None, 4096),
    "liger_chunked": Implementation(liger_chunked_logps, liger_chunked_loss, "liger-kernel", 16384, slow=True),
}


def open_run(loss: Callable, problem: Problem, level: str, extra: int) -> harness.Backward:
    """Forward and backward; its first two leaves are hidden states, with `extra` positions, and weight."""
    hidden = F.pad(problem.hidden.detach(), (0, 0, 0, extra)).requires_grad_() if extra else problem.hidden
    return harness.Backward(lambda: loss(hidden, problem, level), (hidden, problem.weight, problem.hidden))


def grads_of(run: harness.Backward, problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the hidden states of the tokens in the mask [N, H], and of the weight [V, H]."""
    hidden, weight, _ = run.leaves
    return hidden.grad[:, : problem.mask.shape[1]][problem.mask], weight.grad


def true_logps(problem: Problem) -> torch.Tensor:
    """[N] in float64, from all logits."""
    logits = problem.hidden.detach()[problem.mask].double() @ problem.weight.detach().double().T
    return logits.log_softmax(-1).gather(-1, problem.ids[problem.mask][:, None])[:, 0]


def true_grads(problem: Problem, level: str, logps: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor):
    """In float64, the gradients of these rows of the tokens in the mask and of these rows of the weight.

    Args:
        logps: [N] of the tokens in the mask.
    """
    leaf = spread(logps.double(), problem.mask).requires_grad_()
    slopes = torch.autograd.grad(dapo_loss(leaf, problem, level), leaf)[0][problem.mask]
    hidden, weight = problem.hidden.detach()[problem.mask].double(), problem.weight.detach().double()
    ids = problem.ids[problem.mask]
    log_sums = (hidden * weight[ids]).sum(-1) - logps

    def by_logits(i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        probs = (hidden[i] @ weight[v].T - log_sums[i, None]).exp()
        return slopes[i, None] * ((ids[i, None] == v).double() - probs)

    every_row, every_column = (torch.arange(len(x), device=ids.device) for x in (ids, weight))
    return by_logits(rows, every_column) @ weight, by_logits(every_row, columns).T @ hidden


def check(shape: Shape, level: str, names: list[str], device: torch.device) -> dict[str, Contestant]:
    """Each implementation's errors on a small problem, in its facts; its error is set if it failed or is wrong."""
    problem = make_problem((*shape[:2], min(shape[2], CHECK_LENGTH)), device, decided_steps)
    logps = true_logps(problem)
    everything = (torch.arange(n, device=device) for n in (len(logps), shape[1]))
    truth = (logps, *true_grads(problem, level, logps, *everything))
    checked = {name: Contestant(call=dict) for name in dict.fromkeys(("eager", *names))}

    def judge(contestant: Contestant, name: str) -> None:
        contestant.facts.update(errors_of(name, problem, level, truth))
        limits = dict.fromkeys(ERRORS[1:], WRONG)
        if name == "ours":  # without eager there is no bar to pass
            limits = {error: EAGER_FACTOR * checked["eager"].facts.get(error, 0) for error in limits}
            limits["logp_error"] = MAX_LOGP_ERROR
        WrongResult.unless(contestant.facts, limits)

    for name, contestant in checked.items():
        print(f"          {name}", flush=True)
        harness.attempt(contestant, device, partial(judge, name=name))
    return checked


def errors_of(name: str, problem: Problem, level: str, truth: tuple) -> dict[str, float]:
    """Largest error of the log-probabilities, and relative errors of the gradients (Frobenius norms)."""
    implementation, errors = IMPLEMENTATIONS[name], []
    in_chunks = [partial(ours_loss, chunk_size=CHECK_CHUNK)] if name == "ours" else []
    for loss in (implementation.loss, *in_chunks):
        run = open_run(loss, problem, level, implementation.extra)
        with torch.no_grad():
            logps = implementation.logps(run.leaves[0], problem)[problem.mask]
        run.reset()
        run()
        pairs = zip(grads_of(run, problem), truth[1:], strict=True)
        errors.append([float((logps - truth[0]).abs().max()), *(float((x - y).norm() / y.norm()) for x, y in pairs)])
        run.reset()
    return dict(zip(ERRORS, torch.tensor(errors).amax(0).tolist(), strict=True))  # NaN wins


def verify(run: harness.Backward, problem: Problem, sample: tuple, truth: tuple, twice: bool) -> dict:
    """Relative errors that nine in ten of the sampled rows undercut, of the gradients that a call left.

    The few tokens at the clipping bound may go either way. `twice`: calls again and compares all bits.
    """
    first, errors = grads_of(run, problem), []
    for grad, rows, true in zip(first, sample, truth, strict=True):
        by_row = (grad[rows] - true).norm(dim=1) / true.norm(dim=1).clamp(min=1e-30)
        errors.append(float(by_row.quantile(0.9)))
    facts = dict(zip(SAMPLED_ERRORS, errors, strict=True))
    WrongResult.unless(facts, dict.fromkeys(SAMPLED_ERRORS, WRONG))
    if twice:
        run.reset()
        run()
        facts["deterministic"] = all(map(torch.equal, first, grads_of(run, problem)))
    return facts


@dataclass
class Bench:
    """What the points of a run share."""

    impls: list[str]
    device: torch.device
    seconds: float
    deadline: harness.Deadline
    lines: harness.JsonLines
    floors: dict[tuple, Contestant] = field(default_factory=dict)
    checks: dict[tuple, dict[str, Contestant]] = field(default_factory=dict)

    def run(self, shape: Shape, levels: list[str]) -> None:
        """All points of a shape."""
        self.deadline.say(f"problem {shape}")
        problem = make_problem(shape, self.device, small_steps)
        for level in levels:
            if not self.deadline.passed() and (level == "token" or shape[2] <= LONGEST_BY_SEQUENCE):
                self.point(problem, shape, level)

    def point(self, problem: Problem, shape: Shape, level: str) -> None:
        fields = fields_of(shape) | {"level": level, "tokens": int(problem.num_tokens)}
        wanted = [name for name in self.impls if not self.lines.has(fields | {"impl": name})]
        contestants = self.contestants(problem, shape, level, wanted) if wanted else {}
        self.deadline.say(f"timing {shape}, {level}")
        try:
            harness.measure(contestants, self.device, seconds=self.seconds, deadline=self.deadline)
        finally:
            self.lines.write_point(contestants, fields, 6 * fields["tokens"] * shape[0] * shape[1])

    def contestants(self, problem: Problem, shape: Shape, level: str, names: list[str]) -> dict[str, Contestant]:
        """Those that fit the shape, with what the check found."""
        key = (*shape[:2], level)
        if key not in self.checks:
            self.deadline.say(f"checking {key}")
            self.checks[key] = check(shape, level, [name for name in self.impls if name != "floor"], self.device)
        ids = problem.ids[problem.mask]
        rows = torch.randperm(len(ids), device=self.device)[:SAMPLES]
        columns = torch.cat([ids[rows[::2]], torch.randint_like(ids[rows[::2]], shape[1])])
        truth = true_grads(problem, level, problem.logps[problem.mask], rows, columns)
        contestants = {}
        for name in names:
            if name != "floor" and shape[2] <= IMPLEMENTATIONS[name].longest:
                implementation, checked = IMPLEMENTATIONS[name], self.checks[key][name]
                run = open_run(implementation.loss, problem, level, implementation.extra)
                verifier = partial(verify, run, problem, (rows, columns), truth, name == "ours")
                facts = implementation.peer() | checked.facts
                contestant = Contestant(run, run.reset, verifier, implementation.slow, facts, error=checked.error)
                contestants[name] = contestant
        return contestants | ({"floor": self.floor(problem)} if "floor" in names else {})

    def floor(self, problem: Problem) -> Contestant:
        """Nothing to call: the times of the three products by cuBLAS, scaled from 4,096 rows to all tokens."""
        weight = problem.weight.detach()
        if weight.shape not in self.floors:
            self.deadline.say(f"products of {tuple(weight.shape)}")
            self.floors[weight.shape] = Contestant(call=dict)
            harness.attempt(self.floors[weight.shape], self.device, lambda c: c.times_ms.extend(self.products(weight)))
        measured = self.floors[weight.shape]
        times = [x * int(problem.num_tokens) / GEMM_ROWS for x in measured.times_ms]
        return Contestant(call=dict, times_ms=times, error=measured.error, max_rounds=0)

    def products(self, weight: torch.Tensor) -> list[float]:
        """ms of logits, gradient of hidden states and gradient of weight, their sum a round."""
        hidden, slopes = (weight.new_empty(GEMM_ROWS, n).normal_() for n in reversed(weight.shape))
        logits, total = torch.empty_like(slopes), torch.zeros_like(weight, dtype=torch.float32)
        calls = [
            lambda: torch.mm(hidden, weight.T, out=logits),
            lambda: torch.mm(slopes, weight),
            lambda: torch.addmm(total, slopes.T, hidden, out_dtype=torch.float32, out=total),
        ]
        return harness.rounds_ms(calls, self.device, self.deadline)


def fields_of(shape: Shape) -> dict:
    return {"op": "grpo_loss", "H": shape[0], "V": shape[1], "L": shape[2], "dtype": "bfloat16"}


def main(argv: list[str] | None = None) -> None:
    parser = harness.arguments(__doc__, [*IMPLEMENTATIONS, "floor"])
    parser.add_argument("--shapes", nargs="+", metavar="H,V,L")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=LEVELS)
    args = parser.parse_args(argv)
    device, deadline = torch.device(args.device), harness.Deadline(args.max_seconds)
    impls = args.impls or ([*IMPLEMENTATIONS, "floor"] if device.type == "cuda" else ["ours", "eager"])
    lines = harness.JsonLines(args.out, harness.environment(device), args.resume)
    bench = Bench(impls, device, args.seconds, deadline, lines)
    given = [tuple(int(x) for x in text.split(",")) for text in args.shapes or ()]
    for shape in given or (QUICK_SHAPES if args.quick else SHAPES):
        if deadline.passed():
            break
        try:
            bench.run(shape, args.levels)
        except Exception as error:  # the other shapes go on
            lines.write(fields_of(shape) | {"impl": "all", "error": harness.describe(error)})
        harness.free_memory(device)
    deadline.say("out of time: what comes later is missing" if deadline.passed() else "done")


if __name__ == "__main__":
    main()
