"""MathReward: what it takes for the answer, its worker process, and math-verify's verdicts where that is installed."""

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from grpo_moe.rewards import MathReward, RewardCaller
from grpo_moe.rewards.equivalence import _given_answer, _right_answer

STUB = """
import os, time

class LatexExtractionConfig:
    def __init__(self, boxed_match_priority): ...

def parse(text, config, fallback_mode, parsing_timeout):
    print("noise")
    answer = text.removeprefix("\\\\boxed{").removesuffix("}")
    if answer == "unreadable":
        return []
    if answer == "die":
        os._exit(3)
    if answer == "sleep":
        time.sleep(60)
    if answer == "in C code":
        10 ** 10 ** 9
    return [sorted(answer)]

def verify(right, given, timeout_seconds):
    return right == given
"""


@pytest.fixture
def stubbed(tmp_path, monkeypatch):
    """A stand-in for math-verify: answers are equal when they have the same letters."""
    (tmp_path / "math_verify.py").write_text(textwrap.dedent(STUB))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    return MathReward(time_limit=0.5)


def score(reward, given, right):
    return reward(["q"], [given], answer=[right], other=["ignored"])[0]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("so \\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\boxed{1} no, \\boxed{\\{2\\}} yes", "\\{2\\}"),
        ("<answer>so $\\boxed{3}$</answer>", "3"),
        ("\\boxed{4} <answer> $5$ </answer>", "5"),
        ("first 1,234 then 5,678.50.", "5,678.50"),
        ("it is 1/2", "1/2"),
        ("10-5 is -5", "-5"),
        ("10-5", "5"),
        ("1, 2, 3", "3"),
        ("\\boxed{1", "1"),
        ("none", ""),
        ([{"role": "assistant", "content": "\\boxed{x}"}], "x"),
        ([{"role": "assistant", "content": None}], ""),
    ],
)
def test_the_given_answer_is_the_marked_one_or_the_last_number(completion, answer):
    assert _given_answer(completion) == answer


@pytest.mark.parametrize(
    ("column", "answer"), [(7, "7"), (" $x$ ", "x"), ("work \\boxed{\\sqrt{2}}", "\\sqrt{2}"), ("", "")]
)
def test_the_right_answer_may_be_marked_or_not(column, answer):
    assert _right_answer(column) == answer


def test_answers_equal_as_text_or_number_need_no_worker(stubbed):
    assert score(stubbed, "\\boxed{sleep}", "sleep") == 1.0
    assert score(stubbed, "1,000", 1000) == 1.0
    assert stubbed._process is None


def test_the_worker_compares_what_text_cannot(stubbed):
    assert score(stubbed, "\\boxed{ab}", "ba") == 1.0
    assert score(stubbed, "\\boxed{ab}", "bc") == 0.0
    assert stubbed(["q"] * 3, ["\\boxed{ab}", "\\boxed{c}", "ab"], ["ba"] * 3) == [1.0, 0.0, 0.0]


def test_a_right_answer_that_cannot_be_read_leaves_the_row_unscored(stubbed):
    assert score(stubbed, "\\boxed{ab}", "unreadable") is None
    assert score(stubbed, "\\boxed{ab}", "") is None
    assert score(stubbed, "", "") is None
    assert score(stubbed, "\\boxed{ab}", "x" * 1001) is None


def test_a_given_answer_that_is_missing_or_long_is_wrong_without_a_worker(stubbed):
    assert score(stubbed, "none", "ba") == 0.0
    assert score(stubbed, f"\\boxed{{{'x' * 1001}}}", "ba") == 0.0
    assert stubbed._process is None


@pytest.mark.parametrize("given", ["sleep", "in C code"])
def test_a_slow_comparison_is_ended_and_wrong(stubbed, given):
    start = time.perf_counter()
    assert score(stubbed, f"\\boxed{{{given}}}", "ba") == 0.0
    assert time.perf_counter() - start < 10
    assert score(stubbed, "\\boxed{ab}", "ba") == 1.0


def test_a_worker_that_dies_is_named_and_replaced(stubbed, caplog):
    assert score(stubbed, "\\boxed{die}", "ba") == 0.0
    assert "comparing 'die' ended math-verify with code 3" in caplog.text
    assert score(stubbed, "\\boxed{ab}", "ba") == 1.0


def test_an_interrupt_does_not_shift_the_answers(stubbed, monkeypatch):
    assert score(stubbed, "\\boxed{ab}", "ba") == 1.0

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(stubbed._process, "stdout", type("Pipe", (), {"readline": interrupted, "close": print}))
    with pytest.raises(KeyboardInterrupt):
        score(stubbed, "\\boxed{c}", "ba")  # its answer, false, is still to come
    assert score(stubbed, "\\boxed{aab}", "aba") == 1.0


def test_it_works_outside_the_main_thread(stubbed):
    caller = RewardCaller(stubbed, timeout=30)
    assert caller.names == ["math_equivalence"]
    found = []
    thread = threading.Thread(target=lambda: found.append(caller(["q"], ["\\boxed{ab}"], {"answer": ["ba"]}).rewards))
    thread.start()
    thread.join()
    assert found == [[1.0]]


def test_the_worker_ends_with_its_reward(stubbed):
    score(stubbed, "\\boxed{ab}", "ba")
    process = stubbed._process
    stubbed._stop()
    assert process.returncode is not None
    assert score(stubbed, "\\boxed{ab}", "ba") == 1.0


def test_a_broken_installation_is_named(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(RuntimeError, match="equivalence_worker.py must start, got an early end"):
        score(MathReward(), "\\boxed{ab}", "ba")


def test_without_math_verify_construction_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="math_verify must be installed.*pip install 'math-verify"):
        MathReward()


def test_a_time_limit_out_of_range_is_refused(stubbed):
    with pytest.raises(ValueError, match="time_limit must be a positive number of seconds, got 0"):
        MathReward(time_limit=0)


@pytest.fixture(scope="module")
def installed():
    pytest.importorskip("math_verify")
    return MathReward(time_limit=5)


@pytest.mark.parametrize(
    ("given", "right", "reward"),
    [
        ("\\boxed{0.5}", "\\frac{1}{2}", 1.0),
        ("it is 1/2", "0.5", 1.0),
        ("\\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        ("\\boxed{\\{2,1\\}}", "\\{1,2\\}", 1.0),
        ("\\boxed{50\\%}", "0.5", 1.0),
        ("\\boxed{x=7}", "7", 1.0),
        ("\\boxed{x^2}", "x^3", 0.0),
        ("\\boxed{\\frac{1}{3}}", "\\frac{1}{2}", 0.0),
        ("\\boxed{)(}", "\\frac{1}{2}", 0.0),
        ("\\boxed{__import__('os').abort()}", "2", 0.0),
        ("\\boxed{1}", "}{", None),
    ],
)
def test_verdicts_of_math_verify(installed, given, right, reward):
    assert score(installed, given, right) == reward


@pytest.mark.parametrize("given", ["9^{9^{9^{9}}}", "10^{10^{9}}", "(" * 900])
def test_math_verify_is_bounded_on_hostile_answers(installed, given):
    start = time.perf_counter()
    assert score(MathReward(time_limit=1), f"\\boxed{{{given}}}", "2") == 0.0
    assert time.perf_counter() - start < 20


def test_the_worker_needs_nothing_of_the_library():
    """It starts in well under a second because it imports neither torch nor transformers."""
    from grpo_moe.rewards.equivalence import _WORKER

    code = (
        "import sys, runpy; runpy.run_path(sys.argv[1]); print([m for m in ('torch', 'grpo_moe') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code, str(_WORKER)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
