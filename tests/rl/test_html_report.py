"""The report of a run is one safe page, of whatever the run left behind."""

import json
import re
from html.parser import HTMLParser

import pytest
from tiny import prompt_rows, share_of_letter, tiny_model, tokenizer

from grpo_moe import GRPOConfig, GRPOTrainer
from grpo_moe.rl import figures
from grpo_moe.rl.html_report import visible, write_html_report
from grpo_moe.rl.metrics import read_metrics
from grpo_moe.rl.report import write_completions, write_summary

PNG = "data:image/png;base64,"
LINES = [
    {"step": 0, "eval_pass_rate": 0.25, "eval_reward": 0.5},
    *(
        {
            "step": step,
            "reward": step / 10,
            "approx_kl": 0.01 * step,
            "waterfall/groups": 1000.0,
            "waterfall/zero_spread": 250.0,
            "waterfall/tokens_with_gradient": 750.0 - step,
            "routing/max_violation": 1.5,
            "routing/dead_experts": 0.0,
            "routing/flip_rate_layer_0": 0.1,
            "routing/flip_rate_layer_10": 0.2 if step > 2 else None,
        }
        for step in (2, 4, 6)
    ),
]
SUMMARY = {
    "steps": 6,
    "skipped_updates": 1,
    "eval_before": {"pass_rate": 0.25},
    "eval_after": {"pass_rate": 0.75},
    "config": {"loss_type": "dapo", "output_dir": "<i>x</i>"},
    "versions": {"torch": "2"},
}


