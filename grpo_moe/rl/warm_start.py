"""Supervised warm start: teaches a policy the form of an answer from demonstrations, before RL; cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import load_model, save_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.checks import check_flag, check_int, check_number, keep_plain
from grpo_moe.text import clean, say
from grpo_moe.types import Completion, Prompt

from .batch import Group, batch_logps, collate
from .files import atomic_path

Demonstrations = Callable[[int], Sequence[tuple[str, str]]]


@dataclass(frozen=True)
class WarmStart:
    """Options of :func:`warm_start`."""

    steps: int
    """Updates."""
    learning_rate: float = 3e-3
    """Peak of AdamW; rises over 20 updates, then falls to a tenth."""
    router_aux_loss_coef: float = 0.01
    """Weight of the load-balancing loss, so that experts start out in use."""
    log_every: int = 100
    """Updates between printed lines; 0 prints none."""
    bf16: bool = False
    """Mixed precision: forward in bf16 by autocast, weights and optimiser in fp32."""
    save_every: int = 0
    """Updates between saves beside the cache, from which an interrupted call goes on; 0 starts again."""

    def __post_init__(self):
        check_int("steps", self.steps, least=1, fix="give a number of updates")
        check_int("log_every", self.log_every, least=0, fix="0 prints no lines")
        check_int("save_every", self.save_every, least=0, fix="0 saves nothing on the way")
        check_number("learning_rate", self.learning_rate, lambda x: x > 0, "above 0", fix="3e-3 is the default")
        weight = self.router_aux_loss_coef
        check_number("router_aux_loss_coef", weight, lambda x: x >= 0, "0 or positive", fix="0 leaves the loss out")
        check_flag("bf16", self.bf16)
        keep_plain(self)


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    demonstrations: Demonstrations,
    options: WarmStart,
    *,
    cache_dir: str | os.PathLike,
    cache_key: dict,
) -> None:
    """Trains the model in place on demonstrations, or loads what an equal call left in the cache.

    The main process of a machine trains while the others wait and then load, so all start from the same weights.

    Args:
        model: a GPT-OSS-Lite model (its base output has the balance loss).
        tokenizer: its tokenizer; the EOS token is appended to every completion.
        demonstrations: from the update's number to a batch of (prompt, completion) texts; must be deterministic.
        options: of the training.
        cache_dir: folder of safetensors files.
        cache_key: JSON values that, with the options and the model's config, determine the result.
    """
    decisive = {name: x for name, x in asdict(options).items() if name not in ("log_every", "save_every")}
    key = json.dumps([cache_key, decisive, model.config.to_diff_dict()], sort_keys=True, default=str)
    path = Path(cache_dir) / f"warm_start_{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
    state = PartialState()
    model.to(state.device)
    with state.local_main_process_first():
        if path.exists():
            load_model(model, str(path))
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".unfinished.pt")
        _train(model, tokenizer, demonstrations, options, unfinished)
        with atomic_path(path) as temporary:
            save_model(model, str(temporary))
        unfinished.unlink(missing_ok=True)


def _train(model, tokenizer, demonstrations, options, unfinished):
    add_token_logps(model).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    scheduler = get_scheduler(
        "cosine_with_min_lr", optimizer, 20, options.steps, scheduler_specific_kwargs={"min_lr_rate": 0.1}
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    done = _load_unfinished(unfinished, parts)
    started = time.perf_counter()
    for step in range(done + 1, options.steps + 1):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=options.bf16):
            loss = _loss(model, tokenizer, demonstrations(step), options.router_aux_loss_coef)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        if options.log_every and step % options.log_every == 0:
            seconds = time.perf_counter() - started
            say(f"warm start {step}/{options.steps}  loss {loss.item():.3f}  {seconds:.0f} s")
        if options.save_every and step % options.save_every == 0 and step < options.steps:
            with atomic_path(unfinished) as temporary:
                torch.save({"step": step, **{name: part.state_dict() for name, part in parts.items()}}, temporary)


def _load_unfinished(path: Path, parts: dict) -> int:
    """The updates that an interrupted call had saved, whose state the parts now have; 0 without one."""
    if not path.exists():
        return 0
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    except Exception as error:  # of many kinds: cut off, flipped, of another version
        raise ValueError(f"{path} must be an unfinished warm start, got {clean(error, 300)}; remove it") from error
    say(f"warm start goes on after update {saved['step']}")
    return saved["step"]


def _loss(model, tokenizer, pairs, aux_coefficient):
    groups = _demonstrations(tokenizer, pairs)
    batch = collate(groups, torch.zeros(len(groups), 1), mask_truncated=False, device=model.device)
    scored = batch_logps(model, batch, return_aux_loss=aux_coefficient > 0)
    loss = -scored.logps.sum() / batch.completion_mask.sum()
    return loss + aux_coefficient * scored.aux_loss if aux_coefficient else loss


def _demonstrations(tokenizer, pairs):
    """Each pair as a group of one, so that demonstrations and rollouts are collated alike."""
    prompts, completions = zip(*pairs, strict=True)
    prompt_ids = tokenizer(list(prompts)).input_ids
    completion_ids = tokenizer(list(completions), add_special_tokens=False).input_ids
    nothing = torch.zeros(1, dtype=torch.float64)
    groups = []
    for prompt, completion in zip(prompt_ids, completion_ids, strict=True):
        tokens = (*completion, tokenizer.eos_token_id)
        made = Completion(tokens, (0.0,) * len(tokens), "stop")
        groups.append(Group(Prompt(tuple(prompt)), [made], nothing, nothing, []))
    return groups
