"""Every bad input of the tables ends in one clear error: what is wrong, the rule, the value, and how to mend it."""

import re
import warnings
from collections.abc import Iterable

import pytest
from properties import bad_files, bad_inputs
from properties.bad_inputs import Bad

# what a reward function raised, and what argparse says, have a form of their own
_CLEAR = re.compile(
    r"must .*, got .+; .+"
    r"|reward function .* raised .+; it was called with .+"
    r"|(argument|the following arguments|unrecognized arguments:) .+; see .+ --help"
)
_LEAST = 2700  # entries of all tables: a table that runs dry must not pass


def fault_of(bad: Bad) -> str | None:
    """What is unclear about the way in which a bad input ends; None where all is as it should be."""
    try:
        bad.call()
    except (ValueError, TypeError, RuntimeError) as error:
        text = str(error)
        if "\n" in text or len(text) > 1500:
            return f"not one line: {text[:200]!r}"
        if not re.search(bad.says, text):
            return f"does not say {bad.says!r}: {type(error).__name__}: {text}"
        if isinstance(error, RuntimeError) and "raised" not in text:
            return f"RuntimeError: {text}"
        return None if _CLEAR.search(text) else f"lacks the rule, the value or the fix: {type(error).__name__}: {text}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def check(area: str, table: Iterable[Bad], counted: dict[str, int]) -> None:
    counted[area] = 0
    faults = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for bad in table:
            counted[area] += 1
            if fault := fault_of(bad):
                faults.append(f"{bad.label}: {fault}")
    assert not faults, f"{len(faults)} of {counted[area]} bad inputs:\n" + "\n".join(faults)


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """Bad inputs tried so far, by area."""
    return {}


@pytest.mark.parametrize("area", bad_inputs.AREAS)
def test_every_bad_input_has_a_clear_message(area, counted):
    check(area, (bad for part in bad_inputs.AREAS[area] for bad in part()), counted)


@pytest.mark.parametrize("area", bad_files.AREAS)
def test_every_bad_file_and_command_line_has_a_clear_message(area, counted, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    check(area, bad_files.AREAS[area](tmp_path), counted)


def test_the_tables_are_full(counted, capsys):
    """Prints how many bad inputs were tried; runs last, after the tests above."""
    if len(counted) < len(bad_inputs.AREAS) + len(bad_files.AREAS):
        pytest.skip("only some of the tables were run")
    with capsys.disabled():
        print("\n" + "\n".join(f"{n:5} bad inputs: {area}" for area, n in counted.items()))
        print(f"{sum(counted.values()):5} in all")
    assert sum(counted.values()) >= _LEAST and min(counted.values()) >= 10


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("seed must be 0 or positive, got -1; 0 is the default", None),
        ("seed must be 0 or positive, got -1", "lacks"),
        ("seed is wrong; mend it", "lacks"),
        ("top_k must be 0, got 1; leave it out", "does not say"),
        ("seed must be\n0, got 1; mend it", "not one line"),
    ],
)
def test_the_judge_can_fail(text, fault):
    def call():
        raise ValueError(text)

    found = fault_of(Bad("", call, "seed"))
    assert found is None if fault is None else found.startswith(fault)
    assert fault_of(Bad("", lambda: None, "seed")) == "no error"
    assert fault_of(Bad("", lambda: {}["seed"], "seed")).startswith("KeyError")
