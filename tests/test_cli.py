"""The command line: what it prints, writes and exits with."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny import tiny_config

from grpo_moe import cli
from grpo_moe.ops import LossConfig
from grpo_moe.rl.capsule import save_capsule
from grpo_moe.rl.doctor import DOCTOR_VARIABLE
from grpo_moe.types import RolloutBatch

ROOT = Path(__file__).parents[1]
PLAN = ["--model", "gptoss-lite", "--gpus", "H200"]
RECIPE = """
import sys
from beside import train
if __name__ == "__main__":
    train(sys.argv[1:])
"""


def capsule(path):
    ids = torch.arange(6).view(2, 3)
    batch = RolloutBatch(
        input_ids=torch.arange(8).view(2, 4), attention_mask=torch.ones(2, 4, dtype=torch.bool),
        prompt_lengths=torch.ones(2, dtype=torch.long), completion_ids=ids, completion_mask=ids >= 0,
        advantages=torch.tensor([1.0, -1.0]), sampling_logps=-ids.float() - 1, old_logps=-ids.float() - 1,
    )  # fmt: skip
    logps = batch.old_logps + torch.tensor([[0.5, -0.4, 0.0], [0.1, -0.1, 0.3]])
    save_capsule(path, batch, LossConfig(delta=3.0), step=12, reason="grad_norm is inf", current_logps=logps)
    return str(path)


def test_report_writes_the_page_and_says_where(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    assert cli.main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")


def test_errors_are_one_line_and_exit_with_2(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n123\n')
    metrics = f"grpo-moe report: error: {tmp_path / 'metrics.jsonl'} must hold JSON objects, got b'123' in line 2"
    for arguments, message in (
        (["report", str(tmp_path)], metrics),
        (["report", str(tmp_path / "none")], "grpo-moe report: error: run must be a folder with metrics.jsonl"),
        (["replay", str(tmp_path / "none")], "grpo-moe replay: error: capsule must be a file"),
        (["doctor", str(tmp_path / "none.py")], "grpo-moe doctor: error: recipe must be a Python file"),
        (["plan", "--model", "gpt-5", "--gpus", "H200"], "grpo-moe plan: error: model must be a folder or one of"),
        (["plan", "--model", str(tmp_path), "--gpus", "H200"], "grpo-moe plan: error: model must be a folder with"),
        (["plan", "--model", "gptoss-lite", "--gpus", "8xH20"], "grpo-moe plan: error: gpus must be a number and"),
        (["plan", *PLAN, "--num_generations", "1"], "grpo-moe plan: error: num_generations must be at least 2, got 1"),
        (["plan", *PLAN, "--lora_r", "-1"], "grpo-moe plan: error: lora_rank must be at least 0, got -1"),
        (
            ["plan", *PLAN, "--max_completion_length", "130817"],
            "grpo-moe plan: error: prompt_tokens + max_completion_length must be at most the 131072 positions of "
            "gptoss-lite, got 256 + 130817; lower --max_completion_length or --prompt_tokens",
        ),
        (["replay", capsule(tmp_path / "c"), "--epsilon", "-1"], "grpo-moe replay: error: epsilon must be finite"),
    ):
        assert cli.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(message) and captured.err.count("\n") == 1, captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["plans"],
    ],  # fmt: skip
)
def test_no_command_and_an_unknown_one_exit_with_2_and_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown = capsys.readouterr().err
    assert ended.value.code == 2 and "usage: grpo-moe" in shown and "required: command, arguments" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "the following arguments are required: run"),
        (["doctor"], "the following arguments are required: recipe"),
        (["plan", "--gpus", "H200"], "the following arguments are required: --model"),
        (["plan", "--model", "gptoss-lite", "--gpus", "H200", "--no_such_option"], "unrecognized arguments: --no_such"),
        (["replay", "c", "--no_such_option", "1"], "unrecognized arguments: --no_such_option 1"),
        (["replay", "c", "--beta", "x"], "argument --beta: invalid float value: 'x'"),
        (["replay", "c", "--use_bias_correction_kl", "maybe"], "argument --use_bias_correction_kl: invalid bool value"),
    ],
)
def test_wrong_arguments_of_a_command_are_one_line_and_exit_with_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    shown, name = capsys.readouterr().err, f"grpo-moe {arguments[0]}"
    assert ended.value.code == 2 and shown.startswith(f"{name}: error: {message}") and shown.count("\n") == 1
    assert shown.endswith(f"; see {name} --help\n")


def test_help_lists_commands_and_every_option_of_the_loss(capsys):
    shown = []
    for arguments in (["--help"], ["replay", "--help"], ["doctor", "--help"], ["report", "--help"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        shown.append(capsys.readouterr().out)
    assert all(name in shown[0] for name in ("plan --model", "report RUN", "doctor RECIPE", "replay CAPSULE"))
    assert all(f"--{name} " in shown[1] for name in LossConfig.__dataclass_fields__)
    assert "Weight of the KL term to the reference policy." in shown[1]


def test_plan_prints_phases_verdict_and_what_to_change(capsys):
    arguments = ["plan", "--model", "qwen3-30b-a3b", "--gpus", "8xH200", "--bf16", "--sharding"]
    assert cli.main([*arguments, "fsdp2"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("qwen3-30b-a3b, 30.53B parameters, on 8xH200 (139.8 GiB each), fsdp2; GiB on each GPU\n")
    rows = {line[:22].strip(): line[22:].split() for line in out.split("\n\n")[1].splitlines()}
    assert rows[""] == ["rollout", "forward_backward", "optimizer_step"]
    assert rows["weights"] == ["14.22"] * 3 and rows["optimizer"] == ["28.44"] * 3
    for column, total in enumerate(rows["total"]):
        parts = [row[column] for name, row in rows.items() if name not in ("", "total") and row[column] != "-"]
        assert abs(sum(map(float, parts)) - float(total)) < 0.1
    assert "\nfits, " in out and "longest completion: " in out and "FLOPs of a step on all GPUs: prefill " in out
    assert "at 40 % MFU" in out and "estimate: " in out and "; sharding that fits: fsdp2\n" in out
    assert cli.main([*arguments, "ddp"]) == 1
    out = capsys.readouterr().out
    assert "does not fit: " in out and "largest micro-batch that fits: none (of " in out


def test_plan_as_json_follows_the_options_of_a_run(capsys):
    def plan(*options):
        code = cli.main(["plan", *PLAN, "--bf16", "--json", *options])
        report = json.loads(capsys.readouterr().out)
        assert code == (0 if report["fits"] else 1)
        return report

    plain = plan()
    sums = {phase: sum(own.values()) for phase, own in plain["phases_gib"].items()}
    assert plain["peak_gib"] == pytest.approx(max(sums.values())) and sums[plain["peak_phase"]] == max(sums.values())
    assert plain["flops"]["recompute"] == 0 and plain["checkpointing"] == "none needed"
    assert plan("--beta", "0.1")["phases_gib"]["rollout"]["reference"] == pytest.approx(4 * 501_836_640 / 2**30)
    assert "old_logps" in plan("--num_iterations", "2")["phases_gib"] and "old_logps" not in plain["phases_gib"]
    assert plan("--lora_r", "16")["peak_gib"] < plain["peak_gib"]
    long = ["--max_completion_length", "4096", "--per_device_train_batch_size", "32"]
    wide, wrapped = plan(*long), plan(*long, "--gradient_checkpointing")
    assert wrapped["peak_gib"] < wide["peak_gib"] and wrapped["flops"]["recompute"] > 0
    assert re.fullmatch(r"--gradient_checkpointing --gradient_checkpointing_every \d+", wide["checkpointing"])
    advised = plan(*long, *wide["checkpointing"].split())
    assert advised["fits"] and advised["flops"]["recompute"] > 0
    assert not wide["fits"] and 1 <= wide["largest_micro_batch"] < 32 and wide["largest_completion"] < 4096
    assert plan(*long, "--attention", "flex")["peak_gib"] < wide["peak_gib"]
    fitting = plan(*long[:2], "--per_device_train_batch_size", "8", "--attention", "flex", "--prompt_tokens", "1024")
    assert fitting["fits"] and fitting["largest_completion"] >= 4096


def test_plan_reads_a_folder(tmp_path, capsys):
    tiny_config().save_pretrained(tmp_path)
    lengths = ["--prompt_tokens", "32", "--max_completion_length", "96"]  # all of its positions
    assert cli.main(["plan", "--model", str(tmp_path), "--gpus", "L40S", *lengths]) == 0
    assert f"{tmp_path}, 0.00B parameters, on 1xL40S" in capsys.readouterr().out


def test_plan_of_a_config_without_a_whole_number_of_positions_is_an_error(tmp_path, capsys):
    tiny_config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": "many"}))
    assert cli.main(["plan", "--model", str(tmp_path), "--gpus", "L40S"]) == 2
    assert "max_position_embeddings is 'many'; mend it, or give another one" in capsys.readouterr().err


def test_replay_prints_both_objectives(tmp_path, capsys):
    path = capsule(tmp_path / "c")
    changes = ["--loss_type", "cispo", "--epsilon_high", "5", "--delta", "none", "--use_bias_correction_kl", "false"]
    assert cli.main(["replay", path, *changes]) == 0
    out = capsys.readouterr().out
    assert "update 12: grad_norm is inf" in out and "cosine of these gradients" in out
    lines = {line[:30].strip(): line[30:].split() for line in out.splitlines()}
    assert lines["loss_type"] == ["dapo", "cispo"] and lines["delta"] == ["3.0", "None"]
    assert lines["use_bias_correction_kl"] == ["True", "False"]
    assert float(lines["loss"][0]) != float(lines["loss"][1]) and "stand for them" not in out
    assert cli.main(["replay", path, "--no_use_bias_correction_kl"]) == 0  # as a recipe takes it
    assert "use_bias_correction_kl                    True           False" in capsys.readouterr().out
    assert cli.main(["replay", path, "--use_bias_correction_kl"]) == 0
    assert "use_bias_correction_kl" not in capsys.readouterr().out


def command_says(tmp_path):
    """Each command with what makes it print; the recipe ends the process as a trainer under the doctor does."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n")
    saying = recipe(tmp_path, "def train(arguments):\n    print('no check failed')\n    raise SystemExit(0)")
    return [["plan", *PLAN], ["report", str(tmp_path)], ["doctor", saying], ["replay", capsule(tmp_path / "c")]]


