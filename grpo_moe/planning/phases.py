"""Bytes of each phase of a GRPO step on one GPU: what stays, what comes and goes, and the worst moment of each."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from .activations import (
    LITE,
    BlockMemory,
    Compute,
    block_memory,
    kv_bytes,
    lora_parameters,
    outside_memory,
)
from .hardware import GIB, Hardware
from .shapes import ModelShape

CONTEXT_BYTES, COMMUNICATION_BYTES = round(0.6 * GIB), round(0.8 * GIB)
"""Outside of PyTorch's allocator: CUDA context with loaded kernels; NCCL's buffers."""
SLACK = 0.05
"""Of what comes and goes: blocks that the allocator has cut too small to use again."""
MAX_ROWS, PREFILL_TOKENS = 1024, 2**16  # of NativeEngine
SHARE_OF_FREE_MEMORY = 0.8  # that NativeEngine takes for rows


@dataclass(frozen=True, kw_only=True)
class RunShape:
    """What of a run's options decides its memory, for one process."""

    micro_batch: int
    """Rows of a forward and backward."""
    prompt_tokens: int
    completion_tokens: int
    """Of every row: the longest."""
    prompts_per_rollout: int
    """Of this process."""
    num_generations: int
    accumulates: bool = False
    """Several micro-batches in an update: gradients are there from the second one's start."""
    old_logps: bool = False
    """Several updates in a rollout: old log-probabilities are computed first."""
    reference: bool = False
    """beta > 0: a frozen copy of the model, unless there is LoRA."""
    checkpoint_period: int | None = None
    """Every g-th block is recomputed (1: all); None: none."""
    padding_free: bool = False
    """A micro-batch is one row: scores and masks, where there are any, are those of all its tokens."""
    padded: bool = True
    """Rows of different lengths, whose mask makes SDPA repeat keys and values to all heads."""
    bf16: bool = True
    """Autocast to bf16, or FSDP2's bf16 parameters; False: everything in the weights' dtype."""
    weight_bytes: int = 4
    """Of a parameter as it was loaded: 4 (fp32 masters) or 2 (bf16, whose AdamW is bf16 too)."""
    lora_rank: int = 0
    """Adapters of this rank on all projections of attention, the weights frozen; 0: everything is trained."""
    lora_experts: bool = False
    """The experts have adapters of this rank too."""
    routes: bool = False
    """The rollout records routes (R3)."""
    attention: str | None = None
    """Of ``ATTENTIONS``; None: what the model's configuration names, else the default: scores in memory for
    GPT-OSS-Lite, FlexAttention for GPT-OSS, SDPA for the others."""
    experts: str = "fused"
    """"fused", or "stacked": PyTorch, the default of GPT-OSS-Lite's configuration and all that a CPU has."""

    @property
    def tokens(self) -> int:
        """Of a row."""
        return self.prompt_tokens + self.completion_tokens


