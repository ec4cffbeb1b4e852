import functools
import importlib
import json
import sys
import types
from pathlib import Path

import pytest
from accelerate import PartialState

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


@pytest.fixture
def gym(monkeypatch):
    """What make_task calls of the package reasoning-gym, with one task."""

    class Doubles:
        def __init__(self, name, *, seed, size):
            self.seed, self.size = seed, size

        def __len__(self):
            return self.size

        def __getitem__(self, row):
            if row >= self.size:
                raise IndexError(row)
            return {"question": f"{self.seed} {row}", "answer": str(2 * row)}

        def score_answer(self, answer, entry):
            return 1 if answer == entry["answer"] else 0.25

    made = types.SimpleNamespace(factory=types.SimpleNamespace(DATASETS={"double": Doubles}), create_dataset=Doubles)
    monkeypatch.setitem(sys.modules, "reasoning_gym", made)


def test_a_reasoning_gym_task_says_that_it_makes_its_problems_and_scores_each_by_its_own(gym, monkeypatch, capsys):
    task = tasks.make_task("reasoning_gym:double", None, tasks.PRESETS["cpu"].countdown, 7)
    assert capsys.readouterr().out.startswith("making 2200 problems of reasoning_gym:double")
    assert (len(task.train_dataset), len(task.eval_dataset)) == (2000, 200)
    rows = [task.train_dataset[3], task.eval_dataset[4]]
    assert [row["prompt"][0]["content"] for row in rows] == ["7 3", f"{tasks.EVAL_SEED} 4"]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns.pop("prompt")
    assert task.reward(prompts, [[{"role": "assistant", "content": " 6"}], "6"], **columns) == [1.0, 0.25]
    monkeypatch.setenv("RANK", "1")  # the other processes are silent
    tasks.reasoning_gym_task("double", 0, num_train=2, num_eval=2)
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="task reasoning_gym:chess must be one of double"):
        tasks.reasoning_gym_task("chess", 0)


@pytest.mark.parametrize("recipe", ["dapo_gptoss", "pretrain_then_dapo"])
def test_a_preset_for_gpus_on_a_cpu_is_warned_of_before_work_begins(recipe, monkeypatch, tmp_path, capsys):
    module = importlib.import_module(recipe)
    monkeypatch.setattr(module, "use_all_cores", lambda args: PartialState(cpu=True))  # the tests share the cores
    few = functools.partial(tasks.countdown_task, num_train=4, num_eval=4)
    monkeypatch.setattr(tasks, "countdown_task", few)
    monkeypatch.setattr(module, "countdown_task", few, raising=False)
    monkeypatch.setattr(module, "warm_started_policy", lambda *given: sys.exit("work begins"))
    for preset in ("gpu", "h200", "cpu"):
        given = ["--preset", preset, "--output_dir", str(tmp_path), "--use_cpu"]
        monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *given])
        with pytest.raises(SystemExit, match="work begins"):
            module.main()
        warned = f"warning: preset {preset} is made for a GPU: hours on a CPU, as here; --preset cpu takes"
        assert capsys.readouterr().out.startswith(warned) == (preset != "cpu")


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
