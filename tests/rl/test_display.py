"""Displays show the run, and neither crash on nor pass on hostile text."""

import io
import sys
import time

import pytest

from grpo_moe.rl.display import Display, LiveDisplay, NullDisplay, PlainDisplay, clean, make_display, sparkline

HOSTILE = [
    "\x1b[31mred\x1b[0m \x1b]0;title\x07 \x9b2J \x1b]8;;http://x\x1b\\link \x1b",
    "[/bold] [red]x[/ [bold] {braces} %s \\[",
    "lone \ud800 surrogate \udfff",
    "x" * 1_000_000,
    "\x1b]0;" * 100_000,
    "\r\b\x00\x07\u202eevil\u2066\u200b\ufeff",
    "",
    [{"role": "user", "content": "a chat\nmessage"}],
]


class Screen(io.TextIOWrapper):
    """A stand-in for stdout: a terminal, or not, of some encoding."""

    def __init__(self, encoding="utf-8", terminal=False):
        super().__init__(io.BytesIO(), encoding=encoding, newline="\n")
        self.isatty = lambda: terminal

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def screen(monkeypatch):
    def install(**options):
        monkeypatch.setattr(sys, "stdout", Screen(**options))
        return sys.stdout

    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "200")
    return install


def show_a_run(display: Display, text) -> None:
    with display:
        for step in range(1, 4):
            metrics = {"reward": step / 4, "pass_rate": None, "grad_norm": float("nan"), "seconds/update": 2.0}
            display.update(step, metrics)
        display.update(3, {"eval_pass_rate": 0.625})
        display.show_completions([(text, text, 1.0), (text, text, float("nan")), (text, text, None)])
        display.message(text)
    display.stop()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("text", HOSTILE, ids=[repr(text)[:12] for text in HOSTILE])
@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_hostile_text_neither_crashes_nor_reaches_the_terminal(screen, kind, text, encoding):
    shown = screen(encoding=encoding)
    show_a_run(kind(3, text), text)
    output = shown.text()
    assert "0.75" in output and "eval pass 0.625" in output
    assert not set(output) & set("\x1b\x9b\x00\x07\b\r\u202e\u200b")
    assert len(output) < 10_000


@pytest.mark.parametrize("kind", [PlainDisplay, LiveDisplay])
def test_markup_is_shown_as_it_is(screen, kind):
    shown, text = screen(), "[red]x[/ [/b]"
    show_a_run(kind(3, text), text)
    assert shown.text().count(text) == 8  # title, message, and three times prompt and completion


def test_live_display_on_a_terminal_shows_everything(screen):
    shown = screen(terminal=True)
    with LiveDisplay(10, "gptoss-lite") as display:
        display.update(1, {"reward": 0.0, "seconds/rollout": 3.0, "seconds/total": 4.0})
        display.update(2, {"reward": 1.0})
        display.show_completions([("8 8 2=18?", "8+8=16+2=18", 1.0)])
        display.message("saved")
    text = shown.text()
    for part in ("gptoss-lite", "2/10", "eta", "▁█", "rollout 3.00 s (75%)", "8 8 2=18?", "8+8=16+2=18", "saved"):
        assert part in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1, "the cursor must come back"


def test_live_display_gives_the_terminal_back_after_an_error(screen):
    shown = screen(terminal=True)
    with pytest.raises(RuntimeError), LiveDisplay(10, "run"):
        raise RuntimeError
    assert "\x1b[?25h" in shown.text() and sys.stdout is shown


def test_live_display_survives_a_narrow_ascii_terminal(screen, monkeypatch):
    monkeypatch.setenv("COLUMNS", "12")
    shown = screen(encoding="ascii", terminal=True)
    show_a_run(LiveDisplay(3, "a long title of a run"), HOSTILE[0])
    assert "0.75" in shown.text() and "\x1b]" not in shown.text()


def test_plain_display_prints_a_line_a_step_with_the_time_left(screen, monkeypatch):
    clock = iter([100.0, 130.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    shown = screen()
    with PlainDisplay(202, "run") as display:
        display.update(20, {"reward": 0.5})  # a resumed run: the pace counts from here
        display.update(22, {"reward": 0.75, "step": 22})
    assert shown.text() == "run\nstep 20/202  reward 0.5  eta ?\nstep 22/202  reward 0.75  eta 45m00s\n"


def test_make_display_chooses_once(screen, monkeypatch):
    screen()
    assert type(make_display(True, 10, "run")) is PlainDisplay
    screen(terminal=True)
    assert type(make_display(True, 10, "run")) is LiveDisplay
    assert type(make_display(False, 10, "run")) is NullDisplay
    assert type(make_display(True, 10, "run", enabled=False)) is NullDisplay
    monkeypatch.setenv("TERM", "dumb")
    assert type(make_display(True, None, "run")) is PlainDisplay


class Failing(io.StringIO):
    """As a pipe that nobody reads any more, or a terminal that is gone."""

    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal

    def write(self, text):
        raise BrokenPipeError("nobody reads")

    flush = close = lambda self: None


@pytest.mark.parametrize("kind", ["none", "closed", "a pipe", "a terminal"])
@pytest.mark.parametrize("fails", ["from the start", "later"])
def test_a_run_outlives_its_standard_output(screen, monkeypatch, caplog, kind, fails):
    closed = io.StringIO()
    closed.close()
    gone = {"none": None, "closed": closed}.get(kind, Failing(kind == "a terminal"))
    monkeypatch.setattr("grpo_moe.text.LenientFile._has_warned", False)
    screen(terminal=kind == "a terminal")
    if fails == "from the start":
        monkeypatch.setattr(sys, "stdout", gone)
    display = make_display(True, 3, "title")
    monkeypatch.setattr(sys, "stdout", gone)
    show_a_run(display, "text")
    lost = [message for message in caplog.messages if message.startswith("Standard output takes no more text")]
    assert len(lost) == (kind != "none" and not (kind == "a terminal" and fails == "later"))


def test_null_display_shows_nothing(screen):
    shown = screen()
    show_a_run(NullDisplay(), "text")
    assert shown.text() == ""


def test_clean_keeps_start_and_end_and_shows_newlines():
    assert clean("a\n\tb é 中") == r"a\n\tb é 中"
    assert clean("lone \ud800") == r"lone \ud800"
    long = clean("start" + "x" * 1_000_000 + "end", limit=30)
    assert len(long) == 30 and long.startswith("start") and long.endswith("end") and "..." in long
    assert clean("y" * 30, limit=30) == "y" * 30


def test_sparkline_scales_bins_and_skips_gaps():
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([0.0, float("nan"), 1.0], ascii_only=True) == ".@"
    assert sparkline([float(i) for i in range(1000)], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline([]) == ""


def test_of_a_conversation_the_last_message_is_shown(capsys):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?\x1b[2J"}]
    PlainDisplay(2, "t").show_completions([(chat, [{"role": "assistant", "content": "4"}], 1.0), ("a", [], 0.0)])
    shown = capsys.readouterr().out
    assert "2+2?" in shown and "-> 4" in shown and "role" not in shown and "\x1b" not in shown
