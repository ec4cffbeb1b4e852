"""GSPO on OpenAI's GPT-OSS, in transformers' implementation, on our experts and with its attention sinks.

    accelerate launch recipes/gspo_gptoss_hf.py --tiny                          # a tiny random model, offline
    accelerate launch recipes/gspo_gptoss_hf.py --bf16 --gradient_checkpointing # openai/gpt-oss-20b, dequantised
    accelerate launch recipes/gspo_gptoss_hf.py --bf16 --lora_r 16 --model_name_or_path FOLDER \
        --dataset_name DATA.jsonl                                               # LoRA, own model and data

Algorithm (GSPO, arXiv 2507.18071): one ratio a sequence, the geometric mean of its tokens', clipped at 3e-4 and 4e-4;
each sequence counts alike; no KL; four updates a rollout. Sequence ratios stand the changes of routing that upset
token ratios, so routes are left to the live router (--routing_replay R2 pins them).
"""

from published import train_published
from running import run
from transformers import GptOssConfig

from grpo_moe.adapters.hf_attention import SINK_ATTENTION


def main() -> None:
    """Runs the recipe."""
    train_published(
        "openai/gpt-oss-20b",
        GptOssConfig,
        dict(
            intermediate_size=48,
            num_local_experts=8,
            num_experts_per_tok=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"],
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        attn_implementation=SINK_ATTENTION,
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        steps_per_generation=4,
        output_dir="runs/gspo_gptoss_hf",
        save_steps=20,
    )


if __name__ == "__main__":
    run(main)