class Tags(HTMLParser):
    """Collects tags and attributes, and the text outside of style."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def run_folder(path, lines=LINES, summary=SUMMARY, completions=()):
    path.mkdir(exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        write_summary(path / "summary.json", summary)
    for number, rows in enumerate(completions):
        (path / "completions").mkdir(exist_ok=True)
        write_completions(path / "completions" / f"completions_{number:06d}.parquet", rows)
    return path


def page_of(path, **options):
    return write_html_report(path, **options).read_text(encoding="utf-8")


def test_the_page_of_a_real_run_holds_all_of_it(tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path / "run"), per_device_train_batch_size=8, num_generations=4, max_completion_length=6,
        use_cpu=True, show_progress=False, max_steps=3,
    )  # fmt: skip
    GRPOTrainer(
        tiny_model(), share_of_letter, args, prompt_rows(6), eval_dataset=prompt_rows(3), processing_class=tokenizer()
    ).train()
    page = page_of(tmp_path / "run")
    for said in ("Where the signal goes", "Experts", "Completions", "held-out pass_rate", "training reward",
                 "3 optimiser updates", "share_of_letter", "loss_type"):  # fmt: skip
        assert said in page, said
    assert "did not finish" not in page
    assert page.count(PNG) == 4 and len(re.findall("<pre>", page)) == 2 * 4 * 3
    load = read_metrics(tmp_path / "run" / "expert_load.jsonl")
    assert [line["step"] for line in load] == [1, 2, 3] and list(load[0]["load"]) == ["0", "1", "2", "3"]
    tokens = {sum(of_layer) for of_layer in load[0]["load"].values()}
    assert len(tokens) == 1 and tokens.pop() > 0  # every layer sends every token to k experts
    assert {"curves.png", "signal.png", "experts.png", "expert_load.png", "report.html"} <= {
        p.name for p in (tmp_path / "run").iterdir()
    }


def test_the_load_of_experts_is_drawn_at_its_first_and_last(tmp_path, monkeypatch):
    lines = [{"step": n, "load": {"0": [4 * (n < 3), 0], "5": [n, n]}} for n in range(1, 21)]
    drawn = []
    monkeypatch.setattr(figures, "_draw_heat", lambda ax, heat, *rest: drawn.append(heat.tolist()))
    assert figures.draw_load(lines, tmp_path / "report.html") and (tmp_path / "expert_load.png").exists()
    assert drawn == [[[2, 0], [1, 1]], [[0, 0], [1, 1]]]
    assert not figures.draw_load([], tmp_path / "report.html")


def test_figures_before_and_after_and_the_waterfall(tmp_path):
    page = page_of(run_folder(tmp_path / "run"), out=tmp_path / "elsewhere" / "page.html")
    shown = Tags(page).text
    assert re.search(r"held-out pass_rate\s*0.25\s*0.75", shown)
    assert re.search(r"training reward\s*0.2\s*0.6", shown)
    assert "6 optimiser updates, 1 skipped" in shown
    assert re.search(r"generated\s*1,000\s*1,000\s*1,000", shown) and re.search(
        r"with gradient\s*748\s*746\s*744", shown
    )
    assert "width: 74.6%" in page and "&lt;i&gt;x&lt;/i&gt;" in page
    assert not (tmp_path / "run" / "report.html").exists() and (tmp_path / "elsewhere" / "experts.png").exists()


def test_the_page_needs_nothing_and_runs_nothing(tmp_path):
    tags = Tags(page_of(run_folder(tmp_path / "run")))
    assert not {"script", "link", "iframe", "object", "form"} & set(tags.tags)
    assert not [name for name, _ in tags.attributes if name.startswith("on") or name == "href"]
    assert all(value.startswith(PNG) for name, value in tags.attributes if name == "src")


HOSTILE = '<script>alert("x")</script><img src=x onerror=y> & \x1b[2J\x00\x07\x7f\x9b\u202e\u200b\tend\r\n\ud800'


def test_model_text_cannot_become_markup_or_hide(tmp_path):
    rows = [{"step": 1, "prompt": HOSTILE, "completion": HOSTILE, "reward": 1.0, "rewards/<script>": 1.0}]
    names = {**SUMMARY, "eval_before": {"<script>": 1.0}, "config": {"<script>": "<script>"}}
    lines = [*LINES, {"step": 7, "waterfall/<script>": 5.0}]
    page = page_of(run_folder(tmp_path / "<b>", lines, {**names, "steps": 7}, [rows]))
    tags = Tags(page)
    assert "script" not in tags.tags and tags.tags.count("img") == 3
    assert tags.text.count('<script>alert("x")</script><img src=x onerror=y>') == 2
    assert not set(page) & {chr(c) for c in (*range(9), *range(11, 32), *range(127, 160), 0x202E, 0x200B)}
    for shown in ("␛", "␀", "␇", "␡", "\\u009b", "\\u202e", "\\u200b", "␉", "␍", r"\ud800"):
        assert tags.text.count(shown) >= 2, shown


def test_visible_keeps_lines_and_the_ends_of_long_text():
    assert visible("a\nb é 你") == "a\nb é 你"
    shown = visible("a" * 10_000 + "z")
    assert shown.startswith("aaa") and shown.endswith("z") and "6001 characters left out" in shown and len(shown) < 4100


def test_a_run_that_crashed_is_shown_as_far_as_it_came(tmp_path):
    run = run_folder(tmp_path / "run", summary=None, completions=[[], [{"step": 1, "prompt": "a", "completion": "b"}]])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "rew')
    (run / "completions" / "completions_000009.parquet").write_bytes(b"PAR1 torn")
    shown = Tags(page_of(run)).text
    assert "This run did not finish: its last logged update is 6" in shown
    assert "held-out pass_rate" in shown and "completions_000009.parquet cannot be read" in shown


def test_the_summary_of_an_earlier_run_in_the_folder_is_not_taken_for_this_one(tmp_path):
    shown = Tags(page_of(run_folder(tmp_path / "run", summary={**SUMMARY, "steps": 100}))).text
    assert "did not finish" in shown and not re.search(r"held-out pass_rate\s*0.25\s*0.75", shown)


def test_what_was_not_logged_leaves_no_empty_sections(tmp_path):
    shown = Tags(page_of(run_folder(tmp_path / "run", [{"step": 1, "loss": None}], None))).text
    assert "Curves" in shown
    assert not [name for name in ("Experts", "Where the signal goes", "Completions", "Options") if name in shown]


def test_folders_that_are_no_run_are_refused(tmp_path):
    empty = run_folder(tmp_path / "empty", [], None)
    for path in (tmp_path / "nowhere", empty, run_folder(tmp_path / "no_step", [{"reward": 1}], None)):
        with pytest.raises(
            ValueError, match=f"run must be a folder with metrics.jsonl of at least one step, got .*{path}"
        ):
            write_html_report(path)
    assert not (empty / "report.html").exists() and not (tmp_path / "nowhere").exists()
    damaged = run_folder(tmp_path / "damaged")
    (damaged / "summary.json").write_text("{")
    with pytest.raises(ValueError, match="summary.json must be JSON, got a damaged file"):
        write_html_report(damaged)
    (damaged / "metrics.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 2}\n')
    with pytest.raises(ValueError, match="must hold JSON lines"):
        write_html_report(damaged)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1}\n123\n', "must hold JSON objects, got b'123' in line 2"),
        ("metrics.jsonl", '{"step": 1}\n{"step": "2"}\n', "must hold numbers for step, got .* in line 2"),
        ("metrics.jsonl", '{"step": 1, "reward": "<b>x"}\n', "must hold numbers, got '<b>x' for 'reward' in line 1"),
        ("metrics.jsonl", '{"step": 1}\n{"step": 2, "x": [1]}', r"must hold numbers, got \[1\] for 'x' in line 2"),
        ("metrics.jsonl", '{"step": 1, "loss": 1' + "0" * 400 + "}", "must hold numbers, got 10.* for 'loss' in"),
        ("summary.json", '{"eval_before": 3}', "must hold metrics by name, got eval_before: 3; remove the file"),
        ("summary.json", '{"eval_after": [1]}', r"must hold metrics by name, got eval_after: \[1\]"),
        ("expert_load.jsonl", '{"step": 1}', "must hold under load the tokens of .* got None in line 1"),
        ("expert_load.jsonl", '{"load": {"0": [1, "x"]}}', "must hold under load the tokens .* in line 1"),
        ("expert_load.jsonl", '{"load": {"0": [1], "1": [1, 2]}}', "must hold under load the tokens .* in line 1"),
        ("expert_load.jsonl", '{"load": {"0": [1]}}\n{"load": {"1": [1]}}', "must hold under load .* in line 2; r"),
        ("expert_load.jsonl", '{"load": {}}', "must hold under load the tokens .* in line 1"),
    ],
)  # fmt: skip
def test_damage_is_named_with_its_file_and_line(tmp_path, file, content, message):
    run = run_folder(tmp_path / "run")
    (run / file).write_text(content)
    with pytest.raises(ValueError, match=f"{run / file} {message}") as caught:
        write_html_report(run)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json", "expert_load.jsonl"])
def test_a_folder_in_place_of_a_file_is_named(tmp_path, file):
    run = run_folder(tmp_path / "run")
    (run / file).unlink(missing_ok=True)
    (run / file).mkdir()
    with pytest.raises(ValueError, match=f"{run / file} must be .*Is a directory"):
        write_html_report(run)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    run = run_folder(tmp_path / "run")
    for out in ("/proc/x.html", "/proc/no/x.html", run / "metrics.jsonl" / "x.html"):
        with pytest.raises(ValueError, match=f"out must be a file that can be written, got {out}: .*; choose another"):
            write_html_report(run, out)
    with pytest.raises(ValueError, match=f"out must be a file, got the folder {run}; name a file in it"):
        write_html_report(run, run)
    assert sorted(p.name for p in run.iterdir()) == ["metrics.jsonl", "summary.json"]
