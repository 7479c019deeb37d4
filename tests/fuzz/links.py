"""What comes over a link between two nodes of an indexer: questions, and answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from math import inf
from typing import Any

import structlog
import trio
import trio.testing

from upr_protocol.errors import UprError
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.node_links import serve_link
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import Query
from upr_server.indexer.remote_slice import RemoteSlice
from upr_server.indexer.replicated_slice import ReplicatedSlice
from upr_server.indexer.slices import (
    CatalogReport,
    SliceAnswer,
    SliceId,
    SliceObserver,
    SliceScan,
    SliceStatus,
)

TO_NODE, FROM_NODE = range(2)
"""What an input is, by its first byte."""

SLICE = SliceId(0, 1)
POOL_BYTES = 64 * 1024 * 1024


class _Observer:
    def slice_restarted(self, index: int) -> None:
        assert index == 0

    def catalog_read(self, index: int, report: CatalogReport) -> None:
        assert index == 0
        assert isinstance(report, CatalogReport)


class _Slice:
    """Answers at once. What would change it is a finding."""

    slice_id = SLICE
    title = str(SLICE)
    heard_at = inf

    async def run(self, observer: SliceObserver) -> None:
        raise AssertionError("a link runs a slice")

    async def stop(self) -> None:
        raise AssertionError("a link stops a slice")

    def close(self) -> None:
        raise AssertionError("a link closes a slice")

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        raise AssertionError("a link defines indexes")

    async def ping(self) -> None:
        await trio.lowlevel.checkpoint()

    async def confirm(self) -> int:
        await trio.lowlevel.checkpoint()
        return 0

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        await trio.lowlevel.checkpoint()
        return SliceAnswer(
            searches=0,
            entries_read=0,
            index_entries=0,
            freshness="as_it_was",
            waits=[],
            read_seconds=0.0,
            moment="x" if scan.query.hold_s else "",
        )

    async def release(self, token: str) -> None:
        await trio.lowlevel.checkpoint()

    async def status(
        self, name: IndexName, definition: IndexDefinition, newest_seqs: Mapping[PartitionId, SeqNo]
    ) -> SliceStatus:
        await trio.lowlevel.checkpoint()
        return SliceStatus(slice=0, state="ready")

    async def statistics(self) -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        return {}


def links(data: bytes) -> None:
    """Whatever comes ends the link at most, and changes nothing."""
    kind, message = (data[0] % 2, data[1:]) if data else (TO_NODE, b"")
    with structlog.testing.capture_logs():
        trio.run(_serve if kind == TO_NODE else _ask, message)


async def _serve(message: bytes) -> None:
    pool = MemoryPool(POOL_BYTES)
    part = ReplicatedSlice(SLICE, {0: ("http://n:1", _Slice())}, 0)
    own_end, peer_end = trio.testing.memory_stream_pair()
    await own_end.send_all(message)
    await own_end.send_eof()
    await serve_link(peer_end, part, pool)
    assert pool.scan_bytes == 0


async def _ask(message: bytes) -> None:
    own_end, peer_end = trio.testing.memory_stream_pair()

    async def open_link() -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        return own_end

    part = RemoteSlice(SLICE, "http://n:1", open_link)

    async def ask() -> None:
        # It is the second question, as a ping is the first; or there is no link yet.
        with suppress(UprError):
            await part.scan(SliceScan(IndexName("d", "i"), IndexDefinition(("a",)), Query(), 1))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(part._run_link, _Observer())
        # Until the link is open.
        await trio.testing.wait_all_tasks_blocked()
        nursery.start_soon(ask)
        await trio.lowlevel.checkpoint()
        with suppress(trio.BrokenResourceError):
            await peer_end.send_all(message)
        await peer_end.aclose()
