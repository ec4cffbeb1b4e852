"""The loss benchmark on a CPU: its lines and their table, and that a wrong result gets no time."""

import dataclasses
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FIELDS = {
    *("op", "impl", "level", "H", "V", "L", "tokens", "dtype", "ms", "p20", "p80", "rounds", "tflops", "peak_gib"),
    *("logp_error", "grad_hidden_error", "grad_weight_error", "sampled_hidden_error", "sampled_weight_error"),
    *("gpu", "torch", "triton", "float32_matmul_precision", "commit", "date"),
}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import loss_head_to_head

    return loss_head_to_head


@pytest.fixture
def run(bench, tmp_path):
    out = tmp_path / "new" / "results.jsonl"

    def run(*arguments):
        shape = () if "--quick" in arguments or "--shapes" in arguments else ("--shapes", "16,60,40")
        bench.main(["--device", "cpu", "--seconds", "0", "--out", str(out), *shape, *arguments])
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    return run


def replace(bench, monkeypatch, name, **changes):
    changed = dataclasses.replace(bench.IMPLEMENTATIONS[name], **changes)
    monkeypatch.setitem(bench.IMPLEMENTATIONS, name, changed)


def test_main_writes_a_line_a_point(run):
    lines = run("--quick")
    assert [(line["level"], line["impl"]) for line in lines] == [
        *(("token", "ours"), ("token", "eager"), ("sequence", "ours"), ("sequence", "eager"))
    ]
    for line in lines:
        assert line.keys() >= FIELDS and "error" not in line
        assert (line["op"], line["tokens"], line["rounds"]) == ("grpo_loss", 575, 5)
        assert 0 < line["p20"] <= line["ms"] <= line["p80"]
        assert 0 < line["grad_hidden_error"] < 0.01 and 0 < line["grad_weight_error"] < 0.01
    ours, eager = lines[:2]
    assert ours["logp_error"] <= 1e-4 < eager["logp_error"]
    assert ours["deterministic"] is True


def test_main_resumes_and_stops_in_time(run):
    assert len(run("--levels", "token", "--impls", "ours")) == 1
    lines = run("--resume", "--levels", "token")
    assert [line["impl"] for line in lines] == ["ours", "eager"]
    assert run("--max-seconds", "0") == lines


@pytest.mark.parametrize(("name", "factor"), [("ours", 1.05), ("eager", 1.3), ("ours", float("nan"))])
def test_main_refuses_wrong_gradients(bench, run, monkeypatch, name, factor):
    right = bench.IMPLEMENTATIONS[name].loss
    replace(bench, monkeypatch, name, loss=lambda *inputs: right(*inputs) * factor)
    by_name = {line["impl"]: line for line in run("--levels", "token")}
    refused = by_name.pop(name)
    assert "WrongResult" in refused["error"] and "ms" not in refused
    assert all("ms" in line for line in by_name.values())


def test_main_refuses_wrong_logps(bench, run, monkeypatch):
    right = bench.IMPLEMENTATIONS["ours"].logps
    replace(bench, monkeypatch, "ours", logps=lambda *inputs: right(*inputs) + 2e-4)
    (line,) = run("--levels", "token", "--impls", "ours")
    assert "logp_error" in line["error"] and "ms" not in line


def test_main_refuses_what_is_wrong_at_full_size_only(bench, run, monkeypatch):
    right = bench.IMPLEMENTATIONS["eager"].loss

    def wrong_if_long(hidden, problem, level):
        return right(hidden, problem, level) * (1 if hidden.shape[1] <= bench.CHECK_LENGTH else 2)

    replace(bench, monkeypatch, "eager", loss=wrong_if_long)
    (line,) = run("--levels", "token", "--impls", "eager", "--shapes", "16,60,200")
    assert "sampled_hidden_error" in line["error"] and "ms" not in line
    assert line["grad_hidden_error"] < 0.01


def test_main_records_a_failure_and_goes_on(bench, run, monkeypatch):
    def fail(*inputs):
        raise MemoryError("all of it")

    replace(bench, monkeypatch, "eager", loss=fail)
    monkeypatch.setattr(
        bench, "check", lambda *given: dict.fromkeys(bench.IMPLEMENTATIONS, bench.Contestant(call=dict))
    )
    lines = run("--levels", "token", "--impls", "eager", "ours")
    assert lines[0]["error"] == "MemoryError: all of it" and "ms" not in lines[0]
    assert lines[1]["impl"] == "ours" and lines[1]["ms"] > 0


def test_render_shows_the_last_line_of_a_point(bench, run):
    import render

    lines = run("--levels", "token")
    again = {**lines[0], "ms": 1.5, "p20": 1.25, "p80": 1.75, "tflops": 600.0, "peak_gib": 3.5}
    text = render.render([*lines, again, {**lines[1], "impl": "peer", "error": "WrongResult: off"}])
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert table[0][:3] == ["| level", "H", "V"] and table[0][-1] == "peer |"
    assert table[2][5] == "1.5 ms (1.25-1.75), 600 TFLOP/s, 3.5 GiB" and table[2][-1] == "failed |"
    assert "- peer at level token, H 16, V 60, L 40, tokens 119: WrongResult: off" in text
    assert lines[0]["commit"] in text


def test_interleave_takes_turns(bench):
    harness, order = bench.harness, []
    contestants = [
        harness.Contestant(lambda: order.append("a")),
        harness.Contestant(lambda: order.append("b"), max_rounds=1),
        harness.Contestant(lambda: order.append("c")),
    ]
    device = bench.torch.device("cpu")
    harness.interleave(contestants, device, seconds=0, deadline=harness.Deadline(60))
    assert "".join(order) == "abc" + "ca" + "ca" + "ac" + "ca"
    assert [len(x.times_ms) for x in contestants] == [5, 1, 5]
