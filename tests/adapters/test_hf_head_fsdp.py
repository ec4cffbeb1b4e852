"""The head inside the forward of a model sharded by FSDP2, whose hooks gather the weights: on one gloo rank."""

import copy

import pytest
import torch
from moe_families import tiny_moe
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import grpo_moe  # noqa: F401  registers the experts
from grpo_moe.adapters.hf_head import add_token_logps, completion_logps, completion_loss
from grpo_moe.ops import LossConfig, grpo_loss

IDS = torch.arange(24).reshape(2, 12) % 61 + 3


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_log_probabilities_loss_and_gradients_equal_those_of_the_whole_model(family, tied, mesh):
    options = {"attn_implementation": "grpo_moe_sinks"} if family == "gpt_oss" else {}
    changes = {"tie_word_embeddings": tied}
    whole = tiny_moe(family, changes=changes, experts_implementation="grpo_moe", **options)
    sharded = copy.deepcopy(whole)
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    mask = torch.ones_like(IDS, dtype=torch.bool)
    places = {"input_ids": IDS, "attention_mask": mask, "prompt_lengths": torch.tensor([4, 2])}
    given = (IDS[:, 4:], mask[:, 4:], torch.tensor([1.0, -0.5]), LossConfig())

    def loss_fn(hidden_states, lm_head_weight, **head):
        return grpo_loss(hidden_states, lm_head_weight, *given, **head).loss

    made = []
    for model in (whole, sharded):
        add_token_logps(model)
        scored = completion_logps(model, **places, completion_ids=IDS[:, 4:], completion_mask=mask[:, 4:])
        loss = completion_loss(model, loss_fn, **places, completion_length=8)
        (scored.logps.sum() + loss).backward()
        grads = [getattr(p.grad, "full_tensor", lambda g=p.grad: g)() for p in model.parameters()]
        made.append([scored.logps, loss.detach(), *grads])
    for ours, expected in zip(*made, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
