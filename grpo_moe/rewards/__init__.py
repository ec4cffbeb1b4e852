"""Reward functions, and the caller that guards them."""

from grpo_moe.rewards.answer import answer_reward
from grpo_moe.rewards.caller import RewardCaller, RewardFunction, RewardOutput
from grpo_moe.rewards.countdown import Countdown, countdown_reward
from grpo_moe.rewards.equivalence import MathReward
from grpo_moe.rewards.format import format_reward
from grpo_moe.rewards.length import cosine_length_reward
from grpo_moe.rewards.model import ModelReward
from grpo_moe.rewards.shaping import soft_overlong_penalty

__all__ = [
    "Countdown",
    "MathReward",
    "ModelReward",
    "RewardCaller",
    "RewardFunction",
    "RewardOutput",
    "answer_reward",
    "cosine_length_reward",
    "countdown_reward",
    "format_reward",
    "soft_overlong_penalty",
]
