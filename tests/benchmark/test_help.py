"""Every script of benchmark/ says by --help what it takes."""

import importlib
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmark"
SCRIPTS = sorted(path.stem for path in BENCHMARK.glob("*.py") if path.stem != "harness")


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_says_how_a_script_is_called(script, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    main = importlib.import_module(script).main
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_files_without_what_is_wanted_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARK))
    render, plot = (importlib.import_module(name).main for name in ("render", "plot_checkpointing"))
    with pytest.raises(SystemExit):
        render([str(tmp_path / "none.jsonl")])
    assert "files must exist, got" in capsys.readouterr().err
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SystemExit, match="empty.jsonl must hold lines of grpo_step.py without checkpointing"):
        plot([str(tmp_path / "empty.jsonl"), str(tmp_path / "x.png")])
