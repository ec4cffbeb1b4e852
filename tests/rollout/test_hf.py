from types import SimpleNamespace

import contract
import pytest
import torch
from tiny import prompt, tiny_model, tokenizer
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.rollout import HFEngine
from grpo_moe.types import SamplingParams


def qwen3_moe():
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=30,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        max_position_embeddings=64,
        initializer_range=0.3,
        pad_token_id=0,
        eos_token_id=2,
    )
    return AutoModelForCausalLM.from_config(config)


@pytest.fixture(params=["qwen3_moe", "gptoss_lite"])
def model(request):
    return add_token_logps((qwen3_moe() if request.param == "qwen3_moe" else tiny_model()).float().eval())


def test_greedy_equals_the_full_forward(model):
    contract.greedy_equals_full_forward(HFEngine(model, tokenizer()), model, [prompt(n) for n in (1, 4, 9, 15)])


def test_sampled_logps_equal_the_training_forward(model):
    engine = HFEngine(model, tokenizer(), max_rows=6)
    contract.sampled_logps_equal_the_training_forward(engine, model, [prompt(n) for n in (1, 5, 12)], 0.7)


def test_flags_come_back(model):
    contract.flags_come_back(HFEngine(model, tokenizer()), model, [prompt(4)])


def test_new_weights_are_seen(model):
    contract.new_weights_are_seen(HFEngine(model, tokenizer()), model, [prompt(n) for n in (3, 9)])


def test_a_seed_repeats_and_leaves_the_global_generator_alone(model):
    engine, prompts = HFEngine(model, tokenizer()), [prompt(n) for n in (3, 5)]
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first = engine.generate(prompts, SamplingParams(8, num_generations=2, seed=1))
    assert torch.equal(torch.rand(1), expected)
    assert first == engine.generate(prompts, SamplingParams(8, num_generations=2, seed=1))
    assert first != engine.generate(prompts, SamplingParams(8, num_generations=2, seed=2))


def test_only_our_own_options_shape_the_sampling(model):
    model.generation_config.update(repetition_penalty=1.5, min_p=0.9, top_k=1, do_sample=True)
    engine = HFEngine(model, tokenizer())
    contract.greedy_equals_full_forward(engine, model, [prompt(4), prompt(9)])
    (group,) = engine.generate([prompt(4)], SamplingParams(1, num_generations=64))
    assert len({c.token_ids for c in group}) > 3
    assert model.generation_config.min_p == 0.9


@pytest.fixture
def batching():
    model = add_token_logps(qwen3_moe().float().eval())
    return HFEngine(model, tokenizer(), continuous_batching=True), model


@pytest.mark.slow
def test_continuous_batching_passes_the_contract(batching):
    engine, model = batching
    contract.greedy_equals_full_forward(engine, model, [prompt(n) for n in (1, 4, 9)])
    contract.sampled_logps_equal_the_training_forward(engine, model, [prompt(n) for n in (1, 5, 12)], 0.7)
    contract.flags_come_back(engine, model.eval(), [prompt(4)])
    contract.new_weights_are_seen(engine, model.eval(), [prompt(n) for n in (3, 9)])


def test_continuous_batching_repeats_a_seed_and_refuses_routes(batching):
    engine, _ = batching
    made = [engine.generate([prompt(3), prompt(5)], SamplingParams(8, num_generations=2, seed=s)) for s in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    with pytest.raises(ValueError, match="return_routes must be False with continuous_batching"):
        engine.generate([prompt(3)], SamplingParams(4, return_routes=True))


def test_continuous_batching_does_not_hide_a_fault(batching, monkeypatch):
    engine, model = batching
    failed = SimpleNamespace(error="out of blocks", generated_tokens=[])
    for made, found in (({"a": failed}, "out of blocks"), ({}, "the others missing")):
        monkeypatch.setattr(model, "generate_batch", lambda *args, made=made, **kwargs: made)
        with pytest.raises(RuntimeError, match=f"must complete all 1 sequences, got 0, .*{found}"):
            engine.generate([prompt(3)], SamplingParams(4))


def test_other_prompts_draw_other_numbers(model):
    first, second = HFEngine(model, tokenizer(), max_rows=4).generate([prompt(4), prompt(4)], SamplingParams(8, 4))
    assert [c.token_ids for c in first] != [c.token_ids for c in second]


def test_truncated_sampling_is_refused(model):
    with pytest.raises(ValueError, match="top_k, top_p and min_p must be 0, 1 and 0"):
        HFEngine(model, tokenizer()).generate([prompt(3)], SamplingParams(4, top_k=5))
