"""The native engine's graphs on a GPU, judged by the training forward of a copy of the model on the CPU."""

import copy

import pytest
import torch
from contract import sequences
from test_native import FAMILIES
from test_native import engine_and_model as made
from tiny import prompt

from grpo_moe.adapters.routing import RoutingReplay
from grpo_moe.ops.attention import LayerShape
from grpo_moe.rollout import NativeEngine
from grpo_moe.types import SamplingParams

pytestmark = pytest.mark.gpu
PROMPTS = [prompt(n, index=n) for n in range(1, 23)]


def engine_and_model(family):
    return made(family, **({"moe_dispatch": "fused"} if family == "gptoss_lite" else {}))


def whole_forwards(model, prompts, completions, temperature=1.0):
    """Log-probabilities of all completions' tokens under the recorded routes."""
    made = []
    with RoutingReplay(model) as routing, torch.no_grad():
        for ids, completion in sequences(prompts, completions):
            tokens, ids = len(completion.token_ids), ids.to(model.device)
            with routing.replay(completion.routes.to(model.device)):
                logits = model(ids, use_cache=False).logits[0, -tokens - 1 : -1].float() / temperature
            made.append(logits.log_softmax(-1).gather(1, ids[0, -tokens:, None])[:, 0].cpu())
    return torch.cat(made)


def sampled(completions):
    return torch.tensor([x for group in completions for c in group for x in c.sampling_logps])


def largest_difference(model, prompts, completions):
    return float((whole_forwards(model, prompts, completions, 0.8) - sampled(completions)).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_refill_and_see_new_weights(family):
    _, model = engine_and_model(family)
    on_gpu = copy.deepcopy(model).cuda()
    engine = NativeEngine(on_gpu, max_rows=8, keep_graphs=True)
    sampling = SamplingParams(24, num_generations=3, temperature=0.8, seed=3, return_routes=True)
    first = engine.generate(PROMPTS, sampling)
    assert largest_difference(model, PROMPTS, first) < 1e-4
    assert {"stop", "length"} == {c.finish_reason for group in first for c in group}
    assert all(c.finish_reason == "stop" or len(c.token_ids) == 24 for group in first for c in group)
    assert engine.kv_bytes > 0
    batch = engine._batch
    assert engine.generate(PROMPTS, sampling) == first
    assert engine._batch is batch and any(batch.graphs._graphs.values())
    for each in (model, on_gpu):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.mul_(-0.7)
    second = engine.generate(PROMPTS, sampling)
    assert second != first and largest_difference(model, PROMPTS, second) < 1e-4
    engine.release()
    assert engine.kv_bytes == 0
    assert engine.generate(PROMPTS, sampling) == second


def test_greedy_and_truncated_sampling_in_graphs():
    _, model = engine_and_model("qwen3_moe")
    on_gpu = copy.deepcopy(model).cuda()
    engine, on_cpu = NativeEngine(on_gpu), NativeEngine(model)
    for options in ({"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}):
        sampling = SamplingParams(16, num_generations=2, **options)
        made, expected = engine.generate(PROMPTS, sampling), on_cpu.generate(PROMPTS, sampling)
        pairs = [(a, b) for x, y in zip(made, expected, strict=True) for a, b in zip(x, y, strict=True)]
        same = [a.token_ids == b.token_ids for a, b in pairs]
        assert sum(same) > 0.9 * len(same)  # rounding may tip a draw
        for a, b in pairs:
            if a.token_ids == b.token_ids:
                assert a.sampling_logps == pytest.approx(b.sampling_logps, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights_and_autocast(family):
    sampling = SamplingParams(24, num_generations=2, seed=3, return_routes=True)
    for autocast in (False, True):
        _, model = engine_and_model(family)
        on_gpu = copy.deepcopy(model).cuda()
        if not autocast:
            on_gpu.bfloat16()
            model.bfloat16().float()  # rounded alike
        before = {name: (p.dtype, p.data_ptr()) for name, p in on_gpu.named_parameters()}
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            completions = NativeEngine(on_gpu, max_rows=16, keep_graphs=True).generate(PROMPTS, sampling)
            eager = whole_forwards(on_gpu, PROMPTS, completions)
        assert before == {name: (p.dtype, p.data_ptr()) for name, p in on_gpu.named_parameters()}
        truth = whole_forwards(model, PROMPTS, completions)
        error, allowed = ((x - truth).abs().mean() for x in (sampled(completions), eager))
        assert error <= 1.5 * allowed + 1e-3


def test_experts_that_wait_for_the_host_run_eagerly_and_say_so(caplog):
    _, model = made("gptoss_lite")
    on_gpu = copy.deepcopy(model).cuda()
    engine = NativeEngine(on_gpu, keep_graphs=True)
    sampling = SamplingParams(12, num_generations=2, temperature=0.8, return_routes=True)
    completions = engine.generate(PROMPTS, sampling)
    assert "run eagerly, not as CUDA graphs" in caplog.text and not any(engine._batch.graphs._graphs.values())
    assert largest_difference(model, PROMPTS, completions) < 1e-4
    engine.release()
    on_gpu.set_experts_implementation("fused")
    completions = engine.generate(PROMPTS, sampling)
    assert any(engine._batch.graphs._graphs.values())
    assert largest_difference(model, PROMPTS, completions) < 1e-4


def test_a_gpu_that_is_full_is_an_error():
    _, model = engine_and_model("qwen3_moe")
    engine = NativeEngine(model.cuda())
    engine._decoder.layers = {0: LayerShape(10**9, 64, 64, None)}
    with pytest.raises(RuntimeError, match="must fit the GPU, got .* GiB"):
        engine.generate(PROMPTS, SamplingParams(4))
