"""A server with a bucket, and peers that have opened the bucket and publish to it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final

from tests.kit.placed_keys import key_in
from tests.server.connected_peer import P0, QUOTA_BYTES, Peer, connected, make_server
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Durability, Operation, PartitionId, SeqNo
from upr_protocol.wire import (
    Get,
    GetReply,
    Message,
    Mutate,
    MutateReply,
    Stats,
    StatsReply,
)
from upr_server.app import Server
from upr_server.storage.api import Store
from upr_server.storage.simulated import SimulatedStore
from upr_server.storage.simulated_disk import SimulatedDisk

BUCKET: Final = "b"
P1: Final = PartitionId(1)
K0: Final = key_in(0, 2)
K1: Final = key_in(1, 2)
MEMORY: Final = Durability.MEMORY
PERSISTED: Final = Durability.PERSISTED
WRITER: Final = b"sixteen bytes id"
_ids = count(1)


@asynccontextmanager
async def serving(store: Store, partitions: int = 2) -> AsyncIterator[Server]:
    """A server with a bucket on `store`. The bucket is created if it does not exist."""
    server = make_server(store, ids=_ids)
    async with server.recovered_buckets():
        if BUCKET not in server.catalog.buckets:
            await server.catalog.create_bucket(BUCKET, partitions, QUOTA_BYTES)
        yield server


@asynccontextmanager
async def speaking(server: Server) -> AsyncIterator[Peer]:
    """A peer that has opened the bucket."""
    async with connected(server) as peer:
        await peer.open()
        yield peer


async def send(
    peer: Peer,
    chunk: Chunk,
    durability: Durability,
    partition: PartitionId = P0,
    counter: int = 0,
) -> int:
    """Sends a batch, and returns the opaque of the request. With a counter, the batch has a writer
    token."""
    opaque = peer.opaque()
    writer = WRITER if counter else bytes(16)
    await peer.send(
        Mutate(
            Bundle.of_one_run(partition, chunk, counter),
            durability=durability,
            writer=writer,
            opaque=opaque,
        )
    )
    return opaque


async def answer_to(peer: Peer, opaque: int) -> Message:
    """The answer to a request."""
    while True:
        message = await peer.receive(Message)
        if getattr(message, "opaque", 0) == opaque:
            return message


def status_of(answer: Message) -> Status:
    """The status of an answer, or of the only run of a bundle."""
    if isinstance(answer, MutateReply):
        (run,) = answer.runs
        return Status(run.status)
    return Status(answer.status)


async def value_of(peer: Peer, key: bytes, partition: PartitionId = P0) -> bytes | None:
    """The value of a key; None if it has no value."""
    await peer.send(Get((key,), partition=partition, opaque=peer.opaque()))
    (row,) = (await peer.receive(GetReply)).chunk
    return None if row.op == Operation.DELETE else row.value


async def statistics(peer: Peer) -> dict[str, Any]:
    """The statistics of the bucket."""
    await peer.send(Stats(BUCKET, opaque=peer.opaque()))
    figures: dict[str, Any] = json.loads((await peer.receive(StatsReply)).json)
    return figures


def increment(key: bytes, delta: int) -> Chunk:
    """A batch with one increment."""
    value = CounterDelta(delta, delta).encode()
    return Chunk.build([Mutation(Operation.INCREMENT, key, value)], SeqNo(0), SeqNo(0))


def log_of(store: SimulatedStore) -> SimulatedDisk:
    """The disk that has the bucket's log."""
    return store.directory.disks[BUCKET][0]
