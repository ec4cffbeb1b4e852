"""Which parts of a model train, are frozen or carry LoRA, and which adapters a backward pass did not reach."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

ROLES = ("embeddings", "attention", "router", "experts", "mlp", "norm", "head", "other")
"""What a parameter is part of; shared experts and dense layers are "mlp"."""


@dataclass
class Coverage:
    """Numbers of parameters with one role."""

    trained: int = 0
    """Those of the model itself that train."""
    lora: int = 0
    """Those of adapters that train."""
    frozen: int = 0


def coverage(model: nn.Module) -> dict[str, Coverage]:
    """Parameters of each role that occurs in a transformers causal LM, with PEFT's adapters or without.

    A tied head counts as embeddings.
    """
    embeddings, head = (_own(module) for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    found: dict[str, Coverage] = {}
    for name, parameter in model.named_parameters():
        role = "embeddings" if id(parameter) in embeddings else "head" if id(parameter) in head else _role(name)
        counts = found.setdefault(role, Coverage())
        if not parameter.requires_grad:
            counts.frozen += parameter.numel()
        elif ".lora_" in name:
            counts.lora += parameter.numel()
        else:
            counts.trained += parameter.numel()
    return {role: found[role] for role in ROLES if role in found}


def coverage_table(rows: dict[str, Coverage]) -> str:
    """The rows as text, for people."""
    lines = [f"{'':12}{'trained':>16}{'LoRA':>16}{'frozen':>16}"]
    lines += [f"{role:12}{row.trained:16,}{row.lora:16,}{row.frozen:16,}" for role, row in rows.items()]
    return "\n".join(lines)


def unreached_adapters(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Modules whose adapter has a zero gradient, or none, in all of its matrices after a backward pass.

    A fresh adapter has one in its B alone, since its B is 0.
    """
    reached: dict[str, bool] = {}
    for name, parameter in named_parameters:
        module, lora, _ = name.partition(".lora_")
        if lora and parameter.requires_grad:
            moves = parameter.grad is not None and bool(parameter.grad.count_nonzero())
            reached[module] = reached.get(module, False) or moves
    return [module for module, moves in reached.items() if not moves]


def _own(module: nn.Module | None) -> set[int]:
    return set() if module is None else {id(p) for p in module.parameters()}


def _role(name: str) -> str:
    """By the parts of the parameter's name, from the outside in."""
    for part in name.split(".")[:-1]:
        if "norm" in part:  # before attention, for post_attention_layernorm
            return "norm"
        if "attn" in part or "attention" in part or part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            return "attention"
        if part == "experts":
            return "experts"
        if part in ("gate", "router"):
            return "router"
        if part.startswith(("shared_expert", "gate_proj", "up_proj", "down_proj")):
            return "mlp"
    return "other"
