"""Checkpoints that are either whole or absent: accelerate's state, our own state as JSON, renamed into place."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

from accelerate import Accelerator

STATE_FILE = "grpo_state.json"
RUN_FILE = "run_id"
FREE_OPTIONS = {  # may differ between a run and its continuation: they do not shape the updates
    "output_dir",
    "max_steps",
    "max_train_seconds",
    "use_cpu",
    "gradient_checkpointing",
    "report_to",
    "eval_on_start",
    "eval_steps",
    "eval_temperature",
    "pass_threshold",
    "save_steps",
    "save_total_limit",
    "resume_from_checkpoint",
    "log_completions",
    "show_progress",
}


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


def start_run(output_dir: str | os.PathLike) -> str:
    """Gives a fresh run in ``output_dir`` a name, so that an earlier run's checkpoints are not taken for its own.

    Call on the main process; returns the name for ``state["run_id"]``.
    """
    name = uuid.uuid4().hex
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    (Path(output_dir) / RUN_FILE).write_text(name, encoding="utf-8")
    return name


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Finished checkpoints of the newest run in ``output_dir``, by step."""
    run = Path(output_dir) / RUN_FILE
    name = run.read_text(encoding="utf-8") if run.is_file() else None
    found = [p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    finished = [p for p in found if (p / STATE_FILE).is_file()]
    own = [p for p in finished if name is not None and read_state(p).get("run_id") == name]
    return sorted(own, key=lambda p: int(p.name.split("-")[1]))


def find_checkpoint(name: str | bool, output_dir: str) -> Path | None:
    """The folder that ``resume_from_checkpoint`` names; None for "latest" (or True) when there is none yet.

    Raises:
        ValueError: a path that is not one of our checkpoints.
    """
    if name is True or name in ("latest", "True", "true"):
        existing = list_checkpoints(output_dir)
        return existing[-1] if existing else None
    path = Path(name)
    if not (path / STATE_FILE).is_file():
        known = ", ".join(str(p) for p in list_checkpoints(output_dir)) or "none"
        raise ValueError(
            f"resume_from_checkpoint must be 'latest' or a checkpoint folder with {STATE_FILE}, got {name}; "
            f"checkpoints in {output_dir}: {known}"
        )
    read_state(path)
    return path


def read_state(path: Path) -> dict[str, Any]:
    """Our own state in a checkpoint.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path / STATE_FILE} must be JSON, got a damaged file; resume from another checkpoint"
        ) from error
    if not isinstance(state, dict) or not {"step", "num_processes", "config"} <= state.keys():
        raise ValueError(f"{path / STATE_FILE} must be the state of a run, got other content; resume from another one")
    return state


def check_run_folder(output_dir: str, resume_from_checkpoint: str | None) -> None:
    """Finds out before any work whether the folder can be written and the checkpoint to resume from is there.

    Raises:
        ValueError: naming output_dir or resume_from_checkpoint.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise ValueError(f"output_dir must be a folder that can be written, got {output_dir!r}: {error}") from error
    if resume_from_checkpoint is not None:
        find_checkpoint(resume_from_checkpoint, output_dir)


def load_checkpoint(accelerator: Accelerator, path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Loads model, optimiser and schedule in place and returns our own state.

    Args:
        config: the run's options; those that shape the updates must be the checkpoint's.

    Raises:
        ValueError: the checkpoint was written with other options, by another number of processes, for another model.
    """
    state = read_state(path)
    changed = {
        name: (state["config"].get(name), value)
        for name, value in json.loads(json.dumps(config)).items()
        if name not in FREE_OPTIONS and state["config"].get(name) != value
    }
    if changed:
        pairs = ", ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in changed.items())
        raise ValueError(
            f"options must be those of the checkpoint {path}, got changes {pairs}; drop them or start anew"
        )
    if state["num_processes"] != accelerator.num_processes:
        raise ValueError(
            f"num_processes must be that of the checkpoint {path}, {state['num_processes']}, "
            f"got {accelerator.num_processes}; launch with the same number"
        )
    try:
        accelerator.load_state(str(path))
    except Exception as error:  # of many kinds: damaged files, missing ones, another model
        raise ValueError(f"{path} must be a whole checkpoint of this model, got: {error}") from error
    return state


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
