"""Maps for a bucket's log and index: LMDB's and simulated ones, and both in them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.logged_index import LoggedIndex
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.simulated_disk import SimulatedDisk


@pytest.fixture(params=["lmdb", "simulated"])
def log_and_index(request: pytest.FixtureRequest, tmp_path: Path) -> list[OrderedMap]:
    """Two empty maps, which the test closes."""
    maps: list[OrderedMap] = []
    for name in ("log", "index"):
        if request.param == "lmdb":
            (tmp_path / name).mkdir()
            copies_values = name == "index"
            maps.append(
                LmdbOrderedMap(tmp_path / name, bytes_max=1 << 28, copies_values=copies_values)
            )
        else:
            maps.append(SimulatedDisk())
    return maps


@pytest.fixture
def logged_index(log_and_index: list[OrderedMap]) -> Iterator[LoggedIndex]:
    yield LoggedIndex(*log_and_index)
    for ordered_map in log_and_index:
        ordered_map.close()
