import gc
import threading
import weakref

import contract
import pytest
import torch
from moe_families import SMALL, tiny_moe
from tiny import prompt, tiny_model, tokenizer
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GraniteMoeConfig,
    Phi3Config,
)
from transformers.generation.logits_process import MinPLogitsWarper

from grpo_moe.adapters import hf_decode
from grpo_moe.adapters.hf_decode import layer_windows
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
    with pytest.raises(
        TypeError, match="keep keys and values alone, got qwen3_next with LinearAttention.*; use HFEngine"
    ):
        NativeEngine(model)
    assert isinstance(default_engine(model, tokenizer()), HFEngine)
    assert isinstance(default_engine(tiny_moe("mixtral"), tokenizer()), NativeEngine)


def test_a_window_that_the_cache_does_not_know_is_found(monkeypatch):
    for family, changes in (("gpt_oss", {}), ("mixtral", {"sliding_window": 5}), ("gptoss_lite", {})):
        engine_and_model(family, **changes)
        with monkeypatch.context() as patch:
            patch.setattr(hf_decode, "KNOWN_WINDOWS", ())
            patch.setattr(hf_decode.KVCache, "load", forgetful(hf_decode.KVCache.load))
            with pytest.raises(ValueError, match="steps of .* must give the hidden states .*; use HFEngine"):
                engine_and_model(family, **changes)


def forgetful(load):
    """A cache that forgets two tokens of a prompt."""

    def wrong(self, layer, keys, values, **given):
        load(self, layer, keys.clone().index_fill_(2, torch.tensor([2, 3]), 0), values, **given)

    return wrong


def test_shared_keys_keep_their_window():
    config = Gemma3nTextConfig(
        **{**SMALL, "num_hidden_layers": 6}, head_dim=8, num_kv_shared_layers=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 3, activation_sparsity_pattern=[0.0] * 6,
    )  # fmt: skip
    windows = layer_windows(config)
    assert [windows.get(layer) for layer in range(6)] == [5, None] * 3


@pytest.mark.parametrize("config", [Gemma3nTextConfig, Gemma4TextConfig])
def test_layers_that_share_keys_and_values_decode_as_they_train(config):
    """Where transformers once lost what is shared without a cache, as under gradient checkpointing."""
    own = {"activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 4} if config is Gemma3nTextConfig else {}
    shape = config(
        **{**SMALL, "num_hidden_layers": 6}, **own, head_dim=8, num_kv_shared_layers=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"] * 3, intermediate_size=48, vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
    )  # fmt: skip
    torch.manual_seed(0)
    model = add_token_logps(AutoModelForCausalLM.from_config(shape).float().eval())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(5 if p.dim() > 1 else 1)
    for engine in (NativeEngine(model), HFEngine(model, None)):
        contract.sampled_logps_equal_the_training_forward(engine, model, [prompt(n) for n in (3, 9)], 0.8)
        contract.flags_come_back(engine, model, [prompt(4), prompt(9)])


def test_rotary_factors_that_depend_on_the_batch_are_refused():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16, **factors}
    config = Phi3Config(**SMALL, rope_parameters=rope, original_max_position_embeddings=16)
    with pytest.raises(TypeError, match="longrope, whose factors depend on .* beyond 16 tokens; .*use HFEngine"):
        layer_windows(config)


def test_models_that_are_no_causal_lm_are_refused():
    model = tiny_moe("qwen3_moe")
    with pytest.raises(ValueError, match="the head of Qwen3MoeModel must be a linear layer"):
        NativeEngine(model.model)
    with pytest.raises(ValueError, match="model must be a transformers causal LM, got Linear; pass the model itself"):
        NativeEngine(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="max_rows must be at least 1, got 0"):
        NativeEngine(model, max_rows=0)


def test_what_goes_wrong_in_a_step_is_explained(monkeypatch):
    monkeypatch.setattr(hf_decode.KVCache, "attend", lambda *args, **kwargs: None["no"])
    with pytest.raises(ValueError, match="through transformers' attention interface, got TypeError.*use HFEngine"):
        engine_and_model("qwen3_moe")


