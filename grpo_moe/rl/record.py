"""What a run leaves behind besides its weights: metrics, progress on the terminal, trackers, completions, summary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .batch import Group
from .collect import Rollout, as_prompted
from .config import GRPOConfig
from .display import Display, NullDisplay, make_display
from .evaluation import rollout_metrics
from .metrics import Metrics, MetricsWriter, PhaseTimer, read_metrics
from .report import LOAD_FILE, METRICS_FILE, plot_curves, versions, write_completions, write_summary
from .routing import PolicyRouting
from .waterfall import add_waterfall

SAMPLES_SHOWN = 3


class RunRecord:
    """Writes into ``output_dir`` on the main process; every process may call it.

    Args:
        accelerator: of the run.
        args: its options.
        reward_names: of the reward functions.
    """

    def __init__(self, accelerator: Accelerator, args: GRPOConfig, reward_names: Sequence[str]):
        self.accelerator, self.args, self.reward_names = accelerator, args, reward_names
        self.folder = Path(args.output_dir)
        self._writers: dict[str, MetricsWriter] = {}
        """By name of the file; of the main process only."""
        self._display: Display = NullDisplay()

    def start(self, title: str, last_step: int) -> Display:
        """Opens the files, less the lines after ``last_step``, and the trackers; returns the display to enter."""
        is_main = self.accelerator.is_main_process
        for name in (METRICS_FILE, LOAD_FILE) if is_main else ():
            self._writers[name] = MetricsWriter(self.folder / name)
            self._writers[name].truncate_after(last_step)
        self.accelerator.init_trackers("grpo_moe", config={k: v for k, v in asdict(self.args).items() if v is not None})
        self._display = make_display(is_main, self.args.max_steps, title, self.args.show_progress)
        return self._display

    def log(self, step: int, line: dict[str, float]) -> None:
        """One line of metrics."""
        line = {"step": step, **line}
        self._write(METRICS_FILE, line)
        self._display.update(step, line)
        self.accelerator.log(line, step=step)

    def warn(self, text: str) -> None:
        """One loud line on the terminal, from the main process."""
        self._display.message(f"WARNING: {text}")

    def step_metrics(
        self, step: int, metrics: Metrics, rollout: Rollout, routing: PolicyRouting, timer: PhaseTimer
    ) -> dict[str, float]:
        """What the losses of a step left in ``metrics``, and the rest that is known of it, over all processes.

        The tokens of each expert, too many for a line of metrics, go into their own file, layer by layer.
        """
        for name, (value, weight) in rollout_metrics(
            rollout.generated, self.reward_names, self.args.pass_threshold
        ).items():
            metrics.add(name, value, weight)
        if load := routing.finish(metrics):
            self._write(LOAD_FILE, {"step": step, "load": load})
        add_waterfall(metrics, rollout, self.args)
        metrics.add("sampling/rounds", rollout.rounds)
        metrics.add_sum("sampling/groups_kept", len(rollout.kept))
        metrics.add_sum("sampling/groups_generated", len(rollout.generated))
        metrics.add_sum("sampling/groups_skipped", sum(g.skipped for g in rollout.generated))
        for phase, seconds in timer.step_seconds().items():
            metrics.add(f"seconds/{phase}", seconds)
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

    def summary(self, state: Any, phase_seconds: dict[str, float], num_parameters: int) -> dict[str, Any]:
        """The summary of a run, which the main process writes beside the curves."""
        summary = {
            "loss_type": self.args.loss_type,
            "steps": state.step,
            "rollouts": state.rollouts,
            "skipped_updates": state.skipped_updates,
            **{
                f"eval_{name}": {k.removeprefix("eval_"): v for k, v in metrics.items()}
                for name, metrics in state.evaluations.items()
            },
            "seconds": phase_seconds,
            "num_processes": self.accelerator.num_processes,
            "num_parameters": num_parameters,
            "versions": versions(),
            "config": asdict(self.args),
        }
        if self.accelerator.is_main_process:
            if state.skipped_updates == state.step:
                print("Warning: every update was skipped: no group of completions had a spread of rewards.")
            write_summary(self.folder / "summary.json", summary)
            plot_curves(read_metrics(self.folder / METRICS_FILE), self.folder / "curves.png")
        return summary

    def _write(self, name: str, line: dict[str, Any]) -> None:
        if name in self._writers:
            self._writers[name].write(line)
