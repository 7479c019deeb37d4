"""Streams of the keys with a prefix have exactly the rows of the whole stream with that prefix,
while memory is freed, the disk is slow, connections break and the server crashes."""

from __future__ import annotations

from random import Random
from typing import Final

import msgspec
import pytest
import trio
import trio.testing

from tests.kit.effort import effort
from tests.kit.fake_net import CuttableStream
from tests.kit.held_store import HeldStore
from tests.kit.mirror import Mirror
from tests.server.connected_peer import P0, Peer, connected, make_server, name_replica
from tests.server.modelled_partition import Model
from tests.server.served_bucket import BUCKET, serving, speaking
from upr_protocol.address import Address
from upr_protocol.chunk import Chunk, Mutation, chunk_of_plain_sets
from upr_protocol.client import ChunkReceived, RolledBack, SnapshotEnd, SnapshotStart, consume
from upr_protocol.errors import Status
from upr_protocol.failover import NOTHING_YET
from upr_protocol.ids import Operation, PartitionState, SeqNo
from upr_protocol.limits import KEY_BYTES_MAX, WINDOW_BYTES_MIN
from upr_protocol.wire import (
    Go,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    Stats,
    StatsReply,
    Stream,
    StreamReply,
)
from upr_server.app import Server
from upr_server.engine import Partition
from upr_server.net import streamer
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.simulated import SimulatedDirectory

KEYS: Final = [b"a", b"ab", b"ab1", b"ab2", b"b", b"ba", *(b"c%d" % n for n in range(9))]
PREFIXES: Final = (b"", b"a", b"ab", b"ab1", b"c", b"zz")
STARTS: Final = 4
STEPS: Final = 30

Written = list[tuple[bytes, bytes | None]]


def contents(written_items: Written, prefix: bytes) -> dict[bytes, bytes]:
    """The items with a prefix after all of these writes."""
    items = {key: value for key, value in written_items if key.startswith(prefix)}
    return {key: value for key, value in items.items() if value is not None}


class World:
    """A server of one partition that crashes and starts again, and everything that was written to
    it.

    Attributes:
        written: By history, everything that was written in it and before it.
        has_begun: Set once the server has started.
        is_over: Whether all writes are done.
        are_done: Set once all consumers have read everything.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.written: dict[int, Written] = {0: []}
        self.has_begun = trio.Event()
        self.is_over = False
        self.are_done = trio.Event()
        self._directory = SimulatedDirectory()
        self._server: Server | None = None
        self._connections: trio.Nursery | None = None
        self._ends: list[CuttableStream] = []

    async def dial(self, address: Address) -> trio.abc.Stream:
        await trio.lowlevel.checkpoint()
        if self._server is None or self._connections is None:
            raise ConnectionRefusedError(f"nobody listens at {address}")
        own_end, peer_end = trio.testing.memory_stream_pair()
        connection = self._server.connections.new_connection(peer_end, "memory")
        self._connections.start_soon(connection.run)

        def close() -> None:
            own_end.send_stream.close()
            own_end.receive_stream.close()

        self._ends.append(CuttableStream(own_end, close))
        return self._ends[-1]

    async def run_until_crash(self, *, is_last: bool) -> None:
        """Runs the server until it crashes. The last time, everything is on disk before that."""
        before = next(reversed(self.written.values()))
        store = HeldStore(self._directory)
        store.released.set()
        with trio.CancelScope() as scope:
            async with (
                serving(store, 1) as server,
                trio.open_nursery() as self._connections,
            ):
                bucket = server.catalog.bucket(BUCKET)
                disk, partition = server.catalog.disks[bucket], bucket.partitions[0]
                written_rows = self._current = before[: partition.high_seq]
                self.written[partition.failover_log.current] = written_rows
                self._server = server
                self.has_begun.set()
                for _ in range(STEPS):
                    await self._step(store, server, disk, partition)
                if is_last:
                    store.released.set()
                    await disk.flusher.wait_until_persisted(partition, partition.high_seq)
                    self.is_over = True
                    # Consumers connect again, and receive an end even if they have read everything.
                    self.cut()
                    await self.are_done.wait()
                partition.manager.check_invariants()
                # Changes that are not on disk are lost.
                _hold_commits(store)
                self._server = None
                self.cut()
                scope.cancel()
                await trio.lowlevel.checkpoint()

    def cut(self) -> None:
        """Breaks all connections."""
        for end in self._ends:
            end.cut()
        self._ends.clear()

    async def _step(
        self, store: HeldStore, server: Server, disk: BucketDisk, partition: Partition
    ) -> None:
        choice = self.random.random()
        if choice < 0.6:
            await self._write(store, server, self.random.randint(1, 40))
        elif choice < 0.7:
            _hold_commits(store)
        elif choice < 0.8:
            store.released.set()
            await disk.flusher.wait_until_persisted(partition, partition.high_seq)
        elif choice < 0.9:
            Model(disk, partition).forget()
        else:
            self.cut()
        await trio.sleep(self.random.choice((0, 0.01, 1)))

    async def _write(self, store: HeldStore, server: Server, count: int) -> None:
        items, rows = contents(self._current, b""), []
        for _ in range(count):
            key, operation = self.random.choice(KEYS), Operation.SET
            value = b"%d" % self.random.randrange(10**9) * self.random.randint(1, 20)
            if key in items and self.random.random() < 0.3:
                operation, value = Operation.DELETE, b""
                del items[key]
            else:
                items[key] = value
            rows.append(Mutation(operation, key, value))
            self._current.append((key, items.get(key)))
        async with speaking(server) as peer, trio.open_nursery() as nursery:
            nursery.start_soon(_release_later, store)
            reply = await peer.mutate(Chunk.build(rows, SeqNo(0), SeqNo(0)))
            nursery.cancel_scope.cancel()
        assert reply.runs[0].last_seq == len(self._current)

    _current: Written


def _hold_commits(store: HeldStore) -> None:
    """From now on commits wait."""
    if store.released.is_set():
        store.released = trio.Event()


async def _release_later(store: HeldStore) -> None:
    """Releases commits after a while: reading a key from disk may wait for maintenance, which may
    wait for a commit."""
    await trio.sleep(5)
    store.released.set()


async def follow(world: World, prefix: bytes) -> None:
    """Reads the stream of a prefix, and compares the copy with the model at each snapshot's end."""
    mirror, history, end = Mirror(), 0, 0
    await world.has_begun.wait()
    async with consume(
        f"upr://memory:1/{BUCKET}",
        key_prefix=prefix,
        dial=world.dial,
        window_bytes=WINDOW_BYTES_MIN,
        retry_timeout_s=1e9,
    ) as consumer:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, SnapshotStart):
                history = event.history_id
            elif isinstance(event, ChunkReceived):
                assert all(key.startswith(prefix) for key in event.chunk.keys())  # noqa: SIM118
            elif isinstance(event, RolledBack):
                assert event.to <= event.ceiling
            elif isinstance(event, SnapshotEnd):
                end = event.end
                assert mirror.contents == contents(world.written[history][:end], prefix)
            if world.is_over and end == len(world.written[history]):
                return
    raise AssertionError("the stream ended")


