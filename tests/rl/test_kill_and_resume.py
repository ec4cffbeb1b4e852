"""A run killed at any update, or while it writes a checkpoint, ends with the weights of one that was not, to the bit.

Run as a script, it trains in forked children that kill themselves with SIGKILL, each where its options say.
"""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl.metrics import read_metrics
from grpo_moe.rl.run_folder import list_checkpoints

UPDATES = 12
TWO_UPDATES = {"steps_per_generation": 2}  # a rollout: 2 passes over one window
FOUR_UPDATES = {"steps_per_generation": 4}  # 2 passes over two windows


class Killed(BaseException):
    """Stands for a kill in the tests' own process; no handler of ordinary errors catches it."""


def trainer(path, **changes):
    """12 updates of 2 passes and 2 micro-batches; the 5 prompts are in their third epoch from update 11 on."""
    values = dict(
        output_dir=str(path), max_steps=UPDATES, num_iterations=2, gradient_accumulation_steps=2,
        per_device_train_batch_size=4, num_generations=4, max_completion_length=6, learning_rate=1e-2, warmup_steps=5,
        save_steps=1, use_cpu=True, show_progress=False, eval_on_start=False, log_completions=False, **TWO_UPDATES,
    )  # fmt: skip
    return GRPOTrainer(
        tiny_model(num_hidden_layers=2),
        share_of_letter,
        GRPOConfig(**{**values, **changes}),
        prompt_rows(5),
        processing_class=tokenizer(),
    )


def die_at_update(run, number, die):
    """``die`` is called instead of the optimiser's update of this number, from 1."""
    step, count = run.optimizer.step, iter(range(1, UPDATES + 1))
    run.optimizer.step = lambda: die() if next(count) == number else step()


def die_at_save(run, number, moment, die):
    """``die`` is called at a moment of the writing of this checkpoint, from 1."""
    save, count = run.save_checkpoint, iter(range(1, UPDATES + 1))

    def save_or_die():
        if next(count) == number:
            MOMENTS[moment](run, die)
        return save()

    run.save_checkpoint = save_or_die


def die_at_byte(run, number, size):
    """The kernel ends the process when a file of this checkpoint, from 1, grows beyond so many bytes."""
    save, count = run.save_checkpoint, iter(range(1, UPDATES + 1))

    def save_with_limit():
        if next(count) == number:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # which Python ignores
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return save()

    run.save_checkpoint = save_with_limit


def while_tensors_are_written(run, die):
    save_state = run.accelerator.save_state

    def half(folder, **options):
        save_state(folder, **options)
        weights = Path(folder) / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:1000])
        next(Path(folder).glob("optimizer*")).unlink()
        die()

    run.accelerator.save_state = half


def before_it_gets_its_name(run, die):
    replace = os.replace
    os.replace = lambda source, target: die() if "checkpoint-" in str(target) else replace(source, target)


def after_it_got_its_name(run, die):
    replace = os.replace

    def replace_and_die(source, target):
        replace(source, target)
        if "checkpoint-" in str(target):
            die()

    os.replace = replace_and_die


def while_a_checkpoint_is_removed(run, die):
    rmtree = shutil.rmtree

    def half(path, *rest, **options):
        if not Path(path).is_dir() or "checkpoint-" not in str(path):
            return rmtree(path, *rest, **options)
        next(Path(path).glob("*.safetensors")).unlink()
        die()

    shutil.rmtree = half


MOMENTS = {
    "tensors": while_tensors_are_written,
    "before": before_it_gets_its_name,
    "after": after_it_got_its_name,
    "rotation": while_a_checkpoint_is_removed,
}


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    """They are most of the time of a run as short as these."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **options: Path(path).touch())


@pytest.fixture
def whole(tmp_path_factory):
    """Weights and metrics of the run that nothing stopped, by its options."""
    return lambda **changes: _whole(tmp_path_factory, tuple(changes.items()))


_WHOLE = {}


def _whole(factory, changes):
    if changes not in _WHOLE:
        path = factory.mktemp("whole")
        run = trainer(path, **dict(changes))
        start = run.policy.lm_head.weight.clone()
        run.train()
        assert run.source.position == 12 > 2 * len(run.source)  # the third epoch
        assert (run.policy.lm_head.weight - start).abs().max() > 1e-2 and not run.state.skipped_updates
        _WHOLE[changes] = outcome(path)
    return _WHOLE[changes]


def outcome(path):
    weights = load_file(path / "model" / "model.safetensors")
    lines = read_metrics(path / "metrics.jsonl")
    return weights, [(m["step"], m["reward"], m["grad_norm"], m["learning_rate"]) for m in lines]


def assert_ends_as(expected, path, **changes):
    """Resumes the run in ``path`` and compares it with the outcome of the uninterrupted one."""
    torch.manual_seed(random.randrange(2**31))  # nothing may hang on the global generator
    trainer(path, **changes).train(resume_from_checkpoint="latest")
    weights, lines = outcome(path)
    assert lines == expected[1]
    assert weights.keys() == expected[0].keys()
    assert all(torch.equal(weights[name], expected[0][name]) for name in weights)


def abort():
    raise Killed


@pytest.mark.parametrize(
    "update", [u if u in (1, 5, 6, 11) else pytest.param(u, marks=pytest.mark.slow) for u in range(1, UPDATES + 1)]
)
def test_a_run_stopped_at_any_update_ends_as_the_whole_one(tmp_path, whole, update):
    """Epoch 0 is updates 1 to 5, epoch 2 begins within update 11's rollout."""
    run = trainer(tmp_path)
    die_at_update(run, update, abort)
    with pytest.raises(Killed):
        run.train()
    saved = [path.name for path in list_checkpoints(tmp_path)]
    boundaries = range(2, update, 2)  # whole rollouts before the kill
    assert saved == [f"checkpoint-{step}" for step in boundaries][-2:]
    assert_ends_as(whole(), tmp_path)


