"""Seeds Trio's scheduler, which draws the order of the tasks that are ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import trio._core._run as trio_run


@contextmanager
def seeded_scheduler(seed: int) -> Iterator[None]:
    """Makes Trio draw the same orders for the same seed.

    These are private parts of Trio, which is pinned: a test in tests/simulation/test_world.py fails
    if they change.
    """
    parts: Any = trio_run
    before = parts._ALLOW_DETERMINISTIC_SCHEDULING, parts._r.getstate()
    parts._ALLOW_DETERMINISTIC_SCHEDULING = True
    parts._r.seed(seed)
    try:
        yield
    finally:
        parts._ALLOW_DETERMINISTIC_SCHEDULING = before[0]
        parts._r.setstate(before[1])
