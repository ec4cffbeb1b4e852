"""Shapes and parameter counts of models, against the models themselves and published numbers."""

import pytest
import torch
import transformers
from moe_families import FAMILIES, SMALL, tiny_moe
from tiny import tiny_config
from transformers import AutoModelForCausalLM

from grpo_moe import GptOssLiteConfig
from grpo_moe.planning import CATEGORIES, AttentionShape, MLPShape, ModelShape

PUBLISHED = {
    "Qwen3-30B-A3B": (
        "Qwen3MoeConfig",
        dict(
            vocab_size=151_936,
            hidden_size=2048,
            num_hidden_layers=48,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            tie_word_embeddings=False,
        ),
    ),
    "gpt-oss-20b": (
        "GptOssConfig",
        dict(
            vocab_size=201_088,
            hidden_size=2880,
            intermediate_size=2880,
            num_hidden_layers=24,
            num_attention_heads=64,
            num_key_value_heads=8,
            head_dim=64,
            num_local_experts=32,
            num_experts_per_tok=4,
            sliding_window=128,
            tie_word_embeddings=False,
        ),
    ),
    "OLMoE-1B-7B": (
        "OlmoeConfig",
        dict(
            vocab_size=50_304,
            hidden_size=2048,
            intermediate_size=1024,
            num_hidden_layers=16,
            num_attention_heads=16,
            num_key_value_heads=16,
            num_experts=64,
            num_experts_per_tok=8,
            tie_word_embeddings=False,
        ),
    ),
}


def family_config(family):
    name, own = FAMILIES[family]
    return getattr(transformers, name)(**{**SMALL, **own})


def dense_config(name, **changes):
    return getattr(transformers, name)(**{**SMALL, "intermediate_size": 64, **changes})


def published(name):
    kind, values = PUBLISHED[name]
    return ModelShape.from_config(getattr(transformers, kind)(**values))


@pytest.mark.parametrize("family", FAMILIES)
def test_from_config_counts_every_parameter_of_the_model(family):
    shape, model = ModelShape.from_config(family_config(family)), tiny_moe(family)
    assert shape.total_parameters == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    router = sum(p.numel() for name, p in model.named_parameters() if ".gate." in name or ".router." in name)
    assert (shape.parameters["experts"], shape.parameters["router"]) == (experts, router)
    assert shape.active_parameters == shape.total_parameters - experts * 6 // 8  # two of eight
    assert sum(shape.parameters.values()) == shape.total_parameters and tuple(shape.parameters) == CATEGORIES


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"nemotron_h", "gpt_oss", "deepseek_v3"}))
def test_from_config_of_families_reads_attention_and_experts(family):
    shape = ModelShape.from_config(family_config(family))
    dim = 16 if "head_dim" in FAMILIES[family][1] else 8
    assert shape.blocks[1].attention == AttentionShape("full", 4, 2, dim, dim)
    shared = {"qwen2_moe": 16, "qwen3_next": 16, "qwen3_5_moe": 16, "glm4_moe": 24, "ernie4_5_moe": 24}
    assert shape.blocks[1].mlp == MLPShape(24, True, 8, 2, shared.get(family, 0))
    first = shape.blocks[0]
    if family in ("glm4_moe", "ernie4_5_moe"):
        assert first.mlp == MLPShape(64, True) and first.mlp.kind == "dense" and shape.blocks[1].mlp.kind == "experts"
    if family in ("qwen3_next", "qwen3_5_moe"):
        assert first.attention == AttentionShape("linear", 4, 2, 8, 8)


def test_from_config_reads_windows_latent_attention_and_blocks_of_one_part():
    window, full = (block.attention for block in ModelShape.from_config(family_config("gpt_oss")).blocks)
    assert (window.kind, window.window, full.kind, full.window) == ("window", 16, "full", None)
    latent = ModelShape.from_config(family_config("deepseek_v3")).blocks[1].attention
    assert latent == AttentionShape("mla", 4, 4, 16, 8)
    attention, experts = ModelShape.from_config(family_config("nemotron_h")).blocks
    assert attention.mlp is None and attention.attention == AttentionShape("full", 4, 2, 16, 16)
    assert experts.attention is None and experts.mlp == MLPShape(24, False, 8, 2, 16)
    everywhere = ModelShape.from_config(dense_config("MistralConfig", sliding_window=5))
    assert [block.attention.window for block in everywhere.blocks] == [5, 5]
    lite = ModelShape.from_config(tiny_config())
    assert [block.attention.window for block in lite.blocks] == [6, None, 6, None]


