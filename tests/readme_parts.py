"""The parts of the README that are made from the code; `python tests/readme_parts.py` writes them anew.

A part stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from grpo_moe import GRPOConfig, planning

README = Path(__file__).parents[1] / "README.md"


def options_table() -> str:
    """Every option of GRPOConfig with its default and its help."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(GRPOConfig):
        default = str(field.default).lower() if isinstance(field.default, bool) else field.default
        text = field.metadata["help"].replace("|", "\\|")
        lines.append(f"| `{field.name}` | {'' if default is None else f'`{default}`'} | {text} |")
    return "\n".join(lines)


def memory_table() -> str:
    """Planned GiB of each phase for published models and numbers of H200s."""
    run = planning.RunShape(
        micro_batch=4, prompt_tokens=512, completion_tokens=4096, prompts_per_rollout=1, num_generations=4,
        checkpoint_period=1,
    )  # fmt: skip
    lora = dataclasses.replace(run, lora_rank=16, weight_bytes=2)
    columns = {"1 GPU, LoRA": (lora, 1), "8, FSDP2, LoRA": (lora, 8)}
    columns |= {f"{n}, FSDP2": (run, n) for n in (8, 16, 64)}
    lines = ["| model | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in ("olmoe-1b-7b", "qwen3-30b-a3b", "gpt-oss-20b", "gpt-oss-120b"):
        shape, cells = planning.ModelShape.from_config(planning.preset_config(name)), []
        for options, gpus in columns.values():
            where = (planning.GPUS["H200"], gpus, "none" if gpus == 1 else "fsdp2")
            plan = planning.plan_memory(shape, options, *where)
            sizes = [f"{plan.bytes_of(phase) / 2**30:.0f}" for phase in plan.phases]
            cells.append(" / ".join(sizes) if plan.fits else f"~~{' / '.join(sizes)}~~")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


PARTS = {"options": options_table, "memory": memory_table}


def with_parts(text: str) -> str:
    """The README's text with every part made anew.

    Raises:
        ValueError: a part's place is missing.
    """
    for name, make in PARTS.items():
        text, count = re.subn(
            rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
            lambda m, make=make: m[1] + make() + "\n" + m[2],
            text,
            flags=re.S,
        )
        if count != 1:
            raise ValueError(f"README.md must have the part {name} once, got {count}; add <!-- {name} --> around it")
    return text


if __name__ == "__main__":
    README.write_text(with_parts(README.read_text(encoding="utf-8")), encoding="utf-8")
