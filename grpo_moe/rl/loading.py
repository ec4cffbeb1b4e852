"""Policy, tokenizer, reference model and prompts, loaded and prepared for training with clear errors."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from grpo_moe.adapters.hf_attention import SINK_ATTENTION
from grpo_moe.adapters.hf_experts import can_run_experts
from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.checks import require
from grpo_moe.data import prompt_source
from grpo_moe.rewards import RewardCaller
from grpo_moe.text import clean

from .config import GRPOConfig
from .sharding import check_whole


def check_arguments(args: Any, eval_dataset: Any, compute_metrics: Any, rollout_engine: Any) -> None:
    """Refuses arguments of the trainer that would only fail later.

    Raises:
        ValueError: naming the argument.
    """
    if not isinstance(args, GRPOConfig):
        raise ValueError(f"args must be a GRPOConfig, got {type(args).__name__}; GRPOConfig() has the defaults")
    fits = compute_metrics is None or callable(compute_metrics)
    require(fits, "compute_metrics", "a function of groups", compute_metrics, "pass the function")
    for name in ("eval_steps", "metric_for_best_model") if eval_dataset is None else ():
        if (value := getattr(args, name)) is not None:
            raise ValueError(f"eval_dataset must be given with {name}={value}, got None; leave that out")
    calls = [getattr(rollout_engine, name, None) for name in ("generate", "sync_weights")]
    fits = rollout_engine is None or (all(map(callable, calls)) and not isinstance(rollout_engine, type))
    rule, fix = "an object with generate and sync_weights", "make one, as VLLMEngine(model, tokenizer, ...)"
    require(fits, "rollout_engine", rule, rollout_engine, fix)


def load_policy(model: Any, peft_config: Any = None, **kwargs: Any) -> tuple[PreTrainedModel, Any]:
    """The causal LM to train, and PEFT's wrapper of it if it has adapters, else None.

    A model that is given stays as it is. One at a local path or hub id comes in fp32 unless ``dtype`` says otherwise,
    MXFP4 dequantised, its experts on our kernels and GPT-OSS with sinks in its attention. Weights are read from
    safetensors, and code that comes with them does not run, unless ``kwargs`` say otherwise.

    Args:
        model: a transformers causal LM, PEFT's wrapper of one, or a path or hub id.
        peft_config: adapters to add, as peft.LoraConfig, or None.
        kwargs: for ``from_pretrained``.

    Raises:
        ValueError: nothing is found there, it has an encoder, its weights are quantised or split over processes, its
            generation_config could not be saved, or peft_config comes with adapters already.
    """
    if isinstance(model, str | os.PathLike) and str(model):
        policy, adapters = _load(model, **kwargs), None
    elif hasattr(model, "get_base_model"):
        policy, adapters = model.get_base_model(), model
    elif isinstance(model, PreTrainedModel):
        policy, adapters = model, None
    else:
        got = type(model).__name__ if isinstance(model, nn.Module) else repr(model)
        fix = "load it first; of what DataParallel or torch.compile made, pass the model inside"
        raise ValueError(f"model must be a transformers model, a folder or a hub id, got {got}; {fix}")
    if getattr(policy.config, "is_encoder_decoder", False):
        raise ValueError(
            f"model must be a decoder alone, got the encoder and decoder of {type(policy).__name__}; use a causal LM, "
            "as AutoModelForCausalLM loads"
        )
    check_whole(policy)
    _check_generation_config(policy)
    quantised = [name for name, p in policy.named_parameters() if p.element_size() == 1]
    if quantised:
        raise ValueError(
            f"parameters of {type(policy).__name__} must not be quantised, got {quantised[0]} and {len(quantised) - 1} "
            "others of one byte a number; load the model dequantised (MXFP4: quantization_config=Mxfp4Config("
            "dequantize=True), or pass its path), or an unquantised checkpoint"
        )
    # transformers 5.17 would save no experts of a dequantised MXFP4 model: it tries to undo the conversion of blocks
    if conversions := getattr(policy, "_weight_conversions", None):
        policy._weight_conversions = [c for c in conversions if not any("_blocks" in p for p in c.source_patterns)]
    if peft_config is not None:
        if adapters is not None:
            raise ValueError("peft_config must be None for a model with adapters, got both; leave it out")
        adapters = _add_adapters(policy, peft_config)
    if adapters is not None and adapters.active_peft_config.is_prompt_learning:
        kind = type(adapters.active_peft_config).__name__
        raise ValueError(f"adapters must be part of the model's layers, got {kind} before the prompt; use LoRA")
    return policy, adapters


def _check_generation_config(policy: PreTrainedModel) -> None:
    """The model is saved at the end of training, and transformers refuses some of these to save."""
    config = getattr(policy, "generation_config", None)
    # transformers 5.24 saves any as it was loaded
    if config is None or getattr(config, "_original_object_hash", None) == hash(config) or not policy.can_generate():
        return
    try:
        config.validate(strict=True)
    except ValueError as error:
        raise ValueError(
            f"generation_config of {type(policy).__name__} must be one that transformers saves, got "
            f"{clean(error, 500)}; set its do_sample to True, or leave those options out"
        ) from error


def _add_adapters(policy: PreTrainedModel, peft_config: Any) -> Any:
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise ValueError("peft_config must be None without the package peft, got one; pip install peft") from error
    if not isinstance(peft_config, PeftConfig):
        raise ValueError(f"peft_config must be a configuration of peft, got {peft_config!r}; use peft.LoraConfig(...)")
    return get_peft_model(policy, peft_config)


@contextmanager
def without_adapters(adapters: Any) -> Iterator[None]:
    """PEFT's model with its adapters off; what was frozen stays frozen, which ``disable_adapter`` alone forgets."""
    trained = {p: p.requires_grad for p in adapters.parameters()}
    try:
        with adapters.disable_adapter():
            yield
    finally:
        for parameter, flag in trained.items():
            parameter.requires_grad_(flag)