@pytest.mark.parametrize("update", [3, 7, 12])
def test_several_windows_a_rollout_and_rare_checkpoints(tmp_path, whole, update):
    """Update 3 dies without a checkpoint, 7 and 12 in the middle of a rollout with the reference's KL term.

    The learning rate is another one at every update.
    """
    options = {**FOUR_UPDATES, "beta": 0.05, "save_steps": 4, "lr_scheduler_type": "linear"}
    run = trainer(tmp_path, **options)
    die_at_update(run, update, abort)
    with pytest.raises(Killed):
        run.train()
    assert [p.name for p in list_checkpoints(tmp_path)] == [f"checkpoint-{s}" for s in (4, 8) if s < update]
    assert_ends_as(whole(**options), tmp_path, **options)


def test_a_run_stopped_again_and_again_ends_as_the_whole_one(tmp_path, whole):
    for _ in range(5):
        run = trainer(tmp_path)
        die_at_update(run, 4, abort)  # of this start: a rollout further each time
        with pytest.raises(Killed):
            run.train(resume_from_checkpoint="latest")
    trainer(tmp_path).train(resume_from_checkpoint="latest")
    weights, lines = outcome(tmp_path)
    assert lines == whole()[1] and all(torch.equal(weights[name], whole()[0][name]) for name in weights)


@contextmanager
def put_back(monkeypatch):
    """What the moments replace is itself again afterwards."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", os.replace)
        patch.setattr(shutil, "rmtree", shutil.rmtree)
        yield


@pytest.mark.parametrize("moment", MOMENTS)
def test_dying_while_a_checkpoint_is_written_leaves_the_one_before(tmp_path, whole, moment, monkeypatch):
    run = trainer(tmp_path)
    die_at_save(run, 4, moment, abort)
    with pytest.raises(Killed), put_back(monkeypatch):
        run.train()
    newest = 8 if moment in ("after", "rotation") else 6
    assert list_checkpoints(tmp_path)[-1].name == f"checkpoint-{newest}"
    assert_ends_as(whole(), tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["checkpoint-10", "checkpoint-12"]


def test_dying_while_a_checkpoint_is_written_anew_leaves_one_to_resume_from(tmp_path, whole, monkeypatch):
    """From an older checkpoint, one is written under the name of one that exists."""
    trainer(tmp_path, max_steps=8).train()
    run = trainer(tmp_path)
    with pytest.raises(Killed), put_back(monkeypatch):
        while_a_checkpoint_is_removed(run, abort)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert_ends_as(whole(), tmp_path)


def kills_in_a_script(folder, points):
    """Each point's run in its own folder, killed there by SIGKILL; they share one start of Python."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, __file__, str(folder), json.dumps(points)]
    done = subprocess.run(command, env=environment, timeout=300, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_sigkill_during_an_update_and_during_a_save(tmp_path, whole):
    points = [{"update": 3}, {"update": 12}, {"save": 2, "moment": "tensors"}, {"save": 6, "moment": "before"}]
    kills_in_a_script(tmp_path, points)
    for number in range(len(points)):
        assert_ends_as(whole(), tmp_path / str(number))


@pytest.mark.slow
def test_sigkill_at_every_update_and_every_moment_of_every_save(tmp_path, whole):
    points = [{"update": number} for number in range(1, UPDATES + 1)]
    points += [{"save": number, "moment": moment} for number in range(1, 7) for moment in MOMENTS]
    points = [p for p in points if p.get("moment") != "rotation" or p["save"] > 2]  # nothing to remove before
    kills_in_a_script(tmp_path, points)
    for number in range(len(points)):
        assert_ends_as(whole(), tmp_path / str(number))


@pytest.mark.slow
def test_sigkill_from_outside_at_any_time(tmp_path, whole):
    points = [{"after_s": 0.05 + 0.11 * number} for number in range(16)]
    kills_in_a_script(tmp_path, points)
    for number in range(len(points)):
        assert_ends_as(whole(), tmp_path / str(number))


def train_and_be_killed(folder, point):
    """In a forked child: trains until the point; from outside, a SIGKILL comes some time after the start."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    run = trainer(folder)
    if "update" in point:
        die_at_update(run, point["update"], die)
    if "bytes" in point:
        die_at_byte(run, point["save"], point["bytes"])
    elif "save" in point:
        die_at_save(run, point["save"], point["moment"], die)
    (folder / "ready").touch()
    run.train()


def main(folder, points):
    trainer(folder)  # what it imports and compiles is there for every child
    for number, point in enumerate(points):
        own = folder / str(number)
        own.mkdir()
        child = os.fork()
        if not child:
            train_and_be_killed(own, point)
            os._exit(0)
        if "after_s" in point:
            while not (own / "ready").exists():
                time.sleep(0.01)
            time.sleep(point["after_s"])
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        # one that had ended by itself is still there to be waited for, and killing it does nothing
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ)
        assert killed or "after_s" in point, f"{point} was not reached: {status}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
