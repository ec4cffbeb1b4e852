"""GRPOTrainer: the training loop over Accelerate, from prompts to an updated policy."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo_moe.ops import grpo_loss
from grpo_moe.rewards import RewardCaller
from grpo_moe.rollout import RolloutEngine, default_engine
from grpo_moe.rollout.base import context_length, stop_token_ids
from grpo_moe.types import RolloutBatch, SamplingParams

from .batch import Group, batch_loss, collate, select
from .callbacks import Callbacks
from .capsule import keep_update
from .collect import Collector
from .config import GRPOConfig
from .doctor import DOCTOR_VARIABLE, Check, doctor, run_doctor
from .evaluation import evaluate
from .files import writing
from .forecast import Utilization, forecast_in_words
from .guards import out_of_memory_explained, rehearse, rollout_warnings
from .interrupt import InterruptGuard
from .loading import TaskData, check_arguments, check_ends, check_vocabulary, load_policy, load_tokenizer
from .metrics import Metrics, PhaseTimer
from .policy import Policy
from .processes import agree, check_ranks_agree, end_trackers, make_accelerator
from .record import RunRecord
from .resume import resumed_run, save_run, saving_on_error
from .run_folder import check_run_folder, keep_newest
from .sharding import whole_parameters, whole_state, whole_tensor
from .state import TrainerState
from .waterfall import add_loss_stats
from .windows import Window, deal_windows


class GRPOTrainer:
    """Fine-tunes a causal language model by group-relative policy optimisation.

    Args:
        model: a transformers causal LM, PEFT's wrapper of one, or its path or hub id.
        reward_funcs: one or several ``f(prompts, completions, **columns) -> list[float | None]``.
        args: the options.
        train_dataset: rows with a ``prompt`` (text or chat messages); other columns go to the reward functions.
        eval_dataset: the same for evaluation, or None.
        processing_class: the tokenizer; by default the one that stands with the model.
        callbacks: of transformers.TrainerCallback; see :class:`grpo_moe.rl.callbacks.Callbacks`.
        optimizers: an optimiser of the model's parameters and a schedule, instead of AdamW and that of the options.
        peft_config: adapters to train instead of the model, as peft.LoraConfig; the reference is the model without.
        reward_weights: one number a reward function; all 1 by default.
        compute_metrics: f(evaluated groups) giving further numbers, which become eval_<name>.
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
        callbacks: Sequence[Any] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        *,
        peft_config: Any = None,
        reward_weights: Sequence[float] | None = None,
        compute_metrics: Callable[[list[Group]], dict[str, float]] | None = None,
        rollout_engine: RolloutEngine | None = None,
    ):
        self.args, self.timer, self.state = args, PhaseTimer(), TrainerState()
        self.compute_metrics = compute_metrics
        self.in_update = False  # True: the parameters may be half updated, or the update counted and not made
        check_arguments(args, eval_dataset, compute_metrics, rollout_engine)
        # a folder where another run trains is refused by train alone: evaluate and the doctor write nothing there
        check_run_folder(args.output_dir, args.resume_from_checkpoint, trains=False)
        on_error, timeout = args.reward_on_error, args.reward_timeout
        self.rewards = RewardCaller(reward_funcs, reward_weights, on_error=on_error, timeout=timeout)
        self.accelerator = make_accelerator(args)  # before the model: processes may share its loading
        policy, self.adapters = load_policy(model, peft_config)
        self.tokenizer = load_tokenizer(processing_class, model)
        check_vocabulary(policy, self.tokenizer)
        check_ends(args, stop_token_ids(policy, self.tokenizer))
        datasets = TaskData(train_dataset, eval_dataset, self.tokenizer, args, context_length(policy), self.rewards)
        self.source, self.eval_prompts = datasets.source, datasets.eval_prompts
        self.record = RunRecord(self.accelerator, args, self.rewards.names)
        self._prepared = Policy(policy, self.adapters, args, self.accelerator, optimizers)
        self.policy, self.model, self.reference = policy, self._prepared.wrapped, self._prepared.reference
        self.optimizer, self.scheduler = self._prepared.optimizer, self._prepared.scheduler
        self.routing = self._prepared.routing
        with whole_parameters(policy):
            engine = rollout_engine or default_engine(policy, self.tokenizer)
        self.collector = Collector(engine, self.rewards, args, self.accelerator, timer=self.timer, policy=policy)
        given = {"model": policy, "processing_class": self.tokenizer, "optimizer": self.optimizer}
        self.utilization = Utilization(policy.config, args, trains_all=self.adapters is None)
        self.callbacks = Callbacks(callbacks, args, lr_scheduler=self.scheduler, **given)

    def train(self, resume_from_checkpoint: str | bool | None = None) -> dict[str, Any]:
        """Trains until ``max_steps`` or ``max_train_seconds`` and returns the summary that it also writes.

        Args:
            resume_from_checkpoint: a checkpoint folder, "latest" (or True), or False; by default that of the options.

        Raises:
            KeyboardInterrupt: after SIGINT or SIGTERM, once the step is done and a checkpoint written.
            FloatingPointError: several updates in a row had a non-finite gradient.
            RuntimeError: reward functions failed on every group of several rollouts in a row.
        """
        if os.environ.get(DOCTOR_VARIABLE):
            raise SystemExit(run_doctor(self))
        title = f"{self.args.loss_type} on {type(self.policy).__name__}"
        explained = out_of_memory_explained(self.args, lambda memory: forecast_in_words(self, memory))
        with (
            resumed_run(self, resume_from_checkpoint),
            self.record.start(title, last_step=self.state.step if self.state.rollouts else -1),
            InterruptGuard() as guard,
            explained,
        ):
            self.callbacks("train_begin", self.state)
            if self.args.eval_on_start and "before" not in self.state.evaluations:
                self.state.evaluations["before"] = self._evaluate()
            (done,) = agree(self.state.is_done(self.args))
            if done:
                self.record.say(f"nothing to train: {self.state.ending(self.args)}")
            while not done:
                before = self.state.step
                with saving_on_error(self, guard):
                    metrics = self.step()
                    if self.state.rollouts == 1:
                        rehearse(self)
                    self._log_step(metrics)
                    self.state.check_rewards(metrics)
                    asked = self.callbacks("step_end", self.state, metrics=metrics)
                    ended = self.state.is_done(self.args)
                    interrupted, ended, evaluates, saves = agree(
                        guard.requested, ended, asked.should_evaluate, asked.should_save
                    )
                    evaluates = evaluates or self.state.crossed(self.args.eval_steps, before)
                    saves = saves or self.state.crossed(self.args.save_steps, before)
                    saves = saves or (ended and self.args.save_steps is not None)  # to go on with a larger max_steps
                    # not while gradients are not finite: these checkpoints would push out the last good ones
                    saves = interrupted or (saves and not self.state.skipped_in_a_row)
                    if evaluates and not (ended or interrupted):
                        self._evaluate()
                if saves:
                    path = self.save_checkpoint()
                if interrupted:
                    raise KeyboardInterrupt(f"stopped after update {self.state.step}; {path} resumes from there")
                (done,) = agree(ended or asked.should_training_stop)
                if ended and self.state.step < self.args.max_steps:
                    self.record.say(self.state.ending(self.args))
            with saving_on_error(self, guard):
                self.save_model()
                check_ranks_agree(self.policy)
                self.state.evaluations["after"] = self._evaluate()
            self.callbacks("train_end", self.state)
        end_trackers(self.accelerator)
        return self.record.summary(self.state, dict(self.timer.totals), self.policy.num_parameters())

    def step(self) -> dict[str, float]:
        """One rollout and the optimiser updates it pays for; returns the metrics, equal on every process."""
        started, world = time.perf_counter(), self.accelerator.num_processes
        metrics = Metrics()
        rollout = self.collector.collect(self.source, self.sampling)
        next_step = self.state.step + self.args.updates_per_rollout
        if self.args.rollout_lag and next_step < self.args.max_steps:
            self.collector.start_next(self.source, self._sampling(next_step))
        advantages = self.collector.advantages(rollout.kept)  # [P, G]
        mask_truncated, device = self.args.mask_truncated_completions, self.accelerator.device
        batch = collate(rollout.kept, advantages, mask_truncated=mask_truncated, device=device)
        with self.timer("logps"):
            batch = self.add_reference_logps(batch)
        with self.timer("update"), torch.enable_grad():  # whatever a reward function has left behind
            for _ in range(self.args.num_iterations):
                for window in self.minibatches(batch, advantages.numel()):
                    for number, rows in enumerate(window.micro_batches, start=1):
                        with self.synced(number == len(window.micro_batches)):
                            # no name: it would keep the graph during the next forward
                            self.accelerator.backward(
                                self.loss(select(batch, rows), window, metrics) * world  # DDP takes the mean
                            )
                    self.optimizer_step(batch, window, metrics)
        self.collector.finish_next()
        self.collector.engine.sync_weights(self.policy)
        if not self.state.rollouts:
            for warning in rollout_warnings(rollout.generated, self.args):
                self.record.warn(warning)
        self.state.rollouts += 1
        self.state.train_seconds += time.perf_counter() - started
        self.record.completions(self.state.step, rollout.kept, advantages)
        for fault, rows in self.collector.faults.items():
            metrics.add_sum(f"reward_faults/{fault}", rows)
        self.collector.faults.clear()
        return self.record.step_metrics(
            self.state.step, metrics, rollout, self.routing, self.timer, advantages=advantages, used=self.utilization
        )

    def add_reference_logps(self, batch: RolloutBatch) -> RolloutBatch:
        """Adds log-probabilities by the policy before its update (unless there is just one) and by the reference."""
        return self._prepared.add_logps(batch)

    def minibatches(self, batch: RolloutBatch, num_rows: int) -> list[Window]:
        """The first ``num_rows`` rows dealt into optimiser windows; see :func:`deal_windows`."""
        seed, counts = self._draw_seed(self.state.step), self.routing.window_counts
        return deal_windows(batch, num_rows, self.args, self.accelerator, seed=seed, routing_counts=counts)

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
        add_loss_stats(metrics, result.stats, self.args)
        metrics.add_sum("loss", result.loss.detach() / self.args.updates_per_rollout)
        return result.loss + self.args.router_aux_loss_coef * routed.aux_loss

    def optimizer_step(self, batch: RolloutBatch, window: Window, metrics: Metrics) -> None:
        """Clips and applies the gradient; skips and counts a window without tokens or with a non-finite gradient."""
        limit = self.args.max_grad_norm or math.inf
        norm = whole_tensor(self.accelerator.clip_grad_norm_(self.model.parameters(), limit))
        metrics.add("grad_norm", norm)
        metrics.add("learning_rate", self.scheduler.get_last_lr()[0])
        self._prepared.check_adapters(float(norm))
        before, self.in_update = self.state.step, True
        makes = self.state.count_update(window.num_loss_tokens, float(norm))
        if window.num_loss_tokens and (not makes or self.state.crossed(self.args.capsule_steps, before)):
            folder, rank = Path(self.args.output_dir) / "capsules", self.accelerator.process_index
            keep_update(folder, batch, window, self._prepared, step=self.state.step, rank=rank, grad_norm=float(norm))
            # not those of a non-finite gradient: the first tells why
            keep_newest(folder, rf"update_(\d+)_{rank}\.safetensors", self.args.log_total_limit)
        if makes:
            self.optimizer.step()
        self.in_update = False
        if makes:
            self.scheduler.step()
        self.optimizer.zero_grad()
        self.state.check_gradients(float(norm))
        if self.args.sync_ref_model and self.state.step % self.args.ref_model_sync_steps == 0:
            self._prepared.sync_reference()

    def evaluate(self) -> dict[str, float]:
        """Pass rate and reward on the evaluation prompts; empty without an eval_dataset."""
        if not self.eval_prompts:
            return {}
        metrics, groups = evaluate(
            self.collector,
            self.eval_prompts,
            num_generations=self.args.num_generations_eval,
            compute_metrics=self.compute_metrics,
        )
        self.timer.step_seconds()  # not those of the next step
        self.record.log(self.state.step, metrics)
        self.record.show(groups)
        self.callbacks("evaluate", self.state, metrics=metrics)
        return metrics

    def doctor(self) -> list[Check]:
        """Findings on one small rollout, before hours are spent; changes nothing. See :mod:`grpo_moe.rl.doctor`."""
        return doctor(self)

    def save_model(self, output_dir: str | None = None) -> None:
        """Writes weights (safetensors), config and tokenizer; the folder loads with plain from_pretrained.

        Of a model with adapters only these are written, in PEFT's format.
        """
        path, model = Path(output_dir or Path(self.args.output_dir) / "model"), self.adapters or self.policy
        state = whole_state(model, self.accelerator)
        if self.accelerator.is_main_process:
            with writing(path):
                model.save_pretrained(path, safe_serialization=True, state_dict=state)
                self.tokenizer.save_pretrained(path)
        self.accelerator.wait_for_everyone()

    def save_checkpoint(self) -> Path:
        """Writes a checkpoint from which training goes on to the bit."""
        return save_run(self)

    @property
    def sampling(self) -> SamplingParams:
        """How the next rollout is drawn; its seed is a function of the run's seed and the updates before it."""
        return self._sampling(self.state.step)

    def _sampling(self, step: int) -> SamplingParams:
        return SamplingParams(
            max_new_tokens=self.args.max_completion_length,
            num_generations=self.args.num_generations,
            temperature=self.args.temperature,
            seed=self._draw_seed(step),
            return_routes=self.args.routing_replay == "R3",
        )

    def _evaluate(self) -> dict[str, float]:
        """An evaluation in training, whose best is kept as a checkpoint."""
        metrics = self.evaluate()
        if self.state.is_best(metrics, self.args):
            self.save_checkpoint()
        return metrics

    def _draw_seed(self, step: int) -> int:
        return self.args.seed * 1_000_003 + step

    def synced(self, last: bool):
        """DDP reduces gradients in the last micro-batch of a window only; FSDP in each, to hold no whole gradient."""
        return nullcontext() if last or self.accelerator.is_fsdp2 else self.accelerator.no_sync(self.model)

    def _log_step(self, metrics: dict[str, float]) -> None:
        line = {"epoch": self.source.epochs, "num_skipped_updates": self.state.skipped_updates, **metrics}
        self.record.log(self.state.step, line)
        self.callbacks("log", self.state, logs=line)
