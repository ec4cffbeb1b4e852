"""Checkpoints that are whole or absent: accelerate's state, ours as JSON with a checksum of every file, renamed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError

from grpo_moe.text import printable

from .config import GRPOConfig
from .run_folder import (
    STATE_FILE,
    checksum,
    file_facts,
    list_checkpoints,
    problems_of,
    read_state,
    step_of,
    way_back,
)

FREE_OPTIONS = {  # may differ between a run and its continuation: they do not shape the updates
    "output_dir",
    "max_steps",
    "max_train_seconds",
    "use_cpu",
    "gradient_checkpointing",
    "gradient_checkpointing_every",
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
    "capsule_steps",
    "log_completions",
    "log_total_limit",
    "show_progress",
}
SPLIT_OPTIONS = {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "padding_free"}
"""May differ as long as a rollout and its updates stay of the same size."""

logger = logging.getLogger(__name__)


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
    with _silent_about_tied_weights():
        on_all(lambda: accelerator.save_state(str(unfinished), safe_serialization=True))
    files = {name: found for part in on_all(lambda: _written(accelerator, unfinished)) for name, found in part.items()}
    streams = on_all(_random_streams)
    on_main(lambda: _finish(unfinished, final, {**state, "files": files, "random_streams": streams}))
    on_main(lambda: _rotate(output_dir, state["step"], keep, best))
    return final


def run_settings(args: GRPOConfig, adapters: Any, **others: Any) -> dict[str, Any]:
    """What a resumed run must share with the run it goes on with: options, configuration of adapters, and others."""
    peft = None if adapters is None else adapters.active_peft_config.to_dict()
    known = {name: sorted(x) if isinstance(x, set) else str(x) for name, x in (peft or {}).items()}
    return {**asdict(args), "peft_config": None if peft is None else known, **others}


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
    _check_options(path, state, json.loads(json.dumps(config)), accelerator.num_processes)
    problems = problems_of(path, {name: state["files"][name] for name in _share(accelerator, state["files"])})
    if problems := [problem for part in gather_object([problems]) for problem in part]:
        raise ValueError(
            f"{path} must be a whole checkpoint of this model, got {', '.join(problems)}; {way_back(path)}"
        )
    try:
        for file in sorted(path.glob("custom_checkpoint_*.pkl")):  # which accelerate unpickles whatever is in it
            torch.load(file, map_location="cpu", weights_only=True)
        accelerator.load_state(str(path))
    except Exception as error:  # of many kinds: other parameters, other optimiser, other shapes
        raise ValueError(
            f"{path} must be a checkpoint of this model, got: {printable(error)}; resume with the model and the "
            "adapters of the run that wrote it"
        ) from error
    streams = state["random_streams"]
    if accelerator.process_index < len(streams):  # no option of ours draws from them
        _check_random_streams(path, streams[accelerator.process_index])
    return state


def _check_options(path: Path, state: dict[str, Any], config: dict[str, Any], num_processes: int) -> None:
    """Refuses options that would make other updates; the split of a batch over processes and steps may change."""
    saved = state["config"]
    changed = {name: (saved.get(name), x) for name, x in config.items() if saved.get(name) != x}
    if "max_steps" in changed and config["lr_scheduler_type"] not in ("constant", "constant_with_warmup"):
        logger.warning("lr_scheduler_type %r follows max_steps: the learning rate is another one from here on than in "
                       "one run of %d updates", config["lr_scheduler_type"], config["max_steps"])  # fmt: skip
    if state["num_processes"] != num_processes and config["dynamic_sampling"]:
        logger.warning("dynamic_sampling on %d processes instead of %d keeps other groups than one run of the same "
                       "number would", num_processes, state["num_processes"])  # fmt: skip
    sizes = [_rows_and_windows(*run) for run in ((saved, state["num_processes"]), (config, num_processes))]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"a rollout must be {sizes[0][0]} completions for {sizes[0][1]} updates as in the checkpoint {path}, got "
            f"{sizes[1][0]} for {sizes[1][1]} on {num_processes} processes; choose per_device_train_batch_size, "
            "gradient_accumulation_steps and steps_per_generation for the same product"
        )
    shaping = {name: pair for name, pair in changed.items() if name not in FREE_OPTIONS | SPLIT_OPTIONS}
    if shaping:
        pairs = ", ".join(f"{name}: {old!r} -> {new!r}" for name, (old, new) in shaping.items())
        raise ValueError(
            f"options must be those of the checkpoint {path}, got changes {pairs}; drop them or start anew"
        )


def _rows_and_windows(config: dict[str, Any], num_processes: int) -> tuple[int, int]:
    """Completions of a rollout over all processes, and the updates of one pass over them."""
    steps = config["steps_per_generation"]
    return config["per_device_train_batch_size"] * steps * num_processes, steps // config["gradient_accumulation_steps"]


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


@contextmanager
def _silent_about_tied_weights() -> Iterator[None]:
    """accelerate 1.15 warns in every save that tied weights are stored once; its loading ties them again."""

    def others(record: logging.LogRecord) -> bool:
        return "Removed shared tensor" not in record.getMessage()

    source = logging.getLogger("accelerate.utils.other")
    source.addFilter(others)
    try:
        yield
    finally:
        source.removeFilter(others)


def _written(accelerator: Accelerator, folder: Path) -> dict[str, dict[str, Any]]:
    """Bytes and checksum of this process's share of the files, once they are on disk."""
    names = _share(accelerator, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()])
    for name in names:
        _flush(folder / name)
    return {name: file_facts(folder / name) for name in names}


def _finish(unfinished: Path, final: Path, state: dict[str, Any]) -> None:
    """Writes the state, which makes a folder a checkpoint, and gives the folder its name."""
    content = json.loads(json.dumps(state))
    (unfinished / STATE_FILE).write_text(json.dumps({**content, "checksum": checksum(content)}), encoding="utf-8")
    for path in (unfinished / STATE_FILE, *(p for p in unfinished.rglob("*") if p.is_dir()), unfinished):
        _flush(path)
    earlier = _put_aside(final) if final.exists() else None
    os.replace(unfinished, final)
    _flush(final.parent)
    if earlier is not None:
        _remove(earlier)


def _rotate(output_dir: str, step: int, keep: int, best: int | None) -> None:
    for old in [path for path in list_checkpoints(output_dir) if step_of(path) <= step][:-keep]:
        if step_of(old) != best:
            _remove(old, aside=True)


def _remove(path: Path, *, aside: bool = False) -> None:
    """Removes a folder, or a file or link in its place; one that cannot be removed stays, with a warning."""
    try:
        path = _put_aside(path) if aside else path
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be removed and stays: %s", path, error)


def _put_aside(path: Path) -> Path:
    """Renamed before its removal: a checkpoint that is half removed when the process dies must not look finished."""
    return path.replace(path.with_name(path.name + ".old.tmp"))


def _remove_unfinished(output_dir: str) -> None:
    for path in Path(output_dir).glob("checkpoint-*.tmp"):
        _remove(path)


def _share(accelerator: Accelerator, names: Iterable[str]) -> list[str]:
    """This process's part of the names: reading large files is shared out."""
    return sorted(names)[accelerator.process_index :: accelerator.num_processes]


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
