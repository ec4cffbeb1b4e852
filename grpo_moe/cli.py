"""The command grpo-moe: a run planned, a recipe examined, a run as a page, a failed step replayed by another loss."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_moe.arguments import OneLineParser
from grpo_moe.text import clean, printable

if TYPE_CHECKING:
    from grpo_moe.rl.config import GRPOConfig

# modules of the library are imported by the command that needs them: --help must not wait for torch

_COMMANDS_HELP = """\
commands:
  plan --model M --gpus 8xH200 [...] memory and FLOPs of a step before a GPU is rented; exit code 1 if it does not fit
  report RUN [--out FILE]            one self-contained HTML page of a run folder
  doctor RECIPE [ARGUMENTS ...]      examine what a recipe would train, instead of training; exit code 1 on a fault
  replay CAPSULE [--OPTION VALUE]    loss and gradient of a kept step, under other options of the loss

grpo-moe COMMAND --help says more.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns:
        0; 1 for what the doctor faults or a plan that does not fit, 2 for wrong input, 141 (128 + SIGPIPE) where nobody
        reads the output any more, as under ``| head``.
    """
    try:
        try:
            return _run(argv)
        finally:
            sys.stdout.flush()  # not at the interpreter's end, where nobody could catch it
    except BrokenPipeError:
        if not _output_is_closed():  # another pipe, as of a recipe
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must go somewhere
        return 141


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="grpo-moe", epilog=_COMMANDS_HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=_COMMANDS)
    _add_rest(parser)
    chosen = parser.parse_args(argv)
    try:
        return _COMMANDS[chosen.command](chosen.arguments)
    except ValueError as error:
        print(f"grpo-moe {chosen.command}: error: {printable(error)}", file=sys.stderr)
        return 2


def _output_is_closed() -> bool:
    try:
        print(flush=True)  # a line: under python -u there is nothing to flush
    except BrokenPipeError:
        return True
    return False


def _add_rest(parser: argparse.ArgumentParser, text: str | None = None) -> None:
    """What follows, which may be nothing; Python 3.11 says that something is required."""
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=text).required = False


def _plan(argv: list[str]) -> int:
    from grpo_moe.planning import ATTENTIONS, SHARDINGS
    from grpo_moe.rl.config import GRPOConfig
    from grpo_moe.rl.options import OptionsParser

    parser = OptionsParser(
        GRPOConfig,
        prog="grpo-moe plan",
        allow_abbrev=False,
        description="Memory of a step by phase and category, whether it fits, and what would. Takes every option of "
        "GRPOConfig; batch sizes are those of one process, one on each GPU.",
    )
    parser.add_argument("--model", required=True, help="gptoss-lite, qwen3-30b-a3b, ..., or a folder with config.json")
    parser.add_argument("--gpus", required=True, help="number and kind: H200, 8xH100, 2xA100-80, ...")
    parser.add_argument("--sharding", choices=SHARDINGS, help="none on one GPU, ddp on several by default")
    parser.add_argument("--prompt_tokens", type=int, default=256, help="of the longest prompt")
    parser.add_argument(
        "--lora_r", type=int, default=0, help="adapters of this rank on attention; 0: everything trains"
    )
    parser.add_argument("--lora_experts", action="store_true", help="adapters of the same rank on every expert too")
    parser.add_argument("--weights", choices=("fp32", "bf16"), default="fp32", help="dtype that the model is loaded in")
    parser.add_argument("--attention", choices=ATTENTIONS, help="by default what the trainer runs for the model")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    options = parser.parse_args(argv)
    args = GRPOConfig(**{field.name: getattr(options, field.name) for field in dataclasses.fields(GRPOConfig)})
    report = _plan_report(args, options)
    print(json.dumps(report, indent=2) if options.json else _plan_table(report))
    return 0 if report["fits"] else 1


def _plan_report(args: GRPOConfig, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that ``grpo-moe plan`` says; memory in GiB on each GPU."""
    from grpo_moe import planning
    from grpo_moe.rl.forecast import run_shape

    num_gpus, gpu = planning.parse_gpus(options.gpus)
    sharding = options.sharding or ("none" if num_gpus == 1 else "ddp")
    config = _config_of(options.model)
    shape, run, where = (
        _shape_of(config, options.model),
        run_shape(
            args,
            config,
            prompt_tokens=options.prompt_tokens,
            lora_rank=options.lora_r,
            lora_experts=options.lora_experts,
            attention=options.attention,
            weight_bytes=4 if options.weights == "fp32" else 2,
        ),
        (gpu, num_gpus, sharding),
    )
    _check_context(config, options.model, run)
    plan = planning.plan_memory(shape, run, *where)
    flops = planning.grpo_step_flops(
        shape,
        num_sequences=args.prompts_per_rollout * args.num_generations * num_gpus,
        num_generations=args.num_generations,
        prompt_tokens=run.prompt_tokens,
        completion_tokens=args.max_completion_length,
        num_iterations=args.num_iterations,
        old_logps=run.old_logps,
        reference=run.reference,
        checkpoint_period=run.checkpoint_period,
        frozen=run.lora_rank > 0,
    )
    try:
        period = planning.choose_checkpointing(shape, run, *where)
        flags = f"--gradient_checkpointing --gradient_checkpointing_every {period}"
        checkpointing = "none needed" if period is None else flags
    except ValueError:
        checkpointing = "does not fit with every block checkpointed either"
    others = () if num_gpus == 1 else ("ddp", "fsdp2")
    gib = 2**30
    return {
        "model": options.model,
        "parameters": shape.total_parameters,
        "gpu": gpu.name,
        "num_gpus": num_gpus,
        "sharding": sharding,
        "capacity_gib": plan.capacity_bytes / gib,
        "phases_gib": {phase: {name: x / gib for name, x in own.items()} for phase, own in plan.phases.items()},
        "peak_phase": plan.peak_phase,
        "peak_gib": plan.peak_bytes / gib,
        "fits": plan.fits,
        "rollout_rows": [plan.rollout_rows, plan.wanted_rows],
        "largest_micro_batch": planning.largest_micro_batch(shape, run, *where),
        "largest_completion": planning.largest_completion(
            shape, run, *where, limit=_most_tokens(config, run.prompt_tokens)
        ),
        "checkpointing": checkpointing,
        "shardings_that_fit": [x for x in others if planning.plan_memory(shape, run, gpu, num_gpus, x).fits],
        "flops": flops,
        "seconds_at_mfu_0.4": sum(flops.values()) / (0.4 * gpu.peak_flops * num_gpus),
    }