class Phases:
    """One plan, and the numbers that its phases share; terms as in :func:`grpo_moe.planning.plan_memory`."""

    def __init__(self, shape: ModelShape, run: RunShape, hardware: Hardware, num_gpus: int, sharding: str):
        self.shape, self.run, self.hardware, self.num_gpus, self.sharding = shape, run, hardware, num_gpus, sharding
        self.total = shape.total_parameters
        self.lora = lora_parameters(shape, run.lora_rank, run.lora_experts)
        adapted = [block.parameters["experts"] if run.lora_experts else 0 for block in shape.blocks]
        self.folded = [run.weight_bytes * count for count in adapted]  # experts with their LoRA, made in each forward
        self.gathers = sharding in ("fsdp2", "zero3")
        half_weights = run.weight_bytes == 2 or (run.bf16 and sharding not in ("none", "ddp"))
        casts = run.bf16 and not half_weights
        self.how = Compute(
            hidden_bytes=2 if half_weights else 4,
            operand_bytes=2 if half_weights or run.bf16 else 4,
            casts=casts,
            attention=run.attention or {LITE: "eager", "gpt_oss": "flex"}.get(shape.model_type, "sdpa"),
            experts=run.experts,
            frozen=run.lora_rank > 0,
            lora_rank=run.lora_rank,
            lora_experts=run.lora_experts,
            padded=run.padded or run.padding_free,
        )
        self.batch = (1, run.micro_batch * run.tokens) if run.padding_free else (run.micro_batch, run.tokens)
        self.parameters = [sum(block.parameters.values()) for block in shape.blocks]
        self.outside_parameters = self.total - sum(self.parameters)
        self.head = shape.vocab_size * shape.hidden_size

    def plan(self) -> tuple[dict[str, dict[str, int]], int, int, int]:
        """Bytes by phase and category, of the GPU, rows that the rollout decodes at once, and rows it would like to."""
        states = self._states()
        wanted, per_row, rollout = self._rollout()
        phases = {"rollout": rollout}
        if self.run.old_logps or self.run.reference:
            phases["old_logps"] = self._old_logps()
        phases["forward_backward"] = max(self._moments(), key=lambda moment: sum(moment.values()))
        phases["optimizer_step"] = self._optimizer_step()
        context = CONTEXT_BYTES + (COMMUNICATION_BYTES if self.num_gpus > 1 else 0)
        free = self.hardware.memory_bytes - sum(states.values()) - sum(rollout.values()) - context
        rows = max(0, min(wanted, int(SHARE_OF_FREE_MEMORY * free / (1 + SLACK) // sum(per_row.values()))))
        rollout |= {name: max(rows, 1) * count for name, count in per_row.items()}
        made = {}
        for name, own in phases.items():
            slack = round(SLACK * sum(own.values()))
            everything = {**states, **own, "slack": slack, "context": context}
            made[name] = {category: round(count) for category, count in everything.items() if count}
        return made, self.hardware.memory_bytes, rows, wanted

    def _states(self) -> dict[str, float]:
        """What every phase holds."""
        n, width, zero = self.num_gpus, self.run.weight_bytes, self.sharding in ("zero2", "zero3")
        share = n if self.gathers else 1
        states = {"weights": self.total * (2 if zero and self.run.bf16 else width) / share}
        trained = self.lora or self.total
        own_width = 4 if self.lora else width
        shards = 1 if self.sharding in ("none", "ddp") else n
        states["lora"] = 4 * self.lora / share
        states["master_copy"] = 4 * trained / n if zero and self.run.bf16 else 0
        states["optimizer"] = 2 * (4 if zero else own_width) * trained / shards
        if self.run.reference and not self.lora:
            states["reference"] = self.total * width / share
        if self.sharding == "ddp" and n > 1:
            states["ddp_buckets"] = own_width * trained
        return states

    def _gradient_bytes(self, parameters: float) -> float:
        """Of so many trained parameters, where they stay until the optimiser's step."""
        shards = 1 if self.sharding in ("none", "ddp") else self.num_gpus
        zero = self.sharding in ("zero2", "zero3") and self.run.bf16
        return parameters * (2 if zero else 4 if self.lora else self.run.weight_bytes) / shards

    def _rollout(self) -> tuple[int, dict[str, float], dict[str, float]]:
        """Rows wanted, bytes a row, and bytes of the rest by category."""
        run, c = self.run, self.how.operand_bytes
        wanted = min(_bucket(run.prompts_per_rollout * run.num_generations), MAX_ROWS)
        length = -(-run.tokens // 64) * 64
        routes = sum(block.mlp.top_k for block in self.shape.blocks if block.mlp) * 2 if run.routes else 0
        per_row = {
            "kv_cache": kv_bytes(self.shape, length, c),
            "logits": 3 * 4 * self.shape.vocab_size + (12 + routes) * run.completion_tokens,
        }
        prompts = min(run.prompts_per_rollout, max(1, PREFILL_TOKENS // run.prompt_tokens))
        blocks = self._blocks(prompts, run.prompt_tokens)
        rest = {"prefill": max(x.forward for x in blocks)}
        if self.how.casts:
            rest["weight_copies"] = sum(x.weight_copies for x in blocks) + c * self.head
        rest["folded_lora"] = sum(self.folded)
        if self.gathers:
            rest["gathered"] = c * self.total
        return wanted, per_row, rest

    def _old_logps(self) -> dict[str, float]:
        blocks = self._blocks(*self.batch)
        rows = self.run.micro_batch * self.run.completion_tokens
        copies = c_head = 0
        if self.how.casts:
            copies = sum(self._cached(i) for i in range(len(blocks))) + max(x.weight_copies for x in blocks)
            c_head = self.how.operand_bytes * self.head
        return {
            "temporaries": max(x.forward for x in blocks) + max(self.folded),
            "weight_copies": copies,
            "gathered": self._gathered(),
            "head": c_head + self._chunk_bytes(rows)[0] + rows * self.shape.hidden_size * self.how.hidden_bytes,
        }

    def _moments(self) -> list[dict[str, float]]:
        """Of forward and backward: the head's sweep, its backward, each block's backward, the end."""
        run, how, blocks = self.run, self.how, self._blocks(*self.batch)
        wrapped, kept = self._kept(blocks)
        copies = [0 if wraps else x.weight_copies for x, wraps in zip(blocks, wrapped, strict=True)]
        fixed = {"outside_blocks": self._outside(), "gathered": self._gathered()}
        trained = [0 if self.lora else count for count in self.parameters]
        grads = [self._gradient_bytes(count + self.lora / len(blocks)) for count in trained]
        all_grads = self._gradient_bytes(self.lora or self.total)
        # of a tied head, until the embedding's joins it
        waiting = self._gradient_bytes(self.head) if self.shape.tied_embeddings and not self.lora else 0

        def moment(upto: int, gradients: float, *, weight_copies: float = 0, **own: float) -> dict[str, float]:
            """What the first ``upto`` blocks have kept, and more."""
            held = {**fixed, "weight_copies": weight_copies + sum(copies[:upto]), **own}
            for number in range(upto):
                name = f"activations_{_kind(self.shape, number)}"
                held[name] = held.get(name, 0) + kept[number]
            return {**held, "gradients": all_grads + waiting if run.accumulates else gradients}

        sweep, head_backward = self._head_moments()
        cached = sum(self._cached(i) for i, wraps in enumerate(wrapped) if wraps)
        found = [
            moment(len(blocks), 0, head=sweep, weight_copies=cached),
            moment(len(blocks), 0, head=head_backward),
        ]
        # FSDP2 reduces what is outside of blocks at the very end, and holds it whole until then
        head_grad = 0 if self.lora else how.operand_bytes * self.head * self.gathers or self._gradient_bytes(self.head)
        behind = [head_grad + x for x in accumulate(grads[::-1], initial=0)][::-1]  # of the blocks after each
        for number, x in enumerate(blocks):
            again = x.total_saved + x.weight_copies + self.folded[number] if wrapped[number] else 0
            # FSDP2 reduces the block before meanwhile, in fp32; under autocast fp32 gradients are made of rounded ones,
            # gate and up (two thirds) before the other third is
            reduced = 4 * trained[number] if self.gathers else 0
            after = trained[number] * (4 + how.operand_bytes / 3) if how.casts else 0
            temporaries = again + max(x.backward + reduced, after)
            found.append(moment(number + 1, behind[number + 1], temporaries=temporaries))
        return [*found, moment(0, all_grads, temporaries=self._last_temporaries())]

    def _kept(self, blocks: list[BlockMemory]) -> tuple[list[bool], list[int]]:
        """Which blocks are recomputed, and what each keeps: of those the input and the chosen experts."""
        period, rows = self.run.checkpoint_period, self.run.micro_batch * self.run.tokens
        wrapped = [period is not None and number % period == 0 for number in range(len(blocks))]
        inputs = rows * self.shape.hidden_size * self.how.hidden_bytes
        chosen = [8 * rows * block.mlp.top_k if block.mlp else 0 for block in self.shape.blocks]
        pairs = zip(blocks, wrapped, chosen, self.folded, strict=True)
        return wrapped, [inputs + experts if wraps else x.total_saved + folded for x, wraps, experts, folded in pairs]

    def _outside(self) -> int:
        """Of activations outside of blocks, and masks [B, T, T] by kind of layer."""
        kinds = len({block.attention and block.attention.window for block in self.shape.blocks})
        lite, attention = self.shape.model_type == LITE, self.how.attention
        element = {"sdpa": int(self.how.padded), "flex": 0}.get(attention, 1 if lite else self.how.hidden_bytes)
        if attention != "sdpa" and self.run.checkpoint_period is None:
            element = 0  # blocks that run once need none after
        rows, tokens = self.batch
        return outside_memory(self.shape, rows, tokens, self.how) + kinds * element * rows * tokens**2

    def _last_temporaries(self) -> float:
        """When the embedding's gradient is made."""
        last = 2 * self.run.micro_batch * self.run.tokens * self.shape.hidden_size * self.how.hidden_bytes
        if self.lora:
            return last
        width = self.how.operand_bytes if self.gathers else self.run.weight_bytes
        if self.shape.tied_embeddings or self.run.accumulates:  # before it is added
            last += width * self.head
        return last + (self.outside_parameters * (width + 4) if self.gathers else 0)

    def _head_moments(self) -> tuple[float, float]:
        """Bytes of the fused loss in its sweep and in its backward pass."""
        run, how, hidden = self.run, self.how, self.shape.hidden_size
        rows = run.micro_batch * run.completion_tokens
        chunk, size, single = self._chunk_bytes(rows)
        gathered_rows = rows * hidden * how.hidden_bytes
        copy = how.operand_bytes * self.head if how.casts else 0
        partial = 3 * size * hidden * 4
        summed = 0 if self.lora else rows * hidden * 2 if single else 4 * self.head
        sweep = copy + chunk + 2 * gathered_rows + partial + summed
        kept = gathered_rows + summed + (chunk if single and not self.lora else 0)
        grad = 0 if self.lora else self.head * (how.hidden_bytes if self.gathers else run.weight_bytes)
        return sweep, kept + gathered_rows + grad

    def _chunk_bytes(self, rows: int) -> tuple[float, int, bool]:
        """Bytes of a chunk's exps or logits, its rows, and whether its factors are kept for the weight's gradient."""
        vocab, hidden = self.shape.vocab_size, self.shape.hidden_size
        if self.hardware.is_hopper and self.how.operand_bytes == 2 and hidden % 8 == 0:
            limit = 6144 if rows <= 2 * 6144 else 4096
            width = 2 * vocab
        else:
            limit, width = max(1, GIB // (4 * vocab)), 12 * vocab  # logits, their gradient, a temporary
        parts = -(-rows // limit)
        size = min(limit, -(-rows // parts // 128) * 128, rows)
        return size * width, size, rows <= min(limit, 2 * hidden)

    def _optimizer_step(self) -> dict[str, float]:
        return {"gradients": self._gradient_bytes(self.lora or self.total)}

    def _gathered(self) -> float:
        """Under FSDP2 and ZeRO-3: two blocks, and what is outside of blocks."""
        if not self.gathers:
            return 0
        return self.how.operand_bytes * (2 * max(self.parameters) + self.outside_parameters)

    def _cached(self, number: int) -> float:
        """Bytes of a block's copies in autocast's cache, which frozen weights and experts do not enter."""
        block = self.shape.blocks[number]
        dense = sum(block.multiply_adds[kind] for kind in ("attention", "shared_experts", "dense_mlp"))
        return 0 if self.lora or not self.how.casts else dense * self.how.operand_bytes

    def _blocks(self, batch: int, tokens: int) -> list[BlockMemory]:
        return [block_memory(self.shape, block, batch, tokens, self.how) for block in self.shape.blocks]


def _kind(shape: ModelShape, number: int) -> str:
    """Of a block: full, window, mla, linear; mlp where it has no attention."""
    attention = shape.blocks[number].attention
    return "mlp" if attention is None else attention.kind


def _bucket(rows: int) -> int:
    """Source: :func:`grpo_moe.rollout.graphs.bucket`."""
    power = 1 << max(rows - 1, 0).bit_length()
    middle = 3 * power // 4
    return middle if rows <= middle and power >= 4 else power
