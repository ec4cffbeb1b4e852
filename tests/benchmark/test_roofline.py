"""The roofline benchmark in its smallest form: its lines, its plot, and how it counts and reads bytes."""

import json
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
FIELDS = {
    *("op", "impl", "sweep", "E", "H", "I", "K", "t", "dtype", "ms", "p20", "p80", "rounds", "tflops", "flops"),
    *("bytes", "bytes_source", "bytes_counted", "intensity", "gb_per_s", "bound_ms", "speedup", "rel_err"),
    *("gpu", "torch", "triton", "float32_matmul_precision", "commit", "date"),
}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmark"))
    import roofline

    monkeypatch.setattr(roofline.harness, "MIN_ROUNDS", 1)
    monkeypatch.setattr(roofline, "TOKENS_AT_RATIOS", 2)
    return roofline


@pytest.fixture
def run(bench, tmp_path):
    out = tmp_path / "results.jsonl"

    def run(*arguments):
        bench.main(["--quick", "--seconds", "0", "--out", str(out), *arguments])
        return [json.loads(line) for line in out.read_text().splitlines()]

    return run


def test_main_writes_ceilings_points_and_a_plot(run, tmp_path):
    lines = run("--ratios", "1", "--tokens", "1", "--plot", str(tmp_path / "roof.png"))
    copy, matmul, *points = lines
    assert [copy["impl"], matmul["impl"]] == ["copy", "matmul"] and copy["gb_per_s"] > 0
    assert [(x["sweep"], x["I"], x["t"], x["impl"]) for x in points] == [
        *(("I/H", 16, 2, "single_pass"), ("I/H", 16, 2, "fused")),
        *(("t", 64, 1, "single_pass"), ("t", 64, 1, "fused")),
    ]
    for line in points:
        assert line.keys() >= FIELDS and "error" not in line
        assert line["flops"] == 6 * 2 * line["t"] * 16 * line["I"] and 0 < line["rel_err"] < 0.02
    assert (tmp_path / "roof.png").read_bytes().startswith(b"\x89PNG")

    import render

    assert "| sweep | E | H | I | K | t | single_pass | fused |" in render.render(lines)


def test_main_refuses_a_wrong_result_and_resumes(bench, run, monkeypatch):
    right = bench.IMPLEMENTATIONS["fused"].forward
    wrong = bench.moe.Implementation(lambda problem: right(problem) * 1.05)
    monkeypatch.setitem(bench.IMPLEMENTATIONS, "fused", wrong)
    arguments = ("--ratios", "1", "--tokens", "1", "--impls", "fused")
    first = run(*arguments)
    assert all("rel_err must be at most" in line["error"] and "ms" not in line for line in first[2:])
    assert [line["op"] for line in run("--resume", *arguments)[len(first) :]] == ["ceiling", "ceiling"]


def test_bytes_equal_those_by_hand(bench):
    point = bench.Point("t", E=4, H=10, I=40, K=2, t=3)  # 6 tokens, 12 rows
    once = 4 * (2 * 40 * 10 + 10 * 40) * 2 + (6 * 10 + 6 * 10) * 2 + 12 * (8 + 2)
    assert bench.hbm_bytes(point, 0) == once
    assert bench.hbm_bytes(point, bench.bytes_between(point, "fused", None)) == once + 2 * (12 * 40 * 2 + 12 * 10 * 2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter's blocks are 16 wide")
def test_bytes_of_the_single_pass_are_its_parts(bench):
    point = bench.Point("t", E=4, H=16, I=40, K=2, t=3)
    problem = bench.make_problem(point, torch.device("cpu"))
    assert bench.bytes_between(point, "single_pass", problem) == 3 * 12 * 16 * 4  # 3 splits of 40 columns


def test_problems_give_every_expert_the_same_number_of_tokens(bench):
    index = bench.make_problem(bench.Point("t", E=6, H=8, I=8, K=2, t=5), torch.device("cpu")).tensors["top_k_index"]
    assert torch.bincount(index.flatten()).tolist() == [5] * 6
    assert (index[:, 0] != index[:, 1]).all()
    with pytest.raises(ValueError, match=r"must be a multiple of 2, got 1 \* 3"):
        bench.sweeps(8, 3, [1], [1])


def test_bytes_of_calls_reads_a_report_of_ncu(bench):
    header = '"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"'
    read, written = "dram__bytes_read.sum", "dram__bytes_write.sum"
    rows = [
        *[("0", "spin_kernel(long)", read, "7"), ("0", "spin_kernel(long)", written, "7")],
        *[("1", "_route_kernel", read, "1,000"), ("1", "_route_kernel", written, "20")],
        *[("2", "_single_pass_kernel", read, "300"), ("2", "_single_pass_kernel", written, "0")],
        *[("3", "spin_kernel(long)", read, "7"), ("4", "_gate_up_kernel", read, "5")],
    ]
    table = [f'"{i}","42","{kernel}","{metric}","byte","{value}"' for i, kernel, metric, value in rows]
    assert bench.bytes_of_calls("\n".join(["==PROF== Connected", header, *table])) == [1320, 5]
    assert bench.bytes_of_calls("==ERROR== no permission") == []


def test_the_lines_that_are_kept_are_rendered_as_the_readme_says(bench):
    import render

    text = render.render(render.read_lines(ROOT / "benchmark" / "results" / "h200.jsonl"))
    assert "| qwen3 | 8 | 8 | 128 | 256 | 16 | step 0.717 s, rollout 0.36 s, rest 0.357 s, 56.5 GiB |" in text
    assert "| dapo | none | 0 | 0.166 -> 0.536, 332 updates |" in text
