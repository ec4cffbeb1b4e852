"""Policy, tokenizer and reference model, loaded and prepared for training with clear errors."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo_moe.adapters.hf_head import add_token_logps


def load_policy(model: str | PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
    """The model itself, or the causal LM at a local path or hub id, in fp32 unless ``dtype`` says otherwise.

    Raises:
        ValueError: nothing is found there.
    """
    if isinstance(model, PreTrainedModel):
        return model
    if not isinstance(model, str | os.PathLike) or not str(model):
        raise ValueError(f"model must be a transformers model, a folder or a hub id, got {model!r}")
    return _from_pretrained(AutoModelForCausalLM, model, "model_name_or_path", dtype=torch.float32, **kwargs)


def load_tokenizer(
    processing_class: str | PreTrainedTokenizerBase | None, model: str | PreTrainedModel
) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one that stands with the model.

    Raises:
        ValueError: there is none.
    """
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    if processing_class is not None and not isinstance(processing_class, str):
        raise ValueError(f"processing_class must be a tokenizer, a folder or a hub id, got {processing_class!r}")
    path = processing_class or (model.config._name_or_path if isinstance(model, PreTrainedModel) else model)
    if not path:
        raise ValueError("processing_class must be given with a model that was not loaded from a path, got None")
    return _from_pretrained(AutoTokenizer, path, "processing_class")


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer with more tokens than the model has embeddings.

    Raises:
        ValueError: naming both sizes.
    """
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise ValueError(f"processing_class must have at most the model's {size} tokens, got {len(tokenizer)}")


def reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the model as it is now, able to return token log-probabilities."""
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    return add_token_logps(reference)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout and router jitter to 0: a ratio of two different dropout masks would be noise."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or "jitter" in name):
                setattr(module, name, 0.0)


def _from_pretrained(auto_class, path: str | os.PathLike, name: str, **kwargs: Any):
    path = str(path)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not os.path.isdir(path):
        raise ValueError(f"{name} must be in a folder or on the hub, got {path!r}; there is no such folder")
    try:
        return auto_class.from_pretrained(path, **kwargs)
    except Exception as error:  # of many kinds: no files, no network, damaged weights, unknown architecture
        raise ValueError(f"{name} must be in a folder or on the hub, got {path!r}: {error}") from error
