import pytest
import torch
from moe_families import FAMILIES, tiny_moe
from tiny import tiny_model

from grpo_moe.adapters.coverage import Coverage, coverage, coverage_table, unreached_adapters


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_role(family):
    model = tiny_moe(family)
    rows = coverage(model)
    assert "other" not in rows and {"embeddings", "router", "experts", "norm"} <= set(rows)
    counted = sum(row.trained + row.lora + row.frozen for row in rows.values())
    assert counted == sum(p.numel() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert rows["experts"] == Coverage(trained=experts)


def test_adapters_and_frozen_parts_are_told_apart():
    peft = pytest.importorskip("peft")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = tiny_moe("qwen3_moe", experts_implementation="grpo_moe")
    peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=targets, lora_dropout=0.0)
    )
    rows = coverage(model)
    assert rows["experts"].lora == 2 * 8 * 2 * (32 + 48 + 24 + 32)  # layers, experts, rank, sides of both matrices
    assert rows["attention"].lora == 2 * 2 * (32 + 64) and rows["router"].lora == 0
    assert all(row.trained == 0 and row.frozen > 0 for row in rows.values())
    assert f"{rows['experts'].lora:,}" in coverage_table(rows)

    assert len(unreached_adapters(model.named_parameters())) == 6
    model(torch.arange(9)[None]).logits.square().sum().backward()
    assert unreached_adapters(model.named_parameters()) == []
    one = next(p for name, p in model.named_parameters() if "layers.1.self_attn.q_proj.lora_B" in name)
    one.grad.zero_()
    assert [name.rpartition(".model.")[2] for name in unreached_adapters(model.named_parameters())] == [
        "model.layers.1.self_attn.q_proj"
    ]


def test_a_tied_head_counts_once():
    assert "head" not in coverage(tiny_model(tie_word_embeddings=True))
    assert coverage(tiny_model(tie_word_embeddings=False))["head"].trained > 0
