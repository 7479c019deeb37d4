"""While a replica has not reported a small batch, the server collects further changes into the next
snapshot."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
import trio
import trio.testing

from tests.server.connected_peer import P0, Peer, connected, make_server, name_replica, sets
from upr_protocol.chunk import Chunk
from upr_protocol.ids import HistoryId, SeqNo
from upr_protocol.wire import CloseStream, Go, PartitionSnapshot, ReplicaAck, StreamEnd
from upr_server.net.report_wait import REPORT_WAIT_S, SMALL_BATCH_BYTES

pytestmark: Final = pytest.mark.usefixtures("autojump_clock")


class Replica:
    """A peer that follows partition 0 as a replica, and a publisher."""

    def __init__(self, peer: Peer, publisher: Peer, history_id: HistoryId) -> None:
        self.peer = peer
        self.publisher = publisher
        self._history_id = history_id

    async def set_keys(self, *keys: bytes, value: bytes = b"v") -> None:
        await self.publisher.mutate(sets(*keys, value=value))

    async def report(self, seq: int) -> None:
        await self.peer.send(ReplicaAck(((P0, self._history_id, SeqNo(seq), SeqNo(0)),)))

    async def snapshot_within(self, seconds: float) -> Chunk | None:
        """The next snapshot, or None if it is not sent within so many seconds."""
        with trio.move_on_after(seconds):
            return (await self.peer.receive(PartitionSnapshot)).chunk
        return None


@asynccontextmanager
async def a_replica() -> AsyncIterator[Replica]:
    """A replica that has received two changes, and has reported only the first."""
    server = make_server(node="a")
    async with connected(server, identity="replica:r") as peer, connected(server) as publisher:
        await name_replica(server)
        await peer.open()
        await publisher.open()
        reply = await peer.ask(with_answers=True)
        await peer.send(Go())
        replica = Replica(peer, publisher, reply.log.current)
        # The first snapshot is sent with a `PartitionStart`; later ones are one frame each.
        await replica.set_keys(b"first")
        await trio.testing.wait_all_tasks_blocked()
        await replica.report(1)
        await replica.set_keys(b"second")
        chunk = await replica.snapshot_within(REPORT_WAIT_S / 2)
        assert chunk is not None
        assert (chunk.start, chunk.end) == (1, 2)
        yield replica


async def test_changes_before_a_report_are_sent_in_one_snapshot() -> None:
    async with a_replica() as replica:
        for key in (b"k", b"l", b"m"):
            await replica.set_keys(key)
        assert await replica.snapshot_within(REPORT_WAIT_S * 0.9) is None
        await replica.report(2)
        chunk = await replica.snapshot_within(REPORT_WAIT_S / 2)
        assert chunk is not None
        assert (chunk.start, chunk.end, chunk.count) == (2, 5, 3)


async def test_a_report_of_something_else_does_not_end_the_wait() -> None:
    """The report is of an earlier snapshot, as when the replica has written that to disk."""
    async with a_replica() as replica:
        await replica.set_keys(b"k")
        await replica.report(1)
        assert await replica.snapshot_within(REPORT_WAIT_S * 0.9) is None
        await replica.report(2)
        chunk = await replica.snapshot_within(REPORT_WAIT_S / 2)
        assert chunk is not None
        assert chunk.end == 3


async def test_a_single_change_is_sent_at_once() -> None:
    async with a_replica() as replica:
        for seq in range(2, 6):
            await replica.report(seq)
            await replica.set_keys(b"k")
            chunk = await replica.snapshot_within(REPORT_WAIT_S / 2)
            assert chunk is not None
            assert (chunk.start, chunk.end) == (seq, seq + 1)


async def test_without_a_report_a_change_is_sent_after_a_limited_wait() -> None:
    async with a_replica() as replica:
        for end in (3, 4):
            await replica.set_keys(b"k")
            assert await replica.snapshot_within(REPORT_WAIT_S * 0.9) is None
            chunk = await replica.snapshot_within(REPORT_WAIT_S)
            assert chunk is not None
            assert chunk.end == end


async def test_a_large_batch_is_sent_at_once() -> None:
    async with a_replica() as replica:
        await replica.report(2)
        for end in (3, 4):
            await replica.set_keys(b"large", value=bytes(SMALL_BATCH_BYTES))
            chunk = await replica.snapshot_within(REPORT_WAIT_S / 2)
            assert chunk is not None
            assert chunk.end == end


async def test_a_stream_can_be_closed_before_the_report() -> None:
    async with a_replica() as replica:
        await replica.set_keys(b"k")
        await replica.peer.send(
            CloseStream(partition=P0, opaque=replica.peer.session.streams[P0].opaque)
        )
        with trio.fail_after(REPORT_WAIT_S / 2):
            await replica.peer.receive(StreamEnd)
