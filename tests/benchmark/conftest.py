"""What the tests of benchmarks share: one run in its smallest form."""

import json

import pytest


@pytest.fixture
def run(bench, tmp_path):
    """A function of further arguments to the lines written so far by the module's ``bench``."""
    out = tmp_path / "results.jsonl"

    def run(*arguments):
        bench.main(["--quick", "--device", "cpu", "--seconds", "0", "--out", str(out), *arguments])
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    return run
