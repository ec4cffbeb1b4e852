"""The recipes for published models as a user runs them: tiny, with LoRA, from a folder, and with wrong arguments."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tiny import tokenizer
from transformers import AutoModelForCausalLM

RECIPES = ["grpo_qwen3_moe", "gspo_gptoss_hf"]


@pytest.fixture
def launch(tmp_path, monkeypatch, capsys):
    """Runs a recipe in this process, in a folder of its own: (exit code, output)."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "recipes"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)

    def run(recipe, *arguments):
        import published
        import running

        monkeypatch.setattr(published, "use_all_cores", lambda args: None)  # the tests share them
        given = ["--use_cpu", "--output_dir", "run", "--show_progress", "False"]
        monkeypatch.setattr(sys, "argv", [f"{recipe}.py", *given, *arguments])
        try:
            running.run(importlib.import_module(recipe).main)
        except SystemExit as ended:
            return ended.code, "".join(reversed(capsys.readouterr()))  # errors first
        return 0, capsys.readouterr().out

    return run


@pytest.mark.parametrize("recipe", [RECIPES[0], pytest.param(RECIPES[1], marks=pytest.mark.slow)])
def test_tiny_learns_and_its_model_loads_in_plain_transformers(recipe, tmp_path, launch):
    code, output = launch(recipe, "--tiny")
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_after"]["reward"] > summary["eval_before"]["reward"] + 0.2
    plain = "from transformers import AutoModelForCausalLM as A; import torch; " \
        "print(A.from_pretrained('run/model')(torch.arange(3)[None]).logits.shape)"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", plain], capture_output=True, text=True, cwd=tmp_path)
    assert "torch.Size([1, 3, " in done.stdout, done.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_lora_from_a_folder(recipe, tmp_path, launch):
    pytest.importorskip("peft")
    from moe_families import tiny_moe

    model = tiny_moe("gpt_oss" if "gptoss" in recipe else "qwen3_moe")
    model.save_pretrained(tmp_path / "policy")
    tokenizer().save_pretrained(tmp_path / "policy")
    rows = [json.dumps({"prompt": f"{letter}", "answer": letter}) for letter in "abcd" * 5]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    sizes = ["--per_device_train_batch_size", "8", "--max_steps", "2", "--max_completion_length", "8"]
    given = ["--model_name_or_path", "./policy", "--dataset_name", "rows.jsonl", "--lora_r", "2"]
    code, output = launch(recipe, *given, *sizes)
    assert code == 0, output
    assert "LoRA" in output
    saved = load_file(tmp_path / "run" / "model" / "adapter_model.safetensors")
    assert any("experts" in name for name in saved)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "policy")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny", "--model_name_or_path", "x"], "model_name_or_path must be left out with --tiny"),
        (["--lora_r", "-1"], "lora_r must be at least 0"),
        (["--model_name_or_path", "./nowhere", "--dataset_name", "./rows"], "dataset_name must be"),
        (["--tiny", "--routing_replay", "R9"], "routing_replay must be one of none, R2, R3"),
    ],
)
def test_wrong_arguments_end_in_one_line(arguments, message, launch):
    code, output = launch(RECIPES[0], *arguments)
    assert code == 2 and output.startswith(f"error: {message}")
