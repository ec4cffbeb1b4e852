"""Tables of bad files and command lines, as in bad_inputs.py; each function gets an empty folder to work in."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny import prompt_rows, share_of_letter, tiny_config, tiny_model, tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForSequenceClassification,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from grpo_moe import GptOssLiteForCausalLM, GRPOConfig, GRPOTrainer, cli
from grpo_moe.data import character_tokenizer
from grpo_moe.ops import LossConfig
from grpo_moe.rl import parse_args
from grpo_moe.rl.capsule import load_capsule, replay_capsule, save_capsule
from grpo_moe.rl.loading import load_policy, load_tokenizer
from grpo_moe.rl.run_folder import check_run_folder
from grpo_moe.types import RolloutBatch

from .bad_inputs import Bad

NAN = float("nan")


def said_by(main: Callable[[], Any]) -> None:
    """Runs what a shell would; raises ValueError with its one line of error where it ends as it should, with 2."""
    errors, argv, path = io.StringIO(), sys.argv, list(sys.path)
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main()
        except SystemExit as end:
            code = end.code
        finally:
            sys.argv, sys.path[:] = argv, path
    lines = [line for line in errors.getvalue().splitlines() if "error: " in line]
    if code != 2 or len(lines) != 1 or errors.getvalue().strip() != lines[0]:
        raise AssertionError(f"exit code {code}, said {errors.getvalue()[-500:]!r}")
    raise ValueError(lines[0].split("error: ", 1)[1])


def _command(*argv: str) -> Callable[[], None]:
    return partial(said_by, partial(cli.main, list(argv)))


def _capsule(path: Path) -> Path:
    ids = torch.arange(6).view(2, 3)
    batch = RolloutBatch(
        input_ids=torch.arange(8).view(2, 4), attention_mask=torch.ones(2, 4, dtype=torch.bool),
        prompt_lengths=torch.ones(2, dtype=torch.long), completion_ids=ids, completion_mask=ids >= 0,
        advantages=torch.tensor([1.0, -1.0]), sampling_logps=-ids.float() - 1,
    )  # fmt: skip
    return save_capsule(path, batch, LossConfig(), step=3, reason="grad_norm is inf")


def plans(folder: Path) -> Iterator[Bad]:
    """grpo-moe plan."""
    good = {"--model": "gptoss-lite", "--gpus": "H200"}

    def plan(**options: str) -> Callable[[], None]:
        given = good | {f"--{name}": value for name, value in options.items()}
        return _command("plan", *(text for pair in given.items() for text in pair))

    for name, values in {
        "gpus": ("", " ", "0xH100", "-1xH100", "8x", "x", "8xH20", "H100xH100", "1.5xH100", "8", "٣xH100x", "8×H100"),
        "model": ("", " ", "gpt-5", "GPTOSS-lite", str(folder / "nowhere"), "qwen3\n", "\0"),
        "prompt_tokens": ("0", "-1", "1.5", "nan", "many", "", "1" * 5000),
        "lora_r": ("-1", "1.5", "x"),
        "sharding": ("fsdp", "", "DDP"),
        "weights": ("fp16", "float32"),
        "attention": ("flash", ""),
        "num_generations": ("1", "0", "8.0", "x", "-8"),
        "learning_rate": ("nan", "inf", "x", "-1", ""),
        "dynamic_sampling": ("maybe", "2"),
        "loss_type": ("ppo", ""),
        "max_completion_length": ("0", "-5", "1e3"),
        "chat_template_kwargs": ("{", "[1]", "1"),
        "seed": ("-1", "99999999999", "0x10"),
    }.items():
        for value in values:
            says = "model must be|No such|lora_rank" if name == "model" else f"{name}|lora_rank"
            yield Bad(f"plan --{name} {value!r:.30}", plan(**{name: value}), says)
    for label, text in _bad_configs().items():
        own = folder / f"config {len(list(folder.iterdir()))}"
        own.mkdir()
        if text is not None:
            (own / "config.json").write_bytes(text)
        yield Bad(f"plan of a folder with {label}", plan(model=str(own)), "model must be")
    (folder / "file").write_text("x")
    yield Bad("plan of a file", plan(model=str(folder / "file")), "model must be")
    yield Bad("plan over two GPUs without sharding", plan(gpus="2xH100", sharding="none"), "sharding")


def _bad_configs() -> dict[str, bytes | None]:
    good = tiny_model().config.to_dict()
    return {
        "no config": None,
        "an empty file": b"",
        "half of JSON": json.dumps(good).encode()[:50],
        "no JSON": b"\x89PNG\r\n\x1a\n\xff\xfe",
        "a list": b"[1, 2]",
        "a number": b"5",
        "no model_type": json.dumps({k: v for k, v in good.items() if k != "model_type"}).encode(),
        "an unknown model_type": json.dumps(good | {"model_type": "nonsense"}).encode(),
        "model_type 5": json.dumps(good | {"model_type": 5}).encode(),
        "text for a size": json.dumps(good | {"hidden_size": "many"}).encode(),
        "no experts": json.dumps(good | {"num_experts": 0}).encode(),
        "a negative size": json.dumps(good | {"hidden_size": -8}).encode(),
        "null for a size": json.dumps(good | {"num_hidden_layers": None}).encode(),
        "more experts a token than experts": json.dumps(good | {"num_experts_per_tok": 9}).encode(),
        "heads that do not divide": json.dumps(good | {"num_key_value_heads": 3}).encode(),
        "a vision model": json.dumps({"model_type": "vit", "hidden_size": 8}).encode(),
    }


def reports(folder: Path) -> Iterator[Bad]:
    """grpo-moe report."""
    line = json.dumps({"step": 1, "reward": 0.5}).encode() + b"\n"
    for number, (label, name, content) in enumerate((
        ("an empty file", "metrics.jsonl", b""),
        ("zeros", "metrics.jsonl", b"\0" * 64 + b"\n" + line),
        ("another encoding", "metrics.jsonl", '{"step": 1}\n'.encode("utf-16") + line),
        ("lists", "metrics.jsonl", b"[1]\n" + line),
        ("a step of text", "metrics.jsonl", b'{"step": "1"}\n' + line),
        ("a step of 400 digits", "metrics.jsonl", b'{"step": 1' + b"0" * 400 + b"}\n" + line),
        ("a step of 5000 digits", "metrics.jsonl", b'{"step": 1' + b"0" * 5000 + b"}\n" + line),
        ("deep JSON", "metrics.jsonl", b"[" * 100_000 + b"\n" + line),
        ("text for a number", "metrics.jsonl", b'{"step": 1, "reward": "high"}\n' + line),
        ("a dict for a number", "metrics.jsonl", b'{"step": 1, "reward": {}}\n' + line),
        ("half a line amid others", "metrics.jsonl", b'{"step": 1, "rew\n' + line),
        ("a summary of half JSON", "summary.json", b'{"steps": 3, '),
        ("a summary that is a list", "summary.json", b"[]"),
        ("a summary of bytes", "summary.json", b"\xff\xfe\0\0"),
        ("a summary of deep JSON", "summary.json", b"[" * 100_000),
        ("a load of text", "expert_load.jsonl", b'{"step": 1, "load": "x"}\n'),
        ("a load of lists that do not match", "expert_load.jsonl", b'{"step": 1, "load": [[1, 2], [3]]}\n'),
        ("a load below 0", "expert_load.jsonl", b'{"step": 1, "load": [[1, -2]]}\n'),
    )):  # fmt: skip
        run = folder / f"run {number}"
        (run / name).parent.mkdir(parents=True)
        (run / "metrics.jsonl").write_bytes(line)
        (run / name).write_bytes(content)
        yield Bad(f"report with {label}", _command("report", str(run)), f"{Path(name).stem}|run must be a folder")
    run = folder / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_bytes(line)
    for out in (str(run), str(run / "metrics.jsonl" / "page.html"), "", "\0", "/proc/page.html"):
        yield Bad(f"report --out {out!r:.20}", _command("report", str(run), "--out", out), "out must be")
    for name in ("", "\0", str(folder / "nowhere"), str(run / "metrics.jsonl")):
        yield Bad(f"report of {name!r:.20}", _command("report", name), "run must be a folder|metrics.jsonl")
    folders = folder / "folders"
    (folders / "metrics.jsonl").mkdir(parents=True)
    yield Bad("report with a folder of that name", _command("report", str(folders)), "metrics.jsonl must be a file")
    yield Bad("report without a run", _command("report"), "run")
    yield Bad("report of two", _command("report", "a", "b"), "unrecognized arguments: b")


def replays(folder: Path) -> Iterator[Bad]:
    """grpo-moe replay, and the capsules themselves."""
    whole = _capsule(folder / "whole")
    content, tensors = whole.read_bytes(), load_file(whole)
    known = json.loads(json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]["capsule"])

    def changed(name: str, metadata: Any = None, **changes: Any) -> Path:
        kept = {k: v for k, v in {**tensors, **changes}.items() if v is not None}
        text = json.dumps(known) if metadata is None else metadata
        save_file(kept, folder / name, metadata={"capsule": text})
        return folder / name

    for number, data in enumerate(
        (b"", b"x", b"\0" * 100, content[:40], content[:-8], b"\xff" * 8 + content[8:], b"{}")
    ):
        path = folder / f"bytes {number}"
        path.write_bytes(data)
        yield Bad(f"replay of bytes {data[:8]!r}", _command("replay", str(path)), "capsule must be")
    for name in ("", "\0", str(folder), str(folder / "nowhere"), "/dev/null"):
        yield Bad(f"replay of {name!r:.20}", _command("replay", name), "capsule must be")
    metadata = {
        "null": "null", "no JSON": "{", "a list": "[]", "another format": json.dumps(known | {"format": "2"}),
        "no config": json.dumps({k: v for k, v in known.items() if k != "config"}),
        "a config of text": json.dumps(known | {"config": "dapo"}),
        "an unknown option": json.dumps(known | {"config": known["config"] | {"lr": 1}}),
        "an option of text": json.dumps(known | {"config": known["config"] | {"epsilon": "0.2"}}),
        "an unknown loss": json.dumps(known | {"config": known["config"] | {"loss_type": "ppo"}}),
        "a step of text": json.dumps(known | {"step": "3"}),
        "a count of text": json.dumps(known | {"num_loss_tokens": "many"}),
        "a count below 0": json.dumps(known | {"num_sequences": -1}),
    }  # fmt: skip
    for number, (label, text) in enumerate(metadata.items()):
        yield Bad(f"replay with {label}", _command("replay", str(changed(f"meta {number}", text))), "capsule must be")
    wrong = {
        "no mask": {"completion_mask": None}, "no ids": {"input_ids": None},
        "another tensor": {"weights": torch.ones(2)},
        "a wider mask": {"completion_mask": torch.ones(2, 4, dtype=torch.bool)},
        "a 0-dim tensor": {"advantages": torch.tensor(1.0)},
        "a row more": {"advantages": torch.ones(3)}, "flat logps": {"sampling_logps": torch.ones(6)},
        "advantages of [B, T + 1]": {"advantages": torch.ones(2, 4)},
        "ids of 3 dimensions": {"completion_ids": torch.ones(2, 3, 1)},
        "integer logps": {"sampling_logps": torch.ones(2, 3, dtype=torch.int64)},
    }  # fmt: skip
    for number, (label, changes) in enumerate(wrong.items()):
        path = changed(f"tensors {number}", **changes)
        yield Bad(f"replay with {label}", _command("replay", str(path)), "capsule must be")
    for option, value, says in (
        ("loss_type", "ppo", "loss_type must be"), ("epsilon", "-1", "epsilon must be"),
        ("epsilon", "nan", "epsilon must be"),
        ("epsilon", "", "epsilon"), ("beta", "0.1", "ref_logps must be given"),
        ("temperature", "2", "temperature must be"),
        ("top_entropy_quantile", "0.5", "entropy must be given"),
        ("max_completion_length", "1.5", "max_completion_length"),
        ("delta", "1.0", "delta must be"), ("sampler_clip_max", "2", "sampler_clip_max must be"),
        ("kl_estimator", "k4", "kl_estimator"),
    ):  # fmt: skip
        yield Bad(f"replay --{option} {value}", _command("replay", str(whole), f"--{option}", value), says)
    capsule = load_capsule(whole)
    for name, value in (("lr", 1), ("epsilon", "0.2"), ("loss_type", None), ("beta", True)):
        yield Bad(f"replay_capsule({name}={value!r})", partial(replay_capsule, capsule, **{name: value}), name)


def doctors(folder: Path) -> Iterator[Bad]:
    """grpo-moe doctor, up to where a recipe would load anything."""
    for number, (label, content) in enumerate((
        ("nothing", b""), ("a fault of syntax", b"def main(:\n"), ("bytes", b"\x89PNG\r\n\x1a\n\xff\xfe\0"),
        ("zeros", b"\0" * 20), ("wrong options", b"from grpo_moe import GRPOConfig\nGRPOConfig(num_generations=1)\n"),
        ("a module that is not there", b"import no_such_module_anywhere\n"), ("no training", b"print('done')\n"),
        ("tabs and spaces", b"if True:\n\tx = 1\n        y = 2\n"), ("another encoding", b"# coding: nonsense\n"),
    )):  # fmt: skip
        path = folder / f"recipe_{number}.py"
        path.write_bytes(content)
        yield Bad(f"doctor of {label}", _command("doctor", str(path)), "recipe must|num_generations must")
    for name in ("", "\0", str(folder), str(folder / "none.py"), "/dev/null"):
        yield Bad(f"doctor of {name!r:.20}", _command("doctor", name), "recipe must be")
    yield Bad("doctor of nothing", _command("doctor"), "recipe")


def arguments(folder: Path) -> Iterator[Bad]:
    """Flags and YAML files of a recipe, as its own command line reads them."""

    def read(*argv: str) -> Callable[[], None]:
        return partial(said_by, partial(_as_recipe, lambda: parse_args(GRPOConfig, argv=list(argv))))

    for flag, value, says in (
        ("--learning_rate", "fast", "learning_rate"), ("--learning_rate", "nan", "learning_rate"),
        ("--learning_rate", "1e400", "learning_rate"), ("--max_steps", "3.5", "max_steps"),
        ("--max_steps", "", "max_steps"), ("--max_steps", "9" * 5000, "max_steps"), ("--bf16", "maybe", "bf16"),
        ("--loss_type", "", "loss_type"), ("--seed", "-1", "seed"), ("--save_steps", "never", "save_steps"),
        ("--learning_rte", "1", "learning_rte"), ("--lr", "1", "lr"), ("--output_dir", "", "output_dir"),
        ("--chat_template_kwargs", "{'a': 1}", "chat_template_kwargs"), ("--eval_steps", "0", "eval_steps"),
        ("--config", "", "--config must be"), ("--config", str(folder), "--config must be"),
        ("--config", str(folder / "none.yaml"), "--config must be"), ("--config", "a\0b", "--config must be"),
    ):  # fmt: skip
        yield Bad(f"{flag} {value!r:.30}", read(flag, value), says)
    yield Bad("--config without a value", read("--config"), "config")
    yield Bad("--max_steps without a value", read("--max_steps"), "max_steps")
    yield Bad("a word", read("train"), "train")
    for number, (text, says) in enumerate((
        ("max_steps: three", "max_steps"), ("max_steps: 3.5", "max_steps"), ("max_steps: true", "max_steps"),
        ("max_steps: [3]", "max_steps"), ("max_steps: {a: 1}", "max_steps"), ("max_steps:", "max_steps"),
        ("max_steps: 2024-01-01", "max_steps"), ("max_steps: !!binary aGVsbG8=", "max_steps"),
        ("bf16: maybe", "bf16"),
        ("bf16: 1", "bf16"), ("learning_rate: .nan", "learning_rate"), ("learning_rate: .inf", "learning_rate"),
        ("learning_rate: [1, 2]", "learning_rate"), ("learning_rate: fast", "learning_rate"),
        ("output_dir: 5", "output_dir"),
        ("output_dir:", "output_dir"), ("loss_type: no", "loss_type"), ("report_to: no", "report_to"),
        ("report_to: [wandb]", "report_to"), ("seed: 0x1_0000_0000", "seed"),
        ("chat_template_kwargs: [a]", "chat_template_kwargs"),
        ("chat_template_kwargs: text", "chat_template_kwargs"), ("learning_rte: 1", "learning_rte"),
        ("max_steps: 3\nmax_steps: 4", "max_steps"), ("a: &a [*a]", "--config must be|a"),
        ("- max_steps", "--config must be"),
        ("max_steps: 3\n---\nseed: 4", "--config must be"),
        ("max_steps: !!python/object:os.system 3", "--config must be"),
        ("{max_steps: 3", "--config must be"), ("max_steps: 3\n\tseed: 4", "--config must be"),
        ("? [a]\n: 1", "--config must be"),
        ("[" * 5000, "--config must be"), ("5", "--config must be"), ("text", "--config must be"),
        ("~: 3", "--config must be"),
    )):  # fmt: skip
        path = folder / f"{number}.yaml"
        path.write_text(text)
        yield Bad(f"YAML {text!r:.40}", read("--config", str(path)), says)
    (folder / "bytes.yaml").write_bytes(b"max_steps: \xff\xfe3")
    yield Bad("YAML of bytes", read("--config", str(folder / "bytes.yaml")), "--config must be")


def _as_recipe(main: Callable[[], Any]) -> None:
    """As recipes/running.py runs it."""
    try:
        main()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def recipes(folder: Path) -> Iterator[Bad]:
    """The main recipe's own flags."""
    here = str(Path(__file__).parents[2] / "recipes")
    if here not in sys.path:
        sys.path.insert(0, here)
    import dapo_gptoss
    from running import run

    def launch(*argv: str) -> Callable[[], None]:
        def main() -> None:
            sys.argv = ["dapo_gptoss.py", "--output_dir", str(folder / "run"), *argv]
            run(dapo_gptoss.main)

        return partial(said_by, main)

    for argv, says in (
        (["--preset", "tpu"], "preset must be"), (["--preset", ""], "preset must be"),
        (["--warm_start_steps", "0"], "warm_start_steps"),
        (["--warm_start_steps", "x"], "warm_start_steps"), (["--task", "chess"], "task|model_name_or_path"),
        (["--task", "chess", "--model_name_or_path", str(folder)], "task must be"),
        (["--dataset_name", str(folder / "none.jsonl")], "dataset_name|model_name_or_path"),
        (["--dataset_name", str(folder / "none.jsonl"), "--model_name_or_path", str(folder)], "dataset_name must be"),
        (["--task", "reasoning_gym:x", "--dataset_name", "x"], "task must be"),
        (["--max_completion_length", "200"], "max_completion_length must be"),
        (["--num_generations", "7"], "num_generations must be"),
        (["--resume_from_checkpoint", str(folder / "none")], "resume_from_checkpoint must be"), (["--lr", "1"], "lr"),
        (["--output_dir", str(folder / "file")], "output_dir must be"),
        (["--output_dir", "a\0b"], "output_dir must be"),
    ):  # fmt: skip
        (folder / "file").write_text("x")
        yield Bad(f"dapo_gptoss.py {' '.join(argv)[-60:]!r}", launch(*argv), says)


