"""Streams of the keys that begin with a prefix: they have the rows of the whole stream, without the
others, whatever becomes of memory, disk, connections and the server."""

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
from tests.server.test_backfill import Model
from tests.server.test_connection import P0, Peer, connected, make_server, name_replica
from tests.server.test_durability import BUCKET, serving, speaking
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
LIVES: Final = 4
STEPS: Final = 30

Written = list[tuple[bytes, bytes | None]]


def contents(written_items: Written, prefix: bytes) -> dict[bytes, bytes]:
    """What there is once all of this was written."""
    items = {key: value for key, value in written_items if key.startswith(prefix)}
    return {key: value for key, value in items.items() if value is not None}


class World:
    """A server of one partition that crashes and starts again, and all that was written to it.

    Attributes:
        written: By history what was written in it and before it.
        has_begun: Set once the server has been up.
        is_over: Whether nothing will be written any more.
        are_done: Set once all that follow have read all of it.
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

    async def live(self, *, is_last: bool) -> None:
        """The server is up, and crashes; the last time everything is on disk first."""
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
                    self.cut()  # whoever has read it all hears so once more
                    await self.are_done.wait()
                partition.manager.check_invariants()
                # What is not on disk yet is lost.
                _hold(store)
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
            _hold(store)
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


def _hold(store: HeldStore) -> None:
    """Commits wait from now on."""
    if store.released.is_set():
        store.released = trio.Event()


async def _release_later(store: HeldStore) -> None:
    """Reading a key from disk may wait for maintenance, and that for a commit."""
    await trio.sleep(5)
    store.released.set()


async def follow(world: World, prefix: bytes) -> None:
    """Follows the keys with a prefix, and compares them with the model at each snapshot's end."""
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
    """Follows each of the prefixes."""
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
        for life in range(LIVES):
            await world.live(is_last=life == LIVES - 1)


def _items(prefix: bytes, count: int, size: int = 1000) -> Chunk:
    return chunk_of_plain_sets(
        [prefix + b"%d" % number for number in range(count)], [bytes(size)] * count
    )


async def _open_stream(peer: Peer, key_prefix: bytes, *, with_answers: bool = False) -> StreamReply:
    await peer.say(
        Stream(
            PartitionState.ACTIVE,
            NOTHING_YET,
            with_answers=with_answers,
            key_prefix=key_prefix,
            partition=P0,
            opaque=peer.opaque(),
        )
    )
    return await peer.hear(StreamReply)


async def test_what_is_left_out_is_counted_and_takes_nothing_of_the_window(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps: what is read and not sent takes time, too."""
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
        await peer.say(Go())
        keys: list[bytes] = []
        while len(keys) < 3:
            keys += (await peer.hear(PartitionChunk)).chunk.keys()
        end = await peer.hear(PartitionEnd)
        assert keys == [b"user 0", b"user 1", b"user 2"]
        assert end.end == 4003
        await peer.say(Stats("b", opaque=peer.opaque()))
        figures = msgspec.json.decode((await peer.hear(StatsReply)).json)["left_out"]
        assert figures == {"rows": 4000, "bytes": sum(left_out)}
        assert figures["bytes"] > 4000 * 1000
        assert peer.session.window.used_bytes < 3000
        assert max(left_out) < streamer.BATCH_BYTES + others[0].nbytes
        # What was read for each item counts, too, where a step ends before all was read.
        assert all(cost >= nbytes for cost, nbytes in zip(costs, left_out, strict=True))
        assert max(costs) >= streamer.BATCH_BYTES
        # A change of another key is told as a snapshot of no row.
        await peer.mutate(_items(b"other ", 1))
        snapshot = await peer.hear(PartitionSnapshot)
        assert (snapshot.chunk.count, snapshot.chunk.end) == (0, 4004)
        await peer.mutate(_items(b"user ", 1))
        snapshot = await peer.hear(PartitionSnapshot)
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
