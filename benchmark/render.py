"""Markdown tables from benchmark lines: python benchmark/render.py benchmark/results/h200.jsonl"""

from __future__ import annotations

import argparse
from pathlib import Path

from harness import read_lines

POINT_FIELDS = {
    "grpo_loss": ("level", "H", "V", "L", "tokens"),
    "moe_experts": ("shape", "T", "mode", "start", "routing", "frozen"),
    "single_pass": ("sweep", "E", "H", "I", "K", "t"),
    "ceiling": ("size",),
    "train_step": ("shape", "B", "T", "completion", "checkpointing"),
    "rollout": ("shape", "batch", "prompt", "new_tokens"),
    "rollout_profile": ("shape", "batch", "prompt", "new_tokens"),
    "rollout_mismatch": ("shape", "dtype", "batch", "prompt", "new_tokens", "routes"),
    "grpo_step": (
        "shape",
        "world",
        "micro_batch",
        "prompt",
        "completion",
        "gradient_checkpointing",
        "lora",
        "lora_experts",
        "padding_free",
        "random_rollouts",
    ),
    "trl_step": ("shape", "prompts", "generations", "prompt", "completion", "micro_batch"),
    "pretrain_then_dapo": ("objective", "routing_replay", "seed"),
}
"""What makes a row of an op's table; its columns are the implementations."""
ERROR_FIELDS = {
    "grpo_loss": ("logp_error", "grad_hidden_error", "grad_weight_error"),
    "moe_experts": ("rel_err",),
    "single_pass": ("rel_err",),
    "train_step": ("rel_err", "full_rel_err"),
    "rollout": ("logp_error", "mean_logp_error", "greedy_gap", "entropy_z"),
    "rollout_mismatch": ("mean_abs", "max_abs", "kl", "flip_rate"),
}
"""Errors against float64 truth, the largest of an implementation is shown."""
TIMES = ("ms", "ms_per_step", "device_ms_per_step")
RATES = (("tflops", "TFLOP/s"), ("gb_per_s", "GB/s"), ("tokens_per_s", "tokens/s"))
ENVIRONMENT = ("gpu", "torch", "triton", "float32_matmul_precision", "commit", "date")


def render(lines: list[dict]) -> str:
    """A section for each op: environment, times and memory, errors, and what was refused or failed.

    Of lines with the same op, implementation and point the last one counts.

    Raises:
        ValueError: an op has no entry in POINT_FIELDS.
    """
    sections = []
    for op in dict.fromkeys(line["op"] for line in lines):
        if op not in POINT_FIELDS:
            raise ValueError(f"op must be one of {', '.join(POINT_FIELDS)}, got {op!r}; add its fields to POINT_FIELDS")
        latest = {(line["impl"], _point(line)): line for line in lines if line["op"] == op}
        sections.append(_section(op, list(latest.values())))
    return "\n".join(sections)


def _section(op: str, lines: list[dict]) -> str:
    facts = {name: sorted({str(line[name]) for line in lines if line.get(name)}) for name in ENVIRONMENT}
    facts["peers"] = sorted({line["peer_version"] for line in lines if line.get("peer_version")})
    texts = [f"{name} {', '.join(values)}" for name, values in facts.items() if values]
    parts = [f"### {op}", "", "; ".join(texts), "", *_times(op, lines), "", *_errors(op, lines)]
    failed = [line for line in lines if "error" in line]
    if failed:
        parts += ["", "Refused or failed:", ""]
        parts += [f"- {line['impl']} at {_point_text(op, line)}: {line['error']}" for line in failed]
    return "\n".join(parts) + "\n"


def _times(op: str, lines: list[dict]) -> list[str]:
    """Median (p20-p80), rate and peak memory, a row for each point."""
    impls = list(dict.fromkeys(line["impl"] for line in lines))
    cells = {(line["impl"], _point(line)): _cell(line) for line in lines}
    rows = [[str(x) for x in p] + [cells.get((i, p), "-") for i in impls] for p in dict.fromkeys(map(_point, lines))]
    return _table([*POINT_FIELDS[op], *impls], rows)


def _errors(op: str, lines: list[dict]) -> list[str]:
    names = ERROR_FIELDS.get(op, ())
    rows = []
    for impl in dict.fromkeys(line["impl"] for line in lines):
        of_impl = [line for line in lines if line["impl"] == impl]
        values = [[line[name] for line in of_impl if line.get(name) is not None] for name in names]
        if any(values):
            rows.append([impl, *(f"{max(x):.1e}" if x else "-" for x in values)])
    return _table(["largest", *names], rows) if rows else []


def _cell(line: dict) -> str:
    if "error" in line:
        return "failed"
    if "pass_rate_after" in line:
        return f"{line['pass_rate_before']:.3f} -> {line['pass_rate_after']:.3f}, {line['updates']} updates"
    if "seconds_rollout" in line:
        phases = {name.removeprefix("seconds_"): x for name, x in line.items() if name.startswith("seconds_")}
        peaks = [x for name, x in line.items() if name.startswith("peak_gib") and x is not None]
        text = ", ".join(f"{name} {seconds:.3g} s" for name, seconds in phases.items())
        return f"{text}, {max(peaks):.1f} GiB" if peaks else text
    ms = next((line[name] for name in TIMES if name in line), None)
    text = f"mean {line['mean_abs']:.1e}, KL {line['kl']:.1e}" if ms is None else f"{ms:.4g} ms"
    text += f" ({line['p20']:.4g}-{line['p80']:.4g})" if "p20" in line else ""
    for name, unit in RATES:
        text += f", {line[name]:.0f} {unit}" if name in line else ""
    return text if line.get("peak_gib") is None else f"{text}, {line['peak_gib']:.1f} GiB"


def _point(line: dict) -> tuple:
    return tuple(line.get(name) for name in POINT_FIELDS[line["op"]])


def _point_text(op: str, line: dict) -> str:
    return ", ".join(f"{name} {line.get(name)}" for name in POINT_FIELDS[op])


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of benchmarks")
    files = parser.parse_args(argv).files
    if missing := [str(path) for path in files if not path.is_file()]:
        parser.error(f"files must exist, got {', '.join(missing)}")
    print(render([line for path in files for line in read_lines(path)]))


if __name__ == "__main__":
    main()