@pytest.mark.parametrize("command", range(4), ids=["plan", "report", "doctor", "replay"])
def test_output_that_nobody_reads_ends_a_command_quietly(tmp_path, clean_imports, monkeypatch, command):
    read, write = os.pipe()
    os.close(read)  # as head does after its first line
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        assert cli.main(command_says(tmp_path)[command]) == 128 + signal.SIGPIPE
        print("more")
        closed.flush()  # goes nowhere, without an error at the interpreter's end


def test_another_broken_pipe_is_an_error_of_its_own(tmp_path, clean_imports):
    with pytest.raises(BrokenPipeError, match="of a worker"):
        cli.main(["doctor", recipe(tmp_path, "def train(arguments): raise BrokenPipeError('of a worker')")])


def test_help_of_the_command_imports_nothing_of_the_library(tmp_path):
    """The file itself is light: what a command needs it imports when it runs."""
    code = (
        "import runpy, sys; sys.argv = ['grpo-moe', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'grpo_moe' / 'cli.py')!r}, run_name='__main__')\n"
        "except SystemExit as end: print(end.code, [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def recipe(tmp_path, body):
    """A recipe whose neighbour holds the training, as recipes/ do."""
    (tmp_path / "recipe.py").write_text(RECIPE)
    (tmp_path / "beside.py").write_text(body)
    return str(tmp_path / "recipe.py")


@pytest.fixture
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("beside", None)


def test_a_recipe_runs_with_its_arguments_and_its_exit_code(tmp_path, clean_imports, capsys):
    body = f"""
import os
def train(arguments):
    print("given", arguments, os.environ[{DOCTOR_VARIABLE!r}])
    raise SystemExit(int(arguments[1]))
"""
    path = recipe(tmp_path, body)
    for code in (0, 1):
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", path, "--seed", str(code)])
        assert ended.value.code == code
        assert f"given ['--seed', '{code}'] 1" in capsys.readouterr().out
        assert DOCTOR_VARIABLE not in os.environ


def test_a_recipe_that_trains_nothing_is_an_error(tmp_path, clean_imports, capsys):
    assert cli.main(["doctor", recipe(tmp_path, "def train(arguments): pass")]) == 2
    assert "recipe must call GRPOTrainer.train, got none" in capsys.readouterr().err


TRAINING = """
import time
from tiny import prompt_rows, tiny_model, tokenizer
from grpo_moe import GRPOConfig, GRPOTrainer

def honest(completions, **columns):
    return [text.count("a") / (len(text) + 1) for text in completions]

def broken(completions, **columns):
    return [columns["answer"]]

def late(completions, **columns):
    time.sleep(1.5)

def first_only(completions, **columns):
    return [0.5] + [0.0] * (len(completions) - 1)

def train(arguments):
    args = GRPOConfig(output_dir=arguments[0], per_device_train_batch_size=4, num_generations=4,
                      max_completion_length=6, use_cpu=True, show_progress=False, reward_timeout=0.5)
    reward = {"honest": honest, "first_only": first_only, "broken": broken, "late": late}[arguments[1]]
    GRPOTrainer(tiny_model(), reward, args, prompt_rows(6), processing_class=tokenizer()).train()
"""


@pytest.mark.parametrize(("reward", "code"), [("honest", 0), ("first_only", 1)])
def test_doctor_examines_a_recipe_and_trains_nothing(tmp_path, clean_imports, capsys, reward, code):
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor", recipe(tmp_path, TRAINING), str(tmp_path / "run"), reward])
    out = capsys.readouterr().out
    assert ended.value.code == code, out
    assert ("FAIL reward order" in out) == bool(code) and "group alignment" in out
    assert not list((tmp_path / "run").iterdir())


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            "broken",
            "reward function 'broken' raised KeyError: 'answer'; it was called with 2 completions and .*beside.py",
        ),
        (
            "late",
            "reward function 'late' must return within 0.5 s, got nothing for 2 completions; raise the time limit",
        ),
    ],
)
@pytest.mark.parametrize("as_recipe", [False, True])
def test_a_reward_function_that_fails_at_once_is_one_line_and_no_failed_check(
    tmp_path, clean_imports, monkeypatch, capsys, reward, message, as_recipe
):
    arguments = ["doctor", recipe(tmp_path, TRAINING), str(tmp_path / "run"), reward]
    if as_recipe:  # with recipes/running.py around it
        monkeypatch.syspath_prepend(str(ROOT / "recipes"))
        guarded = "import running\n" + RECIPE.replace("train(sys.argv[1:])", "running.run(lambda: train(sys.argv[1:]))")
        (tmp_path / "recipe.py").write_text(guarded)
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        code = ended.value.code
    else:
        code = cli.main(arguments)
    said = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert code == 2 and len(said) == 1 and re.search(f"error: {message}", said[0])
