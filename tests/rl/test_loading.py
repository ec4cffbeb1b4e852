"""Policies as people have them: paths, instances, adapters, quantised checkpoints."""

import json

import pytest
import torch
from moe_families import tiny_moe
from safetensors.torch import load_file, save_file
from tiny import tiny_model, tokenizer
from transformers import GptOssConfig

from grpo_moe.adapters.hf_attention import SINK_ATTENTION
from grpo_moe.rewards import RewardCaller
from grpo_moe.rl import GRPOConfig
from grpo_moe.rl.loading import TaskData, disable_dropout, load_policy, without_adapters

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def save_mxfp4(path):
    """A tiny GPT-OSS as OpenAI publishes it: experts in blocks of 32 four-bit numbers, two a byte, with one exponent.

    Returns its experts' weights as they must come back: [E, H, 2I] and [E, I, H] of layer 0.
    """
    model = tiny_moe("gpt_oss", dtype=torch.bfloat16).bfloat16()
    config = GptOssConfig.from_dict({**model.config.to_dict(), "intermediate_size": 32})
    model = type(model)(config).bfloat16()
    model.save_pretrained(path)
    tensors, expected = load_file(path / "model.safetensors"), {}
    for layer in range(2):
        for name in ("gate_up_proj", "down_proj"):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            experts, rows, columns = tensors.pop(key).shape  # [E, in, out]
            codes = torch.randint(0, 16, (experts, columns, rows // 32, 32))
            exponents = torch.randint(-4, 2, (experts, columns, rows // 32))
            tensors[f"{key}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
            tensors[f"{key}_scales"] = (exponents + 127).to(torch.uint8)
            values = FP4[codes] * torch.exp2(exponents.float())[..., None]
            expected.setdefault(name, values.flatten(2).transpose(1, 2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    told = json.loads((path / "config.json").read_text())
    told["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(told))
    return expected


def test_mxfp4_checkpoints_come_dequantised(tmp_path):
    expected = save_mxfp4(tmp_path)
    policy, adapters = load_policy(str(tmp_path))
    experts = policy.model.layers[0].mlp.experts
    assert adapters is None and all(p.is_floating_point() for p in policy.parameters())
    for name, values in expected.items():
        torch.testing.assert_close(getattr(experts, name).float(), values, rtol=0, atol=0)
    assert policy.config._attn_implementation == SINK_ATTENTION
    assert policy.config._experts_implementation == "grpo_moe"
    assert policy(torch.arange(5)[None]).logits.isfinite().all()
    policy.save_pretrained(tmp_path / "trained")
    again, _ = load_policy(str(tmp_path / "trained"))
    assert torch.equal(again.model.layers[0].mlp.experts.down_proj, experts.down_proj)


def test_quantised_experts_are_refused():
    model = tiny_model()
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"got model.layers.0.*Mxfp4Config\(dequantize=True\)"):
        load_policy(model)


def test_a_path_comes_on_our_kernels_and_an_instance_as_it_is(tmp_path):
    model = tiny_moe("qwen3_moe")
    assert load_policy(model)[0] is model and model.config._experts_implementation == "grouped_mm"
    model.save_pretrained(tmp_path / "qwen3")
    assert load_policy(tmp_path / "qwen3")[0].config._experts_implementation == "grpo_moe"
    tiny_model(moe_dispatch="stacked").save_pretrained(tmp_path / "lite")
    assert load_policy(tmp_path / "lite")[0].config._experts_implementation == "stacked"


def test_what_is_no_model_is_refused():
    for wrong in ("", 3, None):
        with pytest.raises(ValueError, match="model must be a transformers model"):
            load_policy(wrong)
    with pytest.raises(ValueError, match="there is no such folder"):
        load_policy("./nowhere")


def test_adapters_are_added_once():
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["q_proj"])
    policy, adapters = load_policy(tiny_moe("qwen3_moe"), lora)
    assert adapters.get_base_model() is policy and load_policy(adapters) == (policy, adapters)
    with pytest.raises(ValueError, match="peft_config must be None"):
        load_policy(adapters, lora)
    with pytest.raises(ValueError, match="peft_config must be a configuration of peft, got 'lora'"):
        load_policy(tiny_moe("qwen3_moe"), "lora")
    prompts = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="got PromptTuningConfig before the prompt"):
        load_policy(tiny_moe("qwen3_moe"), prompts)


def test_without_adapters_what_was_frozen_stays_frozen():
    peft = pytest.importorskip("peft")
    policy, adapters = load_policy(tiny_moe("qwen3_moe"), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    plain = policy(torch.arange(5)[None]).logits
    for name, p in policy.named_parameters():
        p.requires_grad_("q_proj.lora" in name)
        if "lora_B" in name:
            torch.nn.init.ones_(p)
    flags = [p.requires_grad for p in policy.parameters()]
    with without_adapters(adapters):
        torch.testing.assert_close(policy(torch.arange(5)[None]).logits, plain)
    assert [p.requires_grad for p in policy.parameters()] == flags and 0 < sum(flags) < len(flags)
    assert not torch.allclose(policy(torch.arange(5)[None]).logits, plain)


def test_chat_template_kwargs_reach_the_prompts_of_training_and_evaluation():
    reading = tokenizer()
    reading.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ 'think' if thinking else 'no' }}"
    chats = [{"prompt": [{"role": "user", "content": letter}]} for letter in "ab"]
    rewards = RewardCaller(lambda completions, **columns: [0.0] * len(completions))
    for thinking, added in ((True, "think"), (False, "no")):
        args = GRPOConfig(chat_template_kwargs={"thinking": thinking})
        data = TaskData(chats, chats, reading, args, 512, rewards)
        for prompts in (data.source.first(2), data.eval_prompts):
            texts = [reading.decode(p.input_ids, skip_special_tokens=True) for p in prompts]
            assert texts == [f"a{added}", f"b{added}"]
    texts = [{"prompt": "a"}]
    with pytest.raises(ValueError, match="chat_template_kwargs must be left out with prompts of text"):
        TaskData(texts, None, reading, args, 512, rewards)
    TaskData(chats, texts, reading, args, 512, rewards)


def test_no_kind_of_dropout_stays_on():
    nn = torch.nn
    kinds = [nn.Dropout(0.5), nn.Dropout2d(0.5), nn.AlphaDropout(0.5), nn.FeatureAlphaDropout(0.5)]
    model = nn.ModuleList(kinds)
    model.attention_dropout = model.layerdrop = model.drop_path_rate = model.jitter_noise = 0.5  # as modules name them
    disable_dropout(model)
    x = torch.randn(4, 3, 5)
    assert all(torch.equal(kind(x), x) for kind in kinds)
    assert model.attention_dropout == model.layerdrop == model.drop_path_rate == model.jitter_noise == 0
