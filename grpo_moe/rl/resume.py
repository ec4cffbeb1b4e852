"""Where a trainer stands, put into checkpoints and taken back from them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_moe.text import say

from .checkpoint import load_checkpoint, run_settings, save_checkpoint
from .interrupt import InterruptGuard
from .processes import on_main
from .run_folder import checksum, claim_folder, find_checkpoint, list_checkpoints, start_run
from .run_lock import folder_lock
from .state import MAX_SKIPPED_IN_A_ROW, TrainerState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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

    ``name`` is as ``resume_from_checkpoint`` of the options, which counts where it is None. Inside, no other run can
    start in the folder.

    Raises:
        ValueError: one is training there, or the checkpoint cannot be resumed; on every process.
        OSError: the folder cannot be written; on every process.
    """
    with ExitStack() as held:
        on_main(trainer.accelerator, lambda: held.enter_context(folder_lock(trainer.args.output_dir)))
        _resume_run(trainer, trainer.args.resume_from_checkpoint if name is None else name)
        yield


def _resume_run(trainer: GRPOTrainer, name: str | bool | None) -> None:
    folder = trainer.args.output_dir
    path = None if name is None or name is False else find_checkpoint(name, folder)
    if path is None and trainer.state.rollouts:
        return  # a second call of train: this trainer's own run goes on
    if path is None:
        on_main(trainer.accelerator, lambda: _start_run(trainer, told_to_resume=bool(name)))
        return
    state = load_checkpoint(trainer.accelerator, path, _settings(trainer))
    # it goes on here, wherever the checkpoint stands
    on_main(trainer.accelerator, lambda: claim_folder(folder, state["run_id"], keep=path))
    trainer.source.load_state_dict(state["source"])
    trainer.state = TrainerState(**{name: state.get(name, v) for name, v in asdict(TrainerState()).items()})
    trainer.timer.totals = dict(trainer.state.phase_seconds)


def _start_run(trainer: GRPOTrainer, *, told_to_resume: bool) -> None:
    if told_to_resume:
        folder = trainer.args.output_dir
        say(f"No checkpoint of the last run in {folder}: training starts from the beginning.")
    trainer.state.run_id = start_run(trainer.args.output_dir)


@contextmanager
def saving_on_error(trainer: GRPOTrainer, guard: InterruptGuard) -> Iterator[None]:
    """Around what a user's code can break in a step: what was learned up to here is kept.

    Prompts of a rollout that no update has learned from are drawn again; of one that was learned from in part, the
    rest is left out. Not saved is what an error in the middle of an update leaves, or after a second signal.
    """
    position, step = trainer.collector.position(trainer.source), trainer.state.step
    try:
        yield
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        if trainer.state.step and not (guard.requested and isinstance(error, KeyboardInterrupt)):
            if trainer.state.step > step:
                position = trainer.collector.position(trainer.source)
            note = _saved_at(trainer, position)
            error.add_note(note)
            if isinstance(error, KeyboardInterrupt):  # recipes show its text
                error.args = error.args or (note,)
        raise


def _saved_at(trainer: GRPOTrainer, position: dict[str, Any]) -> str:
    """Saves the run, where that is possible, with its prompts at ``position``; says where it goes on."""
    run = trainer.state
    # of several processes one alone may have failed, and the others would miss it in the collectives of a save
    alone, diverged = trainer.accelerator.num_processes == 1, run.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW
    if trainer.in_update or diverged or not alone:
        existing = list_checkpoints(trainer.args.output_dir)
        newest = f"resume_from_checkpoint={str(existing[-1])!r} goes on before it" if existing else "nor any before it"
        return f"update {run.step} is not saved; {newest}"
    trainer.collector.drop_next()
    trainer.source.load_state_dict(position)
    try:
        return f"{trainer.save_checkpoint()} holds the run up to update {run.step}"
    except Exception as unsaved:  # the first error says more, and may well be the reason: a full disk, a lost GPU
        return f"the run up to update {run.step} could not be saved: {unsaved}"


def _settings(trainer: GRPOTrainer) -> dict[str, Any]:
    """What a continuation of this run must share with it."""
    optimizer = type(getattr(trainer.optimizer, "optimizer", trainer.optimizer)).__name__
    weights = dict(zip(trainer.rewards.names, trainer.rewards.weights, strict=True))
    learning = {"optimizer": optimizer, "lr_scheduler": type(trainer.scheduler).__name__}
    others = {"vocabulary": _vocabulary(trainer.tokenizer), "model_config": _math(trainer)}
    return run_settings(trainer.args, trainer.adapters, reward_weights=weights, **learning, **others)


@lru_cache(maxsize=1)  # not all tokens again at every save
def _vocabulary(tokenizer: PreTrainedTokenizerBase) -> str:
    """Digest of a tokenizer's tokens and their ids."""
    return checksum(tokenizer.get_vocab())[:16]


def _math(trainer: GRPOTrainer) -> str:
    """Digest of what the model's configuration says of its computation, and not of how or where that runs."""
    how = "_name_or_path architectures dtype grad_ckpt_every moe_dispatch transformers_version use_cache".split()
    config = json.loads(trainer.policy.config.to_json_string(use_diff=False))
    return checksum({name: x for name, x in config.items() if name not in how and "implementation" not in name})[:16]
