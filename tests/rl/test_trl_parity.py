"""Our loss and every gradient equal those of TRL's GRPOTrainer on the same rows, or differ as our docstrings say.

The rows are hand-made: a rollout engine hands them to our trainer, and what our loss gets is TRL's input too.
Not compared, since only we do it: dynamic sampling, routing replay, gmpo, dppo_*, dual_clip, geometric_mask, k1 and k2.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from moe_families import tiny_moe
from tiny import prompt_rows, tokenizer
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.types import Completion, RolloutBatch

trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.trl, pytest.mark.filterwarnings("ignore")]

ROWS, GROUP, LONGEST = 8, 4, 9
LENGTHS = (9, 3, 1, 6, 5, 5, 2, 8)  # of the completions
UNFINISHED = (0, 5)  # rows without EOS
REWARDS = (1.0, 0.0, 0.3, 0.0, 0.0, 2.0, None, -1.0)  # None: not scored, advantage 0
PPO = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
TOLERANCE = 1e-5


def model(**changes):
    """Two layers, weights drawn anew from one seed, fp32."""
    return tiny_moe("qwen3_moe", changes={"vocab_size": 30, **changes})


class HandMade:
    """A rollout engine whose completions are the same whatever the policy."""

    def generate(self, prompts, sampling):
        generator = torch.Generator().manual_seed(5)
        made = []
        for row in range(ROWS):
            ids = torch.randint(3, 30, (LENGTHS[row],), generator=generator).tolist()
            if row not in UNFINISHED:
                ids[-1] = 2
            reason = "length" if row in UNFINISHED else "stop"
            made.append(Completion(tuple(ids), (0.0,) * len(ids), reason, text=str(row)))
        return [made[:GROUP], made[GROUP:]]

    def sync_weights(self, model):
        pass


def by_row(prompts, completions, **columns):
    return [REWARDS[int(text)] if text else 0.0 for text in completions]


@dataclass
class Ours:
    """What one update of our trainer used and made."""

    micro_batches: list[RolloutBatch]
    windows: list
    loss: float
    """Of the policy, KL included."""
    aux_loss: float | None
    gradients: list[dict[str, torch.Tensor]]
    """One a window."""


def ours(folder, policy, changes) -> Ours:
    values = dict(
        output_dir=str(folder), per_device_train_batch_size=ROWS, num_generations=GROUP, learning_rate=0.0,
        max_completion_length=LONGEST + 2, max_grad_norm=0.0, use_cpu=True, show_progress=False, log_completions=False,
    )  # fmt: skip
    args = GRPOConfig(**{**values, **changes})
    run = GRPOTrainer(policy, by_row, args, prompt_rows(5), processing_class=tokenizer(), rollout_engine=HandMade())
    add, loss, used, gradients = run.add_reference_logps, run.loss, [], []

    def hand_made(batch):
        return with_logps(add(batch), policy, args)

    def watched(batch, window, *rest):
        used.append((batch, window))
        return loss(batch, window, *rest)

    def keep():
        gradients.append({name: p.grad.clone() for name, p in policy.named_parameters()})

    run.add_reference_logps, run.loss, run.optimizer.step = hand_made, watched, keep
    metrics = run.step()
    batches, windows = zip(*used, strict=True)
    return Ours(batches, windows, metrics["loss"], metrics.get("aux_loss"), gradients)


def with_logps(batch, policy, args):
    """Old, reference and sampling log-probabilities that lie around those of the policy, by row and by token."""
    logps = own_logps(policy, batch, args.temperature)
    generator = torch.Generator().manual_seed(7)

    def around(by_token, by_row=0.0):
        noise = by_token * torch.randn(logps.shape, generator=generator)
        noise = noise + by_row * torch.randn(len(logps), 1, generator=generator)
        return torch.where(existing(batch), logps + noise, 0)

    old = around(0.25, 0.25)
    sampling = torch.where(existing(batch), old + 0.15 * torch.randn(logps.shape, generator=generator), 0)
    sampling[0, 1] = torch.nan  # the engine did not score it
    return replace(batch, old_logps=old, ref_logps=around(0.5) if args.beta else None, sampling_logps=sampling)


def existing(batch):
    """[B, T] whether there is a completion token, learned from or not."""
    lengths = batch.attention_mask.sum(1) - batch.prompt_lengths
    return torch.arange(batch.completion_ids.shape[1]) < lengths[:, None]


@torch.no_grad()
def own_logps(policy, batch, temperature):
    logits = policy(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits / temperature
    places = (batch.prompt_lengths - 1)[:, None] + torch.arange(batch.completion_ids.shape[1])
    of_tokens = logits.log_softmax(-1).take_along_dim(places.clamp(max=logits.shape[1] - 1)[..., None], 1)
    return of_tokens.gather(-1, batch.completion_ids[..., None])[..., 0]


@dataclass
class Theirs:
    loss: float
    gradients: dict[str, torch.Tensor]


def theirs(folder, policy, batches, changes, *, aux_coef=0.0, sampler=None, per_generation=None, num_items=None):
    """TRL's ``_compute_loss`` of each micro-batch, added up.

    Args:
        batches: what our loss was given.
        changes: options that have the same name for both.
        sampler: TRL's name, lower and upper bound of the correction.
        per_generation: micro-batches of a rollout, if not those here.
        num_items: loss tokens of the rollout, if not those here.
    """
    from datasets import Dataset

    micro = {"per_device_train_batch_size": len(batches[0].input_ids), "gradient_accumulation_steps": len(batches)}
    beta = changes.get("beta", 0.0)
    args = trl.GRPOConfig(
        output_dir=str(folder), num_generations=GROUP, steps_per_generation=per_generation or len(batches),
        max_completion_length=LONGEST + 2, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
        router_aux_loss_coef=aux_coef, **micro,
        **{name: value for name, value in changes.items() if name not in (*micro, "beta", "steps_per_generation")},
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["a"] * 8})
    trainer = trl.GRPOTrainer(policy, by_row, args, data, processing_class=tokenizer())
    trainer.beta = beta  # its constructor would load a reference model; the loss takes the log-probabilities given
    trainer.use_vllm = sampler is not None
    trainer.current_gradient_accumulation_steps = len(batches)
    trainer.model.train()
    num_items = num_items or sum(int(batch.completion_mask.sum()) for batch in batches)
    total = 0.0
    for batch in batches:
        loss = trainer._compute_loss(trainer.model, as_trl(batch, num_items, sampler))
        loss.backward()
        total += float(loss.detach())
    return Theirs(total, {name: p.grad for name, p in trainer.model.named_parameters()})


def as_trl(batch, num_items, sampler=None):
    """Prompts padded on the left; a row left out of the loss is left out of the attention too, as TRL does."""
    longest = int(batch.prompt_lengths.max())
    prompts = torch.zeros(len(batch.input_ids), longest, dtype=torch.long)
    mask = torch.zeros_like(prompts)
    for row, length in enumerate(batch.prompt_lengths.tolist()):
        prompts[row, longest - length :], mask[row, longest - length :] = batch.input_ids[row, :length], 1
    inputs = {
        "prompt_ids": prompts,
        "prompt_mask": mask,
        "completion_ids": batch.completion_ids,
        "completion_mask": batch.completion_mask.int(),
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old_logps,
        "num_items_in_batch": torch.tensor(num_items),
    }
    if batch.ref_logps is not None:
        inputs["ref_per_token_logps"] = batch.ref_logps
    if sampler is not None:
        inputs["sampling_per_token_logps"] = batch.sampling_logps
        inputs["importance_sampling_ratio"] = sampler_ratio(batch, *sampler)
    return inputs


def sampler_ratio(batch, mode, low, high):
    """As in ``_generate_and_score_completions`` of TRL 1.16, which cannot be called without vLLM."""
    difference = torch.nan_to_num((batch.old_logps - batch.sampling_logps) * batch.completion_mask, nan=0.0)
    ratio = (difference.sum(-1, keepdim=True) if mode.startswith("sequence") else difference).exp()
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high)
    return ratio.masked_fill((ratio < (-torch.inf if low is None else low)) | (ratio > high), 0.0)


def assert_equal(mine, other):
    assert mine.loss == pytest.approx(other.loss, rel=TOLERANCE, abs=TOLERANCE / 10)
    (gradients,) = mine.gradients
    assert_gradients_equal(gradients, other.gradients)


def assert_gradients_equal(gradients, expected):
    """To 1e-5 of the largest gradient of each parameter; none may vanish."""
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        largest = float(expected[name].abs().max())
        assert largest > 1e-5, f"{name} has no gradient"
        torch.testing.assert_close(gradient, expected[name], rtol=TOLERANCE, atol=TOLERANCE * largest, msg=name)


def bounds(loss_type):
    """Clipping that acts on some rows at both levels; for cispo a cap of the ratio itself."""
    return {"epsilon": 0.2, "epsilon_high": 1.2 if loss_type == "cispo" else 0.28}


def compare(folder, shared, *, own=None, batch=ROWS, **options):
    """Both sides, ours with ``own`` options besides; micro-batches of ``batch`` rows, all in one update."""
    split = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": ROWS // batch,
        "steps_per_generation": ROWS // batch,
    }
    mine = ours(folder, model(), {**shared, **split, **(own or {})})
    assert len(mine.micro_batches) == ROWS // batch
    shared = {name: value for name, value in shared.items() if name != "mask_truncated_completions"}
    return mine, theirs(folder, model(), mine.micro_batches, {**shared, **split}, **options)


LEVELS = [(loss, "token") for loss in (*PPO, "cispo", "sapo", "vespo")]
LEVELS += [(loss, "sequence") for loss in (*PPO, "cispo", "sapo")]  # vespo has its own, and we refuse it there
KL = [{"beta": 0.0}, {"beta": 0.04}, {"beta": 0.04, "use_bias_correction_kl": False}]


@pytest.mark.parametrize("kl", KL, ids=["no-kl", "kl", "plain-kl"])
@pytest.mark.parametrize(("loss_type", "level"), LEVELS)
def test_loss_and_gradients_equal(tmp_path, loss_type, level, kl):
    shared = {"loss_type": loss_type, "importance_sampling_level": level, **bounds(loss_type), **kl}
    assert_equal(*compare(tmp_path, shared))


@pytest.mark.parametrize(
    "options",
    [
        {"delta": 1.4},
        {"delta": 1.4, "importance_sampling_level": "sequence", "loss_type": "grpo"},
        {"off_policy_mask_threshold": 0.05},
        {"top_entropy_quantile": 0.4},
        {"top_entropy_quantile": 0.4, "off_policy_mask_threshold": 0.05, "loss_type": "grpo", "beta": 0.04},
        {"temperature": 0.7, "beta": 0.04},
        {"mask_truncated_completions": True, "beta": 0.04},
        {"mask_truncated_completions": True, "loss_type": "grpo"},
        {"mask_truncated_completions": True, "loss_type": "luspo", "importance_sampling_level": "sequence"},
        {"loss_type": "sapo", "sapo_temperature_pos": 0.8, "sapo_temperature_neg": 1.5},
        {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.5},
        {"loss_type": "vespo", "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.0},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)  # fmt: skip
def test_options_equal(tmp_path, options):
    base = {"loss_type": "dapo", **bounds("dapo")}
    mine, other = compare(tmp_path, {**base, **options})
    assert_equal(mine, other)
    plain = {name: value for name, value in options.items() if name in ("loss_type", "importance_sampling_level")}
    kept = {name: value for name, value in options.items() if name == "beta"}
    without = ours(tmp_path, model(), {**base, **plain, **kept})
    pairs = zip(mine.gradients[0].values(), without.gradients[0].values(), strict=True)
    assert max(float((a - b).abs().max()) for a, b in pairs) > 1e-3, "the option acts on no token of these rows"


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
@pytest.mark.parametrize(
    ("mode", "low", "high"),
    [
        ("token_truncate", 0.9, 1.1),
        ("token_mask", 0.8, 1.15),
        ("sequence_truncate", None, 1.1),
        ("sequence_mask", 0.7, 1.3),
    ],
)
def test_sampler_corrections_equal(tmp_path, loss_type, mode, low, high):
    shared = {"loss_type": loss_type, "beta": 0.04, **bounds(loss_type)}
    own = {"sampler_correction": mode, "sampler_clip_min": low, "sampler_clip_max": high}
    mine, other = compare(tmp_path, shared, own=own, sampler=(mode, low, high))
    assert_equal(mine, other)
    (batch,) = mine.micro_batches
    ratio, untouched = sampler_ratio(batch, mode, low, high), sampler_ratio(batch, mode, 0.0, 1e9)
    assert (ratio != untouched).any() and ratio.any()


def test_off_policy_mask_reads_the_sampler(tmp_path):
    shared = {"loss_type": "grpo", "off_policy_mask_threshold": 0.1, **bounds("grpo")}
    own = {"sampler_correction": "token_truncate", "sampler_clip_max": 2.0}
    assert_equal(*compare(tmp_path, shared, own=own, sampler=("token_truncate", None, 2.0)))


def test_vespo_takes_the_sampler_into_its_weight(tmp_path):
    """With bounds that mask a token we differ: it is left out of the row's weight instead of ending the row."""
    shared = {"loss_type": "vespo", "beta": 0.04}
    for mode, low, high in (("token_truncate", 0.9, 1.1), ("token_mask", 0.0, 1e6)):
        own = {"sampler_correction": mode, "sampler_clip_min": low, "sampler_clip_max": high}
        assert_equal(*compare(tmp_path, shared, own=own, sampler=(mode, low, high)))


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_accumulation_equals_where_theirs_is_exact(tmp_path, loss_type):
    """One window a rollout, micro-batches of equally many rows."""
    shared = {"loss_type": loss_type, "beta": 0.04, **bounds(loss_type)}
    mine, other = compare(tmp_path, shared, batch=4)
    lengths = [int(batch.completion_mask.sum()) for batch in mine.micro_batches]
    assert lengths[0] != lengths[1]
    assert_equal(mine, other)


