"""What something costs, counted: the same on any machine, however busy."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import attrs


@attrs.frozen
class Cost:
    """What was spent.

    Attributes:
        lines: Lines of Python that were run, as often as they were.
        nbytes: Bytes that were allocated, whether or not they were kept: what is copied shows here.
    """

    lines: int
    nbytes: int


def cost_of(action: Callable[[], object]) -> Cost:
    """Runs `action` and counts."""
    lines = nbytes = bytes_before = 0

    def count(_frame: FrameType, event: str, _argument: Any) -> Any:
        nonlocal lines, nbytes, bytes_before
        lines += event == "line"
        # The most that was held since the line before, not only what is left of it.
        now, most = tracemalloc.get_traced_memory()
        nbytes += most - bytes_before
        tracemalloc.reset_peak()
        bytes_before = now
        return count

    before = sys.gettrace()
    tracemalloc.start()
    bytes_before, _ = tracemalloc.get_traced_memory()
    sys.settrace(count)
    try:
        action()
    finally:
        sys.settrace(before)
        tracemalloc.stop()
    return Cost(lines, nbytes)
