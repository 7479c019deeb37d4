"""Trials in a small tree: which lines tests run, and which broken lines they find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]

MODULE: Final = "upr_protocol/small.py"

SOURCE: Final = '''"""A module."""


def double(number: int) -> int:
    if number < 0:
        raise ValueError
    return 2 * number


def count_down(number: int) -> None:
    while number > 0:
        number -= 1


def unused(number: int) -> int:
    return number + 1
'''

TESTS: Final = """
import pytest

from upr_protocol.small import count_down, double

def test_double():
    assert double(2) == 4

def test_negative():
    with pytest.raises(ValueError):
        double(-1)

def test_count_down():
    count_down(1000)
"""

# In a process of its own, as a mutation run forks: the tests' process may have threads.
SCRIPT: Final = """
import json, sys
from pathlib import Path
from tests.mutation.mutants import Mutant
from tests.mutation.trials import Trials

tree, module, tests = Path(sys.argv[1]), sys.argv[2], ["tests/test_small.py"]
source = (tree / module).read_text()
trials = Trials(tree)
costs = trials.costs(tests, {module})
broken = {
    "result": (7, "2 * number", "3 * number"),
    "condition": (5, "number < 0", "number < -5"),
    "endless": (12, "number -= 1", "number += 1"),
    "unused": (16, "number + 1", "number + 2"),
    "nothing": (7, "2 * number", "number * 2"),
}
found = {
    name: trials.is_found(
        module, Mutant(line, before, after, source.replace(before, after)), costs
    )
    for name, (line, before, after) in broken.items()
}
lines = {test: sorted(line for _, line in cost.lines) for test, cost in costs.items()}
seconds = [second for cost in costs.values() for second in (cost.processor_s, cost.elapsed_s)]
line, before, after = broken["result"]
changed = Mutant(line, before, after, source.replace(before, after))
test = "tests/test_small.py::test_"
found_by_all = {
    name: trials.is_found_by_all(module, changed, [test + name])
    for name in ("double", "count_down")
}
tests_left = sorted(trials.costs(tests, {module}, [test + "double", test + "negative"]))
print(json.dumps({
    "found": found, "lines": lines, "seconds": seconds,
    "found_by_all": found_by_all, "tests_left": tests_left,
}))
"""


def _tree(folder: Path, tests: str) -> Path:
    module = folder / MODULE
    module.parent.mkdir()
    module.write_text(SOURCE)
    (folder / "tests").mkdir()
    (folder / "tests" / "test_small.py").write_text(tests)
    return module


def _run(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), MODULE]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run says of the tree, and whether it left the module as it was."""
    folder = tmp_path_factory.mktemp("tree").resolve()
    module = _tree(folder, TESTS)
    modified_at = module.stat().st_mtime_ns
    process = _run(folder)
    assert process.returncode == 0, process.stderr
    is_restored = module.read_text() == SOURCE and module.stat().st_mtime_ns == modified_at
    return {**json.loads(process.stdout), "is_restored": is_restored}


def test_a_broken_line_is_found_if_a_test_fails_or_does_not_end(outcome: dict[str, Any]) -> None:
    assert outcome["found"] == {
        "result": True,
        "condition": True,
        "endless": True,
        "unused": False,
        "nothing": False,
    }


def test_slow_tests_are_left_out_at_first_and_run_by_themselves_later(
    outcome: dict[str, Any],
) -> None:
    assert outcome["tests_left"] == ["tests/test_small.py::test_count_down"]
    assert outcome["found_by_all"] == {"double": True, "count_down": False}


def test_a_module_is_restored_after_its_trials(outcome: dict[str, Any]) -> None:
    assert outcome["is_restored"]


def test_each_test_is_noted_with_the_lines_that_it_runs(outcome: dict[str, Any]) -> None:
    # Code whose lines have all been seen by a test is followed no further; others follow it anew.
    assert outcome["lines"] == {
        "tests/test_small.py::test_double": [5, 7],
        "tests/test_small.py::test_negative": [5, 6],
        "tests/test_small.py::test_count_down": [11, 12],
    }
    assert all(seconds >= 0 for seconds in outcome["seconds"])


def test_tests_that_fail_before_anything_is_broken_end_the_run(tmp_path: Path) -> None:
    _tree(tmp_path.resolve(), TESTS + "\ndef test_failing():\n    assert double(1) == 3\n")
    process = _run(tmp_path.resolve())
    assert process.returncode != 0
    assert "tests/test_small.py fail before anything is broken" in process.stderr
