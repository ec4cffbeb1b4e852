"""What a position in a dataset is a position in."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_moe.checks import check_int, require


def check_identity(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Compares a saved position with the dataset it is to be used with; other columns are warned of.

    Raises:
        ValueError: it is of another dataset, seed or order, or damaged.
    """
    fits = isinstance(state, Mapping)
    require(fits, "state", "what state_dict() gave", state, "resume from a checkpoint of this trainer")
    if state.get("columns", identity["columns"]) != identity["columns"]:
        warnings.warn(
            "The columns beside the prompts are not those of the checkpoint's dataset: reward functions get other "
            "values from here on. Start a new run unless that is meant.",
            stacklevel=3,
        )
    for name, value in identity.items():
        if name != "columns" and state.get(name) != value:
            raise ValueError(
                f"{name} must be that of the checkpoint, {state.get(name)}, got {value}; "
                "resume with the same dataset and seed, or start a new run"
            )
    check_int("position", state.get("position"), least=0, fix="the checkpoint is damaged: resume from another one")


def prompts_fingerprint(prompts: Sequence[Any]) -> str:
    """Of the prompts, not their ids: a chat template may write today's date."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps(prompt, sort_keys=True, default=str).encode() + b"\n")
    return digest.hexdigest()[:16]


def columns_fingerprint(rows: Sequence[Mapping[str, Any]]) -> str:
    """Of what stands beside the prompts of some rows."""
    columns = [sorted((name, value) for name, value in row.items() if name != "prompt") for row in rows]
    try:
        text = json.dumps(columns, default=_plainly, skipkeys=True)
    except Exception:  # values may be anything, as a list that holds itself
        text = json.dumps([[name for name, _ in row] for row in columns])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plainly(value: Any) -> Any:
    """What JSON has no form for, the same in every process: of an image or another object, its type."""
    if hasattr(value, "tolist"):  # arrays and tensors
        return value.tolist()
    return value.hex() if isinstance(value, bytes) else type(value).__name__
