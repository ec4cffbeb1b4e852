"""FLOPs of tokens and steps, against PyTorch's counter on tiny models, brute force and sums by hand."""

import pytest
import torch
import transformers
from moe_families import FAMILIES, SMALL
from tiny import tiny_config
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from grpo_moe import GptOssLiteConfig
from grpo_moe.planning import (
    ModelShape,
    backward_flops,
    device_peak_flops,
    flops_per_token,
    forward_flops,
    grpo_step_flops,
    model_flops_utilization,
    visible_keys,
)

TOKENS = 11
STEP = dict(num_sequences=6, num_generations=3, prompt_tokens=7, completion_tokens=5)


def config_of(name):
    if name in FAMILIES:
        kind, own = FAMILIES[name]
        return getattr(transformers, kind)(**{**SMALL, **own})
    return getattr(transformers, name)(**{**SMALL, "intermediate_size": 64, "head_dim": 8})


def counted(config, *, frozen=False):
    """(forward, backward) FLOPs by PyTorch's counter, without rotary angles, which are a GEMM in some versions."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    model.requires_grad_(not frozen)
    embeds = model.get_input_embeddings()(torch.arange(TOKENS)[None]).detach().requires_grad_()
    with FlopCounterMode(display=False) as forward:
        logits = model(inputs_embeds=embeds, use_cache=False).logits
    with FlopCounterMode(display=False) as backward:
        logits.sum().backward()
    rotary = [sum(x.values()) for name, x in forward.get_flop_counts().items() if name.endswith("rotary_emb")]
    return forward.get_total_flops() - sum(rotary), backward.get_total_flops()


def expected(config, *, frozen=False):
    """The same by our formulas, with the masked pairs that eager attention computes too."""
    shape = ModelShape.from_config(config)
    forward = forward_flops(shape, TOKENS)
    pairs = TOKENS**2
    forward["attention_scores"] = sum(
        2 * pairs * x.attention.heads * (x.attention.head_dim + x.attention.value_dim) for x in shape.blocks
    )
    return sum(forward.values()), sum(backward_flops(forward, frozen=frozen).values())


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3"])
def test_forward_and_backward_flops_are_those_of_the_counter(name, frozen):
    config = config_of(name)
    assert counted(config, frozen=frozen) == expected(config, frozen=frozen)


@pytest.mark.parametrize("window", [None, 1, 4, 9, 40])
@pytest.mark.parametrize(("tokens", "past"), [(0, 3), (1, 0), (9, 0), (5, 7), (13, 2)])
def test_visible_keys_by_brute_force(tokens, past, window):
    seen = sum(
        key <= query and (window is None or query - key < window)
        for query in range(past, past + tokens)
        for key in range(past + tokens)
    )
    assert visible_keys(tokens, past_tokens=past, window=window) == seen


def test_forward_flops_of_gpt_oss_lite_by_hand():
    flops = forward_flops(ModelShape.from_config(GptOssLiteConfig()), 1000)
    assert flops["attention"] == 2 * 1000 * 12 * (2 * 768 * 768 + 768 * 768)  # q and o, kv of half the heads each
    full, window = 1000 * 1001 // 2, 128 * 129 // 2 + (1000 - 128) * 128
    assert flops["attention_scores"] == 6 * (full + window) * 2 * 8 * 2 * 96
    assert flops["experts"] == 2 * 1000 * 12 * 2 * 3 * 768 * 1536
    assert flops["shared_experts"] == flops["experts"] / 2 and flops["dense_mlp"] == 0
    assert flops["router"] == 2 * 1000 * 12 * 8 * 768 and flops["head"] == 2 * 1000 * 768 * 128_000


def test_forward_flops_of_linear_attention_grow_with_tokens_alone():
    shape = ModelShape.from_config(config_of("qwen3_next"))
    first, second = (forward_flops(shape, 10, past_tokens=past)["attention_scores"] for past in (0, 100))
    assert second - first == 10 * 100 * 2 * 4 * (16 + 16)  # of the one full layer
    assert first == 55 * 2 * 4 * (16 + 16) + 10 * 6 * 4 * 8 * 8


def test_tokens_one_by_one_cost_what_they_cost_together():
    shape = ModelShape.from_config(tiny_config())
    one_by_one = [forward_flops(shape, 1, past_tokens=20 + i) for i in range(9)]
    together = forward_flops(shape, 9, past_tokens=20)
    assert together == {key: sum(step[key] for step in one_by_one) for key in together}
    assert forward_flops(shape, 9, head_tokens=2)["head"] == 2 * 2 * 32 * 30


def test_flops_per_token_is_the_mean_over_the_sequence_and_near_six_per_active_weight():
    shape = ModelShape.from_config(tiny_config())
    assert flops_per_token(shape, 8)["experts"] == (2 * 4 * 2 * 3 * 32 * 24, 4 * 4 * 2 * 3 * 32 * 24)
    assert flops_per_token(shape, 8)["attention_scores"][0] == forward_flops(shape, 8)["attention_scores"] / 8
    lite = ModelShape.from_config(GptOssLiteConfig())
    weights = {key: sum(x) for key, x in flops_per_token(lite, 1).items() if key != "attention_scores"}
    assert sum(weights.values()) / (6 * lite.active_parameters) == pytest.approx(1, abs=1e-3)


def test_step_flops_by_phase():
    shape = ModelShape.from_config(tiny_config())
    head = 2 * 32 * 30
    flops = grpo_step_flops(shape, **STEP, num_iterations=2, old_logps=True, reference=True, checkpoint_period=3)
    one = sum(forward_flops(shape, 12).values()) - 7 * head  # logits of five completion tokens
    assert flops["old_logps"] == flops["ref_logps"] == 6 * one and flops["forward"] == 12 * one
    assert flops["backward"] == 2 * flops["forward"]
    assert flops["prefill"] == 2 * (sum(forward_flops(shape, 7).values()) - 6 * head)
    assert flops["decode"] == 6 * sum(forward_flops(shape, 4, past_tokens=7).values())
    blocks = one - 5 * head
    first, second = tiny_blocks(shape)
    assert 2 * (first + second) == blocks and first < second
    assert flops["recompute"] == 12 * (first + second)  # blocks 0 (window) and 3 (full)


def tiny_blocks(shape):
    """FLOPs of a windowed and of a full block of ``tiny_config`` on twelve tokens."""
    weights = 2 * 12 * (3 * 32 * 32 + 4 * 32 + 2 * 3 * 32 * 24 + 3 * 32 * 24)
    pairs = (6 * 7 // 2 + 6 * 6, 12 * 13 // 2)
    return [weights + 2 * count * 4 * (8 + 8) for count in pairs]


def test_step_flops_leave_out_what_was_not_asked_for():
    shape = ModelShape.from_config(tiny_config())
    plain = grpo_step_flops(shape, **STEP)
    assert plain["old_logps"] == plain["ref_logps"] == plain["recompute"] == 0
    everything = grpo_step_flops(shape, **STEP, checkpoint_period=1, completion_head=False)
    assert everything["forward"] - plain["forward"] == 6 * 7 * 2 * 32 * 30
    assert everything["recompute"] == everything["forward"] - 6 * 12 * 2 * 32 * 30  # all but the head
    frozen = grpo_step_flops(shape, **STEP, frozen=True)
    scores = 6 * forward_flops(shape, 12)["attention_scores"]
    assert frozen["backward"] == plain["backward"] - (plain["forward"] - scores) and frozen["decode"] == plain["decode"]
    assert grpo_step_flops(shape, **{**STEP, "completion_tokens": 1})["decode"] == 0


def test_step_flops_rise_by_a_ninth_of_the_blocks_at_period_three():
    shape = ModelShape.from_config(GptOssLiteConfig(layer_types=["full_attention"] * 12))
    flops = grpo_step_flops(shape, **STEP, checkpoint_period=3)
    head = 6 * 5 * 2 * 768 * 128_000
    assert flops["recompute"] * 3 == flops["forward"] - head  # four blocks of twelve


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_sequences": 7}, "num_sequences must be a multiple of num_generations=3, got 7;"),
        ({"completion_tokens": 0}, "completion_tokens must be at least 1, got 0;"),
        ({"checkpoint_period": 0}, "checkpoint_period must be at least 1, got 0;"),
    ],
)
def test_step_flops_refuse_impossible_steps(changes, message):
    with pytest.raises(ValueError, match=message):
        grpo_step_flops(ModelShape.from_config(tiny_config()), **{**STEP, **changes})


def test_utilization_is_the_share_of_the_peak():
    assert model_flops_utilization(989e12, 4.0, 989e12) == 0.25
    for arguments in ((1e12, 0.0, 1e12), (1e12, 1.0, -1.0)):
        with pytest.raises(ValueError, match="must be positive"):
            model_flops_utilization(*arguments)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA B200", 2250e12),
    ],
)
def test_peak_of_known_devices(name, peak):
    assert device_peak_flops(name) == peak


@pytest.mark.parametrize("name", ["NVIDIA GH200 480GB", "NVIDIA L40", "NVIDIA H200 MIG 1g.18gb", "cpu"])
def test_peak_of_other_devices_says_how_to_pass_it(name):
    with pytest.raises(ValueError, match=f"got '{name}'; pass its dense bf16 FLOP/s as peak_flops"):
        device_peak_flops(name)
