"""GRPOConfig: every option of a training run, checked before anything is loaded."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from accelerate.utils import LoggerType

from grpo_moe.checks import keep_plain
from grpo_moe.ops import LossConfig
from grpo_moe.ops.loss.config import MIN_TEMPERATURE, check_rules, check_types, loss_rules, option
from grpo_moe.rl.advantages import resolve_scale

MAX_OVERSAMPLING = 4.0  # a round of dynamic sampling draws at most this many times the prompts that are missing
SCHEDULES = (  # those of transformers.get_scheduler that need no further options
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "inverse_sqrt",
)


class _Derived(int):
    """A number that follows from another option: ``dataclasses.replace`` passes it on, and it is derived anew."""

    def __deepcopy__(self, memo: dict) -> int:
        return int(self)  # of dataclasses.asdict, for files and trackers


@dataclass(frozen=True, kw_only=True)
class GRPOConfig(LossConfig):
    """Options of :class:`grpo_moe.rl.GRPOTrainer`; the loss options are those of :class:`LossConfig`.

    Names are TRL's where TRL has the option. Where the behaviour differs:

    - the loss is normalised by the exact token (or sequence) count of each optimiser step, over all micro-batches and
      processes, for every loss type; splitting a batch differently never changes the update (except under
      ``top_entropy_quantile``, which looks at one micro-batch);
    - ``dynamic_sampling`` exists; groups beyond those that a rollout needs are dropped, not kept for the next;
    - ``top_k``, ``top_p`` and ``min_p`` are refused in training, since the loss scores tokens under the full
      distribution;
    - ``router_aux_loss_coef`` is 0 whatever the model's config says; the loss is that of a whole update (its tokens'
      probabilities now, times the load of each expert before the rollout's updates), each layer by itself, without
      rows that have no token in the loss;
    - one ``temperature`` scales the rollout's, the old, the reference and the current log-probabilities.

    A step of :meth:`GRPOTrainer.step` is one rollout; ``max_steps``, ``eval_steps`` and ``save_steps`` count optimiser
    updates, of which a rollout makes ``num_iterations * steps_per_generation / gradient_accumulation_steps``. A rollout
    is always used up: the last one may go past ``max_steps``.

    Values are kept in one form: scalars of NumPy become Python's, a boolean ``scale_rewards`` the name that it stands
    for in TRL, True as ``resume_from_checkpoint`` "latest", the JSON text of ``chat_template_kwargs`` a dict,
    ~ at the start of a path the home folder. In a copy
    by ``dataclasses.replace``, ``steps_per_generation`` follows ``gradient_accumulation_steps`` unless it was given.

    Raises:
        ValueError: an option out of range, or two that do not go together; both are named.
    """

    # Run
    output_dir: str = option("runs/grpo", "Folder for checkpoints, metrics.jsonl, summary.json, curves.png, model.")
    seed: int = option(0, "Seed of the order of prompts and of all sampling.")
    max_steps: int = option(
        200, "Optimiser updates to make; all those of the last rollout are made, even beyond this number."
    )
    max_train_seconds: float | None = option(
        None, "Stop after the rollout that passes this many seconds of training (evaluation apart)."
    )
    use_cpu: bool = option(False, "Train on the CPU even where there is a GPU.")
    bf16: bool = option(False, "Mixed precision: bf16 forward and backward, fp32 parameters.")
    gradient_checkpointing: bool = option(False, "Recompute activations in backward to save memory.")
    gradient_checkpointing_every: int | None = option(
        None, "Recompute every n-th block alone; unset: all, or as the model's config says. See grpo-moe plan."
    )
    report_to: str | None = option(None, "Tracker of accelerate (tensorboard, wandb, trackio, ...), or none.")

    # Batch
    per_device_train_batch_size: int = option(8, "Completions in a micro-batch on each process.")
    gradient_accumulation_steps: int = option(1, "Micro-batches in an optimiser update.")
    padding_free: bool = option(False, "Run the sequences of a micro-batch as one row without padding.")
    steps_per_generation: int | None = option(None, "Micro-batches in a rollout; gradient_accumulation_steps if unset.")
    num_generations: int = option(8, "Completions a prompt (G), at least 2, for any number of processes.")
    num_iterations: int = option(1, "Passes over each rollout.")
    chat_template_kwargs: dict | str | None = option(
        None, "Further arguments of the chat template, as JSON: '{\"enable_thinking\": false}'."
    )
    shuffle_dataset: bool = option(
        True, "Take the rows in a new random order each epoch (shuffle a stream by its own shuffle())."
    )

    # Rollout
    max_completion_length: int = option(256, "Longest completion in tokens; the constant of dr_grpo.")
    top_k: int = option(0, "Must be 0: the loss scores tokens under the full distribution.")
    top_p: float = option(1.0, "Must be 1, as top_k must be 0.")
    min_p: float = option(0.0, "Must be 0, as top_k must be.")
    dynamic_sampling: bool = option(False, "DAPO: drop groups whose rewards are all equal and sample others.")
    dynamic_sampling_max_rounds: int = option(3, "Rollout rounds to fill a batch; then train on what there is.")
    dynamic_sampling_oversampling: float = option(
        1.0, "Prompts of the first round over those needed; later rounds go by the share of groups kept so far."
    )
    rollout_lag: int = option(
        0, "1: generate the next rollout during the update, by a policy one rollout older (engines with own weights)."
    )
    mask_truncated_completions: bool = option(False, "Leave completions without EOS out of the loss.")
    overlong_cache_length: int | None = option(
        None, "DAPO's soft overlong punishment over the last this many tokens before max_completion_length."
    )

    # Reference
    sync_ref_model: bool = option(False, "Move the reference of the KL term toward the policy now and then (TR-DPO).")
    ref_model_mixup_alpha: float = option(0.6, "Share of the policy in the reference after a move.")
    ref_model_sync_steps: int = option(512, "Updates between moves.")

    # Rewards and advantages
    reward_on_error: str = option("raise", "raise: a fault of a reward function ends the run; skip: drop its groups.")
    reward_timeout: float | None = option(None, "Seconds that one call of a reward function may take.")
    multi_objective_aggregation: str = option(
        "sum_then_normalize", "Of several rewards; normalize_then_sum is GDPO: each by its own spread."
    )
    scale_rewards: str = option("group", "Divide advantages by the std of the group, the batch, or none.")

    # Optimiser
    learning_rate: float = option(1e-6, "Peak learning rate of AdamW.")
    lr_scheduler_type: str = option("constant_with_warmup", "Schedule, as in transformers.get_scheduler.")
    warmup_steps: int = option(0, "Updates over which the learning rate rises.")
    adam_beta1: float = option(0.9, "AdamW beta1.")
    adam_beta2: float = option(0.999, "AdamW beta2.")
    adam_epsilon: float = option(1e-8, "AdamW epsilon.")
    weight_decay: float = option(0.0, "AdamW weight decay.")
    max_grad_norm: float = option(1.0, "Clip the gradient to this norm; 0 leaves it.")
    routing_replay: str = option(
        "none",
        "none: every update routes as it does itself; R2: as the policy did before the first update of the rollout; "
        "R3: as the rollout did.",
    )
    freeze_router: bool = option(False, "Leave the routers of an MoE model as they are.")
    router_aux_loss_coef: float = option(
        0.0, "Weight of the routers' load-balancing loss; off whatever the model says."
    )

    # Evaluation
    eval_on_start: bool = option(True, "Evaluate before training (when there is an eval_dataset).")
    eval_steps: int | None = option(None, "Evaluate every this many updates, besides the start and the end.")
    num_generations_eval: int = option(1, "Sampled completions of each evaluation prompt: pass@k for k up to it.")
    eval_temperature: float = option(1.0, "Temperature of the sampled evaluation; greedy is always reported too.")
    pass_threshold: float = option(1.0, "A completion passes when its total reward is at least this.")

    # Checkpoints and logs
    save_steps: int | None = option(
        100,
        "Checkpoint every this many updates, at the end and when interrupted; none: when interrupted or failed only.",
    )
    save_total_limit: int = option(2, "Checkpoints to keep, besides the best.")
    metric_for_best_model: str | None = option(
        None, "Evaluation metric by which the best checkpoint is kept, as eval_pass_rate or eval_pass_at_4."
    )
    greater_is_better: bool = option(True, "Whether the best is the largest.")
    resume_from_checkpoint: str | None = option(
        None, "Folder of a checkpoint, or 'latest' (also without a value).", nargs="?", const="latest"
    )
    capsule_steps: int | None = option(
        None, "Keep the rows of every n-th update for grpo-moe replay, besides those of a non-finite gradient."
    )
    log_completions: bool = option(True, "Write the completions of each rollout as parquet.")
    log_total_limit: int | None = option(
        None,
        "Files of completions, and of each process capsules by capsule_steps, to keep, the newest; unset: all. "
        "Capsules of a non-finite gradient all stay.",
    )
    show_progress: bool = option(True, "Show progress, curves and samples in the terminal.")

    def __post_init__(self):
        for f in dataclasses.fields(self):
            object.__setattr__(self, f.name, _plain(f.name, getattr(self, f.name)))
        check_types(self)
        keep_plain(self)
        if self.steps_per_generation is None or isinstance(self.steps_per_generation, _Derived):
            object.__setattr__(self, "steps_per_generation", _Derived(self.gradient_accumulation_steps))
        resolve_scale(self.scale_rewards)
        own = chain(self._own_names(), self._own_ranges(), self._own_combinations())
        check_rules(self, chain(own, loss_rules(self)))

    @property
    def updates_per_rollout(self) -> int:
        """Optimiser updates that one rollout makes."""
        return self.num_iterations * self.windows_per_rollout

    @property
    def windows_per_rollout(self) -> int:
        """Parts of a rollout that each make one optimiser update in a pass."""
        return self.steps_per_generation // self.gradient_accumulation_steps

    @property
    def prompts_per_rollout(self) -> int:
        """Prompts that one process takes for a rollout."""
        return self.per_device_train_batch_size * self.steps_per_generation // self.num_generations

    def _own_names(self):
        choices = {
            "lr_scheduler_type": SCHEDULES,
            "routing_replay": ["none", "R2", "R3"],
            "reward_on_error": ["raise", "skip"],
            "multi_objective_aggregation": ["sum_then_normalize", "normalize_then_sum"],
            "report_to": [None, "none", *(kind.value for kind in LoggerType)],
        }
        for name, known in choices.items():
            yield getattr(self, name) in known, name, f"one of {', '.join(map(str, known))}", "check the spelling"

    def _own_ranges(self):
        at_least = {
            "num_generations": (2, "a group of one has no baseline: its advantage would always be 0"),
            **dict.fromkeys(
                (
                    "per_device_train_batch_size",
                    "gradient_accumulation_steps",
                    "steps_per_generation",
                    "num_iterations",
                    "max_steps",
                    "max_completion_length",
                    "dynamic_sampling_max_rounds",
                    "save_total_limit",
                    "log_total_limit",
                    "eval_steps",
                    "save_steps",
                    "capsule_steps",
                    "gradient_checkpointing_every",
                    "ref_model_sync_steps",
                    "num_generations_eval",
                ),
                (1, "give a positive number"),
            ),
            **dict.fromkeys(
                (
                    "seed",
                    "warmup_steps",
                    "learning_rate",
                    "max_grad_norm",
                    "router_aux_loss_coef",
                    "weight_decay",
                    "eval_temperature",
                ),
                (0, "give 0 or a positive number"),
            ),
        }
        for name, (least, fix) in at_least.items():
            value = getattr(self, name)
            yield value is None or value >= least, name, f"at least {least}", fix
        for name in ("adam_beta1", "adam_beta2"):
            yield 0 <= getattr(self, name) < 1, name, "in [0, 1)", "0.9 and 0.999 are usual"
        yield self.adam_epsilon > 0, "adam_epsilon", "positive", "1e-8 is usual"
        fits = self.eval_temperature == 0 or self.eval_temperature >= MIN_TEMPERATURE
        yield fits, "eval_temperature", f"0 or at least {MIN_TEMPERATURE}", "0 is greedy"
        yield self.output_dir != "", "output_dir", "a folder", "runs/grpo is its default"
        yield self.seed < 2**31, "seed", "below 2**31", "choose a smaller one"
        rule = f"in 1..{MAX_OVERSAMPLING:g}"
        fits = 1 <= self.dynamic_sampling_oversampling <= MAX_OVERSAMPLING
        yield fits, "dynamic_sampling_oversampling", rule, "1 draws as many prompts as are needed"
        for name in ("max_train_seconds", "reward_timeout"):
            seconds = getattr(self, name)
            yield seconds is None or seconds > 0, name, "positive", "leave it out for no limit"
        yield 0 < self.ref_model_mixup_alpha <= 1, "ref_model_mixup_alpha", "in (0, 1]", "TR-DPO takes 0.6"

    def _own_combinations(self):
        rows = self.per_device_train_batch_size * self.steps_per_generation
        fits = rows % self.num_generations == 0
        rule = f"a divisor of per_device_train_batch_size * steps_per_generation = {rows}"
        yield fits, "num_generations", rule, "groups stay whole on a process: change one of the three"
        whole = self.steps_per_generation % self.gradient_accumulation_steps == 0
        rule = f"a multiple of gradient_accumulation_steps = {self.gradient_accumulation_steps}"
        yield whole, "steps_per_generation", rule, "a rollout is used up by whole optimiser updates"
        reason = "the loss scores tokens under the full distribution, so a truncated sampler would bias every ratio"
        yield self.top_k == 0, "top_k", "0 in training", reason
        yield self.top_p == 1, "top_p", "1 in training", reason
        yield self.min_p == 0, "min_p", "0 in training", reason
        replays = self.routing_replay != "R2" or self.updates_per_rollout > 1
        rule = "none or R3 with one update a rollout"
        yield (
            replays,
            "routing_replay",
            rule,
            "there is no earlier policy: raise num_iterations or steps_per_generation",
        )
        used = self.gradient_checkpointing or self.gradient_checkpointing_every is None
        yield used, "gradient_checkpointing_every", "unset without gradient_checkpointing", "set that too"
        yield self.rollout_lag in (0, 1), "rollout_lag", "0 or 1", "one rollout ahead is as far as it goes"
        corrected = self.rollout_lag == 0 or self.sampler_correction != "none"
        yield corrected, "rollout_lag", "0 without sampler_correction", "rollouts of an older policy need it: set one"
        best = self.metric_for_best_model
        rule = "a metric of evaluation, as eval_pass_rate"
        yield best is None or best.startswith("eval_"), "metric_for_best_model", rule, "check the spelling"
        synced = not self.sync_ref_model or self.beta > 0
        yield synced, "sync_ref_model", "False without beta", "there is no reference: set beta"
        fits = self.multi_objective_aggregation == "sum_then_normalize" or resolve_scale(self.scale_rewards) == "group"
        yield fits, "multi_objective_aggregation", "sum_then_normalize with this scale_rewards", "GDPO scales by group"
        cache = self.overlong_cache_length
        in_range = cache is None or 1 <= cache <= self.max_completion_length
        rule = f"in 1..max_completion_length = {self.max_completion_length}"
        yield in_range, "overlong_cache_length", rule, "leave it out for no punishment"


def _plain(name: str, value: Any) -> Any:
    """A value as Python has it, in the one form of its option that the rest of the library knows."""
    if isinstance(value, np.generic):
        value = value.item()
    if name == "scale_rewards":
        value = {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
        return resolve_scale(value) if isinstance(value, bool) else value
    if name == "resume_from_checkpoint" and isinstance(value, bool):
        return "latest" if value else None
    if name in ("output_dir", "resume_from_checkpoint") and isinstance(value, str):
        path = os.path.expanduser(value)  # a shell does, a YAML file does not
        return os.path.abspath(path) if path and name == "output_dir" else path  # a reward function may change folders
    if name == "chat_template_kwargs" and value is not None:
        return _template_kwargs(value)
    return value


def _template_kwargs(value: Any) -> dict[str, Any]:
    try:
        read = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        read = None
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise ValueError(
            f"chat_template_kwargs must be a dict of arguments by name, or its JSON text, got {value!r}; for example "
            '{"enable_thinking": false}'
        )
    return dict(read)


TRL_OPTIONS = {
    "use_vllm": "pass rollout_engine=VLLMEngine(...) to GRPOTrainer",
    "vllm_mode": "pass rollout_engine=VLLMEngine(...) to GRPOTrainer",
    "vllm_importance_sampling_correction": "set sampler_correction",
    "vllm_importance_sampling_mode": "set sampler_correction",
    "vllm_importance_sampling_clip_max": "set sampler_clip_max",
    "use_transformers_continuous_batching": "pass rollout_engine=HFEngine(..., continuous_batching=True)",
    "generation_batch_size": "set steps_per_generation",
    "max_prompt_length": "filter the dataset: prompts are never cut",
    "reward_weights": "pass reward_weights to GRPOTrainer",
    "model_init_kwargs": "load the model and pass it",
    "num_train_epochs": "set max_steps",
    "logging_steps": "every rollout is logged",
    "eval_strategy": "set eval_steps",
    "save_strategy": "set save_steps",
    "fp16": "set bf16",
    "use_liger_kernel": "leave it out: the loss is fused with the head already",
    "use_liger_loss": "leave it out: the loss is fused with the head already",
    "cast_lm_head_to_fp32": "leave it out: the head's sums are float32 already",
    "disable_dropout": "leave it out: dropout is always off",
    "remove_unused_columns": "leave it out: all columns reach the reward functions",
    "repetition_penalty": "leave it out: the loss could not mirror it",
    "generation_kwargs": "leave them out: the loss could not mirror them",
    "entropy_coef": "use top_entropy_quantile or epsilon_high",
}
"""Options of TRL that we do not have, and what to do instead."""


def _naming_unknown_options(init: Callable) -> Callable:
    @functools.wraps(init)
    def wrapped(self, **options: Any) -> None:
        for name in options.keys() - {f.name for f in dataclasses.fields(self)}:
            close = difflib.get_close_matches(name, [f.name for f in dataclasses.fields(self)], 1)
            fix = TRL_OPTIONS.get(name) or (f"did you mean {close[0]}?" if close else "see the help of GRPOConfig")
            raise ValueError(f"{name} must be an option of {type(self).__name__}, got {options[name]!r}; {fix}")
        init(self, **options)

    return wrapped


GRPOConfig.__init__ = _naming_unknown_options(GRPOConfig.__init__)
