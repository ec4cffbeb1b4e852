import pytest
import torch
from moe_families import tiny_moe
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.masking_utils import flex_attention_mask, sdpa_mask

from grpo_moe.adapters import hf_attention
from grpo_moe.adapters.hf_attention import (
    SINK_ATTENTION,
    check_sinks,
    sink_attention_forward,
    sink_attention_mask,
)
from grpo_moe.adapters.hf_packing import packed_inputs

IDS = torch.arange(40).reshape(2, 20) % 61 + 3
LONG_IDS = torch.arange(400).reshape(2, 200) * 7 % 61 + 3


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


def generated(name, ids, device="cpu", **options):
    model = tiny_moe("gpt_oss", attn_implementation=name, experts_implementation="eager").eval().to(device)
    return model.generate(ids.to(device), max_new_tokens=20, do_sample=False, eos_token_id=None, **options)


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_generation_equals_that_of_eager(options):
    assert torch.equal(*(generated(name, IDS, **options) for name in ("eager", SINK_ATTENTION)))


@pytest.fixture
def flex_calls(monkeypatch):
    """How many calls of attention went to FlexAttention, with float32 in full precision."""
    calls, before = [], torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    flex = hf_attention.flex_sink_attention
    monkeypatch.setattr(hf_attention, "flex_sink_attention", lambda *a, **k: calls.append(1) or flex(*a, **k))
    yield calls
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def in_blocks(monkeypatch):
    """Name of an attention that does on the CPU what "grpo_moe_sinks" does on a GPU; without gradients."""
    monkeypatch.setattr(masking_utils, "create_block_mask", lambda *a, _compile, **k: create_block_mask(*a, **k))
    monkeypatch.setattr(hf_attention, "supports_flex", lambda query: query.shape[2] >= 128)
    AttentionInterface.register("in_blocks", sink_attention_forward)
    AttentionMaskInterface.register(
        "in_blocks", lambda **k: (flex_attention_mask if k["q_length"] >= 128 else sink_attention_mask)(**k)
    )
    return "in_blocks"


@torch.no_grad()
@pytest.mark.parametrize("columns", [slice(0, 9), slice(-100, None)])
def test_logits_under_block_masks_equal_those_of_eager(in_blocks, columns, flex_calls):
    mask = torch.ones_like(LONG_IDS)
    mask[0, columns] = 0
    made = [
        tiny_moe("gpt_oss", attn_implementation=name).eval()(LONG_IDS, attention_mask=mask, use_cache=False).logits
        for name in ("eager", in_blocks)
    ]
    assert_same(*([x[mask.bool()]] for x in made))
    assert len(flex_calls) == 2  # layers


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static", "disable_compile": True}])
def test_decoding_goes_on_after_a_prompt_under_block_masks(in_blocks, options, flex_calls):
    mask = torch.ones_like(LONG_IDS)
    mask[1, :9] = 0
    made = [generated(name, LONG_IDS, attention_mask=mask, **options) for name in ("eager", in_blocks)]
    assert torch.equal(*made)
    assert len(flex_calls) == 2  # the prompt; the tokens after it are too few for blocks


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_block_masks_that_flex_does_not_take_go_to_sdpa(dropout):
    mask = sink_attention_mask(batch_size=2, q_length=20, kv_length=20, device="cpu")
    blocks = create_block_mask(lambda b, h, q, k: k <= q, 2, None, 20, 20, device="cpu")
    heads, sinks = torch.randn(3, 2, 4, 20, 16, requires_grad=True), torch.randn(4)
    made = []
    for one in (mask, blocks):
        torch.manual_seed(1)
        made.append(sink_attention_forward(None, *heads, one, dropout=dropout, s_aux=sinks)[0])
    assert torch.equal(*made)


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


def on_gpu(name, **inputs):
    model = tiny_moe("gpt_oss", attn_implementation=name, experts_implementation="eager").cuda().eval()
    return outcome(model, **{key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in inputs.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [slice(0, 9), slice(-100, None)])
def test_gradients_by_flex_equal_those_of_eager(columns, flex_calls):
    mask = torch.ones_like(LONG_IDS)
    mask[0, columns] = 0
    made = [on_gpu(name, input_ids=LONG_IDS, attention_mask=mask) for name in ("eager", SINK_ATTENTION)]
    assert len(flex_calls) == 2
    for a, b in zip(*made, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-4 * max(1.0, float(a.abs().max())))


@pytest.mark.gpu
def test_checkpointed_layers_recompute_by_flex(flex_calls):
    model = tiny_moe("gpt_oss", attn_implementation=SINK_ATTENTION, experts_implementation="eager").cuda().train()
    expected = outcome(model, input_ids=LONG_IDS.cuda())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    made = outcome(model, input_ids=LONG_IDS.cuda())
    assert len(flex_calls) == 2 + 4
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, float(b.abs().max())))


@pytest.mark.gpu
def test_packed_sequences_do_not_see_each_other_by_flex(flex_calls):
    lengths = (200, 129)
    model = tiny_moe("gpt_oss", attn_implementation=SINK_ATTENTION, experts_implementation="eager").cuda().eval()
    rows = [LONG_IDS[i, :n] for i, n in enumerate(lengths)]
    packed = packed_inputs(model, LONG_IDS.cuda(), (torch.arange(200) < torch.tensor(lengths)[:, None]).cuda())
    assert all(isinstance(mask, BlockMask) for mask in packed["attention_mask"].values())
    made = outcome(model, **packed)
    assert len(flex_calls) == 2
    model.set_attn_implementation("eager")
    apart = [outcome(model, input_ids=row[None].cuda()) for row in rows]
    expected = [torch.cat([x[0] for x in apart], dim=1), *(a + b for a, b in zip(*(x[1:] for x in apart), strict=True))]
    for a, b in zip(made, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * max(1.0, float(b.abs().max())))


@pytest.mark.gpu
def test_generation_by_flex_equals_that_of_eager(flex_calls):
    mask = torch.ones_like(LONG_IDS)
    mask[1, :9] = 0
    made = [generated(n, LONG_IDS, "cuda", attention_mask=mask.cuda()) for n in ("eager", SINK_ATTENTION)]
    assert torch.equal(*made)
    assert len(flex_calls) == 2
