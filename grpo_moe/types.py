"""The data that moves between dataset, rollout engine, rewards and trainer: frozen dataclasses, checked and no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_moe.checks import check_flag, check_int, check_number, keep_plain

Message = dict[str, Any]  # one chat turn: {"role": ..., "content": ...}


@dataclass(frozen=True)
class Prompt:
    """One prompt, as the engine and the reward functions see it."""

    input_ids: tuple[int, ...]
    """Token ids [L], L >= 1, special tokens included."""
    raw: str | list[Message] = ""
    """The prompt as it stands in the dataset: text, or a list of chat messages. Reward functions get this."""
    index: int | None = None
    """Position in the stream of prompts: names the random stream of its completions. None: derived from the ids."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The other dataset columns of this row, passed to reward functions."""


@dataclass(frozen=True)
class SamplingParams:
    """How completions are drawn. One call of an engine uses one of these for every prompt."""

    max_new_tokens: int
    """Longest completion in tokens, the EOS token included."""
    num_generations: int = 1
    """G, completions per prompt."""
    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens of at least this share of the most likely one's probability; 0 keeps all."""
    seed: int = 0
    """Same seed, same completions, whatever else is in the batch."""
    return_routes: bool = False
    """Record the experts of each token; MoE models only."""

    def __post_init__(self):
        check_int("max_new_tokens", self.max_new_tokens, least=1, fix="give a number of tokens")
        check_int("num_generations", self.num_generations, least=1, fix="1 draws one completion a prompt")
        check_int("top_k", self.top_k, least=0, fix="0 keeps every token")
        check_int("seed", self.seed, least=None, fix="0 is the default")
        check_number(
            "temperature", self.temperature, lambda x: x == 0 or x >= 1e-6, "0 or at least 1e-06", fix="0 is greedy"
        )
        check_number("top_p", self.top_p, lambda x: 0 < x <= 1, "in (0, 1]", fix="1 keeps every token")
        check_number("min_p", self.min_p, lambda x: 0 <= x < 1, "in [0, 1)", fix="0 keeps every token")
        check_flag("return_routes", self.return_routes)
        keep_plain(self)  # JSON and transformers take no other numbers

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens can never be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


@dataclass(frozen=True)
class Completion:
    """One sampled continuation of a prompt."""

    token_ids: tuple[int, ...]
    """Token ids [T]; the EOS token, when there is one, is the last and counts."""
    sampling_logps: tuple[float | None, ...]
    """Log-probability of each token [T] in nats, under the distribution it was drawn from; None or NaN where the engine
    did not score it."""
    finish_reason: str
    """"stop" after an EOS token, "length" when max_new_tokens or the context ran out."""
    text: str = ""
    """Decoded without special tokens; empty where the engine has no tokenizer."""
    routes: Any | None = field(default=None, compare=False, repr=False)
    """RoutingRecord [1, S, L, K] on the CPU, of the experts that the rollout used for the S tokens of prompt and
    completion; -1 for the last token, which was never forwarded. None unless asked for."""


@dataclass(frozen=True)
class RolloutBatch:
    """B rows (P prompts x G completions, group after group), each row prompt then completion, padded on the right."""

    input_ids: torch.Tensor
    """[B, S] int64 prompt and completion."""
    attention_mask: torch.Tensor
    """[B, S] bool, True for real tokens."""
    prompt_lengths: torch.Tensor
    """[B] int64 tokens of the prompt; completion token t stands at column prompt_lengths + t."""
    completion_ids: torch.Tensor
    """[B, T] int64, padded on the right."""
    completion_mask: torch.Tensor
    """[B, T] bool, True where the token takes part in the loss (EOS included)."""
    advantages: torch.Tensor
    """[B] fp32."""
    sampling_logps: torch.Tensor
    """[B, T] fp32, reported by the engine; NaN where it did not score the token."""
    old_logps: torch.Tensor | None = None
    """[B, T] fp32, of the policy that generated, by the training forward. None: use the current ones, detached."""
    ref_logps: torch.Tensor | None = None
    """[B, T] fp32, of the reference model. None without a KL term."""
    routes: Any | None = None
    """RoutingRecord [B, S, L, K] that the updates replay. None: route naturally."""
    expert_load: torch.Tensor | None = None
    """[B, L, E] int64 tokens of each row by expert, before the updates. None without a load-balancing loss."""
