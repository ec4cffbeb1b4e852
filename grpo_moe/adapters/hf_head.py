"""Log-probabilities and losses of completions inside a causal LM's own forward, so that DDP and FSDP hooks fire."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.utils import ModelOutput

from grpo_moe.ops import token_logps

from .hf_packing import packed_inputs


@dataclass
class TokenLogpsOutput(ModelOutput):
    """What :func:`completion_logps` returns."""

    logps: torch.Tensor | None = None
    """[B, T] fp32, 0 where the completion mask is False."""
    entropy: torch.Tensor | None = None
    """[B, T] fp32 entropy in nats of the distribution each token came from; None unless asked for."""
    aux_loss: torch.Tensor | None = None
    """Load-balancing loss of the routers over real tokens; None unless asked for."""


def add_token_logps(model):
    """Gives ``model.forward`` the mode that :func:`completion_logps` and :func:`completion_loss` use.

    Other calls stay as they are.

    Args:
        model: a transformers causal LM, in PEFT's wrapper or not.

    Returns:
        The same model.

    Raises:
        ValueError: no linear head, or LoRA on it, whose delta the head's weight does not hold.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings()
    # adapters of every kind wrap a base layer; PEFT's wrapper of a head that trains whole keeps the original beside it
    if hasattr(head, "base_layer") and not hasattr(head, "original_module"):
        raise ValueError(
            f"the head of {type(base).__name__} must carry no LoRA or other adapter, got {type(head).__module__}."
            f"{type(head).__name__}: the fused head reads its weight alone; take lm_head out of target_modules, or "
            'train it whole with modules_to_save=["lm_head"]'
        )
    if head is None or not hasattr(head, "weight"):
        raise ValueError(
            f"the head of {type(base).__name__} must be a linear layer, got {type(head).__name__}; load the model by "
            "AutoModelForCausalLM"
        )
    if getattr(base, "_has_token_logps", False):
        return model

    @functools.wraps(type(base).forward)  # generate() checks its keyword arguments against this signature
    def forward(self, *args, reading: _Reading | None = None, **kwargs):
        if reading is None:
            return type(self).forward(self, *args, **kwargs)  # not a bound method: a copy of the model stays a copy
        return _read(self, reading)

    base.forward = types.MethodType(forward, base)
    base._has_token_logps = True
    return model


def completion_logps(
    model,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prompt_lengths: torch.Tensor,
    completion_ids: torch.Tensor,
    completion_mask: torch.Tensor,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_aux_loss: bool = False,
    padding_free: bool = False,
) -> TokenLogpsOutput:
    """Log-probability of each completion token given what stands before it; logits exist a chunk of rows at a time.

    Args:
        model: prepared by :func:`add_token_logps`, wrapped or not.
        input_ids, attention_mask: [B, S], prompt then completion, padded on the right.
        prompt_lengths: [B] tokens before the completion, at least 1.
        completion_ids, completion_mask: [B, T]; only tokens under the mask are computed.
        temperature: divides the logits.
        return_entropy: also the entropy of each token's distribution, differentiable.
        return_aux_loss: also the routers' load-balancing loss (models whose base output has ``aux_loss``).
        padding_free: run the B sequences as one row without padding; see :func:`check_padding_free`.
    """

    def read(hidden_states, places, weight, **head):
        rows = completion_mask.nonzero(as_tuple=True)
        ids = completion_ids[rows]
        result = token_logps(
            hidden_states[places[rows]], weight, ids, temperature=temperature, return_entropy=return_entropy, **head
        )
        values = result if return_entropy else (result, None)
        return [x if x is None else x.new_zeros(completion_ids.shape).index_put(rows, x) for x in values]

    columns = completion_ids.shape[1]
    reading = _Reading(input_ids, attention_mask, prompt_lengths, columns, padding_free, read, return_aux_loss)
    (logps, entropy), aux_loss = model(reading=reading)
    return TokenLogpsOutput(logps=logps, entropy=entropy, aux_loss=aux_loss)


