"""The folder of a run: its name, the checkpoints in it, and whether they are whole."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import tempfile
import uuid
from pathlib import Path
from typing import Any

from grpo_moe.text import encodable, say

from .files import parse_json
from .launch import DOCTOR_VARIABLE
from .run_lock import check_is_free

STATE_FILE = "grpo_state.json"
STATE_KEYS = {"step", "num_processes", "config", "files", "random_streams", "checksum"}
RUN_FILE = "run_id"
RUN_FILES = (
    r"checkpoint-\d+|metrics\.jsonl|expert_load\.jsonl|completions|capsules|summary\.json|model|report\.html"
    r"|(curves|signal|experts|expert_load)\.png"
)
"""What else a run writes into its folder: a pattern of whole names."""


def start_run(output_dir: str | os.PathLike) -> str:
    """Gives a fresh run in ``output_dir`` a name, and puts what an earlier one left there into ``earlier-<n>``.

    Call on the main process; returns the name for ``state["run_id"]``.
    """
    name = uuid.uuid4().hex
    claim_folder(output_dir, name)
    return name


def claim_folder(output_dir: str | os.PathLike, name: str, keep: Path | None = None) -> None:
    """Makes the folder that of the run ``name``; what another run left there goes into ``earlier-<n>``.

    Call on the main process.

    Args:
        keep: a checkpoint that is read next, which stays where it is.
    """
    folder = Path(output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    run, known = folder / RUN_FILE, _run_name(folder)
    if known == name:
        return
    left = [path for path in folder.iterdir() if re.fullmatch(RUN_FILES, path.name) and path != keep]
    if known is not None and left:
        numbers = [int(match[1]) for path in folder.iterdir() if (match := re.fullmatch(r"earlier-(\d+)", path.name))]
        aside = folder / f"earlier-{max(numbers, default=0) + 1}"
        aside.mkdir()
        for path in [*left, run]:  # last what says that there is a run to move
            path.replace(aside / path.name)
        say(f"The earlier run in {folder} is now in {aside}.")
    run.write_text(name, encoding="utf-8")


def list_checkpoints(output_dir: str | os.PathLike) -> list[Path]:
    """Finished checkpoints of the newest run in ``output_dir``, by step; without those whose state is damaged."""
    name = _run_name(output_dir)
    found = [(path, *_parse_state(path)) for path in _finished(output_dir)]
    return [path for path, state, _ in found if name is not None and state.get("run_id") == name]


def best_checkpoint(output_dir: str | os.PathLike) -> Path | None:
    """The checkpoint of the newest run's best evaluation; None without one, or where none was saved at its step."""
    existing = list_checkpoints(output_dir)
    best = read_state(existing[-1]).get("best") if existing else None
    return next((path for path in existing if best and step_of(path) == best["step"]), None)


def find_checkpoint(name: str | bool, output_dir: str) -> Path | None:
    """The folder that ``resume_from_checkpoint`` names; None for "latest" (or True) when there is none yet.

    Raises:
        ValueError: a path that is not one of our checkpoints, or a damaged state; the newest one's for "latest".
    """
    if name is True or name in ("latest", "True", "true"):
        existing = list_checkpoints(output_dir)
        if not existing:
            _check_no_others(output_dir)
        last = step_of(existing[-1]) if existing else -1
        for path in _named(output_dir):
            if step_of(path) > last and _parse_state(path)[1]:
                read_state(path)  # raises: to pass over it silently would lose its updates
        return existing[-1] if existing else None
    path = Path(name) if isinstance(name, str | os.PathLike) else None
    if not name or path is None or not (path / STATE_FILE).is_file():
        known = ", ".join(str(p) for p in list_checkpoints(output_dir)) or "none"
        raise ValueError(
            f"resume_from_checkpoint must be 'latest' or a checkpoint folder with {STATE_FILE}, got {name!r}; "
            f"checkpoints in {output_dir}: {known}"
        )
    read_state(path)
    return path


def _check_no_others(output_dir: str | os.PathLike) -> None:
    """A fresh run puts those of another aside, so whole ones that are not of the run that is named are its own."""
    if whole := [path for path in _finished(output_dir) if not _parse_state(path)[1]]:
        raise ValueError(
            f"{Path(output_dir) / RUN_FILE} must name the run of the checkpoints beside it, got "
            f"{_run_name(output_dir) or 'no name of a run'}; go on with resume_from_checkpoint={str(whole[-1])!r}, or "
            "start anew without it"
        )


