"""Where a trainer stands, put into checkpoints and taken back from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint import load_checkpoint, run_settings, save_checkpoint
from .run_folder import claim_folder, find_checkpoint, folder_lock, start_run
from .state import TrainerState

if TYPE_CHECKING:
    from .trainer import GRPOTrainer


def save_run(trainer: GRPOTrainer) -> Path:
    """Writes a checkpoint from which training goes on to the bit."""
    run, args = trainer.state, trainer.args
    run.phase_seconds = dict(trainer.timer.totals)
    state = {
        **asdict(run),
        "source": trainer.collector.position(trainer.source),
        "num_processes": trainer.accelerator.num_processes,
        "config": _settings(trainer),
    }
    keep = {"keep": args.save_total_limit, "best": run.best.get("step")}
    path = save_checkpoint(trainer.accelerator, state, args.output_dir, **keep)
    trainer.callbacks("save", run)
    return path


@contextmanager
def resumed_run(trainer: GRPOTrainer, name: str | bool | None) -> Iterator[None]:
    """Brings a trainer to where the checkpoint stood; without one, starts a fresh run in the folder.

    Inside, no other run can start in the folder.

    Raises:
        ValueError: one is training there, or the checkpoint cannot be resumed.
    """
    lock = folder_lock(trainer.args.output_dir) if trainer.accelerator.is_main_process else nullcontext()
    with lock:
        _resume_run(trainer, name)
        yield


def _resume_run(trainer: GRPOTrainer, name: str | bool | None) -> None:
    folder = trainer.args.output_dir
    path = find_checkpoint(name, folder) if name else None
    if path is None:
        if trainer.accelerator.is_main_process:
            if name:
                print(f"No checkpoint of the last run in {folder}: training starts from the beginning.")
            trainer.state.run_id = start_run(folder)
        return
    state = load_checkpoint(trainer.accelerator, path, _settings(trainer))
    if trainer.accelerator.is_main_process:  # it goes on here, wherever the checkpoint stands
        claim_folder(folder, state["run_id"], keep=path)
    trainer.source.load_state_dict(state["source"])
    trainer.state = TrainerState(**{name: state.get(name, v) for name, v in asdict(TrainerState()).items()})
    trainer.timer.totals = dict(trainer.state.phase_seconds)


@contextmanager
def saving_on_error(trainer: GRPOTrainer) -> Iterator[None]:
    """Around what a user's code can break between updates: what was learned up to here is kept.

    Of several processes one alone may have failed, and the others would miss it in the collectives of a save.
    """
    position = trainer.collector.position(trainer.source)
    try:
        yield
    except Exception as error:
        if trainer.state.step and trainer.accelerator.num_processes == 1:
            trainer.collector.drop_next()
            trainer.source.load_state_dict(position)
            try:
                error.add_note(f"{trainer.save_checkpoint()} holds the run up to update {trainer.state.step}")
            except OSError as unsaved:  # the first error says more, and the full disk may well be it
                error.add_note(f"the run up to update {trainer.state.step} could not be saved: {unsaved}")
        raise


def _settings(trainer: GRPOTrainer) -> dict[str, Any]:
    """What a continuation of this run must share with it."""
    optimizer = type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__
    weights = dict(zip(trainer.rewards.names, trainer.rewards.weights, strict=True))
    return run_settings(trainer.args, trainer.adapters, reward_weights=weights, optimizer=optimizer)
