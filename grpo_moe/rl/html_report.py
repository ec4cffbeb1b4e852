"""Writes a run folder as one HTML page for people: figures before and after, curves, waterfall, experts, samples."""

from __future__ import annotations

import base64
import html
import itertools
import math
import os
import reprlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from grpo_moe.text import encodable, steers_or_hides

from .figures import WATERFALL, draw_experts, draw_load, draw_signal, waterfall
from .files import atomic_path, is_number, parse_json
from .metrics import read_metrics
from .report import LOAD_FILE, METRICS_FILE, plot_curves, series

_SAMPLED_FILES, _ROWS_A_FILE, _TEXT_LIMIT = 3, 4, 4000
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { line-height: 1.2; } h2 { margin-top: 2.2rem; }
img { max-width: 100%; height: auto; background: white; border-radius: 6px; }
table { border-collapse: collapse; } th, td { padding: .25rem .8rem .25rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: #1f77b4; height: .8rem; border-radius: 2px; min-width: 1px; }
.note { opacity: .75; } .warn { border-left: 4px solid #e07b39; padding-left: .8rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; overflow: hidden; margin: .2rem 0; padding: .4rem .6rem;
  background: #8882; border-radius: 4px; }
b.c { color: #c0392b; font-weight: normal; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # nothing of a model's text can ever run


def write_html_report(run: str | os.PathLike, out: str | os.PathLike | None = None) -> Path:
    """Writes the page, and its pictures curves.png, signal.png, experts.png and expert_load.png beside it.

    Reads metrics.jsonl, and where they are there expert_load.jsonl, summary.json and completions/*.parquet; a run that
    did not come to its end is shown as far as it came. The page needs no other file and holds no script.

    Args:
        run: folder of the run.
        out: file to write; report.html in the folder of the run by default.

    Raises:
        ValueError: no folder, no metrics in it, or a damaged file, named with its line; ``out`` cannot be written.
    """
    run = Path(run)
    metrics = _read_numbers(run / METRICS_FILE)
    if not any(row.get("step") is not None for row in metrics):
        raise ValueError(
            f"run must be a folder with metrics.jsonl of at least one step, got {str(run)!r}; give the output_dir of a "
            "run"
        )
    summary, load = _read_summary(run / "summary.json"), _read_load(run / LOAD_FILE)
    out = Path(out) if out is not None else run / "report.html"
    if "\0" in str(out):
        raise ValueError(f"out must be a path, got {str(out)!r}; name a file")
    if out.is_dir():
        raise ValueError(f"out must be a file, got the folder {out}; name a file in it")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        page = _page(run, metrics, summary, _draw(metrics, load, out))
        with atomic_path(out) as temporary:
            temporary.write_text(page, encoding="utf-8")
    except OSError as error:
        reason = error.strerror or error
        raise ValueError(f"out must be a file that can be written, got {out}: {reason}; choose another one") from error
    return out


def _draw(metrics: list[dict], load: list[dict], out: Path) -> dict[str, str]:
    """Each picture beside ``out`` as HTML by its name, empty where there was nothing to draw."""
    plot_curves(metrics, out.with_name("curves.png"))
    pictures = {  # name: label, whether there was anything to draw
        "curves.png": ("Curves", True),
        "signal.png": ("Tokens with a signal, and KL", draw_signal(metrics, out)),
        "experts.png": ("Experts", draw_experts(metrics, out)),
        "expert_load.png": ("Load of each expert", draw_load(load, out)),
    }
    return {n: _picture(out.with_name(n), label) if drawn else "" for n, (label, drawn) in pictures.items()}


def _page(run: Path, metrics: list[dict], summary: dict[str, Any], shown: dict[str, str]) -> str:
    sections = [
        _headline(metrics, summary),
        _section("Curves", shown["curves.png"]),
        _section("Where the signal goes", shown["signal.png"] + _waterfall_table(metrics)),
        _section("Experts", shown["experts.png"] + shown["expert_load.png"]),
        _section("Completions", _samples(run / "completions")),
        _section("Options and versions", _options(summary)),
    ]
    title = f"{run.resolve().name}: grpo_moe run"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{visible(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body><h1>{visible(title)}</h1>\n{''.join(sections)}</body></html>\n"
    )


def visible(text: Any) -> str:
    r"""``str(text)`` as HTML: escaped, and every character that steers or hides (controls, bidi, invisible) named.

    Newlines stay; the other controls become their pictures (␛), the rest \uXXXX or \UXXXXXXXX. Of a long text the
    ends stay.
    """
    text = encodable(str(text))
    if len(text) > _TEXT_LIMIT:
        half = _TEXT_LIMIT // 2
        text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
    return "".join(map(_visible_character, text))


def _visible_character(character: str) -> str:
    code = ord(character)
    if character == "\n" or not steers_or_hides(character):
        return html.escape(character)
    escaped = f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
    shown = chr(0x2400 + code) if code < 0x20 else "␡" if code == 0x7F else escaped
    return f'<b class="c">{shown}</b>'


def _read_numbers(path: Path) -> list[dict[str, Any]]:
    rows = read_metrics(path)
    for number, row in enumerate(rows, start=1):
        for key, value in row.items():
            if not (value is None or isinstance(value, float) or is_number(value)):
                got = f"{reprlib.repr(value)} for {key!r} in line {number}"
                raise ValueError(f"{path} must hold numbers, got {got}; mend or remove the line")
    return rows


def _read_load(path: Path) -> list[dict[str, Any]]:
    lines = read_metrics(path)
    shapes = [_load_shape(line.get("load")) for line in lines]
    for number, (line, shape) in enumerate(zip(lines, shapes, strict=True), start=1):
        if shape is None or shape != shapes[0]:
            got = f"{reprlib.repr(line.get('load'))} in line {number}"
            raise ValueError(
                f"{path} must hold under load the tokens of each expert by layer, of the same experts in every line, "
                f"got {got}; remove the file to go without"
            )
    return lines


def _load_shape(load: Any) -> tuple[list[str], int] | None:
    """The layers and the number of experts of each; None where it is something else."""
    if not isinstance(load, dict) or not all(isinstance(tokens, list) for tokens in load.values()):
        return None
    sizes = {len(tokens) for tokens in load.values()}
    fits = len(sizes) == 1 and 0 not in sizes and all(map(is_number, itertools.chain(*load.values())))
    return (list(load), sizes.pop()) if fits else None


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        summary = parse_json(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} must be JSON, got a damaged file: {error}; remove it to go without") from error
    if not isinstance(summary, dict):
        raise ValueError(f"{path} must be the summary of a run, got {type(summary).__name__}; remove it to go without")
    for name in ("eval_before", "eval_after"):
        if not isinstance(summary.get(name) or {}, dict):
            got = f"{name}: {reprlib.repr(summary[name])}"
            raise ValueError(f"{path} must hold metrics by name, got {got}; remove the file to go without")
    return summary


def _section(title: str, body: str) -> str:
    return f"<h2>{title}</h2>\n{body}\n" if body else ""


def _picture(path: Path, label: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{html.escape(label)}" src="data:image/png;base64,{data}">\n'


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; all columns but the first hold numbers."""
    kinds = ["", *[' class="n"'] * (len(head) - 1)]
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = (
        "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, line, strict=True)) for tag, line in lines
    )
    return "<table>" + "".join(f"<tr>{row}</tr>\n" for row in cells) + "</table>\n"


def _number(value: Any) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{value:,}" if known and isinstance(value, int) else f"{value:.4g}" if known else "-"


def _headline(metrics: list[dict], summary: dict[str, Any]) -> str:
    last = max(row["step"] for row in metrics if row.get("step") is not None)
    finished = summary.get("steps") == last
    state = "" if finished else f'<p class="warn">This run did not finish: its last logged update is {last}.</p>\n'
    before, after = _evaluations(metrics, summary if finished else {})
    rows = [(f"held-out {visible(name)}", _number(before[name]), _number(after.get(name))) for name in before]
    for key in ("reward", "pass_rate", "completions/mean_length"):
        _, values = series(metrics, key)
        if values.size:
            tenth = max(1, len(values) // 10)
            rows.append((f"training {key}", _number(values[:tenth].mean()), _number(values[-tenth:].mean())))
    skipped = f", {_number(summary['skipped_updates'])} skipped" if finished and "skipped_updates" in summary else ""
    note = '<p class="note">Held-out: first and last evaluation. Training: mean of the first and last tenth.</p>\n'
    table = _table(("", "before", "after"), rows) + note if rows else ""
    return f"{state}<p>{last:,} optimiser updates{skipped}.</p>\n{table}"


def _evaluations(metrics: list[dict], summary: dict[str, Any]) -> tuple[dict[str, float], dict[str, float]]:
    """First and last evaluation, by the summary or by what was logged."""
    logged = [
        {key.removeprefix("eval_"): value for key, value in row.items() if key.startswith("eval_")} for row in metrics
    ]
    logged = [row for row in logged if row]
    first, last = (logged[0], logged[-1]) if logged else ({}, {})
    return summary.get("eval_before") or first, summary.get("eval_after") or (last if len(logged) > 1 else {})


def _waterfall_table(metrics: list[dict]) -> str:
    curves = waterfall(metrics)
    largest = max((float(values.mean()) for values in curves.values()), default=0.0) or 1.0
    rows = []
    for name, values in curves.items():
        width = f"{100 * max(float(values.mean()), 0.0) / largest:.1f}%"
        bar = f'<div style="width: 14rem"><div class="bar" style="width: {width}"></div></div>'
        numbers = (f"{value:,.0f}" for value in (values[0], values.mean(), values[-1]))
        rows.append((visible(WATERFALL.get(name, name)), *numbers, bar))
    return _table(("completion tokens a rollout", "first", "mean", "last", ""), rows) if rows else ""


def _samples(folder: Path) -> str:
    """A few completions, best and worst of each file, from the first, a middle and the last rollout."""
    files = sorted(folder.glob("*.parquet"))
    chosen = np.unique(np.linspace(0, len(files) - 1, min(_SAMPLED_FILES, len(files))).round().astype(int))
    return "".join(_samples_of(files[number]) for number in chosen)


def _samples_of(path: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        return f'<p class="warn">{visible(path.name)} cannot be read: {visible(error)}</p>\n'
    rows = sorted(rows, key=lambda row: -row["reward"] if is_number(row.get("reward")) else math.inf)
    places = np.unique(np.linspace(0, len(rows) - 1, min(_ROWS_A_FILE, len(rows))).round().astype(int))
    return "".join(_sample(rows[place]) for place in places)


def _sample(row: dict[str, Any]) -> str:
    numbers = {name: value for name, value in row.items() if name not in ("step", "prompt", "completion")}
    facts = ", ".join(f"{visible(name)} {visible(_fact(value))}" for name, value in numbers.items())
    texts = "".join(f"<pre>{visible(row.get(name) or '')}</pre>" for name in ("prompt", "completion"))
    return f"<p>Update {visible(row.get('step'))}: {facts}</p>{texts}\n"


def _fact(value: Any) -> Any:
    return value if isinstance(value, str) else _number(value)


def _options(summary: dict[str, Any]) -> str:
    tables = []
    for name in ("config", "versions"):
        known = summary.get(name)
        rows = [(visible(key), visible(value)) for key, value in known.items()] if isinstance(known, dict) else []
        if rows:
            tables.append(f"<details><summary>{name}</summary>{_table(('', ''), rows)}</details>\n")
    return "".join(tables)
