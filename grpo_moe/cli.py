"""The command grpo-moe: a run as a page, a recipe examined before it runs, a failed step replayed by another loss."""

from __future__ import annotations

import argparse
import dataclasses
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

# modules of the library are imported by the command that needs them: --help must not wait for torch

_COMMANDS_HELP = """\
commands:
  report RUN [--out FILE]            one self-contained HTML page of a run folder
  doctor RECIPE [ARGUMENTS ...]      examine what a recipe would train, instead of training; exit code 1 on a fault
  replay CAPSULE [--OPTION VALUE]    loss and gradient of a kept step, under other options of the loss

grpo-moe COMMAND --help says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns 0, 1 for a fault that the doctor found, or 2 for wrong arguments or files."""
    parser = argparse.ArgumentParser(
        prog="grpo-moe", epilog=_COMMANDS_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=_COMMANDS)
    _add_rest(parser)
    chosen = parser.parse_args(argv)
    try:
        return _COMMANDS[chosen.command](chosen.arguments)
    except ValueError as error:
        print(f"grpo-moe {chosen.command}: error: {error}", file=sys.stderr)
        return 2


class _OneLineParser(argparse.ArgumentParser):
    """Without the usage before an error, which is a page long where there are many options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _add_rest(parser: argparse.ArgumentParser, text: str | None = None) -> None:
    """What follows, which may be nothing; Python 3.11 says that something is required."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=text).required = False


def _report(argv: list[str]) -> int:
    parser = _OneLineParser(prog="grpo-moe report", description="Writes a run folder as one HTML page.")
    parser.add_argument("run", help="the output_dir of a run, finished or not")
    parser.add_argument("--out", help="file to write; RUN/report.html by default")
    arguments = parser.parse_args(argv)
    from grpo_moe.rl.html_report import write_html_report

    print(write_html_report(arguments.run, arguments.out))
    return 0


def _doctor(argv: list[str]) -> int:
    """Runs the recipe as a script; its ``GRPOTrainer.train`` sees the variable, examines itself and exits."""
    parser = _OneLineParser(
        prog="grpo-moe doctor", description="Runs a recipe up to the point where it would train, and examines that."
    )
    parser.add_argument("recipe", help="a script that calls GRPOTrainer.train")
    _add_rest(parser, "those of the recipe")
    arguments = parser.parse_args(argv)
    recipe = Path(arguments.recipe)
    if not recipe.is_file():
        raise ValueError(f"recipe must be a Python file, got {recipe}; there is none")
    from grpo_moe.rl.doctor import DOCTOR_VARIABLE

    os.environ[DOCTOR_VARIABLE] = "1"
    sys.argv = [str(recipe), *arguments.arguments]
    sys.path.insert(0, str(recipe.resolve().parent))  # as for a script: its neighbours can be imported
    try:
        runpy.run_path(str(recipe), run_name="__main__")
    finally:
        del os.environ[DOCTOR_VARIABLE]
    raise ValueError(f"recipe must call GRPOTrainer.train, got none in {recipe}; nothing was examined")


def _replay(argv: list[str]) -> int:
    parser = _OneLineParser(
        prog="grpo-moe replay",
        description="Computes loss and gradient of a kept step as they were and with other options.",
    )
    parser.add_argument("capsule", help="a file of RUN/capsules")
    from grpo_moe.ops import LossConfig
    from grpo_moe.rl.capsule import load_capsule, loss_options, replay_capsule, replay_table

    texts = {field.name: field.metadata["help"] for field in dataclasses.fields(LossConfig)}
    for name, read in loss_options().items():
        parser.add_argument(f"--{name}", type=read, default=argparse.SUPPRESS, help=texts[name])
    changes = vars(parser.parse_args(argv))
    capsule = load_capsule(changes.pop("capsule"))
    print(f"update {capsule.step}: {capsule.reason}")
    if capsule.logps_name != "current_logps":
        print(f"no log-probabilities of the policy at that update are in it: {capsule.logps_name} stand for them")
    print(replay_table(replay_capsule(capsule, **changes)))
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {"report": _report, "doctor": _doctor, "replay": _replay}

if __name__ == "__main__":
    sys.exit(main())
