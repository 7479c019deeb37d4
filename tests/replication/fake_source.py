"""A replica that follows a fake active node, with a simulated disk that a test can fill."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import msgspec
import trio

from tests.kit.fake_cluster import FakeCluster
from tests.kit.fake_server import BUCKET, FakeServer
from tests.kit.placed_keys import key_in
from tests.kit.process import eventually
from upr_protocol.errors import Status
from upr_protocol.ids import (
    Cas,
    HistoryId,
    PartitionId,
    SeqNo,
)
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import (
    Message,
    Stream,
)
from upr_server.app import Server, running_server
from upr_server.config import ServerConfig
from upr_server.engine import MutateResult, Partition
from upr_server.engine.snapshots.collapse import SHORT_RUN_BYTES_MAX
from upr_server.runtime import System
from upr_server.storage.calls import (
    Commit,
    DeleteIndexEntries,
    Maintain,
    StoreCall,
    Truncate,
)
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.simulated import SimulatedStore

PARTITION: Final = PartitionId(0)
OTHER_PARTITION: Final = PartitionId(1)
NOW: Final = 1000.0
NEW_HISTORY: Final = 77
LOST: Final = MutateResult(HistoryId(1), SeqNo(3), SeqNo(3), Cas(3))
"""The answer to a batch that only the lost history had."""


class Store(SimulatedStore):
    """A store in which commits find no room while `is_full`.

    Attributes:
        is_full: Whether the disk is full.
        fills_up: Whether the disk is full as soon as something was truncated.
        call_without_room: Another type of call that finds no room; None if there is none.
        commit_s: How long a commit takes.
        on_index_deletion: Called when index entries are to be deleted, which takes a second.
        urgent_steps: For each step of maintenance, whether it had to index even a few changes.
        truncations: The truncations so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_full = False
        self.fills_up = False
        self.call_without_room: type[StoreCall[Any]] | None = None
        self.commit_s = 0.0
        self.on_index_deletion: Callable[[], None] = lambda: None
        self.urgent_steps: list[bool] = []
        self.truncations: list[Truncate] = []

    async def wait(self, call: StoreCall[Any]) -> None:
        await super().wait(call)
        if type(call) is self.call_without_room:
            raise DiskFullError("no room")
        if isinstance(call, Commit):
            await trio.sleep(self.commit_s)
            if self.is_full:
                raise DiskFullError("no room")
        elif isinstance(call, DeleteIndexEntries):
            self.on_index_deletion()
            await trio.sleep(1.0)
        elif isinstance(call, Truncate):
            self.truncations.append(call)
            self.is_full = self.is_full or self.fills_up
        elif isinstance(call, Maintain):
            self.urgent_steps.append(call.urgent)


@attrs.frozen
class Replica:
    """The node `b`, which can follow the fake nodes `a` and `c`.

    Attributes:
        server: The node.
        store: Its disk.
        cluster: The other nodes, which share one partition.
        starts: The sequence number after which each requested stream was to start.
    """

    server: Server
    store: Store
    cluster: FakeCluster
    starts: list[SeqNo] = attrs.field(factory=list)

    @property
    def source(self) -> FakeServer:
        return self.cluster.server("a")

    @property
    def disk(self) -> BucketDisk:
        return self.server.catalog.disks[self.server.catalog.bucket(BUCKET)]

    @property
    def partition(self) -> Partition:
        return self.disk.bucket.partitions[PARTITION]

    async def assign(self, *assignments: Assignment) -> None:
        """Gives all nodes the next map, in which the first partitions have these assignments."""
        self.cluster.move(dict(enumerate(assignments)))
        new_map = self.cluster.map
        await self.server.partition_maps.set_map(new_map.revision - 1, new_map.encode())

    def record_start(self, message: Message) -> None:
        """Records after which sequence number a stream is requested."""
        if isinstance(message, Stream):
            self.starts.append(message.position.highest_received)

    async def receive(self, *keys: bytes) -> None:
        """Writes these keys to the source, one snapshot each, and waits until the replica has
        received them."""
        for key in keys:
            self.source.put(key, b"value")
            await eventually(self._has_reported, f"{key!r} was received")

    def _has_reported(self) -> bool:
        reports = self.source.reports
        high = self.source.partitions[PARTITION].high
        return bool(reports) and reports[-1].rows[-1][2] == high

    async def persist(self) -> None:
        """Waits until the replica has everything on disk that the source has."""
        await eventually(
            lambda: self.partition.high_seq == self.source.partitions[PARTITION].high,
            "the disk has everything",
        )

    async def receive_snapshots(self, count: int) -> None:
        """Has the replica receive snapshots, and persist each before the next comes. They are too
        large to be joined."""
        for _ in range(count):
            key = key_in(PARTITION, len(self.disk.bucket.partitions))
            self.source.put(key, bytes(SHORT_RUN_BYTES_MAX))
            await self.persist()

    async def lose(self, end: int) -> None:
        """The source begins a new history at `end`, and loses what is above it."""
        self.source.partitions[PARTITION].fail_over(NEW_HISTORY, end)
        self.source.end_streams(Status.STATE_CHANGED)
        await trio.sleep(1.0)  # the replica requests a new stream


@asynccontextmanager
async def replica(partition_count: int = 1) -> AsyncIterator[Replica]:
    """A replica of `a`, with a mock clock."""
    store = Store()
    async with trio.open_nursery() as nursery:
        cluster = FakeCluster(nursery, "ac", partition_count)
        cluster.map = msgspec.structs.replace(
            cluster.map, nodes={**cluster.map.nodes, "b": "127.0.0.1:1"}
        )
        config = ServerConfig(listen="127.0.0.1:0", node="b", buckets=())
        system = System(dial=cluster.dial)
        async with running_server(config, store, system) as server:
            follower = Replica(server, store, cluster)
            for name in "ac":
                cluster.server(name).refuse = follower.record_start
            cluster.map = msgspec.structs.replace(cluster.map, revision=0)
            await follower.assign(Assignment("a", {"b": ""}))
            yield follower
        nursery.cancel_scope.cancel()


def trouble(follower: Replica) -> str:
    """The reason for which the replica does not replicate, from its figures; empty if it does."""
    replicators = follower.server.partition_maps._buckets[BUCKET].replicators
    (figures,) = replicators.statistics()
    return str(figures["trouble"])
