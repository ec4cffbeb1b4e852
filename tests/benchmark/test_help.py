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
