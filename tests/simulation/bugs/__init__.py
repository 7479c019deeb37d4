"""Bugs planted in server, replica and client, one at a time. The simulation is worth as much as it
finds of them.

Each is named after what the broken code does; `BUGS` has them all.
"""

from __future__ import annotations

from typing import Final

from tests.simulation.bugs import access, disk, engine, events, failover, streams
from tests.simulation.bugs.planted_bug import PlantedBug

BUGS: Final[dict[str, PlantedBug]] = {
    bug.name: bug
    for module in (access, disk, engine, events, failover, streams)
    for bug in module.BUGS
}
"""By name."""

__all__ = ["BUGS", "PlantedBug"]
