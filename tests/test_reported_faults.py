"""REPORTED_FAULTS.md names tests that exist, for every fault once."""

import ast
import fnmatch
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROWS = re.findall(r"^\| (\d+) \| ([^|]+) \| (.+) \|$", (TESTS / "REPORTED_FAULTS.md").read_text(encoding="utf-8"), re.M)


def functions() -> dict[str, set[str]]:
    """Names of the test functions of each file, and of those that files share."""
    return {
        str(path.relative_to(TESTS.parent)): {
            node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if type(node) is ast.FunctionDef
        }
        for path in TESTS.rglob("*.py")
    }


def test_every_fault_is_there_once_with_a_kind_and_an_answer():
    numbers = [int(number) for number, _, _ in ROWS]
    assert len(numbers) == 100 and numbers == sorted(set(numbers))
    assert all(kind.strip() and answer.strip() for _, kind, answer in ROWS)


def test_every_test_that_it_names_exists():
    known = functions()
    names = {name for found in known.values() for name in found}
    missing = []
    for number, _, answer in ROWS:
        for path, name in re.findall(r"([\w/.]*)::(\w[\w*]*)", answer):
            own = known.get(path, names)
            if not fnmatch.filter(own, name):
                missing.append((number, path, name))
        missing += [(number, path) for path in re.findall(r"`(tests/[\w/]+\.py)", answer) if path not in known]
    assert not missing, missing
