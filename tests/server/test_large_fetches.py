"""Large items that requests of one connection read from disk: how many it holds at a time."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.placed_keys import key_in
from tests.server.connected_peer import Peer
from tests.server.modelled_partition import Model
from tests.server.served_bucket import BUCKET, serving, speaking
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Get, GetReply
from upr_server.app import Server
from upr_server.net.backlog import QUEUED_REQUESTS_MAX, REPLIES_BYTES_MAX
from upr_server.storage.simulated import SimulatedStore

pytestmark = pytest.mark.usefixtures("autojump_clock")

PARTITIONS: Final = QUEUED_REQUESTS_MAX
VALUE: Final = bytes(3 * 1024 * 1024)


@asynccontextmanager
async def cold_items() -> AsyncIterator[tuple[Server, list[bytes]]]:
    """A server that has a large item of each partition on disk only; and their keys."""
    keys = [key_in(index, PARTITIONS) for index in range(PARTITIONS)]
    async with serving(SimulatedStore(), PARTITIONS) as server:
        bucket = server.catalog.bucket(BUCKET)
        for partition, key in zip(bucket.partitions, keys, strict=True):
            model = Model(server.catalog.disks[bucket], partition)
            model.write((key, VALUE))
            await model.persist()
            await trio.sleep(3)
            model.forget()
        yield server, keys


async def ask(peer: Peer, keys: list[bytes]) -> None:
    for index, key in enumerate(keys):
        peer.session.send(Get((key,), partition=PartitionId(index), opaque=peer.opaque()))
    await peer.send()


async def test_a_peer_that_reads_no_answers_has_one_large_item_prepared() -> None:
    """Though it asks for one of each partition, at the same time."""
    async with cold_items() as (server, keys), speaking(server) as peer:
        (connection,) = server.connections.connections
        stream = connection._stream.send_stream  # type: ignore[attr-defined]
        stream.send_all_hook = trio.sleep_forever
        tracemalloc.start()
        await ask(peer, keys)
        await trio.sleep(1)
        held_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        backlog = connection.context.backlog
        assert backlog.queued_requests
        assert backlog.unsent_bytes <= REPLIES_BYTES_MAX + len(VALUE)
        # The item, and the answer that the stream in memory has made of it.
        assert held_bytes < 3 * len(VALUE)


async def test_large_items_of_all_partitions_are_answered() -> None:
    async with cold_items() as (server, keys), speaking(server) as peer:
        (connection,) = server.connections.connections
        await ask(peer, keys)
        replies = [await peer.receive(GetReply) for _ in keys]
        assert sorted(reply.partition for reply in replies) == list(range(PARTITIONS))
        assert all(next(iter(reply.chunk)).value == VALUE for reply in replies)
        await trio.testing.wait_all_tasks_blocked()
        assert not connection.context.backlog.queued_requests
        assert not connection.context.backlog.large_turns.locked()
