"""Checkpoints that are whole or absent: accelerate's state, ours as JSON with a checksum of every file, renamed."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from .config import GRPOConfig

STATE_FILE = "grpo_state.json"
STATE_KEYS = {"step", "num_processes", "config", "files", "random_streams", "checksum"}
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
    "num_generations_eval",
    "metric_for_best_model",
    "greater_is_better",
    "pass_threshold",
    "save_steps",
    "save_total_limit",
    "resume_from_checkpoint",
    "log_completions",
    "show_progress",
}


def save_checkpoint(
    accelerator: Accelerator, state: dict[str, Any], output_dir: str, *, keep: int, best: int | None = None
) -> Path:
    """Writes ``checkpoint-<step>`` under ``output_dir`` and drops older ones but the newest ``keep`` and the best.

    Every process takes part. The folder appears under its name only when all of it is on disk. Order is by step, never
    by time; checkpoints of later steps, which a run resumed from an older one has not reached again, stay.

    Args:
        accelerator: whose models, optimisers, schedules and random streams are saved.
        state: JSON values; ``state["step"]`` names the folder.
        output_dir: of the run.
        keep: checkpoints to keep, this one included, at least 1.
        best: step of a checkpoint to keep besides, as ``state["best"]["step"]``; None for no such.

    Raises:
        OSError: the disk is full or cannot be written, on any process; finished checkpoints stay as they are.
    """
    final = Path(output_dir) / f"checkpoint-{state['step']}"
    unfinished = final.with_name(final.name + ".tmp")
    on_all = partial(_on_all, accelerator, unfinished)
    on_main = partial(on_all, only_main=True)
    on_main(lambda: _remove_unfinished(output_dir))
    on_all(lambda: accelerator.save_state(str(unfinished), safe_serialization=True))
    files = {name: found for part in on_all(lambda: _written(accelerator, unfinished)) for name, found in part.items()}
    streams = on_all(_random_streams)
    on_main(lambda: _finish(unfinished, final, {**state, "files": files, "random_streams": streams}))
    on_main(lambda: _rotate(output_dir, state["step"], keep, best))
    return final


def run_settings(args: GRPOConfig, adapters: Any) -> dict[str, Any]:
    """What a resumed run must share with the run it goes on with: its options, and the configuration of adapters."""
    peft = None if adapters is None else adapters.active_peft_config.to_dict()
    known = {name: sorted(x) if isinstance(x, set) else str(x) for name, x in (peft or {}).items()}
    return {**asdict(args), "peft_config": None if peft is None else known}


def start_run(output_dir: str | os.PathLike) -> str:
    """Gives a fresh run in ``output_dir`` a name, so that an earlier run's checkpoints are not taken for its own.

    Call on the main process; returns the name for ``state["run_id"]``.
    """
    name = uuid.uuid4().hex
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    (Path(output_dir) / RUN_FILE).write_text(name, encoding="utf-8")
    return name


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Finished checkpoints of the newest run in ``output_dir``, by step; without those whose state is damaged."""
    run = Path(output_dir) / RUN_FILE
    name = run.read_text(encoding="utf-8") if run.is_file() else None
    found = [(path, *_parse_state(path)) for path in _finished(output_dir)]
    return [path for path, state, _ in found if name is not None and state.get("run_id") == name]


def best_checkpoint(output_dir: str | os.PathLike) -> Path | None:
    """The checkpoint of the newest run's best evaluation; None without one, or where none was saved at its step."""
    existing = list_checkpoints(output_dir)
    best = read_state(existing[-1]).get("best") if existing else None
    return next((path for path in existing if best and _step(path) == best["step"]), None)


def find_checkpoint(name: str | bool, output_dir: str) -> Path | None:
    """The folder that ``resume_from_checkpoint`` names; None for "latest" (or True) when there is none yet.

    Raises:
        ValueError: a path that is not one of our checkpoints, or a damaged state; the newest one's for "latest".
    """
    if name is True or name in ("latest", "True", "true"):
        existing = list_checkpoints(output_dir)
        last = _step(existing[-1]) if existing else -1
        for path in _finished(output_dir):
            if _step(path) > last and _parse_state(path)[1]:
                read_state(path)  # raises: to pass over it silently would lose its updates
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
        ValueError: the file is damaged or of another program; the message names the checkpoint before.
    """
    state, problem = _parse_state(path)
    if problem:
        raise ValueError(f"{path / STATE_FILE} must be {problem}; {_way_back(path)}")
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
    """Loads model, optimiser, schedule and random streams in place and returns our own state.

    Every process takes part. All files are compared with their checksums before anything in memory changes.

    Args:
        accelerator: with the same models, optimisers and schedules as at the time of saving.
        path: a checkpoint.
        config: the run's options; those that shape the updates must be the checkpoint's.

    Raises:
        ValueError: the checkpoint is damaged (the message names the one before), or was written with other options, by
            another number of processes, for another model.
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
    problems = _problems(path, {name: state["files"][name] for name in _share(accelerator, state["files"])})
    if problems := [problem for part in gather_object([problems]) for problem in part]:
        raise ValueError(
            f"{path} must be a whole checkpoint of this model, got {', '.join(problems)}; {_way_back(path)}"
        )
    try:
        accelerator.load_state(str(path))
    except Exception as error:  # of many kinds: other parameters, other optimiser, other shapes
        raise ValueError(
            f"{path} must be a checkpoint of this model, got: {error}; resume with the model and the adapters of the "
            "run that wrote it"
        ) from error
    _check_random_streams(path, state["random_streams"][accelerator.process_index])
    return state


