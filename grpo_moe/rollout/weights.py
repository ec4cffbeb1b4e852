"""A model's weights under the names and shapes of its published checkpoint, a layer at a time, for another engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

WRAPPERS = re.compile(r"\.base_layer|\.modules_to_save\.[^.]+")
ADAPTERS = re.compile(r"\.lora_|\.original_module\.")
LAYER = re.compile(r"(.*?\.\d+)\.")  # the outermost number: experts stay with their layer


def published_weights(
    model: Any, *, dtype: torch.dtype | None = None, meta: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors as ``save_pretrained`` writes them: transformers undoes what it did to the checkpoint.

    Most tensors are views of the parameters; what is no view lives for one layer. LoRA is added on the way, the model
    stays as it is. Tied weights come once. Shards of FSDP2 are gathered, so there every process must iterate.

    Args:
        model: a transformers model, or PEFT's wrapper of one.
        dtype: of the tensors with two dimensions or more; None leaves each in its own.
        meta: tensors without data: names, shapes and dtypes alone.

    Raises:
        ValueError: adapters other than plain LoRA.
    """
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    for _, names in groupby(_sources(model).items(), key=lambda item: _layer(item[0])):
        tensors = {name: source.read(meta) for name, source in names}
        for name, tensor in revert_weight_conversion(model, tensors).items():
            yield name, tensor.to(dtype) if dtype is not None and tensor.dim() > 1 else tensor


def buckets(weights: Iterable[tuple[str, torch.Tensor]], size_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The weights in order, in dictionaries that close once they hold ``size_bytes`` or more."""
    bucket: dict[str, torch.Tensor] = {}
    held = 0
    for name, tensor in weights:
        bucket[name] = tensor
        held += tensor.numel() * tensor.element_size()
        if held >= size_bytes:
            yield bucket
            bucket, held = {}, 0
    if bucket:
        yield bucket


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether parameters are shards of FSDP2, which only all processes together can read."""
    return any(hasattr(p, "full_tensor") for p in model.parameters())


@dataclass(frozen=True)
class _Source:
    """A tensor of the model without adapters, and what adapters add to it."""

    tensor: torch.Tensor
    deltas: list[Callable[[], torch.Tensor]] = field(default_factory=list)

    @torch.no_grad()
    def read(self, meta: bool) -> torch.Tensor:
        if meta:
            return torch.empty(self.tensor.shape, dtype=self.tensor.dtype, device="meta")
        whole = self.tensor.full_tensor() if hasattr(self.tensor, "full_tensor") else self.tensor
        for delta in self.deltas:
            whole = whole + delta().to(whole.dtype)
        return whole


def _sources(model: PreTrainedModel) -> dict[str, _Source]:
    left_out = {*(model.all_tied_weights_keys or ()), *(model._keys_to_ignore_on_save or ())}
    named = ((_plain(key), key, tensor) for key, tensor in model.state_dict().items())
    sources = {name: _Source(x) for name, key, x in named if name not in left_out and not ADAPTERS.search(key)}
    for path, layer in model.named_modules():
        if hasattr(layer, "base_layer"):
            parameter = getattr(layer, "parameter_name", "weight")  # PEFT wraps a module, or one parameter of it
            sources[f"{_plain(path)}.{parameter}"].deltas.extend(_deltas(path, layer))
    return sources


def _plain(name: str) -> str:
    """The name in the model without PEFT's wrappers."""
    return WRAPPERS.sub("", name)


def _deltas(path: str, layer: Any) -> list[Callable[[], torch.Tensor]]:
    """What the active adapters of PEFT's layer add to the parameter that it wraps."""
    plain = hasattr(layer, "lora_A")
    active = [] if not plain or layer.merged or layer.disable_adapters else list(layer.active_adapters)
    active = [name for name in active if name in layer.lora_A or name in layer.lora_embedding_A]
    if not plain or any(name in layer.lora_variant or layer.lora_bias.get(name) for name in active):
        raise ValueError(
            f"adapters must be plain LoRA for an engine that gets the weights, got {type(layer).__name__} of "
            f"{type(layer).__module__} at {path}; use NativeEngine or HFEngine"
        )
    return [partial(layer.get_delta_weight, name) for name in active]


def _layer(name: str) -> str:
    match = LAYER.match(name)
    return match.group(1) if match else name
