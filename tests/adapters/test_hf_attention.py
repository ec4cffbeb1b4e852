import pytest
import torch
from moe_families import tiny_moe
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from grpo_moe.adapters.hf_attention import SINK_ATTENTION, check_sinks, packed_attention_masks, sink_attention_forward

IDS = torch.arange(40).reshape(2, 20) % 61 + 3


def outcome(model, **inputs):
    model.zero_grad()
    logits = model(**inputs, use_cache=False).logits
    seen = inputs.get("attention_mask")
    weights = seen[..., None].float() if isinstance(seen, torch.Tensor) else 1.0
    (logits.log_softmax(-1)[..., 5:6] * weights).sum().backward()
    return [logits.detach() * weights, *(p.grad for p in model.parameters())]


def assert_same(made, expected):
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("left_padding", [0, 7])
def test_logits_and_gradients_equal_those_of_eager(left_padding):
    mask = torch.ones_like(IDS)
    mask[0, :left_padding] = 0
    made = [
        outcome(tiny_moe("gpt_oss", attn_implementation=name).eval(), input_ids=IDS, attention_mask=mask)
        for name in ("eager", SINK_ATTENTION)
    ]
    assert_same(*made)


def test_generation_equals_that_of_eager():
    made = [
        tiny_moe("gpt_oss", attn_implementation=name)
        .eval()
        .generate(IDS, max_new_tokens=20, do_sample=False, eos_token_id=None)
        for name in ("eager", SINK_ATTENTION)
    ]
    assert torch.equal(*made)


@pytest.mark.parametrize("name", ["eager", SINK_ATTENTION])
def test_packed_sequences_do_not_see_each_other(name):
    model = tiny_moe("gpt_oss", attn_implementation=name).eval()
    apart = torch.cat([model(row[None], use_cache=False).logits for row in (IDS[0], IDS[1, :9])], dim=1)
    packed = torch.cat([IDS[:1], IDS[1:, :9]], dim=1)
    numbers = torch.tensor([[0] * 20 + [1] * 9])
    positions = torch.cat([torch.arange(20), torch.arange(9)])[None]
    masks = packed_attention_masks(numbers, model.config.sliding_window)
    if name == "eager":  # which adds its mask to the scores
        masks = {n: torch.zeros(m.shape).masked_fill(~m, torch.finfo(torch.float32).min) for n, m in masks.items()}
    out = model(packed, attention_mask=masks, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(out, apart, rtol=1e-4, atol=1e-5)


def test_masks_of_packed_sequences_by_hand():
    masks = packed_attention_masks(torch.tensor([[4, 4, 4, 9]]), window=2)
    seen = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    assert masks["full_attention"][0, 0].int().tolist() == seen
    seen[2][0] = 0
    assert masks["sliding_attention"][0, 0].int().tolist() == seen
    assert set(packed_attention_masks(torch.zeros(1, 2), window=None)) == {"full_attention"}


def test_an_attention_that_drops_the_sinks_is_refused():
    def without(*args, s_aux=None, **kwargs):
        return sink_attention_forward(*args, **kwargs)

    AttentionInterface.register("forgetful", without)
    AttentionMaskInterface.register("forgetful", sdpa_mask)
    model = tiny_moe("gpt_oss", attn_implementation="forgetful")
    with pytest.raises(ValueError, match='got "forgetful", whose logits do not depend on them; .*"grpo_moe_sinks"'):
        check_sinks(model)


@pytest.mark.parametrize("name", ["eager", SINK_ATTENTION])
def test_the_check_leaves_the_model_as_it_was(name):
    model = tiny_moe("gpt_oss", attn_implementation=name).train()
    before = {n: x.clone() for n, x in model.state_dict().items()}
    check_sinks(model)
    assert model.training and all(torch.equal(before[n], x) for n, x in model.state_dict().items())
    check_sinks(tiny_moe("mixtral"))
