"""Rollout groups for one step: generate, score, and with dynamic sampling replace groups that teach nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_moe.data import PromptSource, PromptStream
from grpo_moe.rewards import RewardCaller, soft_overlong_penalty
from grpo_moe.rollout import RolloutEngine
from grpo_moe.rollout.base import check_completions
from grpo_moe.types import Completion, Message, Prompt, SamplingParams

from .advantages import decoupled_advantages, decoupled_rewards, group_advantages, reward_spread
from .batch import Group
from .config import MAX_OVERSAMPLING, GRPOConfig
from .metrics import PhaseTimer
from .sharding import whole_parameters


@dataclass(frozen=True)
class Rollout:
    """What one process collected for a step."""

    kept: list[Group]
    """Groups to train on."""
    generated: list[Group]
    """All groups, those dropped included: the rewards that are reported."""
    rounds: int
    """Generation rounds it took."""
    lag: int = 0
    """Rollouts that the policy has learned from since it began to generate this one."""


@dataclass(frozen=True)
class _Ahead:
    """A rollout that was begun before the update of the one before."""

    prompts: list[Prompt]
    position: dict
    """Of the source before these prompts."""
    sampling: SamplingParams
    completions: Future


class Collector:
    """Draws completions and scores them.

    Args:
        engine: generates.
        rewards: scores.
        args: the run's options.
        accelerator: for the collectives that keep all processes at the same place of the prompt stream.
        timer: gets the phases "rollout" and "reward".
        policy: what an engine in this process generates from; it is whole for a rollout where it is sharded.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        rewards: RewardCaller,
        args: GRPOConfig,
        accelerator: Accelerator,
        *,
        timer: PhaseTimer,
        policy: torch.nn.Module,
    ):
        self.policy = policy
        self.engine, self.rewards, self.args = engine, rewards, args
        self.accelerator, self.timer = accelerator, timer
        self.faults: Counter[str] = Counter()
        """Completions that reward functions failed on, by "function/kind", until somebody clears it."""
        self._ahead: _Ahead | None = None
        self._thread = ThreadPoolExecutor(1) if args.rollout_lag else None
        if args.rollout_lag and getattr(engine, "in_process", True):
            raise ValueError(
                f"rollout_lag must be 0 with {type(engine).__name__}, got {args.rollout_lag}: it reads the weights "
                "that are being updated; use an engine with weights of its own, as VLLMEngine"
            )

    def collect(self, source: PromptSource | PromptStream, sampling: SamplingParams) -> Rollout:
        """Groups for one step on this process; with dynamic sampling only those with a signal.

        Every process draws from the same stream of prompts, each its own whole groups, and all take part in the same
        number of rounds, so the stream's position stays equal everywhere.
        """
        wanted, kept, generated, rounds = self.args.prompts_per_rollout, [], [], 0
        ahead, self._ahead = self._ahead, None
        while rounds < (self.args.dynamic_sampling_max_rounds if self.args.dynamic_sampling else 1):
            if ahead is not None and not rounds:
                groups = self._groups_of(ahead)
            else:
                count = self._prompts_to_draw(wanted, len(kept), len(generated))
                if count <= 0:
                    break
                groups = self.generate_groups(self._take(source, count), sampling)
            self._check_routes(groups, sampling)
            generated += groups
            kept += self._informative(groups)
            rounds += 1
        return Rollout(kept[:wanted], generated, rounds, lag=int(ahead is not None))

    def start_next(self, source: PromptSource | PromptStream, sampling: SamplingParams) -> None:
        """Begins the next rollout in a thread of its own: its first round, which the next ``collect`` takes.

        Only the engine works there; rewards, further rounds and collectives stay in the calling thread.
        """
        position = source.state_dict()
        prompts = self._take(source, self._prompts_to_draw(self.args.prompts_per_rollout, 0, 0))
        made = self._thread.submit(self.engine.generate, prompts, sampling)
        self._ahead = _Ahead(prompts, position, sampling, made)

    def finish_next(self) -> None:
        """Waits until the engine is idle, as before new weights; what went wrong is raised by ``collect``."""
        if self._ahead is not None:
            wait([self._ahead.completions])
            self.accelerator.wait_for_everyone()  # all processes may share one engine

    def drop_next(self) -> None:
        """Gives up a rollout that was begun."""
        self.finish_next()
        self._ahead = None

    def position(self, source: PromptSource | PromptStream) -> dict:
        """Where a continuation must draw prompts from: a rollout that was begun is not in a checkpoint."""
        return source.state_dict() if self._ahead is None else self._ahead.position

    def generate_groups(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, phases: tuple[str, str] = ("rollout", "reward")
    ) -> list[Group]:
        """One scored group a prompt; the seconds of generation and scoring count under the two phases."""
        in_process = getattr(self.engine, "in_process", True)
        gathered = whole_parameters(self.policy) if in_process else nullcontext()
        with self.timer(phases[0]), gathered, self.accelerator.autocast():  # gathered also by one without prompts
            completions = self.engine.generate(prompts, sampling) if prompts else []
        if not prompts:
            return []
        with self.timer(phases[1]):
            return self._score(prompts, completions, sampling)

    def advantages(self, groups: Sequence[Group]) -> torch.Tensor:
        """Advantages [P, G] of this process's groups; a "batch" scale is taken over all processes."""
        everyone = gather_object([[self._parts(g) for g in groups]])
        mine = sum(len(part) for part in everyone[: self.accelerator.process_index])
        parts = [row for part in everyone for row in part]  # [P][F + 2][G]
        if not groups:
            return torch.zeros(0, self.args.num_generations)
        rewards, *values = torch.tensor(parts, dtype=torch.float64).unbind(1)
        if self._is_decoupled:
            scaled = decoupled_advantages(torch.stack(values), self._weights)
        else:
            scaled = group_advantages(rewards, scale=self.args.scale_rewards)
        return scaled[mine : mine + len(groups)]

    @property
    def _vocab_size(self) -> int | None:
        config = getattr(self.policy, "config", None)
        return None if config is None else config.get_text_config().vocab_size

    @property
    def _is_decoupled(self) -> bool:
        return self.args.multi_objective_aggregation == "normalize_then_sum"

    @property
    def _weights(self) -> list[float]:
        """[F + 1] of the reward functions and of the shaping."""
        return [*self.rewards.weights, 1.0]

    def _parts(self, group: Group) -> list[list[float]]:
        """Rewards [G], then what each function said, then the shaping."""
        return [group.rewards.tolist(), *group.values, (group.rewards - group.scores).tolist()]

    def _check_routes(self, groups: list[Group], sampling: SamplingParams) -> None:
        if sampling.return_routes and any(c.routes is None for group in groups for c in group.completions):
            raise ValueError(
                f"rollout_engine must return routes with routing_replay 'R3', got none from "
                f"{type(self.engine).__name__}; fill Completion.routes under return_routes, or use R2"
            )

    def _groups_of(self, ahead: _Ahead) -> list[Group]:
        with self.timer("rollout"):
            completions = ahead.completions.result()
        with self.timer("reward"):
            return self._score(ahead.prompts, completions, ahead.sampling)

    def _prompts_to_draw(self, wanted: int, kept: int, generated: int) -> int:
        """Prompts of each process for the next round: those missing, and more in the measure of groups dropped."""
        count = wanted - kept
        if self.args.dynamic_sampling and kept < wanted:
            expected_share = kept / generated if generated else 1 / self.args.dynamic_sampling_oversampling
            count = math.ceil((wanted - kept) / max(expected_share, 1 / MAX_OVERSAMPLING))
        return max(gather_object([count]))

    def _take(self, source, count):
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        return source.take(count * world)[rank * count : (rank + 1) * count]

    def _informative(self, groups):
        return [g for g in groups if not g.skipped and (g.has_signal or not self.args.dynamic_sampling)]

    def _score(self, prompts, completions, sampling):
        check_completions(completions, len(prompts), sampling, self.engine, self._vocab_size)
        flat = [c for group in completions for c in group]
        repeated = [p for p, group in zip(prompts, completions, strict=True) for _ in group]
        columns = {name: [p.columns[name] for p in repeated] for name in prompts[0].columns}
        scored = self.rewards(
            [p.raw for p in repeated],
            [as_prompted(p, c) for p, c in zip(repeated, flat, strict=True)],
            {**columns, "completion_ids": [list(c.token_ids) for c in flat]},
            group_size=len(completions[0]),
        )
        self.faults.update(scored.faults)
        scores = torch.tensor(scored.rewards, dtype=torch.float64)
        rewards = scores + torch.tensor([self._overlong_penalty(c) for c in flat], dtype=torch.float64)
        signals = self._signals(rewards, [*scored.values, (rewards - scores).tolist()], len(completions[0]))
        groups, start = [], 0
        for prompt, group, has_signal in zip(prompts, completions, signals, strict=True):
            rows = slice(start, start + len(group))
            values, skipped = [v[rows] for v in scored.values], any(scored.skipped[rows])
            groups.append(Group(prompt, group, scores[rows], rewards[rows], values, skipped, has_signal))
            start += len(group)
        return groups

    def _signals(self, rewards: torch.Tensor, values: list[list[float]], size: int) -> list[bool]:
        """[P] ``Group.has_signal``, from rewards [P * G] and the parts [F + 1][P * G] that they are the sum of."""
        if size < 2:  # of an evaluation
            return [False] * (len(rewards) // size)
        compared = rewards.view(-1, size)
        if self._is_decoupled:
            parts = torch.tensor(values, dtype=torch.float64).view(len(values), -1, size)  # [F + 1, P, G]
            compared = decoupled_rewards(parts, self._weights)
        return (reward_spread(compared) > 0).tolist()

    def _overlong_penalty(self, completion):
        cache_length = self.args.overlong_cache_length
        if cache_length is None:
            return 0.0
        return soft_overlong_penalty(len(completion.token_ids), self.args.max_completion_length, cache_length)


def as_prompted(prompt: Prompt, completion: Completion) -> str | list[Message]:
    """The completion in the form of its prompt: text, or one assistant message."""
    if isinstance(prompt.raw, str):
        return completion.text
    return [{"role": "assistant", "content": completion.text}]
