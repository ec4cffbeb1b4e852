"""The rollout benchmark on a CPU: its lines, that a wrong rollout gets no time, the bytes of its floor."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
FIELDS = {
    *("op", "shape", "impl", "experts", "layers", "dtype", "batch", "prompt", "new_tokens", "weights_gib", "peak_gib"),
    *("ms_per_step", "p20", "p80", "rounds", "whole_ms", "prefill_ms", "cold_ms", "tokens_per_s", "tokens_per_s_whole"),
    *("floor_ms", "floor_share", "greedy_gap", "entropy_z", "gpu", "torch", "triton", "transformers"),
    *("float32_matmul_precision", "commit", "date"),
}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import rollout

    monkeypatch.setattr(rollout.harness, "MIN_ROUNDS", 1)
    monkeypatch.setattr(rollout, "CHECK_TOKENS", 4)
    return rollout


def replace_results(bench, monkeypatch, name, change):
    """Makes an implementation return ``change(completion, model or engine)`` for each completion."""
    right = bench.IMPLEMENTATIONS[name]
    wrong = lambda source, *given: [change(x, source) for x in right(source, *given)]  # noqa: E731
    monkeypatch.setitem(bench.IMPLEMENTATIONS, name, wrong)


def test_main_writes_a_line_for_each_implementation(run):
    lines = run("--new-tokens", "6")
    impls = ("native", "generate")
    assert [(x["shape"], x["impl"]) for x in lines] == [
        (f"{s}_tiny", i) for s in ("qwen3", "gptoss_lite") for i in impls
    ]
    for line in lines:
        assert line.keys() >= FIELDS and "error" not in line
        assert (line["op"], line["dtype"], line["batch"], line["prompt"]) == ("rollout", "bfloat16", 4, 16)
        assert line["greedy_gap"] <= 1e-4 and 0 < line["entropy_z"] < 6
        assert line["tokens_per_s_whole"] == pytest.approx(4 * 6 / line["whole_ms"] * 1e3, rel=0.01)
        assert line["ms_per_step"] == pytest.approx((line["whole_ms"] - line["prefill_ms"]) / 5, abs=1e-3)
        assert line["tokens_per_s"] == pytest.approx(4 / line["ms_per_step"] * 1e3, rel=0.01)
        assert line["floor_ms"] is None and line["floor_share"] is None  # known for an H200 alone
    for line in lines[::2]:
        assert 0 < line["logp_error"] <= 1e-5 and 0 < line["mean_logp_error"] <= 2e-2 and "kv_gib" in line


def test_main_resumes(run):
    arguments = ("--resume", "--shapes", "qwen3_tiny", "--new-tokens", "3", "--impls")
    run(*arguments, "native")
    assert [x["impl"] for x in run(*arguments, "native", "generate")] == ["native", "generate"]


def test_main_refuses_wrong_logps(bench, run, monkeypatch):
    def shifted(completion, engine):
        return dataclasses.replace(completion, sampling_logps=tuple(x + 1e-3 for x in completion.sampling_logps))

    replace_results(bench, monkeypatch, "native", shifted)
    refused, peer = run("--shapes", "qwen3_tiny", "--new-tokens", "3")
    assert refused["error"].startswith("WrongResult: logp_error") and refused["logp_error"] == pytest.approx(1e-3, 0.1)
    assert "ms_per_step" not in refused and "whole_ms" not in refused and peer["whole_ms"] > 0 and "error" not in peer


def test_main_refuses_logps_that_are_wrong_at_full_size_only(bench, run, monkeypatch):
    def shifted(completion, engine):
        shift = 0.05 * (engine.model.dtype == torch.bfloat16)
        return dataclasses.replace(completion, sampling_logps=tuple(x + shift for x in completion.sampling_logps))

    replace_results(bench, monkeypatch, "native", shifted)
    (refused,) = run("--shapes", "gptoss_lite_tiny", "--new-tokens", "3", "--impls", "native")
    assert refused["error"].startswith("WrongResult: mean_logp_error") and refused["logp_error"] <= 1e-5
    assert "ms_per_step" not in refused and "whole_ms" not in refused


@pytest.mark.parametrize(
    ("change", "error"),
    [(lambda ids: ids[:-1], "completions must be 4 of"), (lambda ids: (5,) * len(ids), "greedy_gap")],
)
def test_main_refuses_wrong_tokens_of_a_peer(bench, run, monkeypatch, change, error):
    replace_results(bench, monkeypatch, "generate", lambda x, _: dataclasses.replace(x, token_ids=change(x.token_ids)))
    (refused,) = run("--shapes", "qwen3_tiny", "--new-tokens", "3", "--impls", "generate")
    assert f"WrongResult: {error}" in refused["error"] and "whole_ms" not in refused


def test_verify_refuses_tokens_that_the_model_did_not_draw(bench):
    model = bench.make_model(bench.TINY_QWEN3, torch.device("cpu"), torch.float32)
    rollout = bench.Rollout("generate", model, bench.make_prompts(500, [4] * 4))
    rollout(bench.SamplingParams(100, temperature=0.0))  # greedy ones are too likely
    with pytest.raises(bench.WrongResult, match="entropy_z"):
        rollout.verify(100)


def test_main_measures_the_mismatch(run):
    replayed, natural = run("--mismatch", "--new-tokens", "8")
    assert (replayed["routes"], natural["routes"]) == ("replayed", "natural")
    for line in (replayed, natural):
        assert (line["op"], line["impl"], line["dtype"]) == ("rollout_mismatch", "native", "float32")
        assert 0 < line["mean_abs"] <= line["max_abs"] <= 1e-5 and 0 < line["kl"] <= 1e-5 and line["within_limits"]
        assert line["flip_rate"] == line["flipped_tokens"] == 0 and line["batch"] == 4


def test_run_mismatch_sees_logps_and_routes_of_another_policy(bench, run, monkeypatch):
    def changed(completion, engine):
        routes = completion.routes
        others = torch.where(routes.indices >= 0, (routes.indices + 1) % routes.num_experts, -1)
        return dataclasses.replace(completion, routes=dataclasses.replace(routes, indices=others))

    replace_results(bench, monkeypatch, "native", changed)
    replayed, natural = run("--mismatch", "--new-tokens", "8")
    assert replayed["max_abs"] > 1e-3 and replayed["kl"] > 0 and not replayed["within_limits"]
    assert replayed["flip_rate"] > 0.5 and replayed["flipped_tokens"] >= replayed["flip_rate"]
    assert natural["max_abs"] <= 1e-5 and natural["within_limits"]


def test_profile_wants_a_gpu(run, capsys):
    with pytest.raises(SystemExit):
        run("--profile")
    assert "--profile must go with a CUDA device" in capsys.readouterr().err


def on_meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


def test_floor_bytes_equal_a_count_by_hand(bench):
    expert, router, attention = 3 * 128 * 64, 128, 2 * 128 * 4 * 64 + 2 * 128 * 2 * 64
    norms = 2 * 128 + 2 * 64
    qwen3 = 2 * (16 * (expert + router) + attention + norms) + 128 + 500 * 128  # the untied head, no embedding
    kv = 2 * 2 * 2 * 64  # elements of a token: keys and values, of 2 layers with 2 heads
    seen = (11 + 12 + 13) / 3  # keys of the three steps after a prefill of 10 tokens
    found = bench.floor_bytes(on_meta(bench.TINY_QWEN3), 4, 10, 4)
    assert found == 2 * (qwen3 + 4 * 128 + 4 * seen * kv)

    model = on_meta(bench.TINY_LITE)
    assert model.lm_head.weight is model.model.embed_tokens.weight  # tied: read once, as the head
    seen = ((15 + 16 + 16 + 16) + (15 + 16 + 17 + 18)) / 4  # of both layers; the first sees 16
    weights = sum(x.numel() for x in model.parameters())
    found = bench.floor_bytes(model, 4, 14, 5)
    assert found == 2 * (weights + 4 * seen * kv / 2)


def test_floor_bytes_of_24_layers_are_those_of_15_billion_parameters(bench):
    kv = 64 * 192 * 24 * 2 * 4 * 128  # 64 rows, 192 tokens in the mean
    found = bench.floor_bytes(on_meta(bench.QWEN3_OF[24]), 64, 128, 128)
    assert found == pytest.approx(2 * (15.3e9 + kv), rel=0.01)