@pytest.mark.parametrize("name", ["LlamaConfig", "Qwen3Config"])
def test_from_config_of_dense_models(name):
    config = dense_config(name, head_dim=8)
    shape = ModelShape.from_config(config)
    model = AutoModelForCausalLM.from_config(config)
    assert shape.total_parameters == shape.active_parameters == sum(p.numel() for p in model.parameters())
    assert shape.blocks[0].mlp == MLPShape(64, True) and shape.blocks[0].attention == AttentionShape("full", 4, 2, 8, 8)
    assert shape.parameters["dense_mlp"] == 2 * 3 * 64 * 32 and shape.parameters["experts"] == 0
    assert shape.blocks[0].multiply_adds["dense_mlp"] == 3 * 64 * 32


def test_from_config_leaves_the_configuration_alone_and_makes_no_weights():
    config = family_config("qwen3_moe")
    before = config.to_dict(), config._attn_implementation
    ModelShape.from_config(config)
    assert (config.to_dict(), config._attn_implementation) == before
    assert (
        round(ModelShape.from_config(transformers.DeepseekV3Config()).total_parameters / 1e9) == 671
    )  # 1.3 TB in bf16


def test_from_config_of_a_composite_model_takes_its_language_model():
    text = family_config("qwen3_5_moe")
    composite = transformers.Qwen3_5MoeConfig(text_config=text.to_dict())
    assert ModelShape.from_config(composite) == ModelShape.from_config(text)


def test_a_tied_head_counts_as_embedding_and_still_multiplies():
    tied, own = (ModelShape.from_config(dense_config("LlamaConfig", tie_word_embeddings=x)) for x in (True, False))
    assert tied.tied_embeddings and tied.parameters["head"] == 0
    assert not own.tied_embeddings and own.parameters["head"] == own.parameters["embedding"] == 64 * 32
    assert tied.vocab_size == own.vocab_size == 64


def test_gpt_oss_lite_has_its_documented_counts():
    shape = ModelShape.from_config(GptOssLiteConfig())
    assert (shape.total_parameters, shape.active_parameters) == (501_836_640, 247_032_672)
    assert shape.tied_embeddings and shape.parameters["embedding"] == 128_000 * 768
    assert shape.blocks[0].attention == AttentionShape("window", 8, 4, 96, 96, 128)
    assert shape.blocks[1].mlp == MLPShape(1536, True, 8, 2, 1536)
    assert shape.blocks[0].multiply_adds["attention"] == shape.blocks[0].parameters["attention"] - 8  # sinks


@pytest.mark.parametrize(
    ("name", "total", "active"), [("Qwen3-30B-A3B", 30.5, 3.3), ("OLMoE-1B-7B", 6.9, 1.3), ("gpt-oss-20b", 20.9, 3.6)]
)
def test_published_models_have_their_published_counts(name, total, active):
    shape = published(name)
    counted = shape.active_parameters - (shape.parameters["embedding"] if name == "gpt-oss-20b" else 0)
    print(f"{name}: {shape.total_parameters:,} total, {shape.active_parameters:,} active")
    assert shape.total_parameters / 1e9 == pytest.approx(total, abs=0.05)
    assert counted / 1e9 == pytest.approx(active, abs=0.06)


def test_published_models_by_hand():
    qwen = published("Qwen3-30B-A3B")
    assert qwen.parameters["experts"] == 48 * 128 * 3 * 2048 * 768
    assert qwen.parameters["attention"] == 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + 2 * 128)
    assert qwen.parameters["router"] == 48 * 128 * 2048 and qwen.parameters["norm"] == (2 * 48 + 1) * 2048
    oss = published("gpt-oss-20b")
    assert oss.parameters["experts"] == 24 * 32 * (3 * 2880 * 2880 + 3 * 2880)  # biases of gate, up and down
    assert oss.blocks[0].multiply_adds["experts"] == 4 * 3 * 2880 * 2880


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (lambda: transformers.ViTConfig(), "ViTConfig"),
        (lambda: transformers.GPT2Config(n_layer=1), "no list of layers"),
        (lambda: transformers.MambaConfig(num_hidden_layers=1), "mixer"),
        (lambda: transformers.MiniMaxConfig(**SMALL, intermediate_size=24, head_dim=8), "mixes tokens in another way"),
    ],
)
def test_from_config_refuses_what_it_cannot_count(config, found):
    with pytest.raises(ValueError, match=rf"config must be that of .*, got .*{found}.*;"):
        ModelShape.from_config(config())
    assert torch.empty(0).device.type == "cpu"  # the meta device does not leak
