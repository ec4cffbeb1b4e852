"""The parts of the README that are made from the code; `python tests/readme_parts.py` writes them anew.

A part stands between `<!-- NAME -->` and `<!-- /NAME -->`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from grpo_moe import GRPOConfig

README = Path(__file__).parents[1] / "README.md"


def options_table() -> str:
    """Every option of GRPOConfig with its default and its help."""
    lines = ["| option | default | what it does |", "|---|---|---|"]
    for field in dataclasses.fields(GRPOConfig):
        default = str(field.default).lower() if field.type == "bool" else field.default
        text = field.metadata["help"].replace("|", "\\|")
        lines.append(f"| `{field.name}` | {'' if default is None else f'`{default}`'} | {text} |")
    return "\n".join(lines)


PARTS = {"options": options_table}


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
