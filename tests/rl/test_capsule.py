"""Capsules come back as they were saved, replay to the loss they came from, and are refused when damaged."""

import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.ops import LossConfig
from grpo_moe.rl.batch import batch_logps, select
from grpo_moe.rl.capsule import load_capsule, replay_capsule, replay_table, save_capsule
from grpo_moe.types import RolloutBatch


def made_batch(rows=4, width=5, **changes):
    generator = torch.Generator().manual_seed(0)
    logps = -torch.rand(rows, width, generator=generator) - 0.1
    mask = torch.ones(rows, width, dtype=torch.bool)
    mask[0, 3:] = False
    values = dict(
        input_ids=torch.arange(rows * 8).view(rows, 8),
        attention_mask=torch.ones(rows, 8, dtype=torch.bool),
        prompt_lengths=torch.full((rows,), 3),
        completion_ids=torch.arange(rows * width).view(rows, width),
        completion_mask=mask,
        advantages=torch.tensor([1.0, -1.0, 0.5, -2.0])[:rows],
        sampling_logps=logps,
        old_logps=logps,  # the same memory, on purpose
    )
    return RolloutBatch(**{**values, **changes})


def moved(batch):
    return batch.old_logps + 0.5 * torch.sin(torch.arange(batch.old_logps.numel())).view_as(batch.old_logps)


def made_capsule(path, config=None, **given):
    batch = made_batch()
    given = {"current_logps": moved(batch), "num_loss_tokens": 40, "num_sequences": 9, **given}
    return load_capsule(save_capsule(path, batch, config or LossConfig(), step=7, reason="loss is nan", **given))


def test_a_capsule_comes_back_whole(tmp_path):
    batch, config = made_batch(), LossConfig(sampler_correction="token_mask", sampler_clip_max=math.inf)
    batch.sampling_logps[1, 2], batch.advantages[0] = math.nan, math.inf
    path = save_capsule(
        tmp_path / "new" / "c.safetensors", batch, config, step=7, reason="loss is nan", current_logps=moved(batch)
    )
    capsule = load_capsule(path)
    for name in ("input_ids", "attention_mask", "prompt_lengths", "completion_ids", "completion_mask", "advantages",
                 "sampling_logps", "old_logps"):  # fmt: skip
        torch.testing.assert_close(getattr(capsule.batch, name), getattr(batch, name), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(capsule.current_logps, moved(batch), rtol=0, atol=0, equal_nan=True)
    assert (capsule.step, capsule.reason, capsule.config, capsule.num_loss_tokens) == (7, "loss is nan", config, None)
    assert capsule.batch.ref_logps is None and capsule.entropy is None
    assert [p.name for p in path.parent.iterdir()] == ["c.safetensors"]


@pytest.mark.parametrize("options", [{}, {"loss_type": "grpo", "beta": 0.1, "temperature": 0.7}])
def test_replay_equals_the_loss_of_the_trainer(tmp_path, options):
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=8, num_generations=4, max_completion_length=8,
        use_cpu=True, show_progress=False, num_iterations=2, learning_rate=0.05, **options,
    )  # fmt: skip
    run = GRPOTrainer(tiny_model(), share_of_letter, args, prompt_rows(6), processing_class=tokenizer())
    losses, loss = [], run.loss

    def watched(batch, window, metrics):
        made = loss(batch, window, metrics)
        with torch.no_grad():
            logps = batch_logps(run.policy, batch, temperature=args.temperature).logps
        counts = (window.num_loss_tokens, window.num_sequences)
        path = tmp_path / f"{len(losses)}.safetensors"
        save_capsule(path, batch, args, step=0, reason="test", current_logps=logps, num_loss_tokens=counts[0],
                     num_sequences=counts[1])  # fmt: skip
        losses.append((made.item(), path))
        return made

    run.loss = watched
    run.step()
    assert len(losses) == 2 and abs(losses[1][0]) > 1e-3
    for value, path in losses:
        replay = replay_capsule(load_capsule(path))
        assert replay.original.loss == pytest.approx(value, rel=1e-4, abs=1e-6)
        assert replay.other == replay.original and replay.cosine == pytest.approx(1)
        assert replay.original.gradient_norm > 0


def test_replay_compares_with_another_objective(tmp_path):
    replay = replay_capsule(made_capsule(tmp_path / "c.safetensors"), loss_type="cispo", epsilon_high=5.0)
    assert replay.original.stats["clip_ratio"] > 0 == replay.other.stats["clip_ratio"]
    assert replay.other.num_gradient_tokens == 18 > replay.original.num_gradient_tokens
    assert replay.other.loss != replay.original.loss and 0.1 < replay.cosine < 0.999
    table = replay_table(replay)
    assert "cispo" in table and "epsilon_high" in table and f"{replay.cosine:.6f}" in table
    opposite = replay_capsule(made_capsule(tmp_path / "c.safetensors", num_loss_tokens=80))
    assert replay.original.loss == pytest.approx(2 * opposite.original.loss)


