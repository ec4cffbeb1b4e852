import contract
import pytest
import torch
from moe_families import SMALL, tiny_moe
from tiny import prompt, tiny_model, tokenizer
from transformers import AutoModelForCausalLM, Gemma2Config, GraniteMoeConfig

from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.rollout import HFEngine, NativeEngine, default_engine
from grpo_moe.types import Prompt, SamplingParams

WINDOW = 6


FAMILIES = ["gptoss_lite", "qwen3_moe", "gpt_oss", "mixtral", "olmoe", "deepseek_v3"]


def engine_and_model(family="gptoss_lite", **changes):
    if family == "gptoss_lite":
        model = tiny_model(**changes)
    else:
        attention = {"attn_implementation": "grpo_moe_sinks"} if family == "gpt_oss" else {}
        model = tiny_moe(family, changes=changes, experts_implementation="grpo_moe", **attention)
    add_token_logps(model.eval())
    return NativeEngine(model), model


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_the_full_forward_for_every_prompt_length(family):
    engine, model = engine_and_model(family)
    contract.greedy_equals_full_forward(engine, model, [prompt(n) for n in range(1, WINDOW + 21)])


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_logps_equal_the_training_forward(family, temperature):
    engine, model = engine_and_model(family)
    contract.sampled_logps_equal_the_training_forward(engine, model, [prompt(n) for n in (1, 5, 6, 7, 20)], temperature)


@pytest.mark.parametrize("family", FAMILIES)
def test_flags_come_back(family):
    engine, model = engine_and_model(family)
    contract.flags_come_back(engine, model, [prompt(4)])


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_seen(family):
    engine, model = engine_and_model(family)
    contract.new_weights_are_seen(engine, model, [prompt(n) for n in (3, 9)])


def test_a_head_with_bias_scale_and_cap_is_that_of_the_model():
    config = GraniteMoeConfig(**SMALL, num_local_experts=4, intermediate_size=24, logits_scaling=4.0)
    for made in (config, Gemma2Config(**SMALL, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=0.5)):
        torch.manual_seed(0)
        model = add_token_logps(AutoModelForCausalLM.from_config(made).float().eval())
        engine = NativeEngine(model)
        contract.sampled_logps_equal_the_training_forward(engine, model, [prompt(n) for n in (1, 9)], 0.8)
        contract.greedy_equals_full_forward(engine, model, [prompt(n) for n in (1, 9)])


def tokens(completions):
    return [[c.token_ids for c in group] for group in completions]


@pytest.mark.parametrize("family", FAMILIES)
def test_samples_depend_on_the_seed_and_the_prompt_alone(family):
    engine, _ = engine_and_model(family)
    prompts = [prompt(n, index=100 + n) for n in range(1, 12)]
    sampling = SamplingParams(10, num_generations=3, seed=5)
    together = tokens(engine.generate(prompts, sampling))
    assert together == tokens(engine.generate(prompts, sampling))
    assert together[::-1] == tokens(engine.generate(prompts[::-1], sampling))
    assert together == [tokens(engine.generate([p], sampling))[0] for p in prompts]
    few_rows = NativeEngine(engine.model, max_rows=4)
    assert together == tokens(few_rows.generate(prompts, sampling))
    assert together != tokens(engine.generate(prompts, SamplingParams(10, num_generations=3, seed=6)))
    assert len({c for group in together for c in group}) > 20


def test_plain_token_ids_are_prompts_too():
    engine, _ = engine_and_model()
    sampling = SamplingParams(6, num_generations=2)
    assert engine.generate([[5, 6, 7]], sampling) == engine.generate([Prompt((5, 6, 7))], sampling)


def test_the_same_prompt_twice_draws_different_completions():
    engine, _ = engine_and_model()
    first, second = tokens(engine.generate([prompt(5), prompt(5)], SamplingParams(10, num_generations=2)))
    assert first != second
    (again,) = tokens(engine.generate([prompt(5)], SamplingParams(10, num_generations=2)))
    assert again == first


