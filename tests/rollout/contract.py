"""What every rollout engine must do, as functions of (engine, model, prompts) that the engines' tests call."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from grpo_moe.adapters.hf_head import completion_logps
from grpo_moe.adapters.routing import RoutingRecord, RoutingReplay
from grpo_moe.types import SamplingParams


def greedy_equals_full_forward(engine, model, prompts, max_new_tokens=10):
    completions = engine.generate(prompts, SamplingParams(max_new_tokens, temperature=0.0))
    for prompt, (completion,) in zip(prompts, completions, strict=True):
        ids = list(prompt.input_ids)
        for token in completion.token_ids:
            with torch.no_grad():
                assert token == model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()
            ids.append(token)
        stopped = completion.token_ids[-1] in engine.stop_ids
        assert completion.finish_reason == ("stop" if stopped else "length")
        assert stopped or len(completion.token_ids) == max_new_tokens
        assert not set(completion.token_ids[:-1]) & set(engine.stop_ids)


def sampled_logps_equal_the_training_forward(engine, model, prompts, temperature, tolerance=1e-5):
    sampling = SamplingParams(12, num_generations=3, temperature=temperature, seed=3)
    for prompt, group in zip(prompts, engine.generate(prompts, sampling), strict=True):
        assert len(group) == 3
        for completion in group:
            ids, tokens = (
                torch.tensor([[*prompt.input_ids, *completion.token_ids]]),
                torch.tensor([completion.token_ids]),
            )
            scored = completion_logps(
                model,
                input_ids=ids,
                attention_mask=torch.ones_like(ids, dtype=torch.bool),
                prompt_lengths=torch.tensor([len(prompt.input_ids)]),
                completion_ids=tokens,
                completion_mask=torch.ones_like(tokens, dtype=torch.bool),
                temperature=temperature,
            )
            torch.testing.assert_close(
                torch.tensor([completion.sampling_logps]), scored.logps, rtol=tolerance, atol=tolerance
            )


def flags_come_back(engine, model, prompts):
    """And a model that trains, with dropout and with checkpointing, which turns caches off, generates as any other."""
    sampling = SamplingParams(8, temperature=0.0)
    expected = engine.generate(prompts, sampling)
    model.train()
    model.lm_head.eval()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    use_cache, model.config.use_cache = model.config.use_cache, False
    dropout = model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: torch.nn.functional.dropout(out, 0.5, model.training)
    )
    flags = [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    assert engine.generate(prompts, sampling) == expected
    assert flags == [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    assert torch.is_grad_enabled() and model.config.use_cache is False
    dropout.remove()
    model.config.use_cache = use_cache


def new_weights_are_seen(engine, model, prompts):
    before = engine.generate(prompts, SamplingParams(8, temperature=0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    engine.sync_weights(model)
    after = engine.generate(prompts, SamplingParams(8, temperature=0.0))
    assert [c[0].token_ids for c in before] != [c[0].token_ids for c in after]
    greedy_equals_full_forward(engine, model, prompts)


def routes_equal_the_training_forward(engine, model, prompts):
    plain, hooks = SamplingParams(12, num_generations=3, seed=3), count_hooks(model)
    completions = engine.generate(prompts, replace(plain, return_routes=True))
    assert count_hooks(model) == hooks
    unasked = engine.generate(prompts, plain)
    for group, other in zip(completions, unasked, strict=True):
        assert [c.token_ids for c in group] == [c.token_ids for c in other]
        assert [c.sampling_logps for c in group] == [pytest.approx(c.sampling_logps, abs=1e-5) for c in other]
        assert all(c.routes is None for c in other)
    assert len({len(c.token_ids) for group in completions for c in group}) > 1
    experts = set()
    with RoutingReplay(model) as routing, torch.no_grad():
        for ids, completion in sequences(prompts, completions):
            with routing.record() as records:
                logits = model(ids, use_cache=False).logits
            routes = completion.routes
            assert (routes.layers, routes.indices.shape) == (routing.layers, records[0].indices.shape)
            assert torch.equal(routes.indices[:, :-1], records[0].indices[:, :-1])
            assert (routes.indices[:, -1] == -1).all()
            with routing.replay(routes):
                assert torch.equal(model(ids, use_cache=False).logits, logits)
            experts |= set(routes.indices.flatten().tolist())
    assert len(experts) > routes.num_experts // 2 + 1  # some differ by token


def sampled_logps_equal_the_training_forward_under_the_routes(engine, model, prompts):
    """Where the engine chooses other experts than training would, as another kernel might."""
    sampling = SamplingParams(8, num_generations=2, seed=3, return_routes=True)
    with worst_experts(model, max_tokens=2 * len(prompts)):
        completions = engine.generate(prompts, sampling)
    with RoutingReplay(model) as routing, torch.no_grad():
        for ids, completion in sequences(prompts, completions):
            expected, tokens = torch.tensor(completion.sampling_logps), len(completion.token_ids)

            def logps(ids=ids, tokens=tokens):
                logits = model(ids, use_cache=False).logits[0, -tokens - 1 : -1]
                return logits.log_softmax(-1).gather(1, ids[0, -tokens:, None])[:, 0]

            with routing.replay(completion.routes):
                torch.testing.assert_close(logps(), expected, rtol=1e-5, atol=1e-5)
            assert tokens == 1 or (logps() - expected).abs().max() > 1e-2


def routes_are_recorded_beside_the_hooks_of_a_trainer(engine, model, prompt):
    with RoutingReplay(model.train()) as held:
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(
            held.checkpointing_kwargs
        )
        with held.record() as records:
            completions = engine.generate([prompt], SamplingParams(6, temperature=0.0, return_routes=True))
        ((ids, completion),) = sequences([prompt], completions)
        tokens = len(completion.token_ids)
        assert tokens > 1
        seen = RoutingRecord.concat_steps(records[:tokens])  # an engine may forward the whole sequence afterwards
        assert torch.equal(seen.indices, completion.routes.indices[:, :-1])
        with held.replay(completion.routes), held.record() as records:
            loss = model(ids, use_cache=False).logits.float().logsumexp(-1).mean()
        loss.backward()
        assert torch.equal(records[0].indices[:, :-1], completion.routes.indices[:, :-1])
        assert all(p.grad.abs().max() > 0 for n, p in model.named_parameters() if n.endswith(ROUTERS))


ROUTERS = ("gate.weight", "router.weight")


def sequences(prompts, completions):
    for prompt, group in zip(prompts, completions, strict=True):
        for completion in group:
            yield torch.tensor([[*prompt.input_ids, *completion.token_ids]]), completion


def count_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@contextmanager
def worst_experts(model, max_tokens):
    """Calls of a router of at most so many tokens choose those that it likes least (softmax routers, normalised)."""

    def choose(router, args, out):
        chosen = next(x for x in out if x.dtype == torch.int64)
        logits = next(x for x in out if x.is_floating_point() and x.shape != chosen.shape)
        if len(logits) > max_tokens:
            return out
        worst = logits.topk(chosen.shape[1], largest=False).indices
        weights = logits.gather(1, worst).softmax(-1)
        return tuple(worst if x is chosen else x if x is logits else weights.to(x) for x in out)

    routers = [m for name, m in model.named_modules() if f"{name}.weight".endswith(ROUTERS)]
    handles = [router.register_forward_hook(choose) for router in routers]
    yield
    for handle in handles:
        handle.remove()
