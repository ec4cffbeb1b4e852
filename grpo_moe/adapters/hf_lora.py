"""PEFT's LoRA on experts, folded into their weights while nothing trains: once a rollout instead of once a token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def folded_lora(model: nn.Module) -> Iterator[None]:
    """Within it, adapted parameters (``target_parameters``) hold what PEFT would otherwise make in every forward.

    The values are those of PEFT's own forward, to the bit. Until the end a second copy of these weights exists; then
    the parameters have their own storage and values again. Adapters of linear layers stay as they are.

    Args:
        model: a model with PEFT's adapters in it, or without any.
    """
    folded = []
    try:
        for layer in model.modules():
            if not hasattr(layer, "lora_A") or not hasattr(layer, "parameter_name"):  # peft's ParamWrapper alone
                continue
            if layer.merged or layer.disable_adapters:
                continue
            module, name = layer.get_base_layer(), layer.parameter_name
            parameter = getattr(module, name)
            with torch.no_grad(), layer._activate_lora(layer.active_adapters):
                values = getattr(module, name).detach()
            folded.append((layer, parameter, parameter.data))
            parameter.data = values
            layer.merged_adapters.extend(layer.active_adapters)  # so that its forward adds nothing
        yield
    finally:
        for layer, parameter, values in folded:
            parameter.data = values
            layer.merged_adapters.clear()
