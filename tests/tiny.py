"""Tiny models, tokenizers and tasks shared by the tests."""

import torch

from grpo_moe import GptOssLiteConfig, GptOssLiteForCausalLM
from grpo_moe.data import character_tokenizer
from grpo_moe.types import Prompt

ALPHABET = "abcdefghijklmnopqrstuvwxyz "


def tiny_config(**changes) -> GptOssLiteConfig:
    values = dict(
        vocab_size=30,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        sliding_window=6,
        rope_theta=100.0,
        yarn_scale_factor=4.0,
        yarn_original_max_position_embeddings=64,
        max_position_embeddings=128,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GptOssLiteConfig(**{**values, **changes})


def tiny_model(seed: int = 0, **changes) -> GptOssLiteForCausalLM:
    torch.manual_seed(seed)
    model = GptOssLiteForCausalLM(tiny_config(**changes))
    with torch.no_grad():  # sinks and norms away from their neutral values, so that tests see them
        for name, parameter in model.named_parameters():
            if "sinks" in name or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def tokenizer():
    return character_tokenizer(ALPHABET)


def prompt(length: int, seed: int = 0, index: int | None = None) -> Prompt:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return Prompt(tuple(torch.randint(3, 30, (length,), generator=generator).tolist()), index=index)


def prompt_rows(n: int) -> list[dict]:
    return [{"prompt": ALPHABET[i % 26] * (1 + i % 5), "letter": ALPHABET[(i + 1) % 26]} for i in range(n)]


def share_of_letter(prompts, completions, letter, **columns):
    """A reward with a spread: how much of the completion is the row's letter or one of its neighbours."""
    return [
        sum(c in f"{x}aeiou" for c in text) / max(len(text), 1) for text, x in zip(completions, letter, strict=True)
    ]