def models(folder: Path) -> Iterator[Bad]:
    """Folders of models and tokenizers."""
    whole = folder / "whole"
    tiny_model().save_pretrained(whole)
    tokenizer().save_pretrained(whole)
    weights = (whole / "model.safetensors").read_bytes()

    def copy(name: str, **files: bytes | None) -> str:
        own = folder / name
        own.mkdir()
        for path in whole.iterdir():
            content = files.get(path.stem, path.read_bytes())
            if content is not None:
                (own / path.name).write_bytes(content)
        return str(own)

    for number, (label, text) in enumerate(_bad_configs().items()):
        path = copy(f"config {number}", config=text)
        yield Bad(f"a model with {label}", partial(load_policy, path), "model_name_or_path must be")
    tensors = load_file(whole / "model.safetensors")
    first = next(iter(tensors))
    other, less = io.BytesIO(), folder / "less.safetensors"
    torch.save(tensors, other)
    save_file({k: v for k, v in tensors.items() if k != first}, less, metadata={"format": "pt"})
    for label, content in {
        "no weights": None, "empty weights": b"", "half of the weights": weights[: len(weights) // 2],
        "weights of zeros": b"\0" * 100, "pickled weights": other.getvalue(), "a tensor missing": less.read_bytes(),
    }.items():  # fmt: skip
        path = copy(label, model=content)
        yield Bad(f"a model with {label}", partial(load_policy, path), "model_name_or_path must")
    path = copy("sizes", config=json.dumps(tiny_model(hidden_size=16).config.to_dict()).encode())
    yield Bad("weights of another size", partial(load_policy, path), "model_name_or_path must be")
    for value in ("", None, 5, ["x"], torch.nn.Linear(2, 2), tiny_model, str(folder / "nowhere"),
    str(whole / "config.json"),
                  "./no where", "a/b/c", "\0", "x" * 300, folder / "nowhere"):  # fmt: skip
        yield Bad(
            f"model {str(value)[-30:]!r}", partial(load_policy, value), "model must be|model_name_or_path must be"
        )
    for label, files in {
        "no tokenizer": {"tokenizer": None, "tokenizer_config": None},
        "half a tokenizer": {"tokenizer": b'{"version": '},
        "an empty tokenizer": {"tokenizer": b""}, "a tokenizer that is a list": {"tokenizer": b"[]"},
    }.items():  # fmt: skip
        path = copy(label, **files)
        yield Bad(f"a folder with {label}", partial(load_tokenizer, None, path), "processing_class must be")
    for value in (5, ["x"], object(), tokenizer, str(folder / "nowhere")):
        yield Bad(
            f"processing_class={str(value)[-30:]!r}", partial(load_tokenizer, value, None), "processing_class must be"
        )
    yield Bad("a model of no path", partial(load_tokenizer, None, tiny_model()), "processing_class must be given")


def trainers(folder: Path) -> Iterator[Bad]:
    """What GRPOTrainer itself is given, and where it writes."""
    options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "use_cpu": True}

    def build(model: Any = None, args: dict | None = None, **given: Any) -> Callable[[], None]:
        def call() -> None:
            made = {"output_dir": str(folder / "run"), **options, **(args or {})}
            parts = {
                "model": model if isinstance(model, torch.nn.Module) else tiny_model(**(model or {})),
                "reward_funcs": share_of_letter,
                "args": GRPOConfig(**made),
                "train_dataset": prompt_rows(4),
                "processing_class": tokenizer(),
            }
            GRPOTrainer(**{**parts, **given})

        return call

    (folder / "file").write_text("x")
    (folder / "with a file").mkdir()
    (folder / "with a file" / "completions").write_text("x")
    (folder / "with a folder" / "metrics.jsonl").mkdir(parents=True)
    for name in (str(folder / "file"), str(folder / "file" / "run"), "a\0b", "x" * 300, "/proc/run", "\ud800",
                 str(folder / "with a file")):  # fmt: skip
        yield Bad(f"output_dir {name[-20:]!r}", partial(check_run_folder, name, None), "output_dir must be")
    call = build(args={"output_dir": str(folder / "with a folder")})
    yield Bad("output_dir with a folder for a file", call, "output_dir must")
    if os.geteuid():  # root may write anywhere
        (folder / "read-only").mkdir(mode=0o555)
        call = partial(check_run_folder, str(folder / "read-only"), None)
        yield Bad("a read-only output_dir", call, "output_dir must be")
    for name in ("none", "", "a\0b", str(folder)):
        call = partial(check_run_folder, str(folder / "run"), name)
        yield Bad(f"resume_from_checkpoint {name[-20:]!r}", call, "resume_from_checkpoint must be")
    for label, content in {
        "no JSON": b"{",
        "a list": b"[]",
        "bytes": b"\xff\xfe",
        "nothing": b"",
        "deep": b"[" * 100_000,
    }.items():
        own = folder / f"checkpoint {label}"
        own.mkdir()
        (own / "grpo_state.json").write_bytes(content)
        call = partial(check_run_folder, str(folder / "run"), str(own))
        yield Bad(f"a checkpoint whose state is {label}", call, "grpo_state.json must be")
    few = character_tokenizer("ab")
    no_eos = tokenizer()
    no_eos.eos_token = None
    yield Bad("a tokenizer with more tokens than the model", build(model={"vocab_size": 20}), "processing_class must")
    yield Bad("prompts that the tokenizer cannot write", build(processing_class=few), "prompt must be .* in row 2")
    model = tiny_model(eos_token_id=None)
    model.generation_config.eos_token_id = None
    call = build(model=model, processing_class=no_eos, args={"mask_truncated_completions": True})
    yield Bad("no token that ends a completion", call, "mask_truncated_completions must be False")
    for name, values in {
        "args": (None, {}, "dapo", LossConfig(), GRPOConfig),
        "train_dataset": (None, 5, [], "train", [{"text": "a"}], {"train": prompt_rows(2)}, iter(prompt_rows(2))),
        "eval_dataset": (5, [], "test", [{"text": "a"}], {"test": prompt_rows(2)}),
        "reward_funcs": (None, [], "accuracy", 5, [None]),
        "reward_weights": (5, [], [1, 2], ["1"], [NAN]),
        "callbacks": (5, ["x"], [object()], [dict], object()),
        "optimizers": (None, (), (None,), "adam", (None, None, None), ("adam", None), 5, (torch.optim.AdamW, None),
                       (None, "linear")),
        "compute_metrics": (5, "f1", []),
        "rollout_engine": ("vllm", 5, object(), dict),
        "peft_config": ("lora", 5, {}),
        "processing_class": (5, object(), character_tokenizer),
    }.items():  # fmt: skip
        for value in values:
            call = build(**({"args": {}} if name != "args" else {}), **({name: value} if name != "args" else {}))
            if name == "args":
                call = partial(GRPOTrainer, tiny_model(), share_of_letter, value, prompt_rows(2))
            yield Bad(
                f"GRPOTrainer({name}={str(value)[:30]})", call, name.removesuffix("_dataset") if "set" in name else name
            )
    for args, says in (
        ({"max_completion_length": 128}, "max_completion_length must leave room"),
        ({"eval_steps": 5}, "eval_dataset must be given"),
        ({"metric_for_best_model": "eval_pass_rate"}, "eval_dataset must be given"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs must be left out"),
    ):
        yield Bad(f"GRPOTrainer with {args}", build(args=args), says)
    frozen = tiny_model().requires_grad_(False)
    yield Bad("a frozen model", build(model=frozen), "model must have parameters that require gradients")


def policies(folder: Path) -> Iterator[Bad]:
    """Models and tokenizers that the trainer refuses before any work, and checkpoints that are none."""
    args = GRPOConfig(output_dir=str(folder), per_device_train_batch_size=8, max_completion_length=4, use_cpu=True)

    def make(model: torch.nn.Module, tokens: Any = None) -> GRPOTrainer:
        return GRPOTrainer(model, share_of_letter, args, prompt_rows(2), processing_class=tokens or tokenizer())

    for value, name in ((NAN, "model.norm.weight"), (math.inf, "model.embed_tokens.weight"), (NAN, "lm_head.weight")):
        model = tiny_model(num_hidden_layers=1, tie_word_embeddings=False)
        model.get_parameter(name).data.view(-1)[-1] = value
        yield Bad(f"{value} in {name}", partial(make, model), f"must be finite, got NaN or infinities in {name};")
    with torch.device("meta"):
        empty = GptOssLiteForCausalLM(tiny_config())
    unsavable = tiny_model(num_hidden_layers=1)
    unsavable.generation_config.temperature = 0.5
    sizes = dict(vocab_size=30, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    t5 = T5Config(vocab_size=30, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    for model, says in (
        (empty, "must hold numbers, got model.embed_tokens.weight and .* meta device"),
        (T5ForConditionalGeneration(t5), "model must be a decoder alone, got .*T5ForConditionalGeneration"),
        (LlamaModel(LlamaConfig(**sizes)), "head of LlamaModel must be .* AutoModelForCausalLM"),
        (LlamaForSequenceClassification(LlamaConfig(**sizes)), "head of Llama.* must be .* AutoModelForCausalLM"),
        (torch.nn.DataParallel(tiny_model(num_hidden_layers=1)), "model must be a transformers.*got DataParallel;"),
        (unsavable, "generation_config of .* must be one that transformers saves, got .*temperature"),
    ):
        yield Bad(type(model).__name__, partial(make, model), says)
    holes = Tokenizer(WordLevel({"<eos>": 2, "a": 500}, unk_token="a"))
    holes = PreTrainedTokenizerFast(tokenizer_object=holes, eos_token="<eos>")
    call = partial(make, tiny_model(num_hidden_layers=1), holes)
    yield Bad("ids with holes", call, "processing_class must have token ids below the model's 30, got 500 of 'a'")
    trainer = make(tiny_model(num_hidden_layers=1))
    for value in ("", 4, 1.5, b"latest", [], "nowhere"):
        call = partial(trainer.train, resume_from_checkpoint=value)
        yield Bad(f"resume_from_checkpoint={value!r}", call, "resume_from_checkpoint must be")


AREAS: dict[str, Callable[[Path], Iterator[Bad]]] = {
    "grpo-moe plan": plans,
    "grpo-moe report": reports,
    "grpo-moe replay": replays,
    "grpo-moe doctor": doctors,
    "command lines and YAML": arguments,
    "recipes": recipes,
    "models and tokenizers": models,
    "the trainer": trainers,
    "policies": policies,
}
