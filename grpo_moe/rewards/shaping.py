"""Rewards computed from a completion's length alone, added to what the reward functions say."""

from grpo_moe.checks import is_int, require


def soft_overlong_penalty(num_tokens: int, max_completion_length: int, cache_length: int) -> float:
    """Soft overlong punishment: 0 up to max - cache tokens, from there falling linearly to -1 at max, and -1 beyond.

    Args:
        num_tokens: Tokens of the completion, EOS included.
        max_completion_length: Longest completion in tokens.
        cache_length: Tokens before the maximum over which the penalty grows.

    Raises:
        ValueError: cache_length is not between 1 and max_completion_length, or num_tokens is negative.

    Source:
        DAPO (2503.14476), section 3.4.
    """
    lengths = (num_tokens, max_completion_length, cache_length)
    counted = all(map(is_int, lengths))
    require(counted, "num_tokens, max_completion_length and cache_length", "integers", lengths, "count tokens")
    if not 1 <= cache_length <= max_completion_length:
        raise ValueError(
            f"cache_length must be between 1 and max_completion_length ({max_completion_length}), got {cache_length}; "
            "leave the penalty out to turn it off"
        )
    require(num_tokens >= 0, "num_tokens", "0 or positive", num_tokens, "count tokens")
    overlong_tokens = num_tokens - (max_completion_length - cache_length)
    return -min(max(overlong_tokens, 0) / cache_length, 1.0) + 0.0  # + 0.0: no negative zero
