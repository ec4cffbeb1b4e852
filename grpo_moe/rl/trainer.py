"""GRPOTrainer: the training loop over Accelerate, from prompts to an updated policy."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from grpo_moe.adapters.coverage import coverage, coverage_table, unreached_adapters
from grpo_moe.adapters.hf_attention import check_sinks
from grpo_moe.adapters.hf_head import add_token_logps, check_head, check_padding_free
from grpo_moe.data import PromptSource
from grpo_moe.ops import grpo_loss
from grpo_moe.rewards import RewardCaller
from grpo_moe.rollout import RolloutEngine, default_engine
from grpo_moe.rollout.base import checkpointed_modules, context_length
from grpo_moe.types import RolloutBatch, SamplingParams

from .batch import batch_logps, batch_loss, collate, micro_batches, select, windows
from .checkpoint import check_run_folder, find_checkpoint, load_checkpoint, save_checkpoint, start_run
from .collect import Collector
from .config import GRPOConfig
from .evaluation import evaluate, rollout_metrics
from .interrupt import InterruptGuard
from .launch import runs_on_cpu, world_size
from .loading import (
    check_vocabulary,
    disable_dropout,
    load_policy,
    load_tokenizer,
    reference_model,
    without_adapters,
)
from .metrics import Metrics, PhaseTimer
from .record import RunRecord
from .routing import PolicyRouting, close_routing

MAX_SKIPPED_IN_A_ROW = 3


@dataclass
class TrainerState:
    """What a checkpoint keeps besides weights and optimiser: all randomness is a function of it and the seed."""

    run_id: str = ""
    step: int = 0
    """Optimiser updates counted, skipped ones included."""
    rollouts: int = 0
    train_seconds: float = 0.0
    """Of training steps, over all resumes; evaluation apart."""
    skipped_updates: int = 0
    skipped_in_a_row: int = 0
    evaluations: dict[str, dict[str, float]] = field(default_factory=dict)
    """By name: "before" and "after"."""
    phase_seconds: dict[str, float] = field(default_factory=dict)


class GRPOTrainer:
    """Fine-tunes a causal language model by group-relative policy optimisation.

    Args:
        model: a transformers causal LM, PEFT's wrapper of one, or its path or hub id.
        reward_funcs: one or several ``f(prompts, completions, **columns) -> list[float | None]``.
        args: the options.
        train_dataset: rows with a ``prompt`` (text or chat messages); other columns go to the reward functions.
        eval_dataset: the same for evaluation, or None.
        processing_class: the tokenizer; by default the one that stands with the model.
        peft_config: adapters to train instead of the model, as peft.LoraConfig; the reference is the model without.
        reward_weights: one number a reward function; all 1 by default.
        rollout_engine: generates completions; by default that of :func:`grpo_moe.rollout.default_engine`.

    Raises:
        ValueError: anything that would only fail later: options, columns, prompts that do not fit the context, ...
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: Any,
        args: GRPOConfig,
        train_dataset: Sequence[dict],
        eval_dataset: Sequence[dict] | None = None,
        processing_class: str | PreTrainedTokenizerBase | None = None,
        *,
        peft_config: Any = None,
        reward_weights: Sequence[float] | None = None,
        rollout_engine: RolloutEngine | None = None,
    ):
        self.args, self.timer, self.state = args, PhaseTimer(), TrainerState()
        self._earlier_seconds: dict[str, float] = {}
        self._adapters_reached = False
        if not isinstance(args, GRPOConfig):
            raise ValueError(f"args must be a GRPOConfig, got {type(args).__name__}")
        check_run_folder(args.output_dir, args.resume_from_checkpoint)
        self.rewards = RewardCaller(reward_funcs, reward_weights)
        policy, self.adapters = load_policy(model, peft_config)
        self.tokenizer = load_tokenizer(processing_class, model)
        check_vocabulary(policy, self.tokenizer)
        room = context_length(policy) - args.max_completion_length
        if room < 1:
            raise ValueError(
                f"max_completion_length must leave room for a prompt in the context of {context_length(policy)}, "
                f"got {args.max_completion_length}; lower it"
            )
        self.source = PromptSource(
            train_dataset, self.tokenizer, seed=args.seed, shuffle=args.shuffle_dataset, max_prompt_tokens=room
        )
        self._check_rewards(self.source)
        self.eval_prompts = []
        if eval_dataset is not None:
            evaluation = PromptSource(eval_dataset, self.tokenizer, seed=0, max_prompt_tokens=room)
            self._check_rewards(evaluation)
            self.eval_prompts = evaluation.all()

        self.accelerator = Accelerator(
            mixed_precision="bf16" if args.bf16 else None,  # None: as accelerate was launched
            cpu=runs_on_cpu(args.use_cpu),
            log_with=args.report_to if args.report_to != "none" else None,
            project_dir=args.output_dir,
        )
        if world_size() != self.accelerator.num_processes:
            raise RuntimeError(
                f"num_processes must be {world_size()} as launched, got {self.accelerator.num_processes}; make no "
                "accelerate state before the trainer, or one with runs_on_cpu()"
            )
        self.accelerator.gradient_accumulation_steps = 1  # its backward would divide; the loss has its own normaliser
        self.record = RunRecord(self.accelerator, args, self.rewards.names)
        self._prepare(policy)
        engine = rollout_engine or default_engine(self.policy, self.tokenizer)
        self.collector = Collector(engine, self.rewards, args, self.accelerator, self.timer)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, Any]:
        """Trains until ``max_steps`` or ``max_train_seconds`` and returns the summary that it also writes.

        Args:
            resume_from_checkpoint: a checkpoint folder, or "latest" (or True); by default that of the options.

        Raises:
            KeyboardInterrupt: after SIGINT or SIGTERM, once the step is done and a checkpoint written.
            FloatingPointError: several updates in a row had a non-finite gradient.
        """
        self._resume(resume_from_checkpoint or self.args.resume_from_checkpoint)
        title = f"{self.args.loss_type} on {type(self.policy).__name__}"
        display = self.record.start(title, last_step=self.state.step if self.state.rollouts else -1)
        with display, InterruptGuard() as guard:
            if self.args.eval_on_start and "before" not in self.state.evaluations:
                self.state.evaluations["before"] = self.evaluate()
            (done,) = self._agree(self._done())
            while not done:
                before = self.state.step
                self._log_step(self.step())
                interrupted, done = self._agree(guard.requested, self._done())
                if self._crossed(self.args.eval_steps, before) and not (done or interrupted):
                    self.evaluate()
                if interrupted or self._crossed(self.args.save_steps, before):
                    path = self.save_checkpoint()
                if interrupted:
                    raise KeyboardInterrupt(f"stopped after update {self.state.step}; {path} resumes from there")
            self._check_ranks_agree()
            self.save_model()
            self.state.evaluations["after"] = self.evaluate()
        self.accelerator.end_training()
        return self.record.summary(self.state, self._phase_seconds(), self.policy.num_parameters())

    def step(self) -> dict[str, float]:
        """One rollout and the optimiser updates it pays for; returns the metrics, equal on every process."""
        started = time.perf_counter()
        metrics = Metrics()
        rollout = self.collector.collect(self.source, self.sampling)
        advantages = self.collector.advantages(rollout.kept)  # [P, G]
        batch = collate(
            rollout.kept,
            advantages,
            mask_truncated=self.args.mask_truncated_completions,
            device=self.accelerator.device,
        )
        if self.args.routing_replay == "R3" and rollout.kept and batch.routes is None:
            raise ValueError(
                f"rollout_engine must return routes with routing_replay 'R3', got none from "
                f"{type(self.collector.engine).__name__}; fill Completion.routes under return_routes, or use R2"
            )
        with self.timer("logps"):
            batch = self.add_reference_logps(batch)
        with self.timer("update"):
            for _ in range(self.args.num_iterations):
                for window in self.minibatches(batch, advantages.numel()):
                    for number, rows in enumerate(window.micro_batches, start=1):
                        with self._sync(number == len(window.micro_batches)):
                            loss = self.loss(select(batch, rows), window, metrics)
                            self.accelerator.backward(loss * self.accelerator.num_processes)  # DDP takes the mean
                    self.optimizer_step(window, metrics)
        self.collector.engine.sync_weights(self.policy)
        self.state.rollouts += 1
        self.state.train_seconds += time.perf_counter() - started
        return self._step_metrics(metrics, rollout, advantages)

    def add_reference_logps(self, batch: RolloutBatch) -> RolloutBatch:
        """Adds log-probabilities by the policy before its update (unless there is just one) and by the reference."""
        if self.args.updates_per_rollout > 1 or self.args.router_aux_loss_coef:
            records = []
            old_logps = self._logps(self.policy, batch, lambda part: self.routing.scoring(part, records))
            if self.args.updates_per_rollout > 1:
                batch = replace(batch, old_logps=old_logps)
            batch = self.routing.scored(batch, records, torch.cat(self._every_row(batch)))
        if self.reference is not None:
            with nullcontext() if self.adapters is None else without_adapters(self.adapters):
                batch = replace(batch, ref_logps=self._logps(self.reference, batch))
        return batch

    def minibatches(self, batch: RolloutBatch, num_rows: int) -> list[Window]:
        """The first ``num_rows`` rows dealt into optimiser windows, each with its counts over all processes.

        The rows of all processes are shuffled as one list, so the windows do not depend on the number of processes.
        Every process gets the same number of windows, and in each the same number of micro-batches: a process with
        fewer rows fills up with empty ones, so that no collective is missed.
        """
        rows_by_process = gather_object([num_rows])
        first = sum(rows_by_process[: self.accelerator.process_index])
        generator = torch.Generator().manual_seed(self._draw_seed())
        dealt = windows(sum(rows_by_process), self.args.windows_per_rollout, generator)
        dealt = [rows[(first <= rows) & (rows < first + num_rows)] - first for rows in dealt]
        parts = [micro_batches(batch, rows, self.args.per_device_train_batch_size) for rows in dealt]
        mask = batch.completion_mask.sum(1).cpu()
        mine = [
            (len(part), int(mask[rows].sum()), len(rows), *self.routing.window_counts(batch, rows))
            for part, rows in zip(parts, dealt, strict=True)
        ]
        everyone = gather_object([mine])
        made = []
        for number, part in enumerate(parts):
            micro, *counts = zip(*(counts[number] for counts in everyone), strict=True)
            padding = [torch.zeros(0, dtype=torch.long)] * (max(micro) - len(part))
            made.append(Window(part + padding, *map(sum, counts)))
        return made

    def loss(self, batch: RolloutBatch, window: Window, metrics: Metrics) -> torch.Tensor:
        """This micro-batch's share of the window's loss."""

        def loss_fn(hidden_states, lm_head_weight, **head):
            return grpo_loss(
                hidden_states,
                lm_head_weight,
                batch.completion_ids,
                batch.completion_mask,
                batch.advantages,
                self.args,
                old_logps=batch.old_logps,
                ref_logps=batch.ref_logps,
                sampling_logps=batch.sampling_logps,
                num_loss_tokens=window.num_loss_tokens,
                num_sequences=window.num_sequences,
                return_entropy=True,
                **head,
            )

        with self.accelerator.autocast(), self.routing.update(batch, window, metrics) as routed:
            result = batch_loss(self.model, batch, loss_fn, padding_free=self.args.padding_free)
        metrics.add_stats(result.stats)
        metrics.add_sum("loss", result.loss.detach() / self.args.updates_per_rollout)
        return result.loss + self.args.router_aux_loss_coef * routed.aux_loss

    def optimizer_step(self, window: Window, metrics: Metrics) -> None:
        """Clips and applies the gradient; skips and counts a window without tokens or with a non-finite gradient."""
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm or math.inf)
        metrics.add("grad_norm", norm)
        metrics.add("learning_rate", self.scheduler.get_last_lr()[0])
        if window.num_loss_tokens and math.isfinite(float(norm)):
            self._check_adapters(float(norm))
            self.optimizer.step()
            self.scheduler.step()
            self.state.skipped_in_a_row = 0
        else:
            self.state.skipped_updates += 1
            self.state.skipped_in_a_row += bool(window.num_loss_tokens)
        self.optimizer.zero_grad()
        self.state.step += 1
        if self.state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise FloatingPointError(
                f"grad_norm must be finite, got {float(norm)} in {MAX_SKIPPED_IN_A_ROW} updates in a row at update "
                f"{self.state.step}; lower learning_rate or max_grad_norm, or look at the rewards"
            )

    def evaluate(self) -> dict[str, float]:
        """Pass rate and reward on the evaluation prompts; empty without an eval_dataset."""
        if not self.eval_prompts:
            return {}
        metrics, groups = evaluate(self.collector, self.eval_prompts)
        self.timer.step_seconds()  # not those of the next step
        self.record.log(self.state.step, metrics)
        self.record.show(groups)
        return metrics

    def save_model(self, output_dir: str | None = None) -> None:
        """Writes weights (safetensors), config and tokenizer; the folder loads with plain from_pretrained.

        Of a model with adapters only these are written, in PEFT's format.
        """
        path = Path(output_dir or Path(self.args.output_dir) / "model")
        if self.accelerator.is_main_process:
            (self.adapters or self.policy).save_pretrained(path, safe_serialization=True)
            self.tokenizer.save_pretrained(path)
        self.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint from which training goes on to the bit."""
        self.state.phase_seconds = self._phase_seconds()
        state = {
            **asdict(self.state),
            "source": self.source.state_dict(),
            "num_processes": self.accelerator.num_processes,
            "config": self._settings,
        }
        return save_checkpoint(self.accelerator, state, self.args.output_dir, keep=self.args.save_total_limit)

    @property
    def _settings(self) -> dict[str, Any]:
        """What a resumed run must share with the run it goes on with."""
        adapters = None if self.adapters is None else self.adapters.active_peft_config.to_dict()
        known = {name: sorted(x) if isinstance(x, set) else str(x) for name, x in (adapters or {}).items()}
        return {**asdict(self.args), "peft_config": None if adapters is None else known}

    @property
    def sampling(self) -> SamplingParams:
        """How the next rollout is drawn; its seed is a function of the run's seed and the rollout's number."""
        return SamplingParams(
            max_new_tokens=self.args.max_completion_length,
            num_generations=self.args.num_generations,
            temperature=self.args.temperature,
            seed=self._draw_seed(),
            return_routes=self.args.routing_replay == "R3",
        )

    def _prepare(self, policy: PreTrainedModel) -> None:
        args = self.args
        disable_dropout(policy)
        close_routing(policy)
        self.policy = add_token_logps(policy).to(self.accelerator.device)
        self.reference = None
        if args.beta:  # adapters are switched off for it
            self.reference = reference_model(policy) if self.adapters is None else self.policy
        check_head(self.policy)
        check_sinks(self.policy)
        if args.padding_free:
            check_padding_free(self.policy)
        self.routing = PolicyRouting(self.policy, args)
        if args.gradient_checkpointing or checkpointed_modules(policy):  # renamed in transformers 5.24
            enable = getattr(policy, "activation_checkpointing_enable", policy.gradient_checkpointing_enable)
            enable(self.routing.checkpointing_kwargs)
        if self.adapters is not None and self.accelerator.is_main_process:
            print(coverage_table(coverage(policy)))
        trainable = [p for p in policy.parameters() if p.requires_grad]
        if not trainable:
            fix = "unfreeze some" if self.adapters is None else "load the adapters with is_trainable=True"
            raise ValueError(f"model must have parameters that require gradients, got none; {fix}")
        optimizer = torch.optim.AdamW(
            trainable,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
        )
        # not prepared: accelerate would step it once a process
        self.scheduler = get_scheduler(args.lr_scheduler_type, optimizer, args.warmup_steps, args.max_steps)
        self.accelerator.register_for_checkpointing(self.scheduler)
        self.model, self.optimizer = self.accelerator.prepare(policy, optimizer)
        self.model.train()

    def _check_rewards(self, source: PromptSource) -> None:
        prompts = [source[row] for row in range(min(2, len(source)))]
        columns = {name: [p.columns[name] for p in prompts] for name in prompts[0].columns}
        self.rewards.check([p.raw for p in prompts], {**columns, "completion_ids": [[] for _ in prompts]})

    def _check_adapters(self, norm: float) -> None:
        """Before the first update with a gradient: an adapter that it does not reach never learns."""
        if self.adapters is None or self._adapters_reached or norm == 0:
            return
        if unreached := unreached_adapters(self.policy.named_parameters()):
            raise ValueError(
                f"adapters must all get a gradient, got none at {', '.join(unreached[:8])} ({len(unreached)} in all); "
                "take them out of target_modules and target_parameters"
            )
        self._adapters_reached = True

    def _resume(self, name: str | bool | None) -> None:
        path = find_checkpoint(name, self.args.output_dir) if name else None
        if path is None:
            if name and self.accelerator.is_main_process:
                print(f"No checkpoint of the last run in {self.args.output_dir}: training starts from the beginning.")
            if self.accelerator.is_main_process:
                self.state.run_id = start_run(self.args.output_dir)
            return
        state = load_checkpoint(self.accelerator, path, self._settings)
        self.source.load_state_dict(state["source"])
        self.state = TrainerState(**{name: state[name] for name in asdict(TrainerState())})
        self._earlier_seconds = self.state.phase_seconds

    def _agree(self, *flags: bool) -> list[bool]:
        """Each flag, true everywhere when it is true on any process."""
        return [any(column) for column in zip(*gather_object([flags]), strict=True)]

    def _done(self) -> bool:
        limit = self.args.max_train_seconds
        out_of_time = limit is not None and self.state.train_seconds >= limit
        return out_of_time or self.state.step >= self.args.max_steps

    def _crossed(self, every: int | None, before: int) -> bool:
        """Whether the step went past a multiple of ``every`` since ``before``."""
        return every is not None and self.state.step // every > before // every

    def _draw_seed(self) -> int:
        return self.args.seed * 1_000_003 + self.state.step

    @torch.no_grad()
    def _logps(self, model, batch: RolloutBatch, around=lambda part: nullcontext()) -> torch.Tensor:
        """Log-probabilities [B, T] of the batch under the model, in micro-batches, each run inside ``around(it)``."""
        logps = torch.zeros_like(batch.sampling_logps)
        options = {"temperature": self.args.temperature, "padding_free": self.args.padding_free}
        for rows in self._every_row(batch):
            part = select(batch, rows)
            with self.accelerator.autocast(), around(part):
                scored = batch_logps(model, part, **options)
            logps[rows, : part.completion_ids.shape[1]] = scored.logps.float()
        return logps

    def _every_row(self, batch: RolloutBatch) -> list[torch.Tensor]:
        return micro_batches(batch, torch.arange(len(batch.input_ids)), self.args.per_device_train_batch_size)

    def _sync(self, last: bool):
        """Gradients are reduced over the processes in the last micro-batch of a window only."""
        return nullcontext() if last else self.accelerator.no_sync(self.model)

    def _step_metrics(self, metrics: Metrics, rollout, advantages: torch.Tensor) -> dict[str, float]:
        means = rollout_metrics(rollout.generated, self.rewards.names, self.args.pass_threshold)
        for name, (value, weight) in means.items():
            metrics.add(name, value, weight)
        self.routing.finish(metrics)
        metrics.add("sampling/rounds", rollout.rounds)
        metrics.add_sum("sampling/groups_kept", len(rollout.kept))
        metrics.add_sum("sampling/groups_generated", len(rollout.generated))
        for phase, seconds in self.timer.step_seconds().items():
            metrics.add(f"seconds/{phase}", seconds)
        self.record.completions(self.state.step, rollout.kept, advantages)
        reduced = metrics.reduce(self.accelerator)
        if square := reduced.pop("sampling_ratio_square_mean", 0.0):
            reduced["sampling_effective_size"] = reduced["sampling_ratio_mean"] ** 2 / square
        return reduced

    def _log_step(self, metrics: dict[str, float]) -> None:
        epoch = self.source.position / len(self.source)
        line = {"epoch": epoch, "num_skipped_updates": self.state.skipped_updates, **metrics}
        self.record.log(self.state.step, line)

    def _check_ranks_agree(self) -> None:
        with torch.no_grad():
            sums = gather_object([[float(p.double().sum()) for p in self.policy.parameters()]])
        if any(other != sums[0] for other in sums):
            raise RuntimeError(
                "parameters must be equal on all processes after training, got different sums; report this"
            )

    def _phase_seconds(self) -> dict[str, float]:
        """Seconds by phase over all resumes."""
        phases = {**self._earlier_seconds, **self.timer.totals}
        return {name: self._earlier_seconds.get(name, 0.0) + self.timer.totals.get(name, 0.0) for name in phases}


@dataclass(frozen=True)
class Window:
    """The rows of one optimiser update on this process, and the counts over all processes."""

    micro_batches: list[torch.Tensor]
    """Row numbers; an empty one stands for a masked row."""
    num_loss_tokens: int
    num_sequences: int
    expert_load: torch.Tensor | int = 0
    """[L, E] tokens of each expert by the policy before the updates, for the load-balancing loss."""
    num_routed_tokens: int = 0
    """Tokens that the load was counted over."""
