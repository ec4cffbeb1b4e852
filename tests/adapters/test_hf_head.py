import copy

import pytest
import torch
from moe_families import FAMILIES, tiny_moe
from tiny import tiny_model
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Gemma2Config,
    GraniteMoeConfig,
    PhimoeConfig,
    Qwen3MoeConfig,
)

from grpo_moe.adapters import hf_head
from grpo_moe.adapters.hf_head import (
    add_token_logps,
    check_head,
    check_padding_free,
    check_training_mode,
    completion_logps,
    completion_loss,
)
from grpo_moe.ops import LossConfig, grpo_loss, grpo_loss_from_logps
from grpo_moe.rl.loading import disable_dropout

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
    ids = torch.zeros(len(lengths), int(lengths.max()), dtype=torch.long)
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


def test_a_model_that_draws_at_random_in_training_is_refused():
    noisy = tiny_moe("mixtral", changes={"router_jitter_noise": 0.5})
    torch.manual_seed(0)
    phi = AutoModelForCausalLM.from_config(PhimoeConfig(**SMALL, num_local_experts=8)).float()  # samples its experts
    with torch.no_grad():
        for p in phi.parameters():
            p.mul_(5 if p.dim() > 1 else 1)
    ids = torch.arange(9)[None]
    for model in (noisy, phi):
        expected = model.eval()(ids).logits
        add_token_logps(model).train()
        model.lm_head.eval()
        flags = [m.training for m in model.modules()]
        with pytest.raises(ValueError, match=f"{type(model).__name__} must be the same in training mode as in evaluat"):
            check_training_mode(model)
        assert flags == [m.training for m in model.modules()]
        disable_dropout(model)
        assert torch.equal(model.eval()(ids).logits, expected)  # PhiMoE has a threshold under the name of a noise
    check_training_mode(noisy)
    with pytest.raises(ValueError, match="got differences of up to .*: it draws dropout, noise or experts at random"):
        check_training_mode(phi)


def test_a_copy_of_a_prepared_model_is_a_copy():
    model = add_token_logps(tiny_model())
    reference, ids = copy.deepcopy(model), batch()["input_ids"]
    expected = reference(ids).logits
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    assert torch.equal(reference(ids).logits, expected)


def test_adapters_count_and_lora_on_the_head_is_refused():
    peft = pytest.importorskip("peft")
    inputs = with_completions(batch())
    wrapped = peft.get_peft_model(
        model_of("qwen3_moe"),
        peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False),
    )
    check_head(add_token_logps(wrapped))
    out = completion_logps(wrapped, **inputs)
    out.logps.sum().backward()
    saved = wrapped.get_base_model().lm_head.modules_to_save["default"]
    assert saved.weight.grad.count_nonzero()
    merged = completion_logps(add_token_logps(wrapped.merge_and_unload()), **inputs)
    torch.testing.assert_close(out.logps, merged.logps)
    for adapter in (peft.LoraConfig, peft.LoHaConfig):
        prepared = add_token_logps(tiny_model())
        with pytest.raises(ValueError, match="must carry no LoRA or other adapter"):
            add_token_logps(peft.get_peft_model(prepared, adapter(target_modules=["lm_head"])))


def test_rows_of_the_head_beyond_the_vocabulary_are_left_out():
    model, inputs = add_token_logps(model_of("qwen3_moe")), with_completions(batch())
    expected = completion_logps(model, **inputs)
    expected.logps.sum().backward()
    padded = copy.deepcopy(model)
    padded.zero_grad()
    padded.resize_token_embeddings(80)
    with torch.no_grad():
        padded.lm_head.weight[64:] = 50.0
    padded.config.vocab_size = 64
    check_head(padded)
    out = completion_logps(padded, **inputs)
    torch.testing.assert_close(out.logps, expected.logps)
    out.logps.sum().backward()
    torch.testing.assert_close(padded.lm_head.weight.grad[:64], model.lm_head.weight.grad)
    assert padded.lm_head.weight.grad[64:].count_nonzero() == 0