def _load(path: str | os.PathLike, **kwargs: Any) -> PreTrainedModel:
    code = {"trust_remote_code": kwargs.pop("trust_remote_code", False)}
    config = _from_pretrained(AutoConfig, path, "model_name_or_path", **code)
    quantization = getattr(config, "quantization_config", None) or {}
    mxfp4 = isinstance(quantization, dict) and quantization.get("quant_method") == "mxfp4"
    if mxfp4:
        kwargs["quantization_config"] = Mxfp4Config(dequantize=True)
    if config.model_type == "gpt_oss":
        kwargs.setdefault("attn_implementation", SINK_ATTENTION)
    kwargs = {"dtype": torch.float32, "use_safetensors": True, **code, **kwargs}
    kwargs["output_loading_info"] = True
    policy, info = _from_pretrained(AutoModelForCausalLM, path, "model_name_or_path", **kwargs)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"model_name_or_path must have every weight of {type(policy).__name__}, got {len(missing)} missing in "
            f"{str(path)!r}, of which {missing[0]}; transformers would draw them at random: get the whole checkpoint"
        )
    if mxfp4 and kwargs["dtype"] != "auto":  # transformers 5.17 leaves the experts in bf16
        policy.to(kwargs["dtype"])
    if can_run_experts(policy) and not hasattr(config, "moe_dispatch"):  # GPT-OSS-Lite says it in its config
        policy.set_experts_implementation("grpo_moe")
    return policy


def load_tokenizer(processing_class: str | PreTrainedTokenizerBase | None, model: Any) -> PreTrainedTokenizerBase:
    """The tokenizer given, or the one that stands with the model.

    Raises:
        ValueError: there is none.
    """
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return processing_class
    if processing_class is not None and not isinstance(processing_class, str):
        raise ValueError(
            f"processing_class must be a tokenizer, a folder or a hub id, got {processing_class!r}; load it first"
        )
    path = processing_class or (model.config._name_or_path if hasattr(model, "config") else model)
    if not path:
        raise ValueError(
            "processing_class must be given with a model that was not loaded from a path, got None; pass the tokenizer"
        )
    return _from_pretrained(AutoTokenizer, path, "processing_class", trust_remote_code=False)


