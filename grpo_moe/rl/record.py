"""What a run leaves behind besides its weights: metrics, progress on the terminal, trackers, completions, summary."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from grpo_moe.text import say

from .advantages import sample_std
from .batch import Group
from .collect import Rollout, as_prompted
from .config import GRPOConfig
from .display import Display, NullDisplay, make_display
from .forecast import Utilization
from .metrics import Metrics, MetricsWriter, PhaseTimer, read_metrics
from .report import LOAD_FILE, METRICS_FILE, plot_curves, versions, write_completions, write_summary
from .routing import PolicyRouting
from .run_folder import keep_newest
from .state import TrainerState
from .waterfall import add_waterfall

SAMPLES_SHOWN = 3
SUMMARY_FILE, CURVES_FILE = "summary.json", "curves.png"
_FILES = (METRICS_FILE, LOAD_FILE, SUMMARY_FILE, CURVES_FILE)
_BY_STEP = {"completions": r"completions_(\d+)\.parquet", "capsules": r"(?:update|nonfinite)_(\d+)_\d+\.safetensors"}
"""Folders of a run, and their files of one rollout or update, whose number is the group."""
_UNFINISHED = r".+\.(jsonl|json|png|html|parquet|safetensors)\.\d+\.tmp"
"""What a killed process was writing."""


class RunRecord:
    """Writes into ``output_dir`` on the main process; every process may call it.

    Args:
        accelerator: of the run.
        args: its options.
        reward_names: of the reward functions.

    Raises:
        ValueError: a folder in ``output_dir`` stands where a file will be written, or the other way round.
    """

    def __init__(self, accelerator: Accelerator, args: GRPOConfig, reward_names: Sequence[str]):
        self.accelerator, self.args, self.reward_names = accelerator, args, reward_names
        self.folder = Path(args.output_dir)
        _check_places(self.folder)
        self._writers: dict[str, MetricsWriter] = {}
        """By name of the file; of the main process only."""
        self._display: Display = NullDisplay()

    def start(self, title: str, last_step: int) -> Display:
        """Opens the files and the trackers; returns the display to enter.

        What an earlier run left of the steps after ``last_step`` is removed: lines, completions and capsules.
        """
        is_main = self.accelerator.is_main_process
        if is_main:
            _remove_after(self.folder, last_step)
        for name in (METRICS_FILE, LOAD_FILE) if is_main else ():
            self._writers[name] = MetricsWriter(self.folder / name)
            self._writers[name].truncate_after(last_step)
        options = {name: str(x) if isinstance(x, dict) else x for name, x in asdict(self.args).items() if x is not None}
        self.accelerator.init_trackers("grpo_moe", config=options)
        self._display = make_display(is_main, self.args.max_steps, title, self.args.show_progress)
        return self._display

    def log(self, step: int, line: dict[str, float]) -> None:
        """One line of metrics."""
        line = {"step": step, **line}
        self._write(METRICS_FILE, line)
        self._display.update(step, line)
        self.accelerator.log(line, step=step)

    def say(self, text: str) -> None:
        """One line on the terminal, from the main process."""
        self._display.message(text)

    def warn(self, text: str) -> None:
        """One loud line on the terminal, from the main process."""
        self.say(f"WARNING: {text}")

    def step_metrics(
        self,
        step: int,
        metrics: Metrics,
        rollout: Rollout,
        routing: PolicyRouting,
        timer: PhaseTimer,
        *,
        advantages: torch.Tensor,
        used: Utilization,
    ) -> dict[str, float]:
        """What the losses of a step left in ``metrics``, and the rest that is known of it, over all processes.

        The tokens of each expert, too many for a line of metrics, go into their own file, layer by layer.
        ``advantages`` [P, G] are those of the kept groups.
        """
        means = rollout_metrics(rollout.generated, self.reward_names, self.args.pass_threshold)
        for name, (value, weight) in means.items():
            metrics.add(name, value, weight)
        if load := routing.finish(metrics):
            self._write(LOAD_FILE, {"step": step, "load": load})
        add_waterfall(metrics, rollout, advantages, self.args)
        metrics.add("sampling/rounds", rollout.rounds)
        metrics.add("sampling/lag", rollout.lag)
        metrics.add_sum("sampling/groups_kept", len(rollout.kept))
        metrics.add_sum("sampling/groups_generated", len(rollout.generated))
        metrics.add_sum("sampling/groups_skipped", sum(g.skipped for g in rollout.generated))
        phases = timer.step_seconds()
        measured = {f"seconds/{phase}": seconds for phase, seconds in phases.items()} | used.metrics(rollout, phases)
        for name, value in measured.items():
            metrics.add(name, value)
        reduced = metrics.reduce(self.accelerator)
        if square := reduced.pop("sampling_ratio_square_mean", 0.0):
            reduced["sampling_effective_size"] = reduced["sampling_ratio_mean"] ** 2 / square
        return reduced

    def show(self, groups: list[Group]) -> None:
        """Some completions on the terminal."""
        shown = groups[:SAMPLES_SHOWN]
        self._display.show_completions([(str(g.prompt.raw), g.completions[0].text, float(g.scores[0])) for g in shown])

    def completions(self, step: int, groups: list[Group], advantages: torch.Tensor) -> None:
        """The kept completions of a rollout as a parquet file, unless ``log_completions`` is off."""
        if not (self.args.log_completions and self.accelerator.is_main_process):
            return
        rows = [
            {
                "step": step,
                "prompt": group.prompt.raw,
                "completion": as_prompted(group.prompt, completion),
                "reward": float(group.rewards[i]),
                **{f"rewards/{name}": v[i] for name, v in zip(self.reward_names, group.values, strict=True)},
                "advantage": float(row[i]),
            }
            for group, row in zip(groups, advantages, strict=True)
            for i, completion in enumerate(group.completions)
        ]
        folder = self.folder / "completions"
        folder.mkdir(parents=True, exist_ok=True)
        write_completions(folder / f"completions_{step:06d}.parquet", rows)
        keep_newest(folder, _BY_STEP["completions"], self.args.log_total_limit)

    def summary(self, state: TrainerState, phase_seconds: dict[str, float], num_parameters: int) -> dict[str, Any]:
        """The summary of a run, which the main process also writes, beside the curves."""
        summary = {
            **run_summary(state, self.args),
            "seconds": phase_seconds,
            "num_processes": self.accelerator.num_processes,
            "num_parameters": num_parameters,
            "versions": versions(),
            "config": asdict(self.args),
        }
        if self.accelerator.is_main_process:
            self._write_end(summary)
        return summary

    def _write_end(self, summary: dict[str, Any]) -> None:
        if summary["skipped_updates"] == summary["steps"]:
            say(
                "Warning: every update was skipped: no group of completions had a spread of rewards. "
                "Take easier or harder prompts, raise num_generations, or look at the reward functions."
            )
        write_summary(self.folder / SUMMARY_FILE, summary)
        plot_curves(read_metrics(self.folder / METRICS_FILE), self.folder / CURVES_FILE)

    def _write(self, name: str, line: dict[str, Any]) -> None:
        if name in self._writers:
            self._writers[name].write(line)


def rollout_metrics(groups: list[Group], names: Sequence[str], threshold: float) -> dict[str, tuple[float, float]]:
    """(mean, weight) of each metric of the groups that a process generated; the weight counts what was scored.

    Args:
        groups: all groups, those that dynamic sampling dropped included.
        names: of the reward functions, in the order of ``Group.values``.
        threshold: a completion passes when its score is at least this.
    """
    if not groups:
        return {}
    scores = torch.stack([g.scores for g in groups])  # [P, G]
    rewards = torch.stack([g.rewards for g in groups])
    completions = [c for g in groups for c in g.completions]
    lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.float64)
    truncated = torch.tensor([c.finish_reason == "length" for c in completions], dtype=torch.float64)
    known = {
        "reward": rewards,
        "reward_std": torch.stack([sample_std(row[~row.isnan()]) for row in rewards]),
        "frac_reward_zero_std": torch.tensor([not g.has_signal for g in groups]),
        "pass_rate": scores >= threshold,
        "completions/mean_length": lengths,
        "completions/clipped_ratio": truncated,
    }
    for number, name in enumerate(names):
        known[f"rewards/{name}"] = torch.tensor([g.values[number] for g in groups])
    return {name: (float(x.double().nanmean()), float((~x.isnan()).sum())) for name, x in known.items()}


def run_summary(state: TrainerState, args: GRPOConfig) -> dict[str, Any]:
    """What a run did: its updates and rollouts, and its evaluations by name."""
    evaluations = {
        f"eval_{name}": {k.removeprefix("eval_"): v for k, v in metrics.items()}
        for name, metrics in state.evaluations.items()
    }
    return {
        "loss_type": args.loss_type,
        "steps": state.step,
        "rollouts": state.rollouts,
        "skipped_updates": state.skipped_updates,
        **evaluations,
    }


def _check_places(folder: Path) -> None:
    wrong = [folder / name for name in _FILES if (folder / name).is_dir()]
    wrong += [folder / name for name in _BY_STEP if (folder / name).exists() and not (folder / name).is_dir()]
    for path in wrong:
        found, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
        raise ValueError(
            f"output_dir must have no {found} where the run writes a {wanted}, got {path}; move it away or choose "
            "another output_dir"
        )


def _remove_after(folder: Path, last_step: int) -> None:
    for name, pattern in _BY_STEP.items():
        for path in (folder / name).glob("*"):
            match = re.fullmatch(pattern, path.name)
            if match and int(match[1]) > last_step:
                path.unlink()
    for place in (folder, *(folder / name for name in _BY_STEP)):
        for path in place.glob("*"):
            if re.fullmatch(_UNFINISHED, path.name):
                path.unlink()