def _config_of(model: str) -> Any:
    """Of a folder, or of a published model by name."""
    import grpo_moe  # noqa: F401  registers GPT-OSS-Lite
    from grpo_moe.planning import preset_config

    if not Path(model).is_dir():
        return preset_config(model)
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, trust_remote_code=False)
    except Exception as error:  # of many kinds: no file, damaged, unknown architecture
        raise _bad_model(model, error) from error


def _shape_of(config: Any, model: str) -> Any:
    from grpo_moe.planning import ModelShape

    try:
        return ModelShape.from_config(config)
    except Exception as error:  # a config of the folder may hold anything
        raise _bad_model(model, error) from error


def _bad_model(model: str, error: Exception) -> ValueError:
    return ValueError(
        f"model must be a folder with config.json of a causal LM, got {model!r}: {clean(error, 500)}; mend it, or give "
        "another one"
    )


def _context(config: Any) -> int | None:
    """Positions of the model; None where its configuration sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None) or None


def _check_context(config: Any, model: str, run: Any) -> None:
    context = _context(config)
    if not isinstance(context, int | None):
        raise _bad_model(model, ValueError(f"max_position_embeddings is {context!r}"))
    if context is not None and run.tokens > context:
        raise ValueError(
            f"prompt_tokens + max_completion_length must be at most the {context} positions of {model}, got "
            f"{run.prompt_tokens} + {run.completion_tokens}; lower --max_completion_length or --prompt_tokens"
        )


def _most_tokens(config: Any, prompt_tokens: int) -> int:
    """Of a completion in the model's context."""
    return max(1, (_context(config) or 2**17) - prompt_tokens)


def _plan_table(report: dict[str, Any]) -> str:
    phases = report["phases_gib"]
    names = sorted({name for own in phases.values() for name in own}, key=lambda name: -max(
        own.get(name, 0) for own in phases.values()
    ))  # fmt: skip
    where = f"{report['num_gpus']}x{report['gpu']} ({report['capacity_gib']:.1f} GiB each), {report['sharding']}"
    lines = [f"{report['model']}, {report['parameters'] / 1e9:.2f}B parameters, on {where}; GiB on each GPU", ""]
    lines.append(f"{'':22}" + "".join(f"{phase:>18}" for phase in phases))
    for name in names:
        cells = (own.get(name) for own in phases.values())
        lines.append(f"{name:22}" + "".join(f"{'-' if x is None else f'{x:.2f}':>18}" for x in cells))
    lines.append(f"{'total':22}" + "".join(f"{sum(own.values()):>18.2f}" for own in phases.values()))
    spare = report["capacity_gib"] - report["peak_gib"]
    verdict = f"fits, {spare:.1f} GiB to spare" if spare >= 0 else f"does not fit: {-spare:.1f} GiB too much"
    if spare >= 0 and not report["fits"]:
        verdict = "does not fit: no room for the keys and values of one sequence"
    rows, wanted = report["rollout_rows"]
    completion = report["largest_completion"]
    fitting = ", ".join(report["shardings_that_fit"]) or "neither ddp nor fsdp2"
    shardings = "" if report["num_gpus"] == 1 else f"; sharding that fits: {fitting}"
    flops = "  ".join(f"{phase} {count:.2e}" for phase, count in report["flops"].items() if count)
    lines += [
        "",
        f"{verdict}; peak {report['peak_gib']:.1f} GiB in {report['peak_phase']}",
        f"rollout: {rows} of {wanted} sequences at once",
        f"largest micro-batch that fits: {report['largest_micro_batch'] or 'none'} (of {wanted} rows); "
        "longest completion: "
        f"{f'{completion} tokens' if completion else 'none'}",
        f"gradient checkpointing: {report['checkpointing']}{shardings}",
        f"FLOPs of a step on all GPUs: {flops}",
        f"estimate: {report['seconds_at_mfu_0.4']:.3g} s a step at 40 % MFU throughout; decoding is slower than that",
    ]
    return "\n".join(lines)