async def follow_all(world: World) -> None:
    """Reads the streams of all prefixes."""
    async with trio.open_nursery() as nursery:
        for prefix in PREFIXES:
            nursery.start_soon(follow, world, prefix)
    world.are_done.set()


@pytest.mark.parametrize("seed", range(effort(6, 200)))
async def test_a_stream_has_the_rows_with_its_prefix_and_no_other(
    autojump_clock: trio.testing.MockClock, seed: int
) -> None:
    world = World(seed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(follow_all, world)
        for number in range(STARTS):
            await world.run_until_crash(is_last=number == STARTS - 1)


def _items(prefix: bytes, count: int, size: int = 1000) -> Chunk:
    return chunk_of_plain_sets(
        [prefix + b"%d" % number for number in range(count)], [bytes(size)] * count
    )


async def _open_stream(peer: Peer, key_prefix: bytes, *, with_answers: bool = False) -> StreamReply:
    await peer.send(
        Stream(
            PartitionState.ACTIVE,
            NOTHING_YET,
            with_answers=with_answers,
            key_prefix=key_prefix,
            partition=P0,
            opaque=peer.opaque(),
        )
    )
    return await peer.receive(StreamReply)


async def test_what_is_left_out_is_counted_and_takes_nothing_of_the_window(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows without the prefix are read in steps, because reading takes time even if they are not
    sent."""
    left_out, costs = [], []
    step = streamer.Streamer.step

    def recorded_step(self: streamer.Streamer) -> int:
        costs.append(step(self))
        left_out.append(self._left_out_bytes)
        return costs[-1]

    monkeypatch.setattr(streamer.Streamer, "step", recorded_step)
    async with connected(make_server()) as peer:
        await peer.open()
        others = [_items(b"other %d " % turn, 500) for turn in range(8)]
        for chunk in others:
            await peer.mutate(chunk)
        await peer.mutate(_items(b"user ", 3, size=10))
        assert (await _open_stream(peer, b"user ")).status == Status.OK
        await peer.send(Go())
        keys: list[bytes] = []
        while len(keys) < 3:
            keys += (await peer.receive(PartitionChunk)).chunk.keys()
        end = await peer.receive(PartitionEnd)
        assert keys == [b"user 0", b"user 1", b"user 2"]
        assert end.end == 4003
        await peer.send(Stats("b", opaque=peer.opaque()))
        figures = msgspec.json.decode((await peer.receive(StatsReply)).json)["left_out"]
        assert figures == {"rows": 4000, "bytes": sum(left_out)}
        assert figures["bytes"] > 4000 * 1000
        assert peer.session.window.used_bytes < 3000
        assert max(left_out) < streamer.BATCH_BYTES + others[0].nbytes
        # The cost of a step includes rows that it read without sending them, also if it ends early.
        assert all(cost >= nbytes for cost, nbytes in zip(costs, left_out, strict=True))
        assert max(costs) >= streamer.BATCH_BYTES
        # A change of another key is sent as a snapshot without rows.
        await peer.mutate(_items(b"other ", 1))
        snapshot = await peer.receive(PartitionSnapshot)
        assert (snapshot.chunk.count, snapshot.chunk.end) == (0, 4004)
        await peer.mutate(_items(b"user ", 1))
        snapshot = await peer.receive(PartitionSnapshot)
        assert snapshot.chunk.keys() == [b"user 0"]


async def test_a_prefix_that_no_key_can_have_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with connected(make_server()) as peer:
        await peer.open()
        reply = await _open_stream(peer, b"k" * (KEY_BYTES_MAX + 1))
        assert reply.status == Status.BAD_ARGUMENT
        assert reply.reason == "a key prefix has at most 250 bytes, not 251"
        assert (await _open_stream(peer, b"k" * KEY_BYTES_MAX)).status == Status.OK


async def test_a_replica_streams_all_keys() -> None:
    server = make_server(node="a")
    async with connected(server, identity="replica:r") as peer:
        await name_replica(server)
        await peer.open()
        reply = await _open_stream(peer, b"k", with_answers=True)
        assert reply.reason == "a replica streams all keys; leave out the key prefix"