@pytest.mark.parametrize("family", ["gptoss_lite", *FAMILIES, "gpt_oss eager"])
def test_rows_without_padding_give_the_same_or_are_refused(family, monkeypatch):
    """Log-probabilities and all gradients; models with linear attention cannot keep the sequences apart."""
    name, _, attention = family.partition(" ")
    own = {"attn_implementation": attention or "grpo_moe_sinks"} if name == "gpt_oss" else {}
    model = add_token_logps(tiny_model() if name == "gptoss_lite" else tiny_moe(name, **own))
    if "qwen3_next" in family or "qwen3_5" in family:
        with pytest.raises(ValueError, match="padding_free must be False for Qwen3.*linear_attention carry a state"):
            check_padding_free(model)
        monkeypatch.setattr(hf_head, "layers_with_state", lambda config: [])  # found by numbers, too
        with pytest.raises(ValueError, match="packed sequences see each other, by"):
            check_padding_free(model)
        return
    check_padding_free(model)
    torch.manual_seed(1)
    lengths = torch.tensor([29, 1 + 3, 21, 2])  # GPT-OSS's window is 16
    ids = torch.randint(3, 30, (4, 29))
    inputs = with_completions(
        {
            "input_ids": ids,
            "attention_mask": torch.arange(29) < lengths[:, None],
            "prompt_lengths": torch.tensor([4, 3, 1, 1]),
        }
    )
    weights, made = torch.randn(inputs["completion_ids"].shape), []
    for padding_free in (False, True):
        model.zero_grad()
        out = completion_logps(model, **inputs, padding_free=padding_free)
        (out.logps * weights).sum().backward()
        made.append((out.logps.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (padded, grads), (packed, packed_grads) = made
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=1e-5)
    for parameter, grad in grads.items():
        error = (packed_grads[parameter] - grad).abs().max() / grad.abs().max().clamp(min=1e-3)
        assert error < 1e-5, f"{parameter}: {error}"


def test_a_loss_in_the_forward_equals_the_loss_on_its_log_probabilities():
    model, inputs = add_token_logps(model_of("granite_moe")), with_completions(batch())
    config, advantages = LossConfig(temperature=0.7), torch.tensor([1.0, -0.5, 0.3])
    places = {name: inputs[name] for name in ("input_ids", "attention_mask", "prompt_lengths")}
    given = (inputs["completion_ids"], inputs["completion_mask"], advantages, config)

    def loss_fn(hidden_states, lm_head_weight, **head):
        return grpo_loss(hidden_states, lm_head_weight, *given, return_entropy=True, **head)

    made = []
    for padding_free in (False, True):
        model.zero_grad()
        length = inputs["completion_ids"].shape[1]
        out = completion_loss(model, loss_fn, **places, completion_length=length, padding_free=padding_free)
        out.loss.backward()
        made.append((out.loss, out.stats["entropy"], model.lm_head.weight.grad.clone()))
    model.zero_grad()
    scored = completion_logps(model, **inputs, temperature=0.7, return_entropy=True)
    expected = grpo_loss_from_logps(
        scored.logps, advantages, inputs["completion_mask"], config, entropy=scored.entropy.detach()
    )
    expected.loss.backward()
    for loss, entropy, gradient in made:
        torch.testing.assert_close(loss, expected.loss)
        torch.testing.assert_close(entropy, expected.stats["entropy"])
        torch.testing.assert_close(gradient, model.lm_head.weight.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["gptoss_lite", "qwen3_moe"])
def test_a_row_has_the_same_log_probabilities_alone_and_beside_longer_ones(name):
    """And whatever ids stand in its padding: neither its values nor its gradients see them."""
    model = add_token_logps(model_of(name))
    inputs = with_completions(batch())
    made = []
    for filler in (0, 11):
        model.zero_grad()
        ids = inputs["input_ids"].masked_fill(~inputs["attention_mask"], filler)
        completions = inputs["completion_ids"].masked_fill(~inputs["completion_mask"], filler)
        logps = completion_logps(model, **{**inputs, "input_ids": ids, "completion_ids": completions}).logps
        logps.sum().backward()
        made.append((logps.detach(), model.get_input_embeddings().weight.grad.clone()))
    torch.testing.assert_close(made[0], made[1], rtol=1e-5, atol=1e-6)
    assert made[0][0].masked_select(~inputs["completion_mask"]).count_nonzero() == 0
    for row, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        columns = length - int(inputs["prompt_lengths"][row])
        alone = {
            n: x[[row]] if x.ndim == 1 else x[[row], : length if n in ("input_ids", "attention_mask") else columns]
            for n, x in inputs.items()
        }
        torch.testing.assert_close(
            completion_logps(model, **alone).logps[0], made[0][0][row, :columns], rtol=1e-5, atol=1e-6
        )


def test_log_probabilities_stand_at_the_token_that_they_predict():
    """A model whose logits at position p say "p": only the ids 0, 1, 2, ... after the first are likely."""
    model = add_token_logps(tiny_model())
    width = model.config.hidden_size
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, :] = 20 * torch.eye(model.config.vocab_size, width)

    def by_position(input_ids, attention_mask, **_):
        states = torch.eye(width)[torch.arange(input_ids.shape[1])].expand(len(input_ids), -1, -1)
        return type("Output", (), {"last_hidden_state": states, "aux_loss": None})()

    model.model.forward = by_position
    ids = torch.arange(9).expand(3, -1) - 1  # the token at position p + 1 is p
    ids = ids.clamp(min=0).clone()
    lengths, prompts = torch.tensor([9, 6, 5]), torch.tensor([4, 2, 4])
    inputs = with_completions(
        {"input_ids": ids, "attention_mask": torch.arange(9) < lengths[:, None], "prompt_lengths": prompts}
    )
    logps = completion_logps(model, **inputs).logps
    assert inputs["completion_mask"].sum(1).tolist() == [5, 4, 1] and logps.min() > -1e-5
    shifted = {**inputs, "completion_ids": inputs["completion_ids"] + 1}
    assert completion_logps(model, **shifted).logps[inputs["completion_mask"]].max() < -10
