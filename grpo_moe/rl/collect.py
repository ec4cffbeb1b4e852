"""Rollout groups for one step: generate, score, and with dynamic sampling replace groups that teach nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from grpo_moe.data import PromptSource, PromptStream
from grpo_moe.rewards import RewardCaller, soft_overlong_penalty
from grpo_moe.rollout import RolloutEngine
from grpo_moe.types import Completion, Message, Prompt, SamplingParams

from .advantages import decoupled_advantages, group_advantages, reward_spread
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

    def collect(self, source: PromptSource | PromptStream, sampling: SamplingParams) -> Rollout:
        """Groups for one step on this process; with dynamic sampling only those with a spread of rewards.

        Every process draws from the same stream of prompts, each its own whole groups, and all take part in the same
        number of rounds, so the stream's position stays equal everywhere.
        """
        wanted, kept, generated, rounds = self.args.prompts_per_rollout, [], [], 0
        while rounds < (self.args.dynamic_sampling_max_rounds if self.args.dynamic_sampling else 1):
            count = max(gather_object([self._prompts_to_draw(wanted, len(kept), len(generated))]))
            if count <= 0:
                break
            groups = self.generate_groups(self._take(source, count), sampling)
            generated += groups
            kept += self._informative(groups)
            rounds += 1
        return Rollout(kept[:wanted], generated, rounds)

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
            return self._score(prompts, completions)

    def advantages(self, groups: Sequence[Group]) -> torch.Tensor:
        """Advantages [P, G] of this process's groups; a "batch" scale is taken over all processes."""
        everyone = gather_object([[self._parts(g) for g in groups]])
        mine = sum(len(part) for part in everyone[: self.accelerator.process_index])
        parts = [row for part in everyone for row in part]  # [P][F + 2][G]
        if not groups:
            return torch.zeros(0, self.args.num_generations)
        rewards, *values = torch.tensor(parts, dtype=torch.float64).unbind(1)
        if self.args.multi_objective_aggregation == "normalize_then_sum":
            scaled = decoupled_advantages(torch.stack(values), [*self.rewards.weights, 1.0])
        else:
            scaled = group_advantages(rewards, scale=self.args.scale_rewards)
        return scaled[mine : mine + len(groups)]

    def _parts(self, group: Group) -> list[list[float]]:
        """Rewards [G], then what each function said, then the shaping."""
        return [group.rewards.tolist(), *group.values, (group.rewards - group.scores).tolist()]

    def _prompts_to_draw(self, wanted, kept, generated):
        """Prompts for the next round: those missing, and more in the measure in which groups were dropped so far."""
        if not self.args.dynamic_sampling or kept >= wanted:
            return wanted - kept
        expected_share = kept / generated if generated else 1 / self.args.dynamic_sampling_oversampling
        return math.ceil((wanted - kept) / max(expected_share, 1 / MAX_OVERSAMPLING))

    def _take(self, source, count):
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        return source.take(count * world)[rank * count : (rank + 1) * count]

    def _informative(self, groups):
        groups = [g for g in groups if not g.skipped]
        if not self.args.dynamic_sampling or not groups:
            return groups
        spread = reward_spread(torch.stack([g.rewards for g in groups]))
        return [g for g, s in zip(groups, spread.tolist(), strict=True) if s > 0]

    def _score(self, prompts, completions):
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
        groups, start = [], 0
        for prompt, group in zip(prompts, completions, strict=True):
            rows = slice(start, start + len(group))
            values, skipped = [v[rows] for v in scored.values], any(scored.skipped[rows])
            groups.append(Group(prompt, group, scores[rows], rewards[rows], values, skipped))
            start += len(group)
        return groups

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
