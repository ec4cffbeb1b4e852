"""Under torchrun: a saved model with its experts split over two processes. For test_expert_parallel.py."""

import json
import sys
from pathlib import Path

import torch
from torch import distributed
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import grpo_moe  # noqa: F401  registers the experts
from grpo_moe.rl.loading import load_policy


def whole(tensor):
    return getattr(tensor, "full_tensor", lambda: tensor)()


def logits_and_gradients(model, ids, weights):
    logits = model(ids, use_cache=False).logits
    (logits * weights).sum().backward()
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    model.zero_grad()  # here, while all are shards: a forward without gradients leaves FSDP2's last unit gathered
    return logits.detach(), gradients


def refusal(model):
    try:
        load_policy(model)
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    folder, layouts = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, given, found = distributed.get_rank(), torch.load(folder / "inputs.pt"), {}
    for family in sorted(path.name for path in folder.iterdir() if path.is_dir()):
        for layout, config in layouts.items():
            model = AutoModelForCausalLM.from_pretrained(
                folder / family,
                dtype=torch.float32,
                attn_implementation="eager",
                experts_implementation="grpo_moe",
                distributed_config=DistributedConfig(**config),
            )
            experts = next(m for m in model.modules() if hasattr(m, "is_transposed") and hasattr(m, "down_proj"))
            for length, (ids, weights) in given.items():
                rows = slice(rank, rank + 1) if config.get("fsdp_size") else slice(None)
                with torch.no_grad():
                    inferred = model(ids[rows], use_cache=False).logits
                logits, gradients = logits_and_gradients(model, ids[rows], weights[rows])
                found[family, layout, length] = (experts.num_experts, rows.start, inferred, logits, gradients)
            found[family, layout, "refusal"] = refusal(model)
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()
