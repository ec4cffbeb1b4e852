"""Mixture-of-experts feed-forward: one public function, its implementations behind a name."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import torch

from .activations import ACTIVATIONS, GATED_LAYOUTS, check_clamp, gated_activation
from .reference import check_index, stacked_experts

IMPLEMENTATIONS = ("fused", "stacked", "triton_grouped", "single_pass")
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HAS_TRITON = importlib.util.find_spec("triton") is not None

__all__ = ["IMPLEMENTATIONS", "moe_experts"]


def moe_experts(
    hidden_states: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    *,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    activation: str | Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = "silu",
    layout: str = "concatenated",
    transposed: bool = False,
    impl: str = "fused",
    memory_efficient: bool = False,
    alpha: float = 1.702,
    limit: float = 7.0,
    check: bool = False,
) -> torch.Tensor:
    """Sends every token through its top-k gated experts and sums their outputs by the routing weights.

    Sums over slots and inside the products are float32 or wider and in a fixed order: results repeat to the bit.
    Under autocast the kernels round all floating inputs but ``top_k_weights`` to its dtype, and PyTorch its products.
    torch.compile(fullgraph=True) and torch.export see one operator for "fused" with the name of an activation on a GPU;
    all others break the graph, or say so where it must be full. None of the kernels has a second derivative: asking for
    it raises RuntimeError.

    Args:
        hidden_states: [N, H].
        gate_up_proj: [E, 2I, H], or [E, H, 2I] when ``transposed``.
        down_proj: [E, H, I], or [E, I, H] when ``transposed``.
        top_k_index: [N, K] integer expert of each slot; -1 or E (the expert-parallel sentinel) skips the slot.
        top_k_weights: [N, K], in any floating dtype.
        gate_up_bias, down_bias: [E, 2I] and [E, H], or None. The down bias is weighted like the rest of the output.
        activation: "silu" (SwiGLU), "gelu_tanh", "gpt_oss" (clamped SwiGLU with ``alpha`` and ``limit``), or a
            function of (gate [M, I], up [M, I]) giving [M, I].
        layout: "concatenated" ([gate; up]) or "interleaved" (gate, up, gate, up, ...) along 2I; or "joint" for an
            activation that is a function of the whole projection [M, D], gated or not, of ``gate_up_proj`` [E, D, H].
        transposed: weights stand as [E, in, out].
        impl: how. All give the same within rounding:

            - "fused": Triton kernels on a CUDA GPU, forward and backward, that never wait for the host: a CUDA graph
              replays any routing. An activation of your own runs in PyTorch between their GEMMs. On a CPU and for
              float64 it is "stacked".
            - "stacked": a PyTorch loop over the experts that hold tokens: the specification.
            - "triton_grouped": gate, up and activation in one Triton launch, the rest in PyTorch; H and I to 8,192.
            - "single_pass": up, activation and down in one Triton kernel, for inference with few tokens an expert and
              I > H; its backward pass is that of "stacked".
        memory_efficient: "fused" with a named activation on a GPU overwrites the pre-activations in its backward pass:
            a second one through the same graph raises RuntimeError. Elsewhere it does nothing.
        alpha, limit: of "gpt_oss".
        check: look at the indices on a GPU too, which waits for the device; on a CPU they are always checked. An index
            outside of -1..E is otherwise skipped there.

    Returns:
        [N, H] in the dtype of ``hidden_states``.

    Raises:
        ValueError: a shape, name or index that breaks the rules above.
        ImportError: Triton is missing and ``impl`` needs it.
        RuntimeError: "triton_grouped" or "single_pass" without a GPU (or TRITON_INTERPRET=1).
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl must be one of {', '.join(IMPLEMENTATIONS)}, got {impl!r}; check the spelling")
    tensors = (hidden_states, gate_up_proj, down_proj, gate_up_bias, down_bias)
    _check_once(*tensors, top_k_index, top_k_weights, transposed, layout == "joint")
    if activation == "gpt_oss":
        alpha, limit = check_clamp(alpha, limit)
    known = type(activation) is str and activation in ACTIVATIONS and layout in GATED_LAYOUTS
    if check:
        check_index(top_k_index, len(gate_up_proj))
    by_pytorch = impl == "stacked" or (impl == "fused" and not _on_gpu(hidden_states))
    if not by_pytorch:
        tensors = _autocast(*tensors)
    hidden, up, down, up_bias, down_bias = tensors
    given = (hidden, up, down, top_k_index, top_k_weights)
    options = {"gate_up_bias": up_bias, "down_bias": down_bias, "transposed": transposed}
    if known and not by_pytorch:
        options |= {"activation": activation, "layout": layout, "alpha": alpha, "limit": limit}
    else:
        options["act"] = gated_activation(activation, layout, alpha=alpha, limit=limit)
    if by_pytorch:
        return stacked_experts(*given, **options)
    return _by_triton(impl, given, options, memory_efficient).to(hidden_states.dtype)


def _by_triton(impl: str, given: tuple[torch.Tensor, ...], options: dict, memory_efficient: bool) -> torch.Tensor:
    if not HAS_TRITON:
        raise ImportError(f"impl={impl!r} needs Triton, which is not installed; install triton or use impl='stacked'")
    if impl != "fused" and "act" in options:
        raise ValueError(f"impl={impl!r} knows activations by name only, got a function; use impl='fused' or 'stacked'")
    if impl == "triton_grouped":
        from .w1w3_silu import triton_grouped_experts

        return triton_grouped_experts(*given, **options)
    if impl == "single_pass":
        from .single_pass import single_pass_experts

        return single_pass_experts(*given, **options)
    if "act" in options:
        from .unfused import unfused_experts

        return unfused_experts(*given, **options)
    from .fused import fused_experts

    return fused_experts(*given, **options, memory_efficient=memory_efficient)


