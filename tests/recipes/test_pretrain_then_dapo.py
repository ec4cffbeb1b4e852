"""The recipe from nothing to a reasoning policy, in its smallest size."""

import functools
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / "recipes" / "pretrain_then_dapo.py")


@pytest.fixture
def main(monkeypatch, tmp_path):
    """From arguments to a run of the recipe in this process."""
    monkeypatch.syspath_prepend(str(ROOT / "recipes"))
    import pretrain_then_dapo

    few = functools.partial(pretrain_then_dapo.countdown_task, num_train=64, num_eval=4)
    monkeypatch.setattr(pretrain_then_dapo, "countdown_task", few)

    def run(*arguments):
        paths = ["--output_dir", str(tmp_path / "run"), "--cache_dir", str(tmp_path / "cache")]
        monkeypatch.setattr(sys, "argv", [RECIPE, "--preset", "cpu", "--use_cpu", *paths, *arguments])
        pretrain_then_dapo.main()
        return json.loads((tmp_path / "run" / "summary.json").read_text())

    return run


def test_it_pretrains_trains_and_resumes(main):
    options = ["--warm_start_steps", "3", "--per_device_train_batch_size", "8", "--max_completion_length", "12"]
    options += ["--objective", "gspo", "--routing_replay", "R3"]
    first = main(*options, "--max_steps", "4")
    assert first["steps"] == 4 and first["config"]["importance_sampling_level"] == "sequence"
    again = main(*options, "--max_steps", "8", "--resume_from_checkpoint")
    assert again["steps"] == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--objective", "ppo"], "objective must be one of dapo, gspo, cispo, got 'ppo'"),
        (["--preset", "huge"], "preset must be one of cpu, gpu, h200, got 'huge'"),
    ],
)
def test_wrong_options_are_named(main, arguments, message):
    with pytest.raises(ValueError, match=message):
        main(*arguments)
