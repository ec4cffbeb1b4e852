"""Registers our experts in transformers' ExpertsInterface, so that a model selects them by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from grpo_moe.ops import moe_experts
from grpo_moe.ops.moe.activations import gated_activation

NAMES = {"stacked": "stacked", "triton_grouped": "triton_grouped", "fused": "fused", "grpo_moe": "fused"}
"""Names in the interface, and the ``impl`` of :func:`moe_experts` that each stands for."""


def run_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    name: str,
) -> torch.Tensor:
    """The interface's function ``name``: the experts ``module`` on hidden_states [N, H] with their routing [N, K].

    Silu, tanh-gelu and GPT-OSS gates run inside the kernels, any other function of the module between the GEMMs.

    Raises:
        ValueError: experts that do something besides two projections and an activation; names them and it.
    """
    if not _can_run(module):
        raise ValueError(
            f'experts_implementation="{name}" cannot run {type(module).__name__}: it normalises the output of each '
            'expert (has_post_expert_norm must be False, got True); use transformers\' "grouped_mm" for this model'
        )
    up = "gate_up_proj" if module.has_gate else "up_proj"
    up_bias, down_bias = (getattr(module, f"{up}_bias"), module.down_proj_bias) if module.has_bias else (None, None)
    return moe_experts(
        hidden_states,
        getattr(module, up),
        module.down_proj,
        top_k_index,
        top_k_weights,
        gate_up_bias=up_bias,
        down_bias=down_bias,
        transposed=module.is_transposed,
        impl=NAMES[name],
        **activation_of(module),
    )


def can_run_experts(model: torch.nn.Module) -> bool:
    """Whether the model has experts on transformers' interface, all of which :func:`run_experts` takes."""
    experts = _experts_of(model)
    return bool(experts) and all(_can_run(module) for module in experts)


@contextmanager
def experts_in(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """The float32 weights of the experts in a lower precision, for many forwards under autocast to it.

    Each forward would round them anew. Experts that others run stay as they are.
    """
    ours = getattr(model.config.get_text_config(), "_experts_implementation", None) in NAMES
    weights = [p for m in _experts_of(model) for p in m.parameters(recurse=False)] if ours else []
    own = {p: p.data for p in weights if p.dtype == torch.float32}
    try:
        for parameter, data in own.items():
            parameter.data = data.to(dtype)
        yield
    finally:
        for parameter, data in own.items():
            parameter.data = data


def _experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "down_proj")]


def _can_run(module: torch.nn.Module) -> bool:
    return not getattr(module, "has_post_expert_norm", False)


def activation_of(module: torch.nn.Module) -> dict:
    """Keyword arguments of :func:`moe_experts` for the activation of an experts module, found by what it computes.

    The answer stays with the module for as long as its numbers and its ``act_fn`` do not change.
    """
    if not module.has_gate:
        return {"activation": module.act_fn, "layout": "joint"}
    settings = [repr(getattr(module, "act_fn", None))]
    settings += [(name, x) for name, x in vars(module).items() if type(x) in (int, float)]
    known = getattr(module, "_recognised_gate", None)
    if known is None or known[0] != settings:
        layout = "concatenated" if module.is_concatenated else "interleaved"
        numbers = {name: getattr(module, name, None) for name in ("alpha", "limit")}
        known = (
            settings,
            _recognise(module._apply_gate, layout, {n: float(x) for n, x in numbers.items() if x is not None}),
        )
        module._recognised_gate = known
    return known[1] or {"activation": module._apply_gate, "layout": "joint"}


@torch.no_grad()
def _recognise(apply_gate: Callable, layout: str, numbers: dict[str, float]) -> dict | None:
    """The activation of ours that equals ``apply_gate`` to rounding, near zero and far beyond any limit; or None."""
    sizes = torch.cat([torch.linspace(0.01, 12, 248, device="cpu"), torch.logspace(1, 4, 248, device="cpu")])
    numbered = torch.arange(len(sizes), device="cpu")
    gate_up = (sizes * (1 - 2 * (numbered % 2)))[numbered * 197 % len(sizes)].view(-1, 8)  # signs and sizes mixed
    try:
        expected = apply_gate(gate_up.clone())
    except RuntimeError:  # it holds tensors of another device or dtype: no kernel knows it
        return None
    for activation in ("silu", "gelu_tanh", "gpt_oss"):
        ours = gated_activation(activation, layout, **numbers)(gate_up)
        if expected.shape == ours.shape and torch.allclose(ours, expected, rtol=1e-5, atol=1e-5):
            return {"activation": activation, "layout": layout, **numbers}
    return None


for name in NAMES:
    ALL_EXPERTS_FUNCTIONS.register(name, partial(run_experts, name=name))
