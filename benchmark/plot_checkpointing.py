"""Peak memory and seconds of GPT-OSS-Lite's update by the period of its checkpointed blocks, measured and planned.

    python benchmark/plot_checkpointing.py benchmark/results/h200.jsonl benchmark/results/checkpointing_h200.png

Reads the lines of `benchmark/grpo_step.py --shapes gptoss_lite --random_rollouts --prompts 1 --completion 3968
--every 0 1 2 3 4 6 12`: 8 sequences of 4,096 tokens in one micro-batch. The planned time is that without checkpointing
times :func:`grpo_moe.planning.checkpoint_step_factor`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import read_lines
from matplotlib.figure import Figure

from grpo_moe.planning import checkpoint_step_factor

LAYERS, WANTED = 12, {"op": "grpo_step", "shape": "gptoss_lite", "completion": 3968, "random_rollouts": True}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="JSON lines of grpo_step.py")
    parser.add_argument("png", type=Path, help="the picture")
    options = parser.parse_args(argv)
    plot(options.lines, options.png)


def plot(source: Path, target: Path) -> None:
    """Both curves of the lines in ``source``, as a PNG."""
    lines = [x for x in read_lines(source) if WANTED.items() <= x.items() and "error" not in x]
    by_period = {x["gradient_checkpointing"]: x for x in lines}  # the last run of each
    if 0 not in by_period:
        raise SystemExit(f"{source} must hold lines of grpo_step.py without checkpointing and with {WANTED}, got none")
    periods = [p for p in (1, 2, 3, 4, 6, 12, 0) if p in by_period]
    names = [str(p) if p else "none" for p in periods]
    measured = [by_period[p] for p in periods]
    figure = Figure(figsize=(11, 4), layout="constrained")
    memory, time = figure.subplots(1, 2)
    memory.plot(names, [x["peak_gib_update"] for x in measured], "o-", label="measured")
    memory.plot(names, [x["planned_gib_update"] for x in measured], "x--", label="planned")
    memory.set(title="Peak of the update (GiB)", xlabel="every n-th block recomputed", ylim=(0, None))
    whole = by_period[0]["seconds_update"]
    time.plot(names, [x["seconds_update"] / whole for x in measured], "o-", label="measured")
    planned = [checkpoint_step_factor(LAYERS, p) if p else 1.0 for p in periods]
    time.plot(names, planned, "x--", label="planned, FLOPs")
    time.set(title="Time of the update / without checkpointing", xlabel="every n-th block recomputed", ylim=(0.8, None))
    for ax in (memory, time):
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    figure.suptitle(f"GPT-OSS-Lite, 8 x 4,096 tokens, bf16, {measured[0]['gpu']}, commit {measured[0]['commit'][:7]}")
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
