"""transformers' TrainerCallback objects in our loop: told what happens, and able to ask for more."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

MAX_HISTORY = 10_000  # lines; a run of months would fill the memory


class Callbacks:
    """Calls ``on_<event>(args, state, control, model=, processing_class=, optimizer=, lr_scheduler=, ...)``.

    Events: train_begin, step_end (after the updates of a rollout, with ``metrics``), log (with ``logs``), evaluate
    (with ``metrics``), save, train_end. ``control.should_training_stop`` is heeded after any of them,
    ``should_evaluate`` and ``should_save`` after step_end, each where any process asks. ``state`` has ``global_step``,
    ``max_steps``, ``epoch``, ``log_history`` (the newest 10,000 lines) and ``best_metric``, enough for
    EarlyStoppingCallback.

    Args:
        callbacks: objects or classes.
        args: the options.
        given: keyword arguments of every call.

    Raises:
        ValueError: something that is no TrainerCallback.
    """

    def __init__(self, callbacks: Iterable[Any] | None, args: Any, **given: Any):
        listed = callbacks if isinstance(callbacks, Iterable) else [callbacks] if callbacks is not None else []
        made = [x() if isinstance(x, type) else x for x in listed]
        for callback in made:
            if not isinstance(callback, TrainerCallback):
                raise ValueError(f"callbacks must be of transformers.TrainerCallback, got {callback!r}; derive from it")
        self._callbacks, self._args, self._given = made, _Arguments(args), given
        self._state, self._control = TrainerState(max_steps=args.max_steps), TrainerControl()

    def __call__(self, event: str, state: Any, **details: Any) -> TrainerControl:
        """Tells all of them where the run stands; returns what they ask for.

        Raises:
            ValueError: one returned something else than None or a TrainerControl.
        """
        self._state.global_step, self._state.best_metric = state.step, state.best.get("value")
        if event in ("log", "evaluate"):
            line = details.get("logs") or details["metrics"]
            self._state.epoch = line.get("epoch", self._state.epoch)
            self._state.log_history.append({"step": state.step, **line})
            del self._state.log_history[:-MAX_HISTORY]
        self._control.should_evaluate = self._control.should_save = False
        for callback in self._callbacks:
            answer = getattr(callback, f"on_{event}")(self._args, self._state, self._control, **self._given, **details)
            if answer is not None and not isinstance(answer, TrainerControl):
                raise ValueError(
                    f"{type(callback).__name__}.on_{event} must return the control or None, got {answer!r}"
                )
            self._control = self._control if answer is None else answer
        return self._control


class _Arguments:
    """The options, with what transformers' callbacks read besides."""

    load_best_model_at_end = True
    """The best checkpoint stays; nothing is loaded by itself."""

    def __init__(self, args: Any):
        self._options = args
        self.eval_strategy = "steps" if args.eval_steps else "no"

    def __getattr__(self, name: str) -> Any:
        if name == "_options":  # while it is copied
            raise AttributeError(name)
        if not hasattr(self._options, name):
            raise AttributeError(
                f"args of a callback must be read for options of {type(self._options).__name__}, got {name!r}; leave "
                "out callbacks that belong to transformers' own Trainer"
            )
        return getattr(self._options, name)
