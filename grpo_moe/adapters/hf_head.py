"""Log-probabilities of completion tokens inside a causal LM's own forward, so that DDP, FSDP and ZeRO hooks fire."""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from grpo_moe.ops import token_logps


@dataclass
class TokenLogpsOutput(ModelOutput):
    """What a model returns in log-probability mode."""

    logps: torch.Tensor | None = None
    """[B, T] fp32, 0 where the completion mask is False."""
    entropy: torch.Tensor | None = None
    """[B, T] fp32 entropy in nats of the distribution each token came from; None unless asked for."""
    aux_loss: torch.Tensor | None = None
    """Load-balancing loss of the routers over real tokens; None unless asked for."""


def add_token_logps(model):
    """Gives ``model.forward`` the mode that :func:`completion_logps` uses. Other calls stay as they are.

    Returns:
        The same model.

    Raises:
        ValueError: a PEFT model, or LoRA on the head, whose delta the head's weight does not hold.
    """
    if getattr(model, "_has_token_logps", False):
        return model
    if hasattr(model, "peft_config"):
        raise ValueError("model must be a plain transformers model, got one with PEFT adapters; merge them first")
    head = model.get_output_embeddings()
    if head is None or hasattr(head, "lora_A"):
        raise ValueError(f"the head of {type(model).__name__} must be a plain linear layer, got {type(head).__name__}")
    transform = head_transform(model.config)

    @functools.wraps(type(model).forward)  # generate() checks its keyword arguments against this signature
    def forward(self, *args, completion_ids=None, **kwargs):
        if completion_ids is None:
            return type(self).forward(self, *args, **kwargs)  # not a bound method: a copy of the model stays a copy
        return _token_logps_forward(self, completion_ids, transform, **kwargs)

    model.forward = types.MethodType(forward, model)
    model._has_token_logps = True
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
    """
    return model(
        input_ids=input_ids,
        attention_mask=attention_mask,
        prompt_lengths=prompt_lengths,
        completion_ids=completion_ids,
        completion_mask=completion_mask,
        temperature=temperature,
        return_entropy=return_entropy,
        return_aux_loss=return_aux_loss,
    )


def head_transform(config) -> dict[str, float]:
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
    device, vocabulary = model.device, model.get_input_embeddings().weight.shape[0]
    ids = torch.arange(1, 5, device=device)[None] % vocabulary
    ours = completion_logps(
        model,
        input_ids=ids,
        attention_mask=torch.ones_like(ids, dtype=torch.bool),
        prompt_lengths=torch.ones(1, dtype=torch.long, device=device),
        completion_ids=ids[:, 1:],
        completion_mask=torch.ones_like(ids[:, 1:], dtype=torch.bool),
    ).logps
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].to(ours.dtype)
    theirs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    if not torch.allclose(ours, theirs, atol=tolerance, rtol=tolerance):
        raise ValueError(
            f"log-probabilities of {type(model).__name__} must equal those of its own logits, got {ours.tolist()} "
            f"against {theirs.tolist()}; its head is not supported"
        )


def _token_logps_forward(
    model,
    completion_ids,
    transform,
    *,
    prompt_lengths,
    completion_mask,
    temperature,
    return_entropy,
    return_aux_loss,
    **inputs,
):
    if return_aux_loss:
        inputs["output_router_logits"] = True
    outputs = model.base_model(**inputs, use_cache=False)
    hidden, head = outputs.last_hidden_state, model.get_output_embeddings()
    columns = prompt_lengths[:, None] - 1 + torch.arange(completion_ids.shape[1], device=hidden.device)
    rows = completion_mask.nonzero(as_tuple=True)
    result = token_logps(
        hidden[rows[0], columns[rows]],
        head.weight,
        completion_ids[rows],
        bias=head.bias,
        temperature=temperature,
        return_entropy=return_entropy,
        **transform,
    )
    logps, entropy = result if return_entropy else (result, None)

    def scatter(values):
        return None if values is None else values.new_zeros(completion_ids.shape).index_put(rows, values)

    aux_loss = outputs.aux_loss if return_aux_loss else None
    return TokenLogpsOutput(logps=scatter(logps), entropy=scatter(entropy), aux_loss=aux_loss)
