"""A sequence classification model with one label as a reward function."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from grpo_moe.checks import is_count, require
from grpo_moe.text import clean


class ModelReward:
    """A reward function: the one logit of a reward model for prompt and completion.

    Chats go through the tokenizer's chat template, the completion as their last turn; texts are put together, with
    the special tokens the tokenizer adds by itself (TRL adds none to them). Rows too long for the model are not cut
    but not scored (None). The model is put in eval mode and its ``config.pad_token_id`` is set to the token that pads,
    the tokenizer's or else its EOS, since transformers reads the logit at the last token that is no padding.

    Args:
        model: a transformers model for sequence classification with one label, on its device, or the path of one.
        tokenizer: of the model; by default the one at the path.
        batch_size: rows in one forward pass.
        max_length: longest row in tokens; by default what the model and the tokenizer are made for.
        device: to move the model to; by default it stays where it is (the CPU for a path).

    Raises:
        ValueError: more than one label, weights missing from the path, no tokenizer, no token to pad with, or sizes
            below 1.
    """

    def __init__(
        self,
        model: torch.nn.Module | str | Path,
        tokenizer: Any = None,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        device: torch.device | str | None = None,
    ):
        if isinstance(model, str | Path):
            model, tokenizer = _load(model, tokenizer)
        fix = "pass the reward model's own"
        require(tokenizer is not None, "tokenizer", "given with a model", tokenizer, fix)
        fits = hasattr(tokenizer, "pad_token_id") and callable(tokenizer)
        require(fits, "tokenizer", "a tokenizer of transformers", tokenizer, fix)
        require(is_count(batch_size, 1), "batch_size", "at least 1", batch_size, "8 is the default")
        fits = max_length is None or is_count(max_length, 1)
        require(fits, "max_length", "at least 1", max_length, "leave it out for what the model is made for")
        _check_labels(model)
        self.tokenizer, self.batch_size = tokenizer, batch_size
        self.model = model.eval() if device is None else _moved(model.eval(), device)
        self.max_length = _context_length(model, tokenizer) if max_length is None else max_length
        self._pad_id = _pad_id(tokenizer)
        model.config.pad_token_id = self._pad_id
        self.__name__ = (getattr(model.config, "name_or_path", "") or type(model).__name__).rstrip("/").split("/")[-1]

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """The rewards [N].

        Args:
            prompts: [N] texts or chat messages.
            completions: [N] in the form of their prompt.
            columns: Dataset columns, not used.

        Raises:
            ValueError: The model gives something else than one logit a row.
        """
        rows = [self._token_ids(p, c) for p, c in zip(prompts, completions, strict=True)]
        rewards: list[float | None] = [None] * len(rows)
        fitting = [i for i, row in enumerate(rows) if 0 < len(row) <= (self.max_length or len(row))]
        fitting.sort(key=lambda i: len(rows[i]))  # little padding
        for start in range(0, len(fitting), self.batch_size):
            batch = fitting[start : start + self.batch_size]
            for i, logit in zip(batch, self._logits([rows[i] for i in batch]), strict=True):
                rewards[i] = logit
        return rewards

    def _token_ids(self, prompt: Any, completion: Any) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer(prompt + completion)["input_ids"]
        text = self.tokenizer.apply_chat_template([*prompt, *completion], tokenize=False)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _logits(self, rows: Sequence[Sequence[int]]) -> list[float]:
        device = next(self.model.parameters()).device
        tokens = [torch.tensor(row) for row in rows]
        input_ids = pad_sequence(tokens, batch_first=True, padding_value=self._pad_id).to(device)  # [B, S]
        lengths = torch.tensor([len(row) for row in rows], device=device)
        attention_mask = (torch.arange(input_ids.shape[1], device=device) < lengths[:, None]).long()
        logits = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        if logits.shape != (len(rows), 1):
            raise ValueError(
                f"logits must be one number for each of {len(rows)} rows, got the shape {tuple(logits.shape)}; "
                "use a model for sequence classification"
            )
        return logits[:, 0].float().tolist()


def _load(path: str | Path, tokenizer: Any) -> tuple[torch.nn.Module, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            path, output_loading_info=True, use_safetensors=True, trust_remote_code=False
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False) if tokenizer is None else tokenizer
    except Exception as error:  # of many kinds: no files, no network, damaged weights, unknown architecture
        reason = clean(" ".join(str(error).split()), 500)
        raise ValueError(
            f"model must be in a folder or on the hub, got {str(path)!r}; see what transformers says: {reason}"
        ) from error
    if info["missing_keys"]:
        raise ValueError(
            f"the weights at {path} must be those of a reward model, got none for {sorted(info['missing_keys'])}; "
            "a head drawn at random scores at random"
        )
    return model, tokenizer


def _moved(model: torch.nn.Module, device: torch.device | str) -> torch.nn.Module:
    try:
        return model.to(torch.device(device))
    except Exception as error:  # of many kinds: no such device, PyTorch without it, no memory on it
        reason = clean(" ".join(str(error).split()), 300)
        raise ValueError(
            f"device must be one that the model can be moved to, got {device!r}; see what PyTorch says: {reason}"
        ) from error


def _check_labels(model: torch.nn.Module) -> None:
    labels = getattr(getattr(model, "config", None), "num_labels", None)
    if labels != 1:
        raise ValueError(
            f"model must be one for sequence classification with one label, got {type(model).__name__} "
            f"with {'no' if labels is None else labels} labels; write a reward function that turns its output into one"
        )


def _context_length(model: torch.nn.Module, tokenizer: Any) -> int | None:
    """Tokens that the model was made for; None where nothing says so."""
    config = model.config.get_text_config()
    limits = (getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None))
    return min((limit for limit in limits if limit), default=None)


def _pad_id(tokenizer: Any) -> int:
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return token_id
    raise ValueError("tokenizer must have a token to pad with, got neither PAD nor EOS; set tokenizer.pad_token")
