"""The training-step benchmark on a CPU: its lines, that a wrong result gets no time, that no peer disturbs others."""

import dataclasses
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLAIN = "grouped_mm_full_logits"
FIELDS = {
    *("op", "shape", "impl", "layers", "dtype", "B", "T", "completion", "checkpointing", "ms", "p20", "p80", "rounds"),
    *("tokens_per_s", "tflops", "peak_gib", "weights_gib", "rel_err", "worst_of", "full_rel_err", "peer_version"),
    *("gpu", "torch", "triton", "transformers", "float32_matmul_precision", "commit", "date"),
}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import train_step

    monkeypatch.setattr(train_step.harness, "MIN_ROUNDS", 1)
    monkeypatch.setattr(train_step, "CHECK_SIZES", (2, 40, 16))
    return train_step


def replace_loss(bench, monkeypatch, name, loss):
    monkeypatch.setitem(bench.IMPLEMENTATIONS, name, dataclasses.replace(bench.IMPLEMENTATIONS[name], loss=loss))


def test_main_writes_a_line_for_each_implementation(run):
    lines = run("--phases")
    impls = ("ours", "ours_padding_free", PLAIN)
    assert [(x["shape"], x["impl"]) for x in lines] == [(f"{s}_tiny", i) for s in ("qwen3", "gpt_oss") for i in impls]
    for line in lines:
        assert line.keys() >= FIELDS | {"layers_ms", "head_ms", "backward_ms"} and "error" not in line
        assert (line["op"], line["B"], line["T"], line["completion"]) == ("train_step", 2, 40, 24)
        assert 0 < line["rel_err"] < 0.05 and 0 < line["full_rel_err"] < 0.05
        assert line["tokens_per_s"] == pytest.approx(80 / line["ms"] * 1e3, rel=0.01)


def test_main_measures_trl(run):
    pytest.importorskip("trl")
    for line in run("--impls", "trl_fused_head"):
        assert line["rel_err"] < 0.05 and line["ms"] > 0 and line["peer_version"].startswith("trl ")


def test_main_checkpoints_and_resumes(run):
    (line,) = run("--shapes", "qwen3_tiny", "--impls", "ours", "--checkpointing")
    assert line["checkpointing"] is True and line["full_rel_err"] < 0.05 and line["ms"] > 0
    arguments = ("--resume", "--checkpointing", "--shapes", "qwen3_tiny", "--impls", "ours", PLAIN)
    assert [x["impl"] for x in run(*arguments)] == ["ours", PLAIN]
    assert len(run(*arguments)) == 2


@pytest.mark.parametrize(("name", "factor"), [("ours", 1.06), (PLAIN, 1.3), ("ours_padding_free", float("nan"))])
def test_main_refuses_a_wrong_result(bench, run, monkeypatch, name, factor):
    right = bench.IMPLEMENTATIONS[name].loss
    replace_loss(bench, monkeypatch, name, lambda *given: right(*given) * factor)
    by_name = {line["impl"]: line for line in run("--shapes", "gpt_oss_tiny", "--impls", *{name, PLAIN, "ours"})}
    refused = by_name.pop(name)
    assert "WrongResult" in refused["error"] and "ms" not in refused and refused["rel_err"] != 0
    assert by_name and all(line["ms"] > 0 for line in by_name.values())


def test_main_refuses_what_is_wrong_or_fails_at_full_size_only(bench, run, monkeypatch):
    calls = []

    def wrong(model, batch):
        return bench.ours(model, batch) * (1 if batch.input_ids.shape[1] == 40 else 1.4)

    def failing(model, batch):
        if batch.input_ids.shape[1] != 40:
            calls.append(model)
            raise MemoryError("all of it")
        return bench.ours(model, batch, padding_free=True)

    replace_loss(bench, monkeypatch, "ours", wrong)
    replace_loss(bench, monkeypatch, "ours_padding_free", failing)
    lines = run("--shapes", "qwen3_tiny", "--length", "48", "--impls", "ours", "ours_padding_free", PLAIN)
    assert [x["impl"] for x in lines] == ["ours", "ours_padding_free", PLAIN]
    assert "WrongResult" in lines[0]["error"] and lines[0]["rel_err"] < 0.05 and "ms" not in lines[0]
    assert lines[1]["error"] == "MemoryError: all of it" and "ms" not in lines[1] and len(calls) == 1
    assert lines[2]["ms"] > 0


def test_step_leaves_nothing_to_the_next(bench):
    model = bench.make_model(bench.SHAPES["gpt_oss_tiny"], bench.torch.device("cpu"))
    batch = bench.make_batch(500, (2, 16, 4), model.device)
    ours, plain = (bench.Step(name, model, batch) for name in ("ours", PLAIN))
    ours.set_up()
    ours()
    assert "forward" in vars(model) and model.lm_head.weight.grad is not None
    plain.set_up()
    assert "forward" not in vars(model) and model.lm_head.weight.grad is None
    used = (model.config._experts_implementation, model.config._attn_implementation)
    assert used == ("grouped_mm", "eager")
    ours.set_up()
    ours()
