import torch
from tiny import prompt

from grpo_moe.rollout.base import sequence_keys, uniforms
from grpo_moe.types import SamplingParams


def splitmix64(seed, n):
    """The generator in plain Python, from the paper."""
    mask, out = (1 << 64) - 1, []
    state = seed & mask
    for _ in range(n):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        out.append(((z ^ (z >> 31)) >> 11) * 2.0**-53)
    return out


def test_uniforms_are_splitmix64():
    keys = [0, 1, -1, 2**63 - 1, -(2**63), 1234567]
    drawn = uniforms(torch.tensor(keys)[:, None], torch.arange(5))
    assert drawn.tolist() == [splitmix64(key, 5) for key in keys]


def test_uniforms_are_uniform():
    drawn = uniforms(torch.arange(200)[:, None], torch.arange(500))
    assert 0 <= drawn.min() and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.004 and abs(drawn.var() - 1 / 12) < 0.002
    assert abs(torch.corrcoef(drawn[:2])[0, 1]) < 0.15


def test_keys_differ_by_seed_prompt_and_completion():
    prompts = [prompt(3), prompt(3), prompt(4), prompt(3, index=1), prompt(3, index=2)]
    keys = torch.cat([sequence_keys(prompts, SamplingParams(1, num_generations=3, seed=s)) for s in (0, 1)])
    assert len(set(keys.tolist())) == 2 * 3 * len(prompts)
