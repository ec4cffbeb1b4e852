"""Routes of both engines, and their way into a batch."""

import contract
import pytest
import torch
from moe_families import SMALL, tiny_moe
from tiny import prompt, tiny_model
from transformers import AutoModelForCausalLM, LlamaConfig

from grpo_moe.adapters.hf_head import add_token_logps
from grpo_moe.adapters.routing import RoutingReplay
from grpo_moe.rl.batch import Group, collate, select
from grpo_moe.rollout import HFEngine, NativeEngine
from grpo_moe.types import Completion, SamplingParams

CPU = torch.device("cpu")
PROMPTS = [prompt(n) for n in (1, 5, 12, 20)]
ENGINES = [
    "native gptoss_lite", "native qwen3_moe", "native gpt_oss", "hf gptoss_lite", "hf qwen3_moe", "hf gpt_oss"
]  # fmt: skip
STOP = [2, *range(10, 14)]  # so that sequences end at different times


def engine_of(name, dtype=torch.float32, **options):
    kind, family = name.split()
    model = tiny_model() if family == "gptoss_lite" else tiny_moe(family, attn_implementation="eager")
    model.generation_config.eos_token_id = STOP
    model = add_token_logps(model.to(dtype).eval())
    return NativeEngine(model, **options) if kind == "native" else HFEngine(model, None, **options)


@pytest.mark.parametrize("max_rows", [3, 256])
@pytest.mark.parametrize("name", [*ENGINES, "native deepseek_v3", "hf deepseek_v3"])
def test_routes_equal_the_training_forward(name, max_rows):
    engine = engine_of(name, max_rows=max_rows)
    contract.routes_equal_the_training_forward(engine, engine.model, PROMPTS)


@pytest.mark.parametrize("name", ENGINES)
def test_sampled_logps_equal_the_training_forward_under_the_routes(name):
    engine = engine_of(name)
    contract.sampled_logps_equal_the_training_forward_under_the_routes(engine, engine.model, PROMPTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ENGINES)
def test_routes_are_recorded_beside_the_hooks_of_a_trainer(name, dtype):
    engine = engine_of(name, dtype)
    contract.routes_are_recorded_beside_the_hooks_of_a_trainer(engine, engine.model, prompt(5))


def groups_of(engine, **options):
    sampling = SamplingParams(10, num_generations=3, seed=1, **options)
    zeros = torch.zeros(3)
    made = zip(PROMPTS, engine.generate(PROMPTS, sampling), strict=True)
    return [Group(prompt, completions, zeros, zeros, []) for prompt, completions in made]


def batch_of(groups):
    return collate(groups, torch.zeros(len(groups), 3), mask_truncated=False, device=CPU)


@pytest.mark.parametrize("name", ENGINES)
def test_a_batch_replays_the_routes_of_its_rows(name):
    engine = engine_of(name)
    batch = batch_of(groups_of(engine, return_routes=True))
    last = batch.attention_mask.sum(1) - 1
    recorded = batch.attention_mask.clone()
    recorded[torch.arange(12), last] = False
    assert batch.routes.indices.shape[:2] == batch.input_ids.shape
    assert torch.equal((batch.routes.indices >= 0).all(-1).all(-1), recorded)
    for part in (batch, select(batch, torch.tensor([7, 1, 4]))):
        inputs = dict(input_ids=part.input_ids, attention_mask=part.attention_mask, use_cache=False)
        with RoutingReplay(engine.model) as routing, torch.no_grad():
            with routing.record() as records:
                expected = engine.model(**inputs).logits[part.attention_mask]
            assert part.routes.flip_rate(records[0], part.attention_mask)[1] == 0
            with routing.replay(part.routes):
                assert torch.equal(engine.model(**inputs).logits[part.attention_mask], expected)


def test_a_batch_without_routes_has_none():
    assert batch_of(groups_of(engine_of("native gptoss_lite"))).routes is None
    assert batch_of([]).routes is None


def test_routes_of_some_completions_are_refused():
    groups = groups_of(engine_of("native gptoss_lite"), return_routes=True)
    groups[1].completions[2] = Completion((5,), (-1.0,), "length")
    with pytest.raises(ValueError, match="routes must be on every completion .* got 11 of 12"):
        batch_of(groups)


def test_routes_of_a_model_without_experts_are_refused():
    model = add_token_logps(AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, intermediate_size=32)))
    with pytest.raises(ValueError, match="return_routes must be False for LlamaForCausalLM"):
        HFEngine(model, None).generate(PROMPTS, SamplingParams(4, return_routes=True))