def move_weights(model: PreTrainedModel, device: torch.device) -> None:
    """Moves a model to the device, where its parameters must all be numbers.

    Raises:
        ValueError: naming the first parameter that is on the meta device, or holds NaN or infinities.
    """
    rule = f"parameters of {type(model).__name__} must"
    if empty := [name for name, p in model.named_parameters() if p.is_meta]:
        raise ValueError(
            f"{rule} hold numbers, got {empty[0]} and {len(empty) - 1} others on the meta device; load them by "
            "from_pretrained, or call model.to_empty(device=...) and fill them"
        )
    model.to(device)
    for name, parameter in model.named_parameters():
        # not isfinite of all, which would take as much memory again
        if parameter.numel() and not all(bound.isfinite() for bound in parameter.detach().aminmax()):
            raise ValueError(
                f"{rule} be finite, got NaN or infinities in {name}; go back to an earlier checkpoint of the model, or "
                "load it in float32"
            )


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuses a tokenizer with more tokens, or larger ids, than the model has embeddings.

    Raises:
        ValueError: naming both sizes.
    """
    size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > size:
        raise ValueError(
            f"processing_class must have at most the model's {size} tokens, got {len(tokenizer)}; use the model's own "
            "tokenizer, or model.resize_token_embeddings"
        )
    token, last = max(tokenizer.get_vocab().items(), key=lambda item: item[1])  # ids may have holes
    if last >= size:
        raise ValueError(
            f"processing_class must have token ids below the model's {size}, got {last} of {clean(token)!r}; use the "
            "model's own tokenizer, or model.resize_token_embeddings"
        )


def check_ends(args: GRPOConfig, stop_ids: tuple[int, ...]) -> None:
    """Refuses to leave every completion out of the loss.

    Raises:
        ValueError: completions without EOS are left out, and neither model nor tokenizer has such a token.
    """
    if args.mask_truncated_completions and not stop_ids:
        raise ValueError(
            "mask_truncated_completions must be False without an EOS token, got True; set tokenizer.eos_token, or "
            "no completion takes part in the loss"
        )


def reference_model(model: PreTrainedModel) -> PreTrainedModel:
    """A frozen copy of the model as it is now, able to return token log-probabilities."""
    reference = copy.deepcopy(model).eval().requires_grad_(False)
    return add_token_logps(reference)


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout and router jitter to 0: a ratio of two different dropout masks would be noise.

    What no name gives away is found by :func:`grpo_moe.adapters.hf_head.check_training_mode`.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):  # of every dimension, and alpha dropout
            module.p = 0.0
        for name, value in vars(module).items():
            draws = "drop" in name or ("jitter" in name and name != "router_jitter_noise")  # PhiMoE's: a threshold
            if isinstance(value, float) and draws:
                setattr(module, name, 0.0)


def _from_pretrained(auto_class, path: str | os.PathLike, name: str, **kwargs: Any):
    path = str(path)
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not os.path.isdir(path):
        raise ValueError(f"{name} must be in a folder or on the hub, got {path!r}; there is no such folder")
    try:
        return auto_class.from_pretrained(path, **kwargs)
    except Exception as error:  # of many kinds: no files, no network, damaged weights, unknown architecture
        raise ValueError(
            f"{name} must be in a folder or on the hub, got {path!r}: {clean(error, 500)}; give the folder that "
            "save_pretrained wrote, or mend it; weights in .bin files: load the model yourself and pass it"
        ) from error


@contextmanager
def _named(dataset: str) -> Iterator[None]:
    """Says which of the two data sets an error is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{dataset}: {error}") from error


class TaskData:
    """The prompts of a run, and that its reward functions take their columns.

    Args:
        train_dataset, eval_dataset: rows with a prompt; the second may be None.
        tokenizer: of the policy.
        args: the options.
        context: longest sequence of the policy in tokens.
        rewards: of the run.

    Raises:
        ValueError: prompts that do not fit, rows of another form, columns that a reward function cannot take.
    """

    def __init__(self, train_dataset, eval_dataset, tokenizer, args: GRPOConfig, context: int, rewards: RewardCaller):
        room = context - args.max_completion_length
        if room < 1:
            raise ValueError(
                f"max_completion_length must leave room for a prompt in the context of {context}, "
                f"got {args.max_completion_length}; lower it"
            )
        shared = {"max_prompt_tokens": room, "chat_template_kwargs": args.chat_template_kwargs}
        with _named("train_dataset"):
            order = {"seed": args.seed, "shuffle": args.shuffle_dataset}
            self.source = prompt_source(train_dataset, tokenizer, **order, **shared)
        self.eval_prompts = []
        sources = [self.source]
        if eval_dataset is not None:
            with _named("eval_dataset"):
                sources.append(prompt_source(eval_dataset, tokenizer, seed=0, shuffle=False, **shared))
                self.eval_prompts = sources[-1].all()
        firsts = [source.first(2) for source in sources]
        if args.chat_template_kwargs and all(isinstance(prompts[0].raw, str) for prompts in firsts):
            raise ValueError(
                f"chat_template_kwargs must be left out with prompts of text, got {args.chat_template_kwargs}; only "
                "lists of chat messages go through the chat template"
            )
        for prompts in firsts:
            columns = {name: [p.columns[name] for p in prompts] for name in prompts[0].columns}
            rewards.check([p.raw for p in prompts], {**columns, "completion_ids": [[] for _ in prompts]})
