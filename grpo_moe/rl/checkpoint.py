"""Checkpoints that are either whole or absent: accelerate's state, our own state as JSON, renamed into place."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate import Accelerator

STATE_FILE = "grpo_state.json"


def save_checkpoint(accelerator: Accelerator, state: dict[str, Any], output_dir: str, *, keep: int) -> Path:
    """Writes ``checkpoint-<step>`` under ``output_dir`` and drops all but the newest ``keep``.

    Every process takes part. The folder appears under its name only when all of it is on disk.

    Args:
        state: JSON values; ``state["step"]`` names the folder.
    """
    final = Path(output_dir) / f"checkpoint-{state['step']}"
    unfinished = final.with_name(final.name + ".tmp")
    if accelerator.is_main_process:
        shutil.rmtree(unfinished, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(unfinished), safe_serialization=True)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (unfinished / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")
        for path in unfinished.rglob("*"):
            if path.is_file():
                _flush(path)
        shutil.rmtree(final, ignore_errors=True)
        os.replace(unfinished, final)
        _flush(final.parent)
        for old in list_checkpoints(output_dir)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return final


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Finished checkpoints under ``output_dir`` in the order they were written.

    Not in the order of their steps: the folder may still hold those of an earlier, longer run.
    """
    found = [p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    finished = [p for p in found if (p / STATE_FILE).is_file()]
    return sorted(finished, key=lambda p: (p / STATE_FILE).stat().st_mtime_ns)


def find_checkpoint(name: str, output_dir: str) -> Path | None:
    """The folder that ``resume_from_checkpoint`` names; None for "latest" when there is none yet.

    Raises:
        ValueError: a path that is not one of our checkpoints.
    """
    if name in ("latest", "True", "true"):
        existing = list_checkpoints(output_dir)
        return existing[-1] if existing else None
    path = Path(name)
    if not (path / STATE_FILE).is_file():
        known = ", ".join(str(p) for p in list_checkpoints(output_dir)) or "none"
        raise ValueError(
            f"resume_from_checkpoint must be 'latest' or a checkpoint folder with {STATE_FILE}, got {name}; "
            f"checkpoints in {output_dir}: {known}"
        )
    return path


def load_checkpoint(accelerator: Accelerator, path: Path) -> dict[str, Any]:
    """Loads model, optimiser and schedule in place and returns our own state.

    Raises:
        ValueError: the checkpoint was written by another number of processes.
    """
    state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    if state["num_processes"] != accelerator.num_processes:
        raise ValueError(
            f"num_processes must be that of the checkpoint {path}, {state['num_processes']}, "
            f"got {accelerator.num_processes}; launch with the same number"
        )
    accelerator.load_state(str(path))
    return state


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
