"""Step capsules: a micro-batch whose loss or gradient was not finite, kept as safetensors and replayed by any loss."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from grpo_moe.checks import check_int
from grpo_moe.ops import LossConfig, grpo_loss_from_logps
from grpo_moe.ops.loss.objective import Count
from grpo_moe.text import clean
from grpo_moe.types import RolloutBatch

from .batch import select
from .files import atomic_path, parse_json
from .policy import Policy
from .windows import Window

FORMAT = "grpo_moe step capsule 1"
_NEEDED = (
    "input_ids",
    "attention_mask",
    "prompt_lengths",
    "completion_ids",
    "completion_mask",
    "advantages",
    "sampling_logps",
)
_OPTIONAL = ("old_logps", "ref_logps", "current_logps", "entropy")
_BY_TOKEN = ("completion_ids", "completion_mask", "sampling_logps", *_OPTIONAL)  # [B, T]


@dataclass(frozen=True)
class Capsule:
    """What a loss was computed from."""

    batch: RolloutBatch
    """The rows, without routes and expert load."""
    config: LossConfig
    """Options of the loss."""
    step: int
    """Number of the optimiser update, from 1."""
    reason: str
    """Why it was kept."""
    current_logps: torch.Tensor | None = None
    """[B, T] log-probabilities by the policy at that step, nats."""
    entropy: torch.Tensor | None = None
    """[B, T] nats."""
    num_loss_tokens: int | None = None
    """Of the whole optimiser update, over all processes."""
    num_sequences: int | None = None
    """The same of rows."""

    @property
    def logps_name(self) -> str:
        """Which log-probabilities stand for the policy's: the current ones, else the old, else the engine's."""
        if self.current_logps is not None:
            return "current_logps"
        return "sampling_logps" if self.batch.old_logps is None else "old_logps"


@dataclass(frozen=True)
class Objective:
    """One loss on the log-probabilities of a capsule."""

    config: LossConfig
    loss: float
    gradient_norm: float
    """Of the gradient with respect to the log-probabilities [B, T]."""
    num_gradient_tokens: int
    """Tokens whose log-probability has a gradient."""
    stats: dict[str, float]
    """As in :class:`grpo_moe.ops.loss.LossOutput`."""


@dataclass(frozen=True)
class Replay:
    """A capsule under the loss it came from and under another."""

    original: Objective
    other: Objective
    cosine: float
    """Between both gradients; NaN where one of them is 0 or not finite."""


def save_capsule(
    path: str | os.PathLike,
    batch: RolloutBatch,
    config: LossConfig,
    *,
    step: int,
    reason: str,
    current_logps: torch.Tensor | None = None,
    entropy: torch.Tensor | None = None,
    num_loss_tokens: Count | None = None,
    num_sequences: Count | None = None,
) -> Path:
    """Writes one safetensors file, atomically; what else is known stands as JSON in its header.

    Args:
        path: of the file; its folder is made.
        batch: the rows.
        config: a LossConfig or GRPOConfig; only the options of the loss are kept.
        step, reason, current_logps, entropy, num_loss_tokens, num_sequences: see :class:`Capsule`.
    """
    tensors = {name: getattr(batch, name) for name in (*_NEEDED, "old_logps", "ref_logps")}
    tensors |= {"current_logps": current_logps, "entropy": entropy}
    known = {
        "format": FORMAT,
        "step": step,
        "reason": reason,
        "num_loss_tokens": None if num_loss_tokens is None else int(num_loss_tokens),
        "num_sequences": None if num_sequences is None else int(num_sequences),
        "config": {field.name: getattr(config, field.name) for field in dataclasses.fields(LossConfig)},
    }
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # clones: safetensors refuses tensors that share memory, and writes no strides
    kept = {name: x.detach().cpu().contiguous().clone() for name, x in tensors.items() if x is not None}
    with atomic_path(path) as temporary:
        save_file(kept, temporary, metadata={"capsule": json.dumps(known)})
    return path


def load_capsule(path: str | os.PathLike) -> Capsule:
    """Reads what :func:`save_capsule` wrote.

    Raises:
        ValueError: there is no such file, it is damaged, or it is another kind of file.
    """
    try:
        with safe_open(path, framework="pt") as file:
            known = parse_json((file.metadata() or {}).get("capsule", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except FileNotFoundError as error:
        raise ValueError(f"capsule must be a file, got {str(path)!r}; there is none") from error
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        raise _damaged(path, "another kind of file")
    if fault := _fault(tensors):
        raise _damaged(path, fault)
    try:
        extra = {name: tensors.pop(name, None) for name in ("current_logps", "entropy")}
        counts = {name: known[name] for name in ("step", "reason", "num_loss_tokens", "num_sequences")}
        check_int("step", counts["step"], least=0, fix="it was changed")
        for name in ("num_loss_tokens", "num_sequences"):
            if counts[name] is not None:
                check_int(name, counts[name], least=0, fix="it was changed")
        return Capsule(RolloutBatch(**tensors), LossConfig(**known["config"]), **counts, **extra)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def replay_capsule(capsule: Capsule, **changes: Any) -> Replay:
    """The loss of a capsule and its gradient in the log-probabilities, as it was and with other options.

    Args:
        capsule: where it has no current log-probabilities, those of :attr:`Capsule.logps_name` stand for them.
        changes: options of :class:`grpo_moe.ops.loss.LossConfig`.

    Raises:
        ValueError: an unknown option, one out of its range, one that needs what the capsule does not hold, or
            ``temperature``, which the stored log-probabilities already contain.
    """
    known = {field.name for field in dataclasses.fields(LossConfig)}
    if unknown := sorted(set(changes) - known):
        raise ValueError(f"options must be those of LossConfig, got {', '.join(unknown)}; check the spelling")
    if changes.get("temperature", capsule.config.temperature) != capsule.config.temperature:
        raise ValueError(
            f"temperature must be {capsule.config.temperature} as in the capsule, got {changes['temperature']}; its "
            "log-probabilities were taken at that temperature"
        )
    original, gradient = _objective(capsule, capsule.config)
    other, other_gradient = _objective(capsule, dataclasses.replace(capsule.config, **changes))
    product = float((gradient * other_gradient).sum())
    norms = original.gradient_norm * other.gradient_norm
    return Replay(original, other, product / norms if norms and math.isfinite(norms) else math.nan)


def loss_options() -> dict[str, Callable[[str], Any]]:
    """Every option of :class:`LossConfig` and what reads it from text; "none" where None is allowed."""
    return {name: _reader(get_args(hint) or (hint,)) for name, hint in get_type_hints(LossConfig).items()}


def replay_table(replay: Replay) -> str:
    """Both objectives side by side, for people."""
    pair = (replay.original, replay.other)
    rows = {"": ("original", "replayed"), "loss_type": tuple(x.config.loss_type for x in pair)}
    for field in dataclasses.fields(LossConfig):
        values = tuple(getattr(x.config, field.name) for x in pair)
        if values[0] != values[1]:
            rows[field.name] = tuple(map(str, values))
    numbers = {
        "loss": [x.loss for x in pair],
        "gradient by log-probs, norm": [x.gradient_norm for x in pair],
        "tokens with gradient": [x.num_gradient_tokens for x in pair],
        **{name: [x.stats[name] for x in pair] for name in replay.original.stats if name in replay.other.stats},
    }
    rows |= {name: tuple(f"{value:.6g}" for value in values) for name, values in numbers.items()}
    lines = [f"{name:30}{a:>16}{b:>16}" for name, (a, b) in rows.items()]
    return "\n".join([*lines, f"{'cosine of these gradients':30}{replay.cosine:>32.6f}"])


def _reader(kinds: tuple[type, ...]) -> Callable[[str], Any]:
    kind = next(kind for kind in kinds if kind is not type(None))

    def read(text: str) -> Any:
        if text.lower() == "none" and type(None) in kinds:
            return None
        if kind is bool:
            if text.lower() not in ("true", "false"):
                raise ValueError(text)
            return text.lower() == "true"
        return kind(text)

    read.__name__ = kind.__name__  # argparse's messages say "invalid float value"
    return read


def _objective(capsule: Capsule, config: LossConfig) -> tuple[Objective, torch.Tensor]:
    """The loss, and its gradient [B, T] in float64."""
    batch = capsule.batch
    logps = capsule.current_logps if capsule.current_logps is not None else getattr(batch, capsule.logps_name)
    leaf = logps.clone().requires_grad_()
    result = grpo_loss_from_logps(
        leaf,
        batch.advantages,
        batch.completion_mask,
        config,
        old_logps=batch.old_logps,
        ref_logps=batch.ref_logps,
        sampling_logps=batch.sampling_logps,
        entropy=capsule.entropy,
        num_loss_tokens=capsule.num_loss_tokens,
        num_sequences=capsule.num_sequences,
    )
    gradient = torch.autograd.grad(result.loss, leaf)[0].double()
    stats = {name: float(value) for name, value in result.stats.items()}
    made = Objective(config, result.loss.item(), float(gradient.norm()), int(gradient.count_nonzero()), stats)
    return made, gradient


def _fault(tensors: dict[str, torch.Tensor]) -> str | None:
    """What is wrong with the tensors of a file."""
    names = set(tensors)
    if missing := [name for name in _NEEDED if name not in names]:
        return f"no {', '.join(missing)} in it"
    if extra := sorted(names - {*_NEEDED, *_OPTIONAL}):
        return f"{', '.join(extra)} in it"
    for name in _BY_TOKEN:
        if name in names and tensors[name].shape != tensors["completion_ids"].shape:
            return f"{name} of shape {list(tensors[name].shape)}, not {list(tensors['completion_ids'].shape)}"
    for name in ("advantages", "sampling_logps", *_OPTIONAL):
        if name in names and not tensors[name].is_floating_point():
            return f"{name} of {tensors[name].dtype}"
    rows = {len(x) if x.ndim else 0 for x in tensors.values()}
    if len(rows) > 1:
        return f"tensors of {sorted(rows)} rows"
    shape = tensors["completion_ids"].shape
    if tensors["advantages"].shape not in (shape, shape[:1]):
        return f"advantages of shape {list(tensors['advantages'].shape)} for tokens of shape {list(shape)}"
    return None


def _damaged(path: str | os.PathLike, what: str) -> ValueError:
    return ValueError(f"capsule must be a whole file of save_capsule, got {path}: {clean(what, 500)}; use another one")


def keep_update(
    folder: Path, batch: RolloutBatch, window: Window, policy: Policy, *, step: int, rank: int, grad_norm: float
) -> None:
    """Saves this process's rows of an update as ``update_<step>_<rank>.safetensors``.

    One that was not made, for its gradient, is ``nonfinite_<step>_<rank>.safetensors``.
    """
    rows = torch.cat(window.micro_batches)
    part = select(batch, rows)
    logps = policy.logps(policy.model, part)  # on every process: the parameters may be sharded
    if not len(rows):
        return
    kind = "update" if math.isfinite(grad_norm) else "nonfinite"
    save_capsule(
        folder / f"{kind}_{step:06d}_{rank}.safetensors",
        part,
        policy.args,
        step=step,
        reason=f"grad_norm of the parameters is {grad_norm:.6g}",
        current_logps=logps,
        num_loss_tokens=window.num_loss_tokens,
        num_sequences=window.num_sequences,
    )