def test_bnpo_is_a_mean_over_the_tokens_of_the_whole_update(tmp_path):
    """Theirs is the mean of the micro-batches' means, which depends on the split; ours is dapo."""
    shared = {"loss_type": "bnpo", **bounds("bnpo")}
    mine, other = compare(tmp_path, shared, batch=4)
    assert abs(mine.loss - other.loss) > 1e-4
    assert_equal(mine, compare(tmp_path, {**shared, "loss_type": "dapo"}, batch=4)[1])


def test_each_window_of_a_rollout_is_divided_by_its_own_tokens(tmp_path):
    """Theirs is divided by the mean number of tokens of the rollout's windows."""
    options = {"loss_type": "dapo", **bounds("dapo")}
    split = {"per_device_train_batch_size": 4, "steps_per_generation": 2}
    mine = ours(tmp_path, model(), {**options, **split})
    counts = [int(batch.completion_mask.sum()) for batch in mine.micro_batches]
    assert [window.num_loss_tokens for window in mine.windows] == counts and counts[0] != counts[1]
    for batch, gradients, count in zip(mine.micro_batches, mine.gradients, counts, strict=True):
        other = theirs(tmp_path, model(), [batch], options, per_generation=2, num_items=sum(counts))
        scale = sum(counts) / 2 / count
        assert_gradients_equal(gradients, {name: scale * g for name, g in other.gradients.items()})