def completion_loss(
    model,
    loss_fn: Callable[..., Any],
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    prompt_lengths: torch.Tensor,
    completion_length: int,
    padding_free: bool = False,
) -> Any:
    """What a loss fused with the head, as :func:`grpo_moe.ops.grpo_loss`, makes of the completions' hidden states.

    Args:
        model, input_ids, attention_mask, prompt_lengths, padding_free: as in :func:`completion_logps`.
        loss_fn: ``f(hidden_states [B, T, H], lm_head_weight [V, H], *, bias [V] or None, logit_scale, softcap)``,
            called in the model's forward; column t predicts completion token t, and is anything where there is none.
        completion_length: T.
    """

    def read(hidden_states, places, weight, **head):
        return loss_fn(hidden_states[places], weight, **head)

    return model(reading=_Reading(input_ids, attention_mask, prompt_lengths, completion_length, padding_free, read))[0]


@dataclass(frozen=True)
class _Reading:
    """What to run and how to read it; one opaque object, since FSDP rounds the float tensors among arguments."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    prompt_lengths: torch.Tensor
    completion_length: int
    padding_free: bool
    read: Callable
    """f(hidden_states [N, H], places [B, T] in N, weight, bias, logit_scale, softcap)."""
    return_aux_loss: bool = False


def _read(model, reading: _Reading) -> tuple:
    """What the reading's function makes of a forward of the base model; and its auxiliary loss, or None."""
    inputs = {"input_ids": reading.input_ids, "attention_mask": reading.attention_mask}
    lengths = reading.attention_mask.sum(1)
    if reading.padding_free:
        inputs = packed_inputs(model, **inputs)
        first = lengths.cumsum(0) - lengths  # of each sequence among the tokens
    else:
        first = torch.arange(len(lengths), device=lengths.device) * reading.input_ids.shape[1]
    if reading.return_aux_loss:
        inputs["output_router_logits"] = True
    outputs = model.base_model(**inputs, use_cache=False)
    hidden_states = outputs.last_hidden_state.flatten(0, 1)
    columns = torch.arange(reading.completion_length, device=lengths.device)
    places = (reading.prompt_lengths - 1)[:, None] + columns  # [B, T]
    places = first[:, None] + places.clamp(max=(lengths - 1)[:, None])
    return reading.read(hidden_states, places, **head_of(model)), outputs.aux_loss if reading.return_aux_loss else None


def head_of(model) -> dict[str, Any]:
    """``weight``, ``bias``, ``logit_scale`` and ``softcap`` of the head; rows beyond the vocabulary left out."""
    head, config = model.get_output_embeddings(), model.config.get_text_config()
    weight, bias = head.weight, getattr(head, "bias", None)
    if hasattr(weight, "full_tensor"):  # a shard of FSDP2
        weight = weight.full_tensor()
    if len(weight) > config.vocab_size:
        weight, bias = weight[: config.vocab_size], None if bias is None else bias[: config.vocab_size]
    return {"weight": weight, "bias": bias, **head_transform(config)}


def head_transform(config) -> dict[str, float | None]:
    """``logit_scale`` and ``softcap`` between the head's product and the logits, from the names that configs use."""
    text = config.get_text_config()
    named = (getattr(text, name, None) for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"))
    scale = next((value for value in named if value is not None), None)
    if scale is None and getattr(text, "logits_scaling", None) is not None:
        scale = text.logits_scaling if text.model_type == "hyperclovax" else 1 / text.logits_scaling
    return {
        "logit_scale": 1.0 if scale is None else float(scale),
        "softcap": getattr(text, "final_logit_softcapping", None),
    }


@torch.no_grad()
def check_head(model) -> None:
    """Compares our log-probabilities with the model's own logits on a few tokens.

    Raises:
        ValueError: they differ: the model does something to its logits that ``head_transform`` does not know.
    """
    device, vocabulary = model.device, model.config.get_text_config().vocab_size
    ids = torch.arange(1, 5, device=device)[None] % vocabulary
    ours = _logps_of_rows(model, ids, [ids.shape[1]], padding_free=False)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1, :vocabulary].to(ours.dtype)
    theirs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    if not _close(model, ours, theirs):
        raise ValueError(
            f"log-probabilities of {type(model).__name__} must equal those of its own logits, got {ours.tolist()} "
            f"against {theirs.tolist()}; its head is not supported"
        )


