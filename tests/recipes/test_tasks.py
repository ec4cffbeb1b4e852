import importlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
import tasks  # noqa: E402


@pytest.mark.parametrize("name", tasks.PRESETS)
def test_a_preset_leaves_room_for_its_demonstrations(name):
    preset = tasks.PRESETS[name]
    assert preset.training["max_completion_length"] == preset.countdown.max_completion_length


def test_held_out_problems_are_no_training_problems_and_the_same_for_every_seed():
    first, second = (tasks.countdown_task(tasks.PRESETS["cpu"].countdown, seed, num_train=300) for seed in (0, 1))
    problem = lambda row: (tuple(sorted(row["numbers"])), row["target"])  # noqa: E731
    assert not {problem(r) for r in first.train_dataset} & {problem(r) for r in first.eval_dataset}
    assert first.eval_dataset["prompt"] == second.eval_dataset["prompt"]
    assert first.train_dataset["prompt"] != second.train_dataset["prompt"]


def test_a_file_of_prompts_and_answers_becomes_a_task(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1?", "answer": str(i + 1)}) + "\n" for i in range(20)))
    task = tasks.make_task("countdown", str(path), tasks.PRESETS["cpu"].countdown, 0)
    assert len(task.train_dataset) == 18 and len(task.eval_dataset) == 2
    row = task.train_dataset[0]
    assert task.reward([row["prompt"]], [row["answer"]], answer=[row["answer"]]) == [1.0]


def test_an_unknown_task_is_named():
    with pytest.raises(ValueError, match="task must be countdown or reasoning_gym:<name>, got 'chess'"):
        tasks.make_task("chess", None, tasks.PRESETS["cpu"].countdown, 0)


@pytest.mark.parametrize("recipe", ["dapo_gptoss", "pretrain_then_dapo"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"warm_start_steps": 0}, "warm_start_steps must be at least 1, got 0; leave it out"),
        ({"warm_start_steps": "x"}, "warm_start_steps must be an integer of at least 1, got 'x'; leave it out"),
        ({"warm_start_steps": 2.5}, "warm_start_steps must be an integer of at least 1, got 2.5; leave it out"),
        ({"preset": "huge"}, "preset must be one of cpu, gpu, h200, got 'huge'; check the spelling"),
        ({"preset": ["cpu"]}, r"preset must be one of cpu, gpu, h200, got \['cpu'\]; check the spelling"),
    ],
    ids=str,
)
def test_wrong_options_of_a_recipe_are_named(recipe, wrong, message):
    with pytest.raises(ValueError, match=message):
        importlib.import_module(recipe).RecipeConfig(**wrong)
