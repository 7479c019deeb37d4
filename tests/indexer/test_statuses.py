"""What is told of all indexes at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import pytest
import trio
import trio.testing

from tests.indexer.kit import a_server, name_of
from upr_protocol.client import Address, connect
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.designs import Designs
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.scanner import STATUSES_AT_ONCE, Scanner
from upr_server.indexer.server_progress import ServerProgress
from upr_server.indexer.slices import SliceHolder, SliceId, SliceStatus

INDEXES = 40
DROPPED = name_of("d/i07")
DEFINITION = IndexDefinition(("city",))
NAMES = [name_of(f"d/i{number:02}") for number in range(INDEXES)]


class DesignsWithOneDropped:
    """Many indexes, of which one was dropped since they were listed."""

    def names(self) -> list[IndexName]:
        return NAMES

    def find(self, name: IndexName) -> IndexDefinition:
        if name == DROPPED:
            raise NoIndexError(f"there is no index {name}")
        return DEFINITION


class NoProgress:
    """A server without changes."""

    async def seqs(self) -> Mapping[PartitionId, SeqNo]:
        await trio.lowlevel.checkpoint()
        return {}


class SlowSlice:
    """A slice that takes a second to answer.

    Attributes:
        at_once: How many it was asked at once at most.
    """

    slice_id = SliceId(0, 1)

    def __init__(self) -> None:
        self._open_count = 0
        self.at_once = 0

    async def status(self, _name: IndexName, *_options: object) -> SliceStatus:
        self._open_count += 1
        self.at_once = max(self.at_once, self._open_count)
        await trio.sleep(1)
        self._open_count -= 1
        return SliceStatus(slice=0, state="ready")


async def test_the_slices_are_asked_of_several_indexes_at_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    part = SlowSlice()
    scanner = Scanner(
        cast("Designs", DesignsWithOneDropped()),
        [cast("SliceHolder", part)],
        MemoryPool(1),
        cast("ServerProgress", NoProgress()),
    )
    began = trio.current_time()
    statuses = await scanner.statuses()
    assert [status.name for status in statuses] == [str(name) for name in NAMES if name != DROPPED]
    assert part.at_once == STATUSES_AT_ONCE
    assert trio.current_time() - began == pytest.approx(3)


async def test_questions_to_the_server_at_the_same_time_get_the_same_answer() -> None:
    async with a_server() as server, connect(server.url("b")) as client:
        await client.set("k", "{}")
        progress = ServerProgress(Address.parse(server.url("b")))
        answers: list[int] = []

        async def ask() -> None:
            answers.append(sum((await progress.seqs()).values()))

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
        assert answers == [1, 1, 1]
