import copy

import pytest
import torch
from tiny import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, Cohere2Config, Gemma2Config, GraniteMoeConfig, Qwen3MoeConfig

from grpo_moe.adapters.hf_head import add_token_logps, check_head, completion_logps

SMALL = dict(
    vocab_size=64,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    pad_token_id=0,
)
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SMALL, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    "granite_moe": GraniteMoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, logits_scaling=4.0),
    "gemma2": Gemma2Config(**SMALL, final_logit_softcapping=0.5, query_pre_attn_scalar=8),
    "cohere2": Cohere2Config(**SMALL, logit_scale=0.25),
}


def model_of(name):
    torch.manual_seed(0)
    return tiny_model() if name == "gptoss_lite" else AutoModelForCausalLM.from_config(CONFIGS[name]).float()


def batch(vocabulary=30):
    torch.manual_seed(1)
    return {
        "input_ids": torch.randint(3, vocabulary, (3, 9)),
        "attention_mask": torch.tensor([[1] * 9, [1] * 6 + [0] * 3, [1] * 5 + [0] * 4]).bool(),
        "prompt_lengths": torch.tensor([4, 2, 5]),
    }


def with_completions(inputs):
    lengths = inputs["attention_mask"].sum(1) - inputs["prompt_lengths"]
    ids = torch.zeros(3, int(lengths.max()), dtype=torch.long)
    for row, (start, n) in enumerate(zip(inputs["prompt_lengths"].tolist(), lengths.tolist(), strict=True)):
        ids[row, :n] = inputs["input_ids"][row, start : start + n]
    return {**inputs, "completion_ids": ids, "completion_mask": torch.arange(ids.shape[1]) < lengths[:, None]}


@pytest.mark.parametrize("name", ["gptoss_lite", *CONFIGS])
def test_log_probabilities_and_gradients_equal_those_of_the_logits(name):
    model = model_of(name)
    inputs = with_completions(batch())
    plain = copy.deepcopy(model)
    logits = plain(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], use_cache=False).logits / 0.7
    expected, entropies = torch.zeros(inputs["completion_ids"].shape), torch.zeros(inputs["completion_ids"].shape)
    logps, entropy = logits.log_softmax(-1), torch.distributions.Categorical(logits=logits).entropy()
    for row, column in inputs["completion_mask"].nonzero().tolist():
        place = inputs["prompt_lengths"][row] - 1 + column
        expected[row, column] = logps[row, place, inputs["completion_ids"][row, column]]
        entropies[row, column] = entropy[row, place]

    out = completion_logps(add_token_logps(model), **inputs, temperature=0.7, return_entropy=True)
    torch.testing.assert_close(out.logps, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out.entropy, entropies, rtol=1e-4, atol=1e-5)
    weights = torch.randn_like(expected)
    (out.logps * weights).sum().backward()
    (expected * weights).sum().backward()
    for (parameter_name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=parameter_name)
    check_head(model)


def test_a_masked_batch_gives_zeros_and_zero_gradients():
    model = add_token_logps(tiny_model())
    inputs = with_completions(batch())
    inputs["completion_mask"] = torch.zeros_like(inputs["completion_mask"])
    out = completion_logps(model, **inputs)
    assert out.logps.abs().sum() == 0
    out.logps.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() == 0 for p in model.parameters())


def test_other_calls_stay_as_they_were():
    model = tiny_model()
    ids = batch()["input_ids"]
    expected = model(ids).logits
    add_token_logps(add_token_logps(model))
    assert torch.equal(model(ids).logits, expected)
    assert model.generate(ids, max_new_tokens=2, do_sample=False, eos_token_id=None).shape == (3, 11)


def test_a_head_that_does_something_else_is_refused():
    class Sharpened(type(tiny_model())):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = out.logits * 3
            return out

    torch.manual_seed(0)
    model = add_token_logps(Sharpened(tiny_model().config))
    with pytest.raises(ValueError, match="its head is not supported"):
        check_head(model)


def test_a_copy_of_a_prepared_model_is_a_copy():
    model = add_token_logps(tiny_model())
    reference, ids = copy.deepcopy(model), batch()["input_ids"]
    expected = reference(ids).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(reference(ids).logits, expected)


def test_adapters_are_refused():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny_model(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="got one with PEFT adapters"):
        add_token_logps(model)


def test_lora_on_the_head_is_refused():
    model = tiny_model()
    model.lm_head.lora_A = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="must be a plain linear layer"):
        add_token_logps(model)