def _on_all(accelerator: Accelerator, unfinished: Path, work: Callable[[], Any], *, only_main: bool = False) -> list:
    """What ``work`` returns on each process; when it fails on any, the unfinished folder goes and all raise."""
    result, error = None, None
    try:
        if accelerator.is_main_process or not only_main:
            result = work()
    except (OSError, RuntimeError, SafetensorError) as caught:  # a full disk comes as any of these
        error = caught
    everyone = gather_object([(result, None if error is None else str(error))])
    if problems := [problem for _, problem in everyone if problem is not None]:
        if accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise OSError(
            f"output_dir must have room and be writable for {unfinished.stem}, got {problems[0]}; free some space or "
            "choose another one (finished checkpoints are as they were)"
        ) from error
    return [result for result, _ in everyone]


def _written(accelerator: Accelerator, folder: Path) -> dict[str, dict[str, Any]]:
    """Bytes and checksum of this process's share of the files, once they are on disk."""
    names = _share(accelerator, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()])
    for name in names:
        _flush(folder / name)
    return {name: _file_facts(folder / name) for name in names}


def _finish(unfinished: Path, final: Path, state: dict[str, Any]) -> None:
    """Writes the state, which makes a folder a checkpoint, and gives the folder its name."""
    content = json.loads(json.dumps(state))
    (unfinished / STATE_FILE).write_text(json.dumps({**content, "checksum": _checksum(content)}), encoding="utf-8")
    for path in (unfinished / STATE_FILE, *(p for p in unfinished.rglob("*") if p.is_dir()), unfinished):
        _flush(path)
    earlier = _put_aside(final) if final.exists() else None
    os.replace(unfinished, final)
    _flush(final.parent)
    if earlier is not None:
        shutil.rmtree(earlier)


def _rotate(output_dir: str, step: int, keep: int, best: int | None) -> None:
    for old in [path for path in list_checkpoints(output_dir) if _step(path) <= step][:-keep]:
        if _step(old) != best:
            shutil.rmtree(_put_aside(old))


def _put_aside(path: Path) -> Path:
    """Renamed before its removal: a checkpoint that is half removed when the process dies must not look finished."""
    return path.replace(path.with_name(path.name + ".old.tmp"))


def _remove_unfinished(output_dir: str) -> None:
    for path in Path(output_dir).glob("checkpoint-*.tmp"):
        shutil.rmtree(path)


def _finished(output_dir: str | os.PathLike) -> list[Path]:
    found = [p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted((p for p in found if (p / STATE_FILE).is_file()), key=_step)


def _step(path: Path) -> float:
    """By its name; a checkpoint that was renamed counts as later than any."""
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else math.inf


def _parse_state(path: Path) -> tuple[dict[str, Any], str | None]:
    """The state, or {} and what the file should be and is."""
    try:
        state = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    except ValueError:
        return {}, "JSON, got a damaged file"
    if not isinstance(state, dict) or not STATE_KEYS <= state.keys():
        return {}, "the state of a run, got other content"
    if state.pop("checksum") != _checksum(state):
        return {}, "as it was written, got another checksum"
    return state, None


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _file_facts(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _share(accelerator: Accelerator, names: Iterable[str]) -> list[str]:
    """This process's part of the names: reading large files is shared out."""
    return sorted(names)[accelerator.process_index :: accelerator.num_processes]


def _problems(path: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the files of a checkpoint, each by name."""
    problems = []
    for name, facts in files.items():
        if not (path / name).is_file():
            problems.append(f"no {name}")
        elif (size := (path / name).stat().st_size) != facts["bytes"]:
            problems.append(f"{name} of {size} bytes instead of {facts['bytes']}")
        elif _file_facts(path / name) != facts:
            problems.append(f"{name} with another checksum")
    return problems


def _way_back(path: Path) -> str:
    """How to go on without the checkpoint at ``path``."""
    for earlier in reversed(list_checkpoints(path.parent)):
        if _step(earlier) < _step(path) and not _problems(earlier, _parse_state(earlier)[0]["files"]):
            return f"the one before is whole: resume_from_checkpoint={str(earlier)!r}"
    return "there is no whole one before it: start anew without resume_from_checkpoint"


def _random_streams() -> dict[str, str]:
    """Digest of the state of every random stream of this process."""
    _, numpy_state, *numpy_position = np.random.get_state()
    streams = {
        "python": repr(random.getstate()).encode(),
        "numpy": numpy_state.tobytes() + repr(numpy_position).encode(),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    if torch.cuda.is_available():
        states = torch.cuda.get_rng_state_all()
        streams |= {f"cuda:{number}": state.numpy().tobytes() for number, state in enumerate(states)}
    return {name: hashlib.sha256(state).hexdigest()[:16] for name, state in streams.items()}


def _check_random_streams(path: Path, saved: dict[str, str]) -> None:
    """accelerate 1.15 goes on without a word when it cannot restore them; devices that are not here have none."""
    lost = [name for name, digest in _random_streams().items() if saved.get(name, digest) != digest]
    if lost:
        raise ValueError(
            f"{path} must bring back the random streams {', '.join(lost)}, got others; resume with the versions of "
            "accelerate, torch and numpy that wrote it"
        )


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