def _report(argv: list[str]) -> int:
    parser = OneLineParser(prog="grpo-moe report", description="Writes a run folder as one HTML page.")
    parser.add_argument("run", help="the output_dir of a run, finished or not")
    parser.add_argument("--out", help="file to write; RUN/report.html by default")
    arguments = parser.parse_args(argv)
    from grpo_moe.rl.html_report import write_html_report

    print(write_html_report(arguments.run, arguments.out))
    return 0


def _doctor(argv: list[str]) -> int:
    """Runs the recipe as a script; its ``GRPOTrainer.train`` sees the variable, examines itself and exits."""
    parser = OneLineParser(
        prog="grpo-moe doctor", description="Runs a recipe up to the point where it would train, and examines that."
    )
    parser.add_argument("recipe", help="a script that calls GRPOTrainer.train")
    _add_rest(parser, "those of the recipe")
    arguments = parser.parse_args(argv)
    recipe = Path(arguments.recipe)
    if not recipe.is_file():
        raise ValueError(f"recipe must be a Python file, got {arguments.recipe!r}; there is none")
    try:
        ast.parse(recipe.read_bytes(), str(recipe))
    except (SyntaxError, ValueError) as error:  # ValueError: a null byte
        raise ValueError(f"recipe must be Python, got {recipe}: {clean(error, 500)}; mend it") from error
    from grpo_moe.rl.doctor import DOCTOR_VARIABLE

    os.environ[DOCTOR_VARIABLE] = "1"
    sys.argv = [str(recipe), *arguments.arguments]
    sys.path.insert(0, str(recipe.resolve().parent))  # as for a script: its neighbours can be imported
    try:
        runpy.run_path(str(recipe), run_name="__main__")
    except ModuleNotFoundError as error:
        frames = [x for x in traceback.extract_tb(error.__traceback__) if not x.filename.startswith("<frozen")]
        if frames[-1].filename != str(recipe):  # not of an import of its own
            raise
        raise ValueError(
            f"recipe must find what it imports, got {clean(error, 500)} in line {frames[-1].lineno} of {recipe}; "
            "install it"
        ) from error
    finally:
        del os.environ[DOCTOR_VARIABLE]
    raise ValueError(f"recipe must call GRPOTrainer.train, got none in {recipe}; nothing was examined")


def _replay(argv: list[str]) -> int:
    parser = OneLineParser(
        prog="grpo-moe replay",
        description="Computes loss and gradient of a kept step as they were and with other options.",
    )
    parser.add_argument("capsule", help="a file of RUN/capsules")
    from grpo_moe.ops import LossConfig
    from grpo_moe.rl.capsule import load_capsule, loss_options, replay_capsule, replay_table

    readers = loss_options()
    for field in dataclasses.fields(LossConfig):
        name, is_flag = field.name, isinstance(field.default, bool)
        bare = {"nargs": "?", "const": True} if is_flag else {}
        text = {"default": argparse.SUPPRESS, "help": field.metadata["help"]}
        parser.add_argument(f"--{name}", type=readers[name], **bare, **text)
        if is_flag:  # as in the options of a recipe
            parser.add_argument(f"--no_{name}", action="store_false", dest=name, **text)
    changes = vars(parser.parse_args(argv))
    capsule = load_capsule(changes.pop("capsule"))
    print(f"update {clean(capsule.step)}: {clean(capsule.reason)}")
    if capsule.logps_name != "current_logps":
        print(f"no log-probabilities of the policy at that update are in it: {capsule.logps_name} stand for them")
    print(replay_table(replay_capsule(capsule, **changes)))
    return 0


_COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": _plan,
    "report": _report,
    "doctor": _doctor,
    "replay": _replay,
}

if __name__ == "__main__":
    sys.exit(main())
