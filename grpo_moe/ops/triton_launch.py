"""Launches of Triton kernels in less host time than Triton's own, which is longer than the work of a small batch."""

from __future__ import annotations

import os

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
_compiled: dict[tuple, tuple] = {}


def launch(kernel, grid: tuple[int, int, int], *args, **constants) -> None:
    """``kernel[grid](*args, **constants)`` on the device of the first argument.

    From the second time on for such arguments it calls the compiled kernel, without Triton's binder.

    Args:
        kernel: @triton.jit function, its constexpr parameters after the others.
        grid: programs along x, y, z.
        args: tensors and TensorDescriptors, one of them first, ints and floats: what is not constexpr.
        constants: constexpr parameters, num_warps, num_stages.
    """
    if INTERPRET:
        kernel[grid](*args, **constants)
        return
    device = (args[0].base if type(args[0]) is TensorDescriptor else args[0]).device.index
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *args, **constants)
        return
    # all that Triton specialises a kernel for
    key = (id(kernel), device, *constants, *constants.values(), *[_kind(x) for x in args])
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[grid](*args, **constants)
        _compiled[key] = compiled, [constants[name] for name in kernel.arg_names if name in constants]
    else:
        compiled, values = found
        compiled[grid](*args, *values)


def _kind(x):
    if type(x) is int:
        return 1 if x == 1 else (2 if x % 16 else 3) + 2 * (x >= 2**31)
    if type(x) is float:
        return float
    if type(x) is TensorDescriptor:
        return x.base.dtype, *x.block_shape
    return x.dtype, x.data_ptr() % 16