def _run_name(output_dir: str | os.PathLike) -> str | None:
    """Of the newest run in the folder; None where none was, or the file is damaged."""
    run = Path(output_dir) / RUN_FILE
    name = run.read_text(encoding="utf-8", errors="replace") if run.is_file() else ""
    return name if re.fullmatch("[0-9a-f]{32}", name) else None


def read_state(path: Path) -> dict[str, Any]:
    """Our own state in a checkpoint.

    Raises:
        ValueError: the file is damaged or of another program; the message names the checkpoint before.
    """
    state, problem = _parse_state(path)
    if problem:
        raise ValueError(f"{path / STATE_FILE} must be {problem}; {way_back(path)}")
    return state


def keep_newest(folder: Path, pattern: str, keep: int | None) -> None:
    """Removes all but the ``keep`` files with the largest numbers, the group of ``pattern``; None keeps all."""
    if keep is None:
        return
    found = {path: int(match[1]) for path in folder.glob("*") if (match := re.fullmatch(pattern, path.name))}
    for path in sorted(found, key=found.__getitem__)[:-keep]:
        path.unlink(missing_ok=True)


def check_run_folder(output_dir: str, resume_from_checkpoint: str | None, *, trains: bool = True) -> None:
    """Finds out before any work whether the folder can be written and the checkpoint to resume from is there.

    Args:
        output_dir, resume_from_checkpoint: the options of the run.
        trains: whether a run starts next, which needs a folder where none is training. The doctor starts none.

    Raises:
        ValueError: naming output_dir or resume_from_checkpoint; another run is training in the folder.
    """
    if "\0" in output_dir or encodable(output_dir) != output_dir:
        raise ValueError(f"output_dir must be a path of whole characters, got {output_dir!r}; choose another one")
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
        if trains and not os.environ.get(DOCTOR_VARIABLE) and os.environ.get("RANK", "0") == "0":  # main alone locks
            check_is_free(output_dir)
        for name in ("model", "completions", "capsules"):
            if (Path(output_dir) / name).is_file():
                raise NotADirectoryError(f"{name} in it is a file")
    except OSError as error:
        raise ValueError(
            f"output_dir must be a folder that can be written, got {output_dir!r}: {error}; choose another one"
        ) from error
    if resume_from_checkpoint is not None:
        find_checkpoint(resume_from_checkpoint, output_dir)


def _named(output_dir: str | os.PathLike) -> list[Path]:
    """Folders with the name of a checkpoint, by step."""
    found = [p for p in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)]
    return sorted(found, key=step_of)


def _finished(output_dir: str | os.PathLike) -> list[Path]:
    return [path for path in _named(output_dir) if (path / STATE_FILE).is_file()]


def step_of(path: Path) -> float:
    """By its name; a checkpoint that was renamed counts as later than any."""
    match = re.fullmatch(r"checkpoint-(\d+)", path.name)
    return int(match[1]) if match else math.inf


def _parse_state(path: Path) -> tuple[dict[str, Any], str | None]:
    """The state, or {} and what the file should be and is."""
    try:
        state = parse_json((path / STATE_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, "there, got no such file"
    except ValueError:
        return {}, "JSON, got a damaged file"
    if not isinstance(state, dict) or not STATE_KEYS <= state.keys():
        return {}, "the state of a run, got other content"
    if state.pop("checksum") != checksum(state):
        return {}, "as it was written, got another checksum"
    return state, None


def checksum(content: dict[str, Any]) -> str:
    """SHA-256 of a JSON value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_facts(path: Path) -> dict[str, Any]:
    """Bytes and SHA-256 of a file, as a manifest holds them."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def problems_of(path: Path, files: dict[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the files of a checkpoint, each by name."""
    problems = []
    for name, facts in files.items():
        if not (path / name).is_file():
            problems.append(f"no {name}")
        elif (size := (path / name).stat().st_size) != facts["bytes"]:
            problems.append(f"{name} of {size} bytes instead of {facts['bytes']}")
        elif file_facts(path / name) != facts:
            problems.append(f"{name} with another checksum")
    return problems


def way_back(path: Path) -> str:
    """How to go on without the checkpoint at ``path``."""
    for earlier in reversed(list_checkpoints(path.parent)):
        if step_of(earlier) < step_of(path) and not problems_of(earlier, _parse_state(earlier)[0]["files"]):
            return f"the one before is whole: resume_from_checkpoint={str(earlier)!r}"
    return "there is no whole one before it: start anew without resume_from_checkpoint"
