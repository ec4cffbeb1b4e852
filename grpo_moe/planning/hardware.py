"""GPUs that a plan can be made for: memory that a process can use, and dense bf16 FLOP/s."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .flops import PEAK_FLOPS

GIB = 2**30


@dataclass(frozen=True)
class Hardware:
    """One GPU."""

    name: str
    memory_bytes: int
    """As ``torch.cuda.mem_get_info`` reports the total: less than the name says."""
    peak_flops: float
    """Dense bf16 FLOP/s."""
    is_hopper: bool
    """Hopper or newer, where the head of the loss runs in Triton."""


GPUS = {
    x.name: x
    for x in (
        Hardware("H100", round(79.1 * GIB), PEAK_FLOPS["H100"], True),
        Hardware("H200", round(139.8 * GIB), PEAK_FLOPS["H200"], True),
        Hardware("B200", round(178.3 * GIB), PEAK_FLOPS["B200"], True),
        Hardware("A100-40", round(39.4 * GIB), PEAK_FLOPS["A100"], False),
        Hardware("A100-80", round(79.1 * GIB), PEAK_FLOPS["A100"], False),
        Hardware("L40S", round(44.4 * GIB), PEAK_FLOPS["L40S"], False),
    )
}
"""By name. B200 and L40S from NVIDIA's data sheets less what is reserved, the others as PyTorch shows them."""


def parse_gpus(text: str) -> tuple[int, Hardware]:
    """Number and kind of GPUs from "8xH200", "H200" or "2xA100-80".

    Raises:
        ValueError: another form, or a GPU that is not in the table.
    """
    match = re.fullmatch(r"(?:(\d+)\s*x\s*)?(.+)", text.strip(), re.IGNORECASE)
    known = {name.lower(): gpu for name, gpu in GPUS.items()}
    number, name = (int(match[1] or 1), match[2].lower()) if match else (0, "")
    if number < 1 or name not in known:
        raise ValueError(f"gpus must be a number and one of {', '.join(GPUS)}, got {text!r}; for example 8xH200")
    return number, known[name]
