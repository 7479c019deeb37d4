"""Faults put into server, replica and client on purpose, one at a time: the simulation is worth
what it finds of them.

Each is a context manager, named for what it does; `BUGS` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from tests.simulation.bugs import disk, engine, failover, streams

Bug = Callable[[], AbstractContextManager[None]]

BUGS: Final[dict[str, Bug]] = {
    bug.__name__: bug for module in (disk, engine, failover, streams) for bug in module.BUGS
}
"""By name."""

__all__ = ["BUGS", "Bug"]
