"""The README says what is there: made parts are up to date, its files exist, its commands have only known options."""

import dataclasses
import importlib
import json
import re
import shlex
import sys

import pytest
from readme_parts import README, with_parts

from grpo_moe import GRPOConfig
from grpo_moe.cli import main
from grpo_moe.ops.loss.config import LOSS_TYPES

ROOT = README.parent
TEXT = README.read_text(encoding="utf-8")
OURS = re.compile(r"(accelerate launch|python|grpo-moe) ")
LAUNCHER = {"--cpu", "--num_processes", "--config_file", "--machine_rank", "--main_process_ip", "--main_process_port"}


def commands():
    """Every command line of the README that runs something of ours: in blocks and inline, whatever stands before it."""
    blocks = "\n".join(re.findall(r"```bash\n(.*?)```", TEXT, re.S)).replace("\\\n", " ")
    lines = [part.split(" #")[0] for line in blocks.splitlines() for part in line.split("&&")]
    lines += re.findall(r"`([^`\n]+)`", TEXT)
    return sorted({line.strip() for line in lines if OURS.match(line.strip())})


def script_of(words):
    return next((word for word in words if re.fullmatch(r"(recipes|benchmark|tests)/\w+\.py", word)), None)


def known_options(script: str) -> set[str]:
    """Flags of a recipe: fields of the dataclasses that it parses. Of another script: what its parser adds."""
    if script.startswith("recipes"):
        sys.path.insert(0, str(ROOT / "recipes"))
        module = importlib.import_module(script.removeprefix("recipes/").removesuffix(".py"))
        own = [getattr(module, name, None) for name in ("RecipeConfig", "PublishedModel")]
        own.append(importlib.import_module("published").PublishedModel if not own[0] else None)
        classes = [GRPOConfig, *(cls for cls in own if cls)]
        return {"--help", "--config"} | {f"--{f.name}" for cls in classes for f in dataclasses.fields(cls)}
    sources = [ROOT / script, ROOT / "benchmark" / "harness.py"]
    return {flag for path in sources for flag in re.findall(r'add_argument\(\s*"(--[\w-]+)"', path.read_text())}


def test_made_parts_are_up_to_date():
    assert TEXT == with_parts(TEXT), "run: python tests/readme_parts.py"


def test_every_file_it_names_exists():
    named = set(re.findall(r"(?<![\w/.])((?:tests|benchmark|recipes|grpo_moe)/[\w/]+\.(?:py|yaml|jsonl|png|md))", TEXT))
    assert len(named) > 20
    assert not sorted(name for name in named if not (ROOT / name).exists())


@pytest.mark.parametrize("command", [c for c in commands() if not c.startswith("grpo-moe")])
def test_a_command_has_only_known_options(command):
    words = shlex.split(command)
    script = script_of(words)
    if script is None:  # of accelerate, python or a file of the user's
        return
    assert (ROOT / script).exists()
    at = words.index(script)
    assert {w for w in words[:at] if w.startswith("--")} <= LAUNCHER
    flags = {word.split("=")[0] for word in words[at + 1 :] if word.startswith("--")}
    assert flags <= known_options(script), flags - known_options(script)


def losses() -> tuple[str, dict[str, str]]:
    """The code under "The losses work on their own", and the other losses of its comment, each with its options."""
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", TEXT, re.S) if block.startswith("import torch\n"))
    named = re.search("# or (.*)", code)[1]
    return code, dict(re.findall(r"(\w+)(?: \(([^)]*)\))?(?:, |$)", named))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_the_losses_run_as_they_stand(loss_type):
    code, others = losses()
    assert {"dapo", *others} == set(LOSS_TYPES)
    if loss_type != "dapo":
        code, count = re.subn(r"LossConfig\(.*\)", f"LossConfig(loss_type={loss_type!r}, {others[loss_type]})", code)
        assert count == 1
    names: dict = {}
    exec(compile(code, str(README), "exec"), names)
    assert names["config"].loss_type == loss_type and names["out"].loss.isfinite()
    assert names["hidden_states"].grad.abs().sum() > 0 and names["lm_head_weight"].grad.abs().sum() > 0


def test_the_plan_that_it_shows_is_made(capsys):
    (command,) = (c for c in commands() if c.startswith("grpo-moe plan --model"))
    assert main([*shlex.split(command)[1:], "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["peak_gib"] > 0