def _on_gpu(hidden_states: torch.Tensor) -> bool:
    """Whether "fused" means the kernels: float64 has none."""
    return hidden_states.is_cuda and hidden_states.dtype != torch.float64


def _autocast(hidden_states: torch.Tensor, *others: torch.Tensor | None) -> list[torch.Tensor | None]:
    """All in autocast's dtype, or in that of the hidden states."""
    device, dtype = hidden_states.device.type, hidden_states.dtype
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    return [None if x is None else x.to(dtype) for x in (hidden_states, *others)]


def _check_once(*given) -> None:
    """:func:`_check_inputs`, which takes longer than a launch, for shapes, dtypes and devices that it has not seen."""
    if torch.compiler.is_compiling():  # a look into the set would fix the sizes: a graph for each number of tokens
        _check_inputs(*given)
        return
    *tensors, transposed, joint = given
    try:
        forms = [None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors]
        seen = (*forms, transposed, joint, torch.is_autocast_enabled(tensors[0].device.type))
        known = seen in _accepted
    except (AttributeError, RuntimeError, TypeError):  # no tensors, or meta tensors
        known = False
    if not known:
        _check_tensors(tensors)
        _check_inputs(*given)
        if len(_accepted) >= 4096:  # every number of tokens is a form of its own
            _accepted.clear()
        _accepted.add(seen)


def _check_tensors(tensors: list) -> None:
    for name, x in zip(_NAMES, tensors, strict=True):
        optional = x is None and name.endswith("bias")
        if not (optional or isinstance(x, torch.Tensor)) or (x is not None and x.layout != torch.strided):
            got = x.layout if isinstance(x, torch.Tensor) else type(x).__name__
            raise ValueError(f"{name} must be a dense tensor, got {got}; torch.as_tensor or to_dense() makes one")
    if tensors[0].is_meta:
        raise ValueError("hidden_states must hold numbers, got a meta tensor; load the model's weights first")


_NAMES = (
    "hidden_states",
    "gate_up_proj",
    "down_proj",
    "gate_up_bias",
    "down_bias",
    "top_k_index",
    "top_k_weights",
)
_accepted: set[tuple] = set()


def _check_inputs(hidden, gate_up_proj, down_proj, up_bias, down_bias, top_k_index, top_k_weights, transposed, joint):
    ranks = {"hidden_states": (hidden, 2), "gate_up_proj": (gate_up_proj, 3), "down_proj": (down_proj, 3)}
    ranks |= {"top_k_index": (top_k_index, 2), "top_k_weights": (top_k_weights, 2)}
    for name, (x, ndim) in ranks.items():
        if x.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(x.shape)}; see moe_experts")
    floating = ("bfloat16, float16, float32 or float64", DTYPES)
    for name, x, (names, dtypes) in (
        ("hidden_states", hidden, floating),
        ("top_k_weights", top_k_weights, floating),
        ("top_k_index", top_k_index, ("int32 or int64", (torch.int32, torch.int64))),
    ):
        if x.dtype not in dtypes:
            raise ValueError(f"{name} must be {names}, got {x.dtype}; cast it")
    (tokens, width), slots = hidden.shape, top_k_index.shape[1]
    experts, intermediate = down_proj.shape[0], down_proj.shape[1 if transposed else 2]
    if experts == 0:
        raise ValueError("down_proj must hold at least one expert, got E = 0; skip the layer where there is none")
    joint_width = gate_up_proj.shape[2 if transposed else 1] if joint else 2 * intermediate
    wide, tall = (joint_width, width), (width, intermediate)
    up_shape, down_shape = ((experts, *(shape[::-1] if transposed else shape)) for shape in (wide, tall))
    _check_shapes(hidden, (
        ("gate_up_proj", gate_up_proj, up_shape, "see layout and transposed"),
        ("down_proj", down_proj, down_shape, "see layout and transposed"),
        ("gate_up_bias", up_bias, (experts, joint_width), "see layout"),
        ("down_bias", down_bias, (experts, width), "see down_proj"),
    ), same_dtype=not torch.is_autocast_enabled(hidden.device.type))  # fmt: skip
    _check_shapes(hidden, (
        ("top_k_index", top_k_index, (tokens, slots), "route the same tokens"),
        ("top_k_weights", top_k_weights, (tokens, slots), "route the same tokens"),
    ), same_dtype=False)  # fmt: skip


def _check_shapes(hidden, expected, *, same_dtype: bool) -> None:
    for name, x, shape, fix in expected:
        if x is None:
            continue
        if x.shape != shape:
            raise ValueError(f"{name} must be of shape {shape}, got {tuple(x.shape)}; {fix}")
        if x.device != hidden.device:
            raise ValueError(f"{name} must be on {hidden.device} as hidden_states, got {x.device}; move it there")
        if same_dtype and x.dtype != hidden.dtype:
            raise ValueError(f"{name} must be {hidden.dtype} as hidden_states, got {x.dtype}; cast it or autocast")
