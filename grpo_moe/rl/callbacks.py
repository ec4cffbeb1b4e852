"""transformers' TrainerCallback objects in our loop: told what happens, and able to ask for more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState


class Callbacks:
    """Calls ``on_<event>(args, state, control, model=, processing_class=, optimizer=, lr_scheduler=, ...)``.

    Events: train_begin, step_end (after the updates of a rollout, with ``metrics``), log (with ``logs``), evaluate
    (with ``metrics``), save, train_end. After step_end ``control.should_training_stop``, ``should_evaluate`` and
    ``should_save`` are heeded; every process must set the last two alike.

    Args:
        callbacks: objects or classes.
        args: the options.
        given: keyword arguments of every call.

    Raises:
        ValueError: something that is no TrainerCallback.
    """

    def __init__(self, callbacks: Sequence[Any] | None, args: Any, **given: Any):
        made = [x() if isinstance(x, type) else x for x in callbacks or ()]
        for callback in made:
            if not isinstance(callback, TrainerCallback):
                raise ValueError(f"callbacks must be of transformers.TrainerCallback, got {callback!r}; derive from it")
        self._callbacks, self._args, self._given = made, args, given
        self._state = TrainerState(max_steps=args.max_steps)

    def __call__(self, event: str, step: int, **details: Any) -> TrainerControl:
        """Tells all of them; returns what they ask for."""
        self._state.global_step = step
        control = TrainerControl()
        for callback in self._callbacks:
            answer = getattr(callback, f"on_{event}")(self._args, self._state, control, **self._given, **details)
            control = control if answer is None else answer
        return control
