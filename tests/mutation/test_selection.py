"""Which tests a mutant is tried with, in which order, and for how long."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import attrs
import pytest

from tests.mutation import selection
from tests.mutation.covered_lines import TestCost
from tests.mutation.selection import Selection

ROOT: Final = Path(__file__).resolve().parents[2]

COSTS: Final = {
    "slow": TestCost(3.0, 0.2, frozenset({("m.py", 1), ("m.py", 2)})),
    "quick": TestCost(1.0, 9.0, frozenset({("m.py", 1)})),
    "other": TestCost(2.0, 2.0, frozenset({("n.py", 1)})),
}


@pytest.mark.parametrize(
    ("line", "tests"),
    [
        (("m.py", 1), ["quick", "slow"]),
        (("m.py", 2), ["slow"]),
        (("n.py", 1), ["other"]),
        # It runs at an import only, so any test may fail.
        (("m.py", 3), ["quick", "other", "slow"]),
    ],
)
def test_the_tests_that_run_a_line_are_tried_quickest_first(
    line: tuple[str, int], tests: list[str]
) -> None:
    assert selection.tests_of(line, COSTS) == tests


@attrs.frozen
class Item:
    """What a selection looks at of a test."""

    nodeid: str


def test_other_tests_are_left_out_and_the_order_holds() -> None:
    items: list[Any] = [Item("slow"), Item("other"), Item("quick")]
    Selection(["quick", "slow"], COSTS).pytest_collection_modifyitems(items)
    assert items == [Item("quick"), Item("slow")]


@pytest.mark.parametrize(
    ("limits", "waiting", "ended_by"),
    [
        ("processor_s=0.05, elapsed_s=60", "while True: pass", signal.SIGPROF),
        ("processor_s=60, elapsed_s=0.05", "signal.pause()", signal.SIGALRM),
    ],
)
def test_a_test_that_takes_too_long_is_ended(
    limits: str, waiting: str, ended_by: signal.Signals
) -> None:
    script = (
        "import signal\n"
        "from tests.mutation.selection import limit_time\n"
        f"limit_time({limits})\n"
        f"{waiting}\n"
    )
    process = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert process.returncode == -ended_by


def test_each_test_has_a_limit_of_its_own() -> None:
    script = (
        "import signal\n"
        "from tests.mutation.test_selection import COSTS\n"
        "from tests.mutation.selection import Selection\n"
        "plugin = Selection(list(COSTS), COSTS)\n"
        "for name in COSTS:\n"
        "    plugin.pytest_runtest_logstart(name)\n"
        "    timers = map(signal.getitimer, (signal.ITIMER_PROF, signal.ITIMER_REAL))\n"
        "    print(*(round(seconds) for seconds, _ in timers))\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True
    )
    # 1 s and three times the processor's time; 30 s and five times the clock's.
    assert process.stdout.split("\n") == ["10 31", "4 75", "7 40", ""]
