"""GRPO on Qwen3-MoE, with the routing of the rollout replayed in training.

    accelerate launch recipes/grpo_qwen3_moe.py --tiny                          # a tiny random model, offline
    accelerate launch recipes/grpo_qwen3_moe.py --bf16 --gradient_checkpointing # Qwen/Qwen3-30B-A3B-Instruct-2507
    accelerate launch recipes/grpo_qwen3_moe.py --bf16 --lora_r 16 --model_name_or_path FOLDER \
        --dataset_name openai/gsm8k.jsonl                                       # LoRA, own model and data

Algorithm (GRPO, arXiv 2402.03300, as it is run today): advantages over the std of the group, token-level ratio clipped
at 0.2, each sequence's mean counts alike, no KL; routes of the rollout replayed in every update (R3,
arXiv 2510.11370); truncated importance sampling for what is left between rollout and training.
"""

from published import train_published
from running import run
from transformers import Qwen3MoeConfig


def main() -> None:
    """Runs the recipe."""
    train_published(
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        Qwen3MoeConfig,
        dict(intermediate_size=96, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True),
        loss_type="grpo",
        epsilon=0.2,
        routing_replay="R3",
        sampler_correction="token_truncate",
        steps_per_generation=4,
        output_dir="runs/grpo_qwen3_moe",
        save_steps=20,
    )


if __name__ == "__main__":
    run(main)