def test_the_load_balancing_loss_equals_with_one_layer(tmp_path):
    shared, aux = {"loss_type": "dapo", "beta": 0.04, **bounds("dapo")}, {"router_aux_loss_coef": 0.5}
    mine = ours(tmp_path, model(num_hidden_layers=1), {**shared, **aux})
    other = theirs(tmp_path, model(num_hidden_layers=1), mine.micro_batches, shared, aux_coef=0.5)
    assert mine.loss + 0.5 * mine.aux_loss == pytest.approx(other.loss, rel=TOLERANCE)
    assert_gradients_equal(mine.gradients[0], other.gradients)
    without = ours(tmp_path, model(num_hidden_layers=1), shared)
    router = next(name for name in without.gradients[0] if "mlp.gate.weight" in name)
    assert (without.gradients[0][router] - mine.gradients[0][router]).abs().max() > 1e-3


def test_the_load_balancing_loss_is_of_each_layer_and_of_the_whole_update(tmp_path):
    """Theirs pools the layers and is of one micro-batch; rows left out of the loss count for theirs only."""
    options = {"loss_type": "dapo", "router_aux_loss_coef": 0.5}
    policy = model()
    mine = ours(tmp_path, policy, options)
    (batch,) = mine.micro_batches
    inputs = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask.long()}
    logits = policy(**inputs, output_router_logits=True).router_logits
    by_layer = [load_balancing_loss_func((x,), 8, 2, inputs["attention_mask"]).item() for x in logits]
    assert mine.aux_loss == pytest.approx(sum(by_layer) / len(by_layer), rel=TOLERANCE)
    assert load_balancing_loss_func(logits, 8, 2, inputs["attention_mask"]).item() < mine.aux_loss - 1e-4
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    split = ours(tmp_path, model(), {**options, **halves})
    assert split.aux_loss == pytest.approx(mine.aux_loss, rel=TOLERANCE)
