"""Experts that transformers' distributed config has split over processes: each runs its own through our function."""

import json
import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from moe_families import tiny_moe
from transformers.distributed import DistributedConfig

SCRIPT = Path(__file__).with_name("expert_parallel_run.py")
FAMILIES = ("qwen3_moe", "gpt_oss")
if "ep_size" in {field.name for field in fields(DistributedConfig)}:
    LAYOUTS = {
        "rows shared, tokens sent": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_to_all"},
        "rows shared, sums reduced": {"tp_size": 2, "ep_size": 2, "ep_implementation": "all_reduce"},
        "rows of its own": {"fsdp_size": 2, "ep_size": 2},
    }
else:  # transformers 5.17
    LAYOUTS = {"rows shared, sums reduced": {"tp_size": 2, "enable_expert_parallel": True}}


def inputs(length):
    ids = torch.arange(2 * length).reshape(2, length) % 61 + 3
    return ids, torch.arange(ids.numel() * 64).float().mul(0.37).cos().view(2, length, 64)


@pytest.mark.slow
def test_two_processes_with_half_the_experts_equal_one(tmp_path):
    """Logits with and without gradients, and every gradient; with 12 tokens a row, and with one that most experts lack.

    GPT-OSS has biases, which must be added once. The trainer refuses such a model, in its own words.
    """
    given = {length: inputs(length) for length in (12, 1)}
    torch.save(given, tmp_path / "inputs.pt")
    models = {family: tiny_moe(family, experts_implementation="eager").eval() for family in FAMILIES}
    for family, model in models.items():
        model.set_attn_implementation("eager")
        model.save_pretrained(tmp_path / family)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command += [str(tmp_path), json.dumps(LAYOUTS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]

    for family, layout in ((family, layout) for family in FAMILIES for layout in LAYOUTS):
        model = models[family]
        for length, (ids, weights) in given.items():
            model.zero_grad()
            expected = model(ids, use_cache=False).logits
            (expected * weights).sum().backward()
            for made in found:
                experts, first, inferred, logits, gradients = made[family, layout, length]
                assert experts == 4  # of 8
                rows = slice(None) if first is None else slice(first, first + 1)
                for ours in (inferred, logits):
                    torch.testing.assert_close(ours, expected[rows], rtol=1e-5, atol=1e-5)
                assert gradients.keys() == dict(model.named_parameters()).keys()
                for name, parameter in model.named_parameters():
                    ours = gradients[name] if first is None else 2 * gradients[name]  # FSDP takes the mean
                    where = f"{family}, {layout}, {length}: {name}"
                    torch.testing.assert_close(
                        ours, parameter.grad, rtol=1e-4, atol=1e-4, msg=lambda text, at=where: f"{at}: {text}"
                    )
        for made in found:
            said = made[family, layout, "refusal"]
            assert said.startswith("model must be whole on each process") and " as a shard in " in said
