"""FSDP2 beside what Accelerate does: its precision, whole parameters for a rollout, whole weights for a save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, fsdp_utils
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor


def sharding_plugin(mixed_precision: str | None) -> FullyShardedDataParallelPlugin | None:
    """FSDP2 as ``accelerate launch`` was told to use it, or None.

    accelerate's own policy for bf16 also rounds what the forward returns, log-probabilities and losses, and sums
    gradients in bf16. Here parameters are gathered in bf16, and all else is fp32.

    Raises:
        ValueError: FSDP1, or an option of FSDP2 that this trainer does not support.
    """
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    bf16 = (mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION")) == "bf16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
    plugin = FullyShardedDataParallelPlugin(mixed_precision_policy=policy)
    wraps_layers = getattr(plugin.auto_wrap_policy, "func", plugin.auto_wrap_policy) is transformer_auto_wrap_policy
    rules = (
        ("fsdp_version", plugin.fsdp_version == 2, "2", plugin.fsdp_version),
        ("fsdp_auto_wrap_policy", wraps_layers, "TRANSFORMER_BASED_WRAP", plugin.auto_wrap_policy),
        ("fsdp_activation_checkpointing", not plugin.activation_checkpointing, "false", True),
        ("fsdp_offload_params", not isinstance(plugin.cpu_offload, CPUOffloadPolicy), "false", True),
    )
    for name, holds, rule, value in rules:
        if not holds:
            hint = "; use gradient_checkpointing=True" if "checkpointing" in name else ""
            raise ValueError(f"{name} must be {rule}, got {value}{hint}; see recipes/accelerate/fsdp2.yaml")
    return plugin


def shard_on_cpus(plugin: FullyShardedDataParallelPlugin) -> None:
    """FSDP2 for processes without accelerators, which accelerate 1.15 would leave at DDP; before the Accelerator."""
    if PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU:
        PartialState._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)


def check_whole(model: torch.nn.Module) -> None:
    """Refuses a model that its loading has split over the processes, as expert or tensor parallelism do.

    All processes of a split must run each forward together, and here each generates and learns from rows of its own.

    Raises:
        ValueError: naming the first parameter that is a shard, or the processes that a pipeline's stages stand on.
    """
    found = next((f"{n} as a shard" for n, p in model.named_parameters() if isinstance(p, DTensor)), None)
    if found is None and (mesh := getattr(model, "_device_mesh", None)) is not None:  # transformers sets it
        found = f"a part of it on the process mesh {mesh}"
    if found is not None:
        raise ValueError(
            f"model must be whole on each process, which runs forwards on rows of its own, got {found} in "
            f"{type(model).__name__}; load it without distributed_config and tp_plan (expert, tensor and pipeline "
            "parallelism do not train here), and recipes/accelerate/fsdp2.yaml shards experts and all else"
        )


def check_parallelism(accelerator: Accelerator) -> None:
    """Refuses processes that accelerate has told to share rows: the trainer gives each its own.

    Raises:
        ValueError: tensor, context or sequence parallelism; names the sizes.
    """
    config = accelerator.parallelism_config
    if config is not None and config.non_data_parallel_size > 1:
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in ("tp_size", "cp_size", "sp_size"))
        raise ValueError(
            f"parallelism_config must have tp_size, cp_size and sp_size of 1, as each process learns from rows of its "
            f"own, got {sizes}; use dp_shard_size (and dp_replicate_size), see recipes/accelerate/fsdp2_hybrid.yaml"
        )


def shard_frozen(model: torch.nn.Module, accelerator: Accelerator) -> torch.nn.Module:
    """The model, sharded like the policy where that is; it has no optimiser, without which prepare() refuses it."""
    return fsdp_utils.fsdp2_prepare_model(accelerator, model) if accelerator.is_fsdp2 else model


@contextmanager
def whole_parameters(model: torch.nn.Module) -> Iterator[None]:
    """Gathers every parameter once and keeps them all until the end, with FSDP2's hooks off; nothing for other models.

    Inside, modules hold plain parameters in the dtype they are gathered in, processes may run different numbers of
    forwards, and CUDA graphs can be captured. Entering is a collective; no gradients inside.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not sharded:
        yield
        return
    model._get_fsdp_state()._lazy_init()  # before the first forward a part would take itself for the root
    hooks_before = [(hooks, dict(hooks)) for hooks in _hooks(model)]
    try:
        for module in sharded:
            module.unshard()
        for hooks, before in hooks_before:
            for key in [key for key, hook in before.items() if _is_fsdp(hook)]:
                del hooks[key]
        yield
    finally:
        for hooks, before in hooks_before:
            now = dict(hooks)
            hooks.clear()
            hooks.update({key: hook for key, hook in before.items() if key in now or _is_fsdp(hook)})
            hooks.update(now)
        for module in sharded:
            module.reshard()


def whole_tensor(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A shard gathered on every process, all of which take part; anything else as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole_state(model: torch.nn.Module, accelerator: Accelerator) -> dict[str, torch.Tensor] | None:
    """The state dict of a sharded model, gathered on the main process's CPU; None for a model that is whole.

    Every process takes part. Tied weights are one tensor, as save_pretrained knows them.
    """
    if not accelerator.is_fsdp2:
        return None
    state, first = accelerator.get_state_dict(model), {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in state:
            state[name] = state[first.setdefault(id(parameter), name)]
    return state


def _hooks(model: torch.nn.Module) -> list[dict]:
    """The dicts of hooks around forwards in which FSDP2 has one."""
    dicts = [hooks for module in model.modules() for hooks in (module._forward_pre_hooks, module._forward_hooks)]
    return [hooks for hooks in dicts if any(map(_is_fsdp, hooks.values()))]


def _is_fsdp(hook) -> bool:
    return (getattr(hook, "__module__", None) or "").startswith("torch.distributed.fsdp")
