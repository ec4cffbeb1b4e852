"""How a run is launched: whether it is on CPUs, and ``accelerate launch --cpu --num_processes N`` as N processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import yaml

DOCTOR_VARIABLE = "GRPO_MOE_DOCTOR"
"""Environment variable under which :meth:`GRPOTrainer.train` runs the doctor and ends."""


def start_all_processes() -> None:
    """Becomes torchrun with N workers if ``accelerate launch --cpu --num_processes N`` started this process alone.

    The number may also stand in accelerate's configuration file, as in recipes/accelerate/cpu.yaml.

    accelerate 1.15 starts one process under ``--cpu``, whatever ``--num_processes`` says (``launch_command`` goes to
    ``simple_launcher``), and leaves no other trace of the number than its own command line. Call first in a script's
    main. Drop this when accelerate starts them. Does nothing where there is no /proc.
    """
    parent = Path(f"/proc/{os.getppid()}/cmdline")
    if "WORLD_SIZE" in os.environ or os.environ.get("ACCELERATE_USE_CPU") != "True" or not parent.exists():
        return
    count = requested_processes(parent.read_text(encoding="utf-8", errors="replace").split("\0"), sys.argv[0])
    if count > 1:
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count), *sys.argv]
        os.execv(sys.executable, [sys.executable, *command])


def runs_on_cpu(use_cpu: bool) -> bool:
    """Whether accelerate's states must be made for CPUs: asked for, ``accelerate launch --cpu``, or no GPU for a group.

    PartialState itself looks at none of the last two, and would make every process of a group a run of its own.
    """
    launched = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return use_cpu or launched or (world_size() > 1 and not torch.cuda.is_available())


def world_size() -> int:
    """Processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", 1))


def requested_processes(command: list[str], script: str) -> int:
    """How many an ``accelerate launch`` command line wants by ``--num_processes`` or ``--config_file``, else 1."""
    if not any(Path(word).name.startswith(("accelerate", "launch")) for word in command[:4]) or script not in command:
        return 1
    given = {}
    words = command[: command.index(script)]
    for word, after in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        given[name.lstrip("-").replace("-", "_")] = value or after
    if "num_processes" not in given and "config_file" in given:
        given |= yaml.safe_load(Path(given["config_file"]).read_text(encoding="utf-8"))
    count = str(given.get("num_processes", 1))
    return int(count) if count.isdigit() else 1
