"""Bytes that a block keeps for its backward pass, and holds for a moment: term by term of what its code saves."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from .shapes import AttentionShape, BlockShape, MLPShape, ModelShape

ATTENTIONS = ("eager", "sdpa", "flex", "masked_sdpa")
"""Scores in memory; PyTorch's SDPA; FlexAttention; SDPA under a float mask [B, heads, T, S + 1] with the sinks."""
LITE = "gptoss_lite"
_QK_NORM = ("qwen3", "qwen3_moe", "olmoe", "minimax_m2")
_NORM_IN_FP32 = (LITE, "gpt_oss")  # the others round the normalised rows before the weight


@dataclass(frozen=True)
class Compute:
    """How a forward runs, which decides what is kept."""

    hidden_bytes: int
    """Of an element between blocks: 4 under autocast, whose norms and residuals stay fp32; else that of weights."""
    operand_bytes: int
    """Of an element in GEMMs and attention."""
    casts: bool
    """Autocast: every Linear keeps a rounded copy of its input of its own, and of its fp32 weight."""
    attention: str
    """Of ``ATTENTIONS``."""
    experts: str = "fused"
    """"fused" (kernels on a GPU) or "stacked" (PyTorch)."""
    frozen: bool = False
    """The weights of the model get no gradient: LoRA."""
    lora_rank: int = 0
    """Of adapters on the projections of attention; 0: none."""
    lora_experts: bool = False
    """Experts have adapters too: their weights are made anew with LoRA added, and get whole gradients."""
    padded: bool = False
    """Rows of different lengths: SDPA then takes a mask, and keys and values repeated to all heads."""

    @property
    def experts_frozen(self) -> bool:
        """No gradient of an expert's weights is made."""
        return self.frozen and not self.lora_experts


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one block at one micro-batch."""

    saved: dict[str, int]
    """Activations for the backward pass by kind: "norm", "attention", "router", "experts", "shared_experts",
    "dense_mlp"."""
    weight_copies: int
    """Low-precision copies of fp32 weights, which autograd keeps with them."""
    forward: int
    """All that there is at the worst moment of a forward pass without gradients."""
    backward: int
    """On top of what is saved, at the worst moment of the backward pass; gradients of parameters apart."""

    @property
    def total_saved(self) -> int:
        """Of all kinds."""
        return sum(self.saved.values())


def block_memory(shape: ModelShape, block: BlockShape, batch: int, tokens: int, how: Compute) -> BlockMemory:
    """What a block keeps and needs for ``batch`` rows of ``tokens`` tokens.

    Each term names the operation that saves it; r is ``hidden_bytes``, c ``operand_bytes``, H the hidden size.

    - norm: of each RMSNorm the input in fp32 (4H: under autocast the residual itself), the normalised rows for the
      weight's gradient (4H, or rH in families that round first), one fp32 scale a row.
    - inputs of projections: one copy each in c under autocast, which caches casts of weights and not of activations;
      without autocast one tensor for all.
    - attention: q, k, v as the kernel reads them, its output (which is o_proj's input) and fp32 logsumexp; with norms
      on q and k these in fp32 and normalised. "eager" keeps the softmax [heads, T, S] in fp32 and in c, "flex" the
      output before and after the factor of the sinks.
    - router: fp32 probabilities [N, E], indices and weights of the top k.
    - experts, fused (:mod:`grpo_moe.ops.moe.fused`): the rows as they come, pre-activations [N * K, 2I], int32 routing;
      not the sorted rows, not the activations. "stacked" keeps rows, pre-activations and outputs of every pair.
    - shared experts and dense MLPs: gate, silu(gate), up, their product.
    """
    rows = batch * tokens
    saved: dict[str, float] = dict.fromkeys(
        ("norm", "attention", "router", "experts", "shared_experts", "dense_mlp"), 0.0
    )
    forward = backward = before = 0.0
    norm = rows * _norm(shape.hidden_size, how, shape.model_type)
    if block.mlp is not None:
        mlp, (forward, backward) = _mlp(shape, block, rows, how)
        saved |= {kind: rows * count for kind, count in mlp.items()}
        saved["norm"] += norm
        before = sum(saved.values())
    if block.attention is not None:
        saved["attention"] = rows * _attention(shape, block.attention, tokens, how)
        saved["norm"] += norm
        moments = _attention_moments(shape, block.attention, tokens, how)
        # the MLP's part is gone in the backward pass of attention, and not yet there when it is recomputed
        forward, backward = max(forward, rows * moments[0]), max(backward, rows * moments[1] - before)
    residual = rows * shape.hidden_size * how.hidden_bytes
    return BlockMemory(
        {kind: round(count) for kind, count in saved.items()},
        _weight_copies(shape, block, how),
        round(forward + 2 * residual),  # in and out
        round(backward + 2 * residual),  # gradients of both
    )


def outside_memory(shape: ModelShape, batch: int, tokens: int, how: Compute) -> int:
    """Bytes that the embedding (its indices), rotary tables and the final norm keep."""
    attentions = [x.attention for x in shape.blocks if x.attention is not None]
    dim = max((x.head_dim for x in attentions), default=0)
    rows = batch * tokens
    tables = tokens * 2 * dim * how.hidden_bytes
    if shape.model_type == LITE:
        tables = rows * 8 * dim  # by row and kind of layer, of half a head in fp32
    elif shape.model_type == "gpt_oss":
        tables //= 2
    return rows * (_norm(shape.hidden_size, how, shape.model_type) + 8) + tables


def _norm(width: int, how: Compute, model_type: str) -> int:
    """Bytes a row of an RMSNorm over the residual stream."""
    kept = 4 * width + 4
    if model_type == LITE and how.hidden_bytes < 4:
        kept += how.hidden_bytes * width  # the input itself beside its fp32 copy
    if not how.frozen:
        kept += (4 if model_type in _NORM_IN_FP32 else how.hidden_bytes) * width
    return kept


def _inputs(users: int, width: int, how: Compute) -> float:
    """Bytes a row of the input that ``users`` projections share."""
    if how.frozen:
        return 0
    return users * width * how.operand_bytes if how.casts else width * how.hidden_bytes


def _attention(shape: ModelShape, attention: AttentionShape, tokens: int, how: Compute) -> float:
    c, heads = how.operand_bytes, attention.heads
    query, key = heads * attention.head_dim, attention.kv_heads * attention.head_dim
    value, out = attention.kv_heads * attention.value_dim, heads * attention.value_dim
    lite = shape.model_type == LITE
    kept = _inputs(2 if lite else 3, shape.hidden_size, how)
    if how.lora_rank:
        users = 2 if lite else 3
        # of o_proj the input is there already, unless it is rounded anew
        own = c * (users * shape.hidden_size + out) if how.casts else how.hidden_bytes * shape.hidden_size
        kept += own + c * (users + 1) * how.lora_rank
    if shape.model_type in _QK_NORM:  # the weights of both are small, and train or not as the others
        kept += (query + key) * (4 + (0 if how.frozen else c)) + 4 * (heads + attention.kv_heads)
    if attention.kind == "mla":  # values are a view of what is projected up for keys and values
        kept += c * key
    repeated = query + out  # keys and values of all heads
    if how.attention == "eager":
        sink = shape.model_type in (LITE, "gpt_oss")
        wide = _softmax_bytes(shape, how)
        columns = heads * (wide * (tokens + sink) + (c * tokens if c < wide else 0))  # and rounded
        if lite:
            return kept + c * (query + key + value + out) + columns + tokens  # a bool mask
        return kept + c * (query + repeated + out) + columns + 8 * heads * sink  # where the maximum is
    if how.attention == "flex":
        sinks = c * out + 4 * heads if shape.model_type in (LITE, "gpt_oss") else 0
        both = c * key if lite else 0  # values are a view of the projection that holds the keys too
        return kept + c * (query + key + value + out) + 4 * heads + sinks + both
    if how.attention == "masked_sdpa":
        return kept + c * (query + repeated + out) + 4 * heads + c * heads * (tokens + 1)
    return kept + c * (query + (repeated if how.padded else key + value) + out) + 4 * heads


def _attention_moments(shape: ModelShape, attention: AttentionShape, tokens: int, how: Compute) -> tuple[float, float]:
    """Bytes a row at the worst moments of a forward without gradients, and of a backward pass beside what is saved."""
    c, width = how.operand_bytes, attention.heads * (attention.head_dim + attention.value_dim)
    if how.attention == "eager":
        # at the softmax: masked scores, these with the sink's column, the result; in the backward pass the gradients of
        # the last two, and the rounded result is gone
        plane, wide = attention.heads * tokens, _softmax_bytes(shape, how)
        return 3 * wide * plane + c * width, (2 * wide - (c if c < wide else 0)) * plane
    mask = 2 * c * attention.heads * tokens if how.attention == "masked_sdpa" else 0
    return c * width + mask, 2 * c * width + mask


def _softmax_bytes(shape: ModelShape, how: Compute) -> int:
    """Of an element of eager attention's softmax: fp32, but in GPT-OSS that of its sinks."""
    return how.hidden_bytes if shape.model_type == "gpt_oss" else 4


def _mlp(shape: ModelShape, block: BlockShape, rows: int, how: Compute) -> tuple[dict[str, float], tuple[float, float]]:
    """Bytes a row by kind, and bytes at the worst moments of forward and backward."""
    mlp, hidden, c = block.mlp, shape.hidden_size, how.operand_bytes
    gates = 2 if mlp.gated else 1
    trained = 0 if how.frozen else 1
    dense = mlp.shared_intermediate_size if mlp.num_experts else mlp.intermediate_size
    kept = {"shared_experts" if mlp.num_experts else "dense_mlp": dense * c * (2 * gates - 1 + trained)}
    if not mlp.num_experts:
        kept["dense_mlp"] += _inputs(gates, hidden, how)
        moment = rows * c * (3 * dense + hidden)
        return kept, (moment, moment)
    lite, top_k, width = shape.model_type == LITE, mlp.top_k, gates * mlp.intermediate_size
    users = (not lite) + (gates if dense else 0)
    if how.casts:
        kept["router"] = _inputs(1, hidden, how) if not lite else 4 * hidden * trained
        kept["shared_experts"] += _inputs(users - (not lite), hidden, how)
        own = hidden * c if how.experts == "fused" else 0
    else:
        kept["router"] = 4 * hidden * trained if lite and how.hidden_bytes < 4 else 0
        own = 0 if how.experts_frozen and how.experts == "stacked" else hidden * how.hidden_bytes
    probabilities = top_k if shape.model_type == "gpt_oss" else mlp.num_experts  # its softmax is over the chosen
    kept["router"] += 4 * probabilities + 12 * top_k
    pairs = rows * top_k
    if how.experts == "stacked":
        kept["experts"] = own + top_k * _stacked(shape, mlp, how)
    else:
        kept["experts"] = own + top_k * (c * width + 24)
    trained = 0 if how.experts_frozen else 1
    inner, weights = mlp.intermediate_size, c * block.parameters["experts"] * trained
    forward = c * pairs * (hidden + inner)
    # sorted gradients, those of the activations and pre-activations, weighted activations; then the down projection's
    # gradient beside them; then both weights' gradients beside the slots of the rows' gradient
    backward = max(
        c * pairs * (hidden + width + inner * (1 + trained)),
        c * pairs * (hidden + width + inner * trained) + weights // 3,
        c * pairs * (hidden + width) + weights,
    )
    return kept, (forward, backward)


def _stacked(shape: ModelShape, mlp: MLPShape, how: Compute) -> float:
    """Bytes of a pair of token and expert in PyTorch: its row, projections, activations, output, weighted output."""
    hidden, inner, c = shape.hidden_size, mlp.intermediate_size, how.operand_bytes
    biased = shape.model_type == "gpt_oss"
    gate = how.hidden_bytes if biased else c  # adding a bias of its own dtype
    weighted = how.hidden_bytes if biased or shape.model_type == LITE else c
    acts = (6 if biased else 3) * inner * gate + inner * c * (not how.experts_frozen)
    return hidden * (c * (not how.experts_frozen) + gate + weighted) + acts + 20


def _weight_copies(shape: ModelShape, block: BlockShape, how: Compute) -> int:
    if not how.casts:
        return 0
    linear = sum(block.multiply_adds[kind] for kind in ("attention", "shared_experts", "dense_mlp"))
    router = 0 if shape.model_type == LITE else block.multiply_adds["router"]
    return how.operand_bytes * (linear + router + block.parameters["experts"])


def kv_bytes(shape: ModelShape, tokens: int, element_bytes: int) -> int:
    """Keys and values of one sequence in the rollout: a ring of the window in windowed layers.

    Source: :func:`grpo_moe.ops.attention.kv_cache.bytes_per_row`.
    """
    total = 0
    for block in shape.blocks:
        attention = block.attention
        if attention is None:
            continue
        slots = min(attention.window or inf, tokens)
        total += int(slots) * attention.kv_heads * (attention.head_dim + attention.value_dim) * element_bytes
    return total


def lora_parameters(shape: ModelShape, rank: int, experts: bool = False) -> int:
    """Of adapters on every projection of attention, and on both of each expert's: rank * (inputs + outputs)."""
    count = 0
    for block in shape.blocks if rank else ():
        if experts and block.mlp is not None and block.mlp.num_experts:
            widths = 3 if block.mlp.gated else 2  # gate and up side by side, then down
            count += rank * block.mlp.num_experts * (2 * shape.hidden_size + widths * block.mlp.intermediate_size)
        a = block.attention
        if a is not None:
            query, key, value = a.heads * a.head_dim, a.kv_heads * a.head_dim, a.kv_heads * a.value_dim
            inputs = (2 if shape.model_type == LITE else 3) * shape.hidden_size
            count += rank * (inputs + query + key + value + a.heads * a.value_dim + shape.hidden_size)
    return count
