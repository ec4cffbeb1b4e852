"""What every rollout engine must do, as functions of (engine, model, prompts) that the engines' tests call."""

import torch

from grpo_moe.adapters.hf_head import completion_logps
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
    model.train()
    model.lm_head.eval()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)({"use_reentrant": False})
    flags = [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    engine.generate(prompts, SamplingParams(2))
    assert flags == [(m.training, getattr(m, "gradient_checkpointing", None)) for m in model.modules()]
    assert torch.is_grad_enabled()


def new_weights_are_seen(engine, model, prompts):
    before = engine.generate(prompts, SamplingParams(8, temperature=0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-0.7)
    engine.sync_weights(model)
    after = engine.generate(prompts, SamplingParams(8, temperature=0.0))
    assert [c[0].token_ids for c in before] != [c[0].token_ids for c in after]
    greedy_equals_full_forward(engine, model, prompts)
