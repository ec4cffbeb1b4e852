"""Reward functions in pure Python, and the caller that guards them."""

from grpo_moe.rewards.answer import answer_reward
from grpo_moe.rewards.caller import RewardCaller, RewardFunction, RewardOutput
from grpo_moe.rewards.countdown import Countdown, countdown_reward
from grpo_moe.rewards.shaping import soft_overlong_penalty

__all__ = [
    "Countdown",
    "RewardCaller",
    "RewardFunction",
    "RewardOutput",
    "answer_reward",
    "countdown_reward",
    "soft_overlong_penalty",
]