def test_samples_follow_the_distribution():
    engine, model = engine_and_model()
    sampling = SamplingParams(1, num_generations=4000, temperature=0.8)
    (group,) = engine.generate([prompt(4)], sampling)
    counts = torch.bincount(torch.tensor([c.token_ids[0] for c in group]), minlength=30) / 4000
    with torch.no_grad():
        probabilities = (model(torch.tensor([prompt(4).input_ids])).logits[0, -1] / 0.8).softmax(-1)
    assert (counts - probabilities).abs().max() < 4 * (0.25 / 4000) ** 0.5


def test_top_k_and_top_p_report_the_truncated_distribution():
    engine, model = engine_and_model()
    with torch.no_grad():
        logits = model(torch.tensor([prompt(4).input_ids])).logits[0, -1]
    ordered, order = logits.softmax(-1).sort(descending=True)
    nucleus = order[: int((ordered.cumsum(0) < 0.7).sum()) + 1].tolist()
    for sampling, kept in (
        (SamplingParams(1, num_generations=500, top_k=3), order[:3].tolist()),
        (SamplingParams(1, num_generations=500, top_p=0.7), nucleus),
    ):
        (group,) = engine.generate([prompt(4)], sampling)
        assert {c.token_ids[0] for c in group} == set(kept)
        renormalised = logits[kept].log_softmax(0)
        for completion in group[:20]:
            expected = renormalised[kept.index(completion.token_ids[0])]
            assert abs(completion.sampling_logps[0] - expected) < 1e-5


def test_every_eos_id_ends_a_sequence():
    engine, model = engine_and_model()
    model.generation_config.eos_token_id = [2, 11, 17]
    engine = NativeEngine(model, tokenizer())
    assert engine.stop_ids == (2, 11, 17)
    completions = engine.generate([prompt(n) for n in range(1, 9)], SamplingParams(30, num_generations=4))
    ends = {c.token_ids[-1] for group in completions for c in group if c.finish_reason == "stop"}
    assert {11, 17} <= ends
    for group in completions:
        for c in group:
            assert not set(c.token_ids[:-1]) & {2, 11, 17}
            assert c.text == tokenizer().decode(c.token_ids, skip_special_tokens=True)


def test_one_new_token_and_a_context_that_runs_out():
    engine, _ = engine_and_model(max_position_embeddings=12)
    (one,) = engine.generate([prompt(3)], SamplingParams(1, temperature=0.0))
    assert len(one[0].token_ids) == 1
    full, short = engine.generate([prompt(11), prompt(2)], SamplingParams(20, num_generations=8))
    assert all(len(c.token_ids) == 1 for c in full)
    assert max(len(c.token_ids) for c in short) == 10
    assert all(c.finish_reason == "length" for c in short if len(c.token_ids) == 10 and c.token_ids[-1] != 2)


@pytest.mark.parametrize("length", [0, 128, 200])
def test_empty_and_overlong_prompts_are_refused(length):
    engine, _ = engine_and_model()
    with pytest.raises(ValueError, match=f"prompt 1 must have 1 to 127 tokens .*got {length}"):
        engine.generate([prompt(3), Prompt((5,) * length)], SamplingParams(4))


def test_a_model_that_carries_another_state_is_refused_and_gets_the_other_engine():
    model = tiny_moe("qwen3_next")
    with pytest.raises(TypeError, match="got Qwen3NextForCausalLM with layers of type linear_attention; use HFEngine"):
        NativeEngine(model)
    assert isinstance(default_engine(model, tokenizer()), HFEngine)
    assert isinstance(default_engine(tiny_moe("mixtral"), tokenizer()), NativeEngine)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("num_generations", 0),
        ("temperature", -1.0),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_sampling_params_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} must be"):
        SamplingParams(**{"max_new_tokens": 4, field: value})