def test_replay_without_current_log_probabilities_names_its_stand_in(tmp_path):
    path = tmp_path / "c.safetensors"
    assert made_capsule(path).logps_name == "current_logps"
    assert made_capsule(path, current_logps=None).logps_name == "old_logps"
    save_capsule(path, replace(made_batch(), old_logps=None), LossConfig(), step=0, reason="")
    capsule = load_capsule(path)
    assert capsule.logps_name == "sampling_logps" and replay_capsule(capsule).original.stats["ratio_max"] == 1


def test_log_probabilities_that_are_not_finite_are_counted(tmp_path):
    logps = moved(made_batch())
    logps[1, 1] = math.nan
    replay = replay_capsule(made_capsule(tmp_path / "c.safetensors", current_logps=logps))
    assert replay.original.stats["num_dropped_tokens"] == 1 and math.isfinite(replay.original.loss)
    flat = save_capsule(
        tmp_path / "f", replace(made_batch(), advantages=torch.zeros(4)), LossConfig(), step=0, reason=""
    )
    assert math.isnan(replay_capsule(load_capsule(flat)).cosine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilonn": 1.0}, "options must be those of LossConfig, got epsilonn"),
        ({"temperature": 2.0}, "temperature must be 1.0 as in the capsule, got 2.0"),
        ({"loss_type": "cispo"}, "epsilon_high must be at least 1"),
        ({"beta": 0.1}, "ref_logps must be given"),
        ({"top_entropy_quantile": 0.5}, "entropy must be given"),
    ],
)
def test_replay_refuses_what_it_cannot_compute(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        replay_capsule(made_capsule(tmp_path / "c.safetensors"), **changes)


def test_damaged_capsules_are_refused_by_name(tmp_path):
    path = save_capsule(tmp_path / "c.safetensors", made_batch(), LossConfig(), step=0, reason="")
    whole, tensors = path.read_bytes(), load_file(path)
    wrong = {name: x for name, x in tensors.items() if name != "advantages"}
    for number, (content, message) in enumerate(
        [
            (whole[: len(whole) // 2], "c0"),
            (b"", "c1"),
            (b"\x80\x04pickle", "c2"),
            (whole.replace(b"step capsule 1", b"step capsule 9"), "c3: another kind of file"),
            (whole.replace(b"loss_type", b"loss_tipe"), "c4: TypeError"),
        ]
    ):
        (tmp_path / f"c{number}").write_bytes(content)
        with pytest.raises(ValueError, match=f"capsule must be a whole file of save_capsule, got .*{message}"):
            load_capsule(tmp_path / f"c{number}")
    header = {"capsule": '{"format": "grpo_moe step capsule 1"}'}
    for content, metadata, message in (
        (tensors, None, "another kind of file"),
        (wrong, header, "no advantages in it"),
        ({**tensors, "old_logps": torch.zeros(2)}, header, r"old_logps of shape \[2\], not \[4, 5\]"),
        ({**tensors, "advantages": torch.zeros(2)}, header, r"tensors of \[2, 4\] rows"),
        ({**tensors, "weights": torch.zeros(4)}, header, "weights in it"),
        (tensors, header, "KeyError"),
    ):
        save_file(content, tmp_path / "w", metadata=metadata)
        with pytest.raises(ValueError, match=f"capsule must be a whole file of save_capsule, got .*w: {message}"):
            load_capsule(tmp_path / "w")
    for missing in (tmp_path / "none", tmp_path):
        with pytest.raises(ValueError, match="capsule must be"):
            load_capsule(missing)


def test_a_part_of_a_batch_can_be_saved(tmp_path):
    part = select(made_batch(), torch.tensor([2, 1]))
    capsule = load_capsule(save_capsule(tmp_path / "c", part, LossConfig(), step=0, reason=""))
    assert torch.equal(capsule.batch.advantages, part.advantages) and len(capsule.batch.input_ids) == 2


def test_a_run_keeps_the_updates_that_it_is_asked_to_keep(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2,
        max_completion_length=8, max_steps=4, use_cpu=True, show_progress=False, capsule_steps=2, num_iterations=2,
        learning_rate=1e-2, log_completions=False,
    )  # fmt: skip
    run = GRPOTrainer(tiny_model(), share_of_letter, args, prompt_rows(8), processing_class=tokenizer())
    run.train()
    kept = sorted((tmp_path / "capsules").iterdir())
    assert [path.name for path in kept] == ["update_000002_0.safetensors", "update_000004_0.safetensors"]
    capsule = load_capsule(kept[0])
    assert capsule.step == 2 and len(capsule.batch.input_ids) == 8  # both micro-batches
    assert not torch.equal(capsule.current_logps, capsule.batch.old_logps)  # of the second pass
    replay = replay_capsule(capsule, loss_type="cispo", epsilon_high=5.0)
    assert replay.original.gradient_norm > 0 and 0 < replay.cosine < 1