def test_another_thread_does_not_reach_the_cache():
    engine, model = engine_and_model("qwen3_moe")
    other = tiny_moe("mixtral")
    sampling = SamplingParams(12, num_generations=2)
    prompts = [prompt(n) for n in (3, 9)]
    expected = engine.generate(prompts, sampling)
    running = threading.Event()

    def work():
        while not running.is_set():
            with torch.no_grad():
                other(torch.ones(2, 5, dtype=torch.long), use_cache=False)

    thread = threading.Thread(target=work)
    thread.start()
    made = [engine.generate(prompts, sampling) for _ in range(5)]
    running.set()
    thread.join()
    assert all(x == expected for x in made)


def test_ids_outside_of_the_vocabulary_are_refused():
    engine, _ = engine_and_model("qwen3_moe")
    for ids in ((3, 64), (-1, 3)):
        with pytest.raises(ValueError, match="prompt 1 must have token ids in 0..63, got"):
            engine.generate([(3,), ids], SamplingParams(2))


def test_min_p_keeps_what_transformers_keeps():
    engine, model = engine_and_model()
    (group,) = engine.generate([prompt(4)], SamplingParams(1, num_generations=800, temperature=0.8, min_p=0.05))
    with torch.no_grad():
        logits = model(torch.tensor([prompt(4).input_ids])).logits / 0.8
    kept = MinPLogitsWarper(0.05)(None, logits[0, -1:]).isfinite()[0].nonzero()[:, 0].tolist()
    assert {c.token_ids[0] for c in group} == set(kept) and 1 < len(kept) < 30


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1e-40),
        ("min_p", 1.0),
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


def test_lora_on_experts_is_folded_once_a_call_and_taken_out_again(monkeypatch):
    peft = pytest.importorskip("peft")
    model = tiny_moe("qwen3_moe", experts_implementation="grpo_moe")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, init_lora_weights=False)
    )
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in adapted.named_parameters()}
    activations = []
    activate = peft.tuners.lora.layer.ParamWrapper._activate_lora
    monkeypatch.setattr(
        peft.tuners.lora.layer.ParamWrapper,
        "_activate_lora",
        lambda layer, *args: activations.append(layer) or activate(layer, *args),
    )
    prompts, sampling = [prompt(n) for n in (3, 7)], SamplingParams(max_new_tokens=12, num_generations=2)
    engine = NativeEngine(model)
    activations.clear()
    made = engine.generate(prompts, sampling)
    assert len(activations) == 2 * 2  # layers, parameters of each; not once a token
    for name, p in adapted.named_parameters():
        address, values = before[name]
        assert p.data_ptr() == address and torch.equal(p, values)
    contract.sampled_logps_equal_the_training_forward(engine, model, prompts, 1.0)  # whose forwards add LoRA themselves
    with adapted.disable_adapter():
        assert engine.generate(prompts, sampling) != made
    assert engine.generate(prompts, sampling) == made


def test_a_rollout_leaves_no_keys_and_values_to_the_collector(monkeypatch):
    engine, _ = engine_and_model()
    caches = []
    batch_for = NativeEngine._batch_for

    def watched(self, *args):
        batch = batch_for(self, *args)
        caches.append(weakref.ref(batch.cache))
        return batch

    monkeypatch.setattr(NativeEngine, "_batch_for", watched)
    gc.disable()
    try:
        engine.generate([prompt(5)], SamplingParams(max_new_tokens=4))
        assert caches[0]() is None
    finally:
        gc.enable()


def test_halves_whose_rounding_changes_experts_are_compared_under_held_routes(monkeypatch):
    model = tiny_moe("qwen3_moe", changes={"num_hidden_layers": 6}, experts_implementation="grpo_moe")
    with torch.no_grad():
        for name, parameter in model.to(torch.bfloat16).named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(8 * parameter[:1] + 0.02 * parameter)  # near ties, lost in halves
            elif "experts" in name:
                parameter.mul_(10)
    errors = []
    measure = hf_decode.Decoder._compare_steps
    monkeypatch.setattr(
        hf_decode.Decoder, "_compare_steps", lambda *args, **kw: errors.append(measure(*args, **kw)) or errors[-1]
    )
    NativeEngine(model)
    free, held = errors
    assert free > 0.1 > held > 0
