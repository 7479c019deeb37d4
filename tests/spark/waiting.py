"""Waiting for what can only be asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WAIT_S = 60.0


def until(condition: Callable[[], bool], description: str, wait_s: float = WAIT_S) -> None:
    """Waits until `condition` is true, of something that can only be asked and does not tell."""
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, f"not yet: {description}"
        threading.Event().wait(0.05)