@torch.no_grad()
def check_training_mode(model) -> None:
    """Compares log-probabilities in training mode with those in evaluation mode, in which rollouts are made.

    Raises:
        ValueError: they differ: the model draws numbers of its own in training (dropout, noise, sampled experts), so
            that a ratio of two forwards would be noise.
    """
    config = model.config.get_text_config()
    length = min(getattr(config, "max_position_embeddings", None) or 64, 64)
    ids = torch.arange(1, length + 1, device=model.device)[None] * 7 % config.vocab_size
    flags, made = {module: module.training for module in model.modules()}, []
    try:
        for mode in (True, False):
            model.train(mode)
            made.append(_logps_of_rows(model, ids, [ids.shape[1]], padding_free=False))
    finally:
        for module, flag in flags.items():
            module.training = flag
    if not _close(model, *made):
        apart = float((made[0] - made[1]).abs().max())
        raise ValueError(
            f"log-probabilities of {type(model).__name__} must be the same in training mode as in evaluation, got "
            f"differences of up to {apart:.1e}: it draws dropout, noise or experts at random; set them to 0 in its "
            "config, or use another model"
        )


@torch.no_grad()
def check_padding_free(model) -> None:
    """Finds out whether the sequences of a packed row are kept apart.

    Layers that carry a state along the row are refused by their names; all others by numbers: the sequences of a row
    must have the log-probabilities of the padded ones, and must not change with the sequence before them.

    Raises:
        ValueError: sequences of a packed row see each other.
    """
    refusal = f"padding_free must be False for {type(model).__name__}, got True: "
    if states := layers_with_state(model.config.get_text_config()):
        raise ValueError(f"{refusal}layers of type {', '.join(states)} carry a state from sequence to sequence")
    lengths, vocabulary = [3, 7, 5], model.config.get_text_config().vocab_size
    ids = torch.arange(3 * 7, device=model.device).view(3, 7) * 5 % vocabulary
    other = torch.cat([(ids[:1] + 1) % vocabulary, ids[1:]])
    packed, beside_another = (_logps_of_rows(model, x, lengths, padding_free=True) for x in (ids, other))
    padded = _logps_of_rows(model, ids, lengths, padding_free=False)
    leak = float((packed[1:] - beside_another[1:]).abs().max())
    if not _close(model, packed, padded) or leak > (1e-5 if _is_precise(model) else 0.02):
        apart = float((packed - padded).abs().max())
        raise ValueError(
            f"{refusal}packed sequences see each other, by {leak:.1e} in the log-probabilities beside another sequence "
            f"and {apart:.1e} against padded ones; leave it out"
        )


def layers_with_state(config) -> list[str]:
    """Types of layers, as transformers' configs name them, that carry more than keys and values along a sequence."""
    types = set(getattr(config, "layer_types", None) or ())
    return sorted(kind for kind in types if any(word in kind for word in ("linear", "mamba", "conv")))


def _logps_of_rows(model, ids: torch.Tensor, lengths: list[int], *, padding_free: bool) -> torch.Tensor:
    """Log-probabilities [B, S - 1] of ids [B, S] after the first of each row."""
    lengths = torch.tensor(lengths, device=ids.device)
    mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    return completion_logps(
        model,
        input_ids=ids,
        attention_mask=mask,
        prompt_lengths=torch.ones_like(lengths),
        completion_ids=ids[:, 1:],
        completion_mask=mask[:, 1:],
        padding_free=padding_free,
    ).logps


def _close(model, ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    tolerance = 1e-3 if _is_precise(model) else 0.1
    return torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance / 10)


def _is_precise(model) -> bool:
    """Whether the head reads float32 or wider in a forward; parameters in shards may be gathered in less."""
    ids = torch.ones(1, 2, dtype=torch.long, device=model.device)
    reading = _Reading(ids, ids.bool(), ids[:, 0], 1, False, lambda hidden_states, *_, **__: hidden_states.dtype)
    return model(reading=reading)[0].itemsize >= 4
