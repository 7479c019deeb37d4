"""Which lines each test runs, and how long it takes: one run of the tests, with nothing broken."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Collection, Generator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import attrs
import pytest

Line = tuple[str, int]
"""A module's path in the tree, and a line's number."""


@attrs.frozen
class TestCost:
    """What a test takes and touches.

    Attributes:
        processor_s: Seconds of the processor, while each line is noted.
        elapsed_s: Seconds of the clock.
        lines: The lines that it runs.
    """

    __test__ = False

    processor_s: float
    elapsed_s: float
    lines: frozenset[Line]


class CoveredLines:
    """A pytest plugin that notes the lines of some modules that each test runs.

    Lines that run only when a module is imported, or in another process, are no test's.
    """

    def __init__(self, tree: Path, modules: Collection[str]) -> None:
        self.costs: Final[dict[str, TestCost]] = {}
        self._names: Final = {os.fspath(tree / module): module for module in modules}
        self._unseen: dict[CodeType, set[int]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Measures one test."""
        self._unseen = {}
        processor_s, elapsed_s = time.process_time(), time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)
            self.costs[item.nodeid] = TestCost(
                time.process_time() - processor_s,
                time.monotonic() - elapsed_s,
                frozenset(self._lines_seen()),
            )

    def _lines_seen(self) -> Generator[Line, None, None]:
        for code, unseen in self._unseen.items():
            for line in _lines_of(code) - unseen:
                yield self._names[code.co_filename], line

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Python calls it at each call. Code whose lines have all been seen is not followed."""
        code = frame.f_code
        if code.co_filename not in self._names:
            return None
        unseen = self._unseen.get(code)
        if unseen is None:
            unseen = self._unseen[code] = _lines_of(code)
        if not unseen:
            return None

        def note(frame: FrameType, event: str, argument: Any) -> Any:
            unseen.discard(frame.f_lineno)
            return note

        return note


def _lines_of(code: CodeType) -> set[int]:
    return {line for _, _, line in code.co_lines() if line is not None}
