"""The trainer on a GPU: memory that does not grow, and LoRA on experts in its rollouts' CUDA graphs."""

import pytest
import torch
from accelerate.state import AcceleratorState
from moe_families import tiny_moe
from test_trainer import trainer
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def precision_of_its_own():
    """The first Accelerator of a process fixes its precision."""
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True, "beta": 0.1, "routing_replay": "R3"}])
def test_memory_is_the_same_after_three_steps_and_after_ten(tmp_path, changes):
    run = trainer(tmp_path, tiny_model(moe_dispatch="fused"), use_cpu=False, bf16=True, max_steps=40, **changes)
    run.record.start("test", last_step=-1)
    allocated = []
    for _ in range(10):
        run.step()
        torch.cuda.synchronize()
        allocated.append(torch.cuda.memory_allocated())
    assert allocated[9] == allocated[2], allocated


def test_rollouts_with_lora_on_experts_agree_with_the_update(tmp_path):
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        init_lora_weights=False,
    )
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=16,
        learning_rate=1e-2, show_progress=False, eval_on_start=False, log_completions=False, routing_replay="R3",
    )  # fmt: skip
    model = tiny_moe("qwen3_moe", experts_implementation="grpo_moe")
    rows = prompt_rows(10)
    run = GRPOTrainer(model, share_of_letter, args, rows, processing_class=tokenizer(), peft_config=lora)
    run.record.start("test", last_step=-1)
    lines = [run.step() for _ in range(4)]
    assert max(line["sampling_logp_difference_max"] for line in lines) < 1e-3  # fp32, the routes replayed
    assert lines[-1]["grad_norm"] > 0
