"""Measures work in calls of functions: this count does not depend on the load of the machine."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def calls_of(action: Callable[[], object]) -> int:
    """How many functions, Python's and C's, are called while `action` runs."""
    count = 0

    def profile(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # Hypothesis hooks into the garbage collector, and its calls would be counted
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
