"""What may be asked of FSDP2, and models that are whole."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import ParallelismConfig
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard, distribute_tensor

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.sharding import check_parallelism, sharding_plugin, whole_parameters

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}


@pytest.fixture
def launched(monkeypatch):
    def launch(**variables):
        for name, value in {**FSDP2, **variables}.items():
            monkeypatch.setenv(name, value)

    return launch


def test_bf16_is_for_gathered_parameters_alone(launched):
    assert sharding_plugin(None) is None
    launched()
    assert sharding_plugin(None).mixed_precision_policy is None
    expected = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert sharding_plugin("bf16").mixed_precision_policy == expected
    launched(ACCELERATE_MIXED_PRECISION="bf16")
    assert sharding_plugin(None).mixed_precision_policy == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("FSDP_VERSION", "1", "fsdp_version must be 2, got 1"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "fsdp_auto_wrap_policy must be TRANSFORMER_BASED_WRAP, got"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "must be false, got True; use gradient_checkpointing=True"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params must be false, got True"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(launched, name, value, message):
    launched(**{name: value})
    with pytest.raises(ValueError, match=message):
        sharding_plugin(None)


def test_deepspeed_is_refused_with_what_to_use(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    args = GRPOConfig(output_dir=str(tmp_path), num_generations=4, use_cpu=True)
    with pytest.raises(ValueError, match="distributed_type must not be DEEPSPEED.*recipes/accelerate/fsdp2.yaml"):
        GRPOTrainer(tiny_model(), share_of_letter, args, prompt_rows(4), processing_class=tokenizer())


@pytest.fixture
def mesh():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["expert", "pipeline"])
def test_a_model_that_its_loading_has_split_is_refused(kind, mesh, tmp_path):
    """As from_pretrained leaves it with a distributed_config or tp_plan; see tests/adapters/test_expert_parallel.py."""
    model = tiny_model()
    if kind == "expert":
        experts = model.model.layers[1].mlp.experts
        experts.down_proj = torch.nn.Parameter(distribute_tensor(experts.down_proj.detach(), mesh, [Shard(0)]))
        found = "got model.layers.1.mlp.experts.down_proj as a shard in GptOssLiteForCausalLM; load it without"
    else:  # a stage holds whole parameters, of some layers
        model._device_mesh = mesh
        found = r"got a part of it on the process mesh DeviceMesh\(.*\) in GptOssLiteForCausalLM; load it without"
    args = GRPOConfig(output_dir=str(tmp_path), num_generations=4, use_cpu=True)
    with pytest.raises(ValueError, match=f"model must be whole on each process.*{found}.*fsdp2.yaml"):
        GRPOTrainer(model, share_of_letter, args, prompt_rows(4), processing_class=tokenizer())


def test_processes_that_share_rows_are_refused():
    """Under tensor parallelism two groups of processes would train two policies, and say nothing."""
    for sizes, refused in (({"dp_shard_size": 2}, False), ({"tp_size": 2}, True), ({"cp_size": 2}, True)):
        accelerator = SimpleNamespace(parallelism_config=ParallelismConfig(**sizes))
        if not refused:
            check_parallelism(accelerator)
            continue
        (name,) = sizes
        with pytest.raises(ValueError, match=f"must have tp_size, cp_size and sp_size of 1.*got .*{name}=2.*dp_shard"):
            check_parallelism(accelerator)
    check_parallelism(SimpleNamespace(parallelism_config=None))


def test_a_model_that_is_whole_stays_as_it_is():
    model = torch.nn.Linear(2, 2)
    model.register_forward_hook(lambda *args: None)
    before = dict(model._forward_hooks)
    with whole_parameters(model):
        assert model._forward_hooks == before
    assert model._forward_hooks == before
