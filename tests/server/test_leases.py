"""Leases over real connections: reads under a lease have the same rows each time, or fail."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Mapping
from typing import Any, TypeVar

import pytest
import trio

from tests.kit.fake_net import ENDLESS, CuttableStream
from tests.kit.peer import peer
from upr_protocol.chunk import Mutation
from upr_protocol.client import (
    Address,
    ChunkReceived,
    Client,
    HeldLease,
    ResumeState,
    RolledBack,
    SnapshotEnd,
    SnapshotStart,
    StreamEnded,
    connect,
    consume,
)
from upr_protocol.errors import ServerError, Status
from upr_protocol.failover import NOTHING_YET, PartialSnapshot, Position
from upr_protocol.ids import (
    SEQ_MAX,
    Durability,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.limits import LEASES_MAX
from upr_protocol.transport import dial_tcp
from upr_protocol.wire import CycleEnd, Go, Stream, StreamEnd, StreamReply
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.storage import bucket_maintenance, calls
from upr_server.storage.online import leases
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

T = TypeVar("T")

PARTITIONS = 4
KEYS = [b"key %d" % index for index in range(40)]
CONFIG = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("b", PARTITIONS),))
Rows = dict[PartitionId, list[Mutation]]
Dial = Callable[[Address], Awaitable[trio.abc.Stream]]


class Clock:
    """The server's time."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory() -> SimulatedDirectory:
    return SimulatedDirectory()


@pytest.fixture
async def server(
    clock: Clock, directory: SimulatedDirectory, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Server]:
    monkeypatch.setattr(bucket_maintenance, "GARBAGE_BYTES", 0)
    async with running_server(CONFIG, SimulatedStore(directory)) as server:
        (disk,) = server.catalog.disks.values()
        monkeypatch.setattr(disk.leases, "_time", clock)
        yield server


def result_of(steps: Generator[None, None, T]) -> T:
    """Runs all steps, and returns their result."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: T = end.value
        return result


async def write(client: Client, *rounds: int) -> None:
    """Writes every key once in each round. Each write is a snapshot on disk."""
    for round_ in rounds:
        for key in KEYS:
            await client.set(key, b"round %d of " % round_ + key, durability=Durability.PERSISTED)


async def compact(server: Server) -> None:
    """Indexes everything that is on disk, and compacts the log."""
    (disk,) = server.catalog.disks.values()
    maintenance = disk.maintenance
    before = maintenance.statistics().get("compactions", 0)
    async with maintenance.paused():
        maintenance._waiters += 1
        while await maintenance._step():
            pass
        maintenance._waiters -= 1
    assert maintenance.statistics()["compactions"] != before


def figures(server: Server) -> tuple[int, int]:
    """How many leases are held, and how many have lapsed."""
    (disk,) = server.catalog.disks.values()
    statistics = disk.leases.statistics()
    return int(str(statistics["held"])), int(str(statistics["lapsed"]))


def cutting(rng: random.Random, times: int) -> Dial:
    """Dials connections. The first `times` of them break soon."""
    connections_left = times

    async def dial(address: Address) -> trio.abc.Stream:
        nonlocal connections_left
        connections_left -= 1
        stream = await trio.open_tcp_stream(address.host, address.port)
        back = rng.randrange(1500, 5000) if connections_left >= 0 else ENDLESS
        return CuttableStream(stream, stream.socket.close, ENDLESS, back)

    return dial


async def read(
    server: Server,
    lease_id: int,
    ends: Mapping[Any, Any],
    *,
    starts: Mapping[PartitionId, Position] | None = None,
    dial: Dial = dial_tcp,
) -> Rows:
    """Reads everything in the leased ranges."""
    rows: Rows = {}
    positions = {PartitionId(partition): start for partition, start in (starts or {}).items()}
    async with consume(
        server.url("b"),
        partitions=list(ends),
        resume=ResumeState("b", positions),
        end=ends,
        lease_id=lease_id,
        dial=dial,
        draw=lambda: 0.0,
    ) as consumer:
        async for event in consumer:
            assert not isinstance(event, RolledBack)
            if isinstance(event, SnapshotStart):
                assert event.kind is SnapshotKind.DISK
            elif isinstance(event, ChunkReceived):
                rows.setdefault(event.partition, []).extend(event.chunk)
            elif isinstance(event, SnapshotEnd):
                assert event.end == ends[event.partition]
            elif isinstance(event, StreamEnded):
                assert event.reason is Status.END_REACHED
    return rows


ALL = [(partition, 0, SEQ_MAX) for partition in range(PARTITIONS)]


async def test_a_leased_range_reads_the_same_each_time(server: Server) -> None:
    """Meanwhile every key is overwritten, and everything that is not leased is compacted."""
    async with connect(server.url("b")) as client:
        await write(client, 1, 2, 3)
        lease = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        ends = {r.partition: r.end for r in lease.ranges}
        assert lease.lease_id == 7
        assert ends == {row.partition: row.high_seq for row in await client.seqnos()}
        assert {r.history_id for r in lease.ranges} == {
            row.history_id for row in await client.seqnos()
        }
        assert all(r.nbytes > 0 for r in lease.ranges)
        first = await read(server, 7, ends)
        assert sum(map(len, first.values())) == 3 * len(KEYS), "every version"
        for index in range(4, 9):
            await write(client, index)
            await compact(server)
        assert await read(server, 7, ends) == first
        again = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        assert [(r.start, r.end) for r in again.ranges] == [(r.start, r.end) for r in lease.ranges]
        # A read of a part of the range, from a number in the middle.
        for partition, rows in first.items():
            middle = rows[len(rows) // 2].seq
            (info,) = [info for info in client.partitions() if info.partition == partition]
            position = Position(info.log, middle, middle, None)
            rows_read = await read(
                server, 7, {partition: ends[partition]}, starts={partition: position}
            )
            assert rows_read[partition] == [row for row in rows if row.seq > middle]
        await client.release_lease(7)
        assert figures(server) == (0, 0)
        with pytest.raises(ServerError) as refusal:
            await read(server, 7, ends)
        assert refusal.value.status is Status.RANGE_GONE


async def test_the_size_of_a_lease_of_a_long_log_is_measured_in_pieces(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other reads of the disk take place in between."""
    async with connect(server.url("b")) as client:
        await write(client, 1, 2, 3)
        whole = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        monkeypatch.setattr(calls, "MEASURED_CHUNKS_MAX", 1)
        pieces = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
    assert pieces == whole
    assert sum(r.nbytes for r in whole.ranges) > 3 * len(KEYS) * len(KEYS[0])


async def test_a_leased_range_is_complete_though_deletions_were_removed(server: Server) -> None:
    """A reader may begin in the middle of the range, or continue there after a lost connection."""
    async with connect(server.url("b")) as client:
        await write(client, 1, 2)
        lease = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        ends = {r.partition: r.end for r in lease.ranges}
        first = await read(server, 7, ends)
        for partition in server.catalog.bucket("b").partitions:
            partition.purge_seq = SeqNo(partition.high_seq - 1)
        for info in client.partitions():
            rows = first[info.partition]
            position = Position(info.log, rows[2].seq, rows[2].seq, None)
            rows_read = await read(
                server,
                7,
                {info.partition: ends[info.partition]},
                starts={info.partition: position},
            )
            assert rows_read[info.partition] == rows[3:]
        rng = random.Random(5)
        assert await read(server, 7, ends, dial=cutting(rng, 6)) == first
        with pytest.raises(ServerError) as refusal:
            await client.acquire_lease([(0, 3, SEQ_MAX)], time_to_live_s=60, owner="me")
        assert refusal.value.status is Status.ROLLBACK_NEEDED


async def test_a_lease_is_refused_if_its_bucket_is_deleted_meanwhile(server: Server) -> None:
    """The lease must not be granted in a later bucket of the same name."""
    (disk,) = server.catalog.disks.values()

    async def acquire() -> None:
        async with connect(server.url("b")) as client:
            with pytest.raises(ServerError) as refusal:
                await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
            assert refusal.value.status in (Status.NO_BUCKET, Status.BUCKET_DELETED)

    async with trio.open_nursery() as nursery, connect(server.url()) as client:
        await disk.maintenance._step_lock.acquire()
        nursery.start_soon(acquire)
        while not disk.maintenance._step_lock.statistics().tasks_waiting:  # noqa: ASYNC110
            await trio.sleep(0.001)
        disk.maintenance.abandon()
        disk.maintenance._step_lock.release()
        await trio.testing.wait_all_tasks_blocked()
        assert not disk.leases.lapsed_leases()
        assert len(disk.leases) == 0
        await client.delete_bucket("b")
        await client.create_bucket("b", 2)
    (disk,) = server.catalog.disks.values()
    assert len(disk.leases) == 0


async def test_wrong_ranges_of_a_lease_are_refused(server: Server) -> None:
    async with connect(server.url("b")) as client:
        await write(client, 1)
        for ranges in ([(0, 0, 1), (0, 1, 2)], [(9, 0, SEQ_MAX)], [(0, 2, 1)], []):
            with pytest.raises(ServerError) as refusal:
                await client.acquire_lease(ranges, time_to_live_s=60, owner="me")
            assert refusal.value.status is Status.BAD_ARGUMENT


async def test_a_read_of_a_range_outside_its_lease_is_refused(server: Server) -> None:
    async with connect(server.url("b")) as client:
        await write(client, 1)
        lease = await client.acquire_lease(ALL[:1], time_to_live_s=60, owner="me")
        (leased,) = lease.ranges
        await write(client, 2)
        for ends in ({0: leased.end + 1}, {1: 1}):
            with pytest.raises(ServerError, match="does not hold") as refusal:
                await read(server, lease.lease_id, ends)
            assert refusal.value.status is Status.RANGE_GONE


def leased_stream(lease: HeldLease, position: Position, end: int, opaque: int) -> Stream:
    """A request to stream the first range of a lease, from a position to an end."""
    return Stream(
        PartitionState.ACTIVE,
        position,
        SeqNo(end),
        lease.lease_id,
        partition=lease.ranges[0].partition,
        opaque=opaque,
    )


async def test_a_leased_stream_that_would_end_inside_the_clients_snapshot_is_refused(
    server: Server,
) -> None:
    async with connect(server.url("b")) as client:
        await write(client, 1)
        lease = await client.acquire_lease(ALL[:1], time_to_live_s=60, owner="me")
        log = client.partitions()[0].log
    end = lease.ranges[0].end
    position = Position(log, SeqNo(0), SeqNo(1), PartialSnapshot(log.current, SeqNo(0), end))
    async with peer("127.0.0.1", server.port, "b") as hand:
        for stream_end, status in ((end - 1, Status.BAD_ARGUMENT), (end, Status.OK)):
            await hand.send(leased_stream(lease, position, stream_end, hand.opaque()))
            assert (await hand.expect(StreamReply)).status == status


async def test_the_release_of_a_lease_before_its_read_begins_ends_only_its_stream(
    server: Server,
) -> None:
    """The connection goes on. Another request for the stream is refused with `RANGE_GONE`."""
    async with connect(server.url("b")) as client:
        await write(client, 1)
        lease = await client.acquire_lease(ALL[:1], time_to_live_s=60, owner="me", lease_id=7)
    end = lease.ranges[0].end
    (disk,) = server.catalog.disks.values()
    async with peer("127.0.0.1", server.port, "b") as hand:
        async with disk.maintenance.paused():
            await hand.send(leased_stream(lease, NOTHING_YET, end, hand.opaque()))
            assert (await hand.expect(StreamReply)).status == Status.OK
            await disk.leases.release(7)
        await hand.send(Go())
        assert (await hand.expect(StreamEnd)).status == Status.ROLLBACK_NEEDED
        await hand.expect(CycleEnd)
        await hand.send(leased_stream(lease, NOTHING_YET, end, hand.opaque()))
        assert (await hand.expect(StreamReply)).status == Status.RANGE_GONE


async def test_a_lease_stays_at_the_node_that_granted_it(server: Server) -> None:
    """The node can renew and release the lease when it is not active any more."""
    async with connect(server.url("b")) as client:
        await write(client, 1)
        lease = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        for partition in server.catalog.bucket("b").partitions:
            partition.change_state(PartitionState.REPLICA, partition.failover_log)
        renewed_lease = await client.renew_lease(7, time_to_live_s=90)
        assert renewed_lease.ranges == lease.ranges
        assert renewed_lease.time_to_live_s == 90
        await client.release_lease(7)
        assert figures(server) == (0, 0)
        with pytest.raises(ServerError) as refusal:
            await client.renew_lease(7, time_to_live_s=90)
        assert refusal.value.status is Status.RANGE_GONE
        with pytest.raises(ServerError) as refusal:
            await client.release_lease(7)
        assert refusal.value.status is Status.BAD_ARGUMENT


async def test_a_lapsed_lease_can_be_renewed_until_compaction_removes_data(
    server: Server, clock: Clock
) -> None:
    async with connect(server.url("b")) as client:
        await write(client, 1, 2)
        lease = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        ends = {r.partition: r.end for r in lease.ranges}
        first = await read(server, 7, ends)
        clock.now += 100
        assert figures(server) == (0, 1)
        assert await read(server, 7, ends) == first
        assert (await client.renew_lease(7, time_to_live_s=60)).ranges == lease.ranges
        assert figures(server) == (1, 0)
        await write(client, 3)
        await compact(server)
        assert await read(server, 7, ends) == first
        clock.now += 100
        await write(client, 4)
        await compact(server)
        with pytest.raises(ServerError) as refusal:
            await read(server, 7, ends)
        assert refusal.value.status is Status.RANGE_GONE
        # A new lease of the same ID would have other rows, so it is refused.
        with pytest.raises(ServerError) as refusal:
            await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        assert refusal.value.status is Status.RANGE_GONE
        with pytest.raises(ServerError) as refusal:
            await client.renew_lease(7, time_to_live_s=60)
        assert refusal.value.status is Status.RANGE_GONE
        clock.now += 8 * 24 * 3600
        await write(client, 5)
        await compact(server)
        assert figures(server) == (0, 0), "after a week it is forgotten"


async def test_a_lease_lapses_in_time_though_the_clock_was_set_back(
    server: Server, clock: Clock
) -> None:
    """Otherwise the lease of a client that has gone would keep compaction from the log for as long
    as the clock was ahead."""
    async with connect(server.url("b")) as client:
        await write(client, 1, 2)
        await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        clock.now -= 3600
        await write(client, 3)
        await compact(server)
        assert figures(server) == (1, 0)
        clock.now += 60
        assert figures(server) == (0, 1)


async def test_a_position_is_listed_with_its_distance_and_protects_no_range(
    server: Server, clock: Clock
) -> None:
    """A position is listed even if its consumer has not connected for days."""
    (disk,) = server.catalog.disks.values()

    def consumers() -> Any:
        return result_of(disk.leases.list_consumers())

    async with connect(server.url("b")) as client:
        await write(client, 1)
        ends = {row.partition: row.high_seq for row in await client.seqnos()}
        for lease_id, seqs in ((5, dict.fromkeys(ends, 0)), (6, ends)):
            ranges = [(partition, seq, seq) for partition, seq in seqs.items()]
            await client.acquire_lease(ranges, time_to_live_s=60, owner="orders", lease_id=lease_id)
            clock.now += 1
        assert disk.leases.held_ranges() == []
        assert consumers() == [
            {
                "name": "orders",
                "id": f"{6:016x}",
                "partitions": PARTITIONS,
                "numbers_behind": 0,
                "position_age_s": 1.0,
            }
        ]
        await write(client, 2)
        # A lease is forgotten a week after it has lapsed.
        clock.now += 7 * 24 * 3600
        await disk.leases.delete_lapsed()
        (row,) = consumers()
        assert row["numbers_behind"] == len(KEYS)
        assert disk.leases.held_ranges() == []
        await client.release_lease(6)
        assert consumers()[0]["numbers_behind"] == 2 * len(KEYS), "the one before"


async def test_a_read_of_an_empty_bucket_is_not_listed_as_a_position(
    server: Server, directory: SimulatedDirectory
) -> None:
    """A server that reads the leases from disk does not list it either."""
    async with connect(server.url("b")) as client:
        await client.acquire_lease(ALL, time_to_live_s=60, owner="a read", lease_id=5)
        ranges = [(partition, 0, 0) for partition, _, _ in ALL]
        await client.acquire_lease(ranges, time_to_live_s=60, owner="orders", lease_id=6)
        await client.renew_lease(6, time_to_live_s=90)
    async with running_server(CONFIG, SimulatedStore(directory)) as restarted:
        for server_now in (server, restarted):
            (disk,) = server_now.catalog.disks.values()
            assert [row["owner"] for row in result_of(disk.leases.list_held())] == [
                "a read",
                "orders",
            ]
            assert [row["name"] for row in result_of(disk.leases.list_consumers())] == ["orders"]


async def test_many_leases_are_listed_in_steps(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STEP_RANGES", 2 * PARTITIONS)
    (disk,) = server.catalog.disks.values()
    async with connect(server.url("b")) as client:
        ranges = [(partition, 0, 0) for partition, _, _ in ALL]
        for lease_id in range(1, 6):
            owner = f"owner {lease_id}"
            await client.acquire_lease(ranges, time_to_live_s=60, owner=owner, lease_id=lease_id)
        statistics = await client.stats("b")
    for steps in (disk.leases.list_held(), disk.leases.list_consumers()):
        assert [next(steps), next(steps)] == [None, None]
        with pytest.raises(StopIteration) as end:
            next(steps)
        assert len(end.value.value) == 5
    assert len(statistics["leases"]["leases"]) == len(statistics["leases"]["consumers"]) == 5


async def test_a_list_of_leases_is_complete_though_its_bucket_is_deleted_meanwhile(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "STEP_RANGES", PARTITIONS)
    async with connect(server.url("b")) as client:
        await write(client, 1)
        ranges = [(partition, seq, seq) for partition, seq in enumerate([0] * PARTITIONS)]
        await client.acquire_lease(ranges, time_to_live_s=60, owner="orders", lease_id=5)
        steps = server.connections.statistics("b")
        next(steps)
        await server.catalog.delete_bucket("b")
        leases_told: Any = result_of(steps)["leases"]
        (row,) = leases_told["consumers"]
        assert row["numbers_behind"] == len(KEYS)


async def test_lapsed_leases_are_evicted_for_new_ones(server: Server, clock: Clock) -> None:
    async with connect(server.url("b")) as client:
        await write(client, 1)

        async def acquire(lease_id: int) -> None:
            await client.acquire_lease(ALL[:1], time_to_live_s=60, owner="me", lease_id=lease_id)

        for lease_id in range(1, LEASES_MAX + 1):
            await acquire(lease_id)
            clock.now += 0.01
        with pytest.raises(ServerError) as refusal:
            await acquire(5000)
        assert refusal.value.status is Status.LIMIT_REACHED
        await client.renew_lease(1, time_to_live_s=600)
        clock.now += 60
        await acquire(5000)
        with pytest.raises(ServerError):
            await client.renew_lease(2, time_to_live_s=60)
        for lease_id in (1, 3):
            await client.renew_lease(lease_id, time_to_live_s=60)


async def test_an_evicted_lease_is_not_granted_again(
    server: Server, clock: Clock, directory: SimulatedDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its owner would read other rows under its ID."""
    monkeypatch.setattr(leases, "LEASES_MAX", 2)
    monkeypatch.setattr(leases, "EVICTED_LEASES_MAX", 3)

    async def acquire(client: Client, lease_id: int, end: int = SEQ_MAX) -> Status:
        try:
            ranges = [(0, 0, end)]
            await client.acquire_lease(ranges, time_to_live_s=60, owner="me", lease_id=lease_id)
        except ServerError as error:
            return error.status
        return Status.OK

    (disk,) = server.catalog.disks.values()
    async with connect(server.url("b")) as client:
        await write(client, 1)
        # The third lease is a position, which its owner may store again.
        for lease_id, end in ((1, SEQ_MAX), (2, SEQ_MAX), (3, 0), (4, SEQ_MAX), (5, SEQ_MAX)):
            assert await acquire(client, lease_id, end) is Status.OK
            clock.now += 61
        for lease_id in (1, 2):
            assert await acquire(client, lease_id) is Status.RANGE_GONE
        assert await acquire(client, 3, 0) is Status.OK
        assert figures(server) == (1, 1)
        for simulated_disk in directory.disks["b"]:
            simulated_disk.crash()
        async with (
            running_server(CONFIG, SimulatedStore(directory)) as restarted,
            connect(restarted.url("b")) as other,
        ):
            for lease_id in (1, 2, 4):
                assert await acquire(other, lease_id) is Status.RANGE_GONE
        # The server remembers three evicted leases: it forgets the oldest, and after a week all.
        clock.now += 61
        assert await acquire(client, 6) is Status.OK
        assert await acquire(client, 2) is Status.RANGE_GONE
        clock.now += 61
        assert await acquire(client, 1) is Status.OK
        clock.now += 8 * 24 * 3600
        await disk.leases.delete_lapsed()
        assert await acquire(client, 2) is Status.OK


async def test_lapsed_leases_are_evicted_when_new_ones_need_their_ranges(
    server: Server, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "LEASED_RANGES_MAX", 9)
    async with connect(server.url("b")) as client:

        async def acquire(lease_id: int) -> None:
            await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=lease_id)

        for lease_id in (1, 2):
            await acquire(lease_id)
            clock.now += 1
        with pytest.raises(ServerError, match="release one first") as refusal:
            await acquire(3)
        assert refusal.value.status is Status.LIMIT_REACHED
        clock.now += 59
        await acquire(3)
        with pytest.raises(ServerError):
            await client.renew_lease(1, time_to_live_s=60)
        await client.renew_lease(2, time_to_live_s=60)


async def test_a_long_or_unprintable_owner_is_refused(server: Server) -> None:
    async with connect(server.url("b")) as client:
        for owner in ("x" * 201, "\x01", "two\nlines"):
            with pytest.raises(ServerError, match="200 bytes") as refusal:
                await client.acquire_lease(ALL, time_to_live_s=60, owner=owner)
            assert refusal.value.status is Status.BAD_ARGUMENT
        await client.acquire_lease(ALL, time_to_live_s=60, owner="x" * 200)
        (listed,) = (await client.stats("b"))["leases"]["leases"]
        assert listed["owner"] == "x" * 200
        assert "leases" not in (await client.stats())["buckets"]["b"]["leases"]


async def test_a_lease_of_too_long_a_time_or_of_too_many_ranges_is_refused(server: Server) -> None:
    day_s = 24 * 3600
    async with connect(server.url("b")) as client:
        await client.acquire_lease(ALL, time_to_live_s=day_s, owner="me", lease_id=7)
        await client.renew_lease(7, time_to_live_s=day_s)
        with pytest.raises(ServerError, match="86400 seconds") as refusal:
            await client.renew_lease(7, time_to_live_s=day_s + 1)
        assert refusal.value.status is Status.BAD_ARGUMENT
        with pytest.raises(ServerError, match="86400 seconds"):
            await client.acquire_lease(ALL, time_to_live_s=day_s + 1, owner="me")
        ranges = [(PartitionId(0), SeqNo(0), SeqNo(0))] * 1025
        with pytest.raises(ServerError, match="1 to 1024 ranges"):
            await client.acquire_lease(ranges, time_to_live_s=60, owner="me")


async def test_a_released_lease_does_not_come_back_after_a_restart(
    server: Server, directory: SimulatedDirectory
) -> None:
    async with connect(server.url("b")) as client:
        await write(client, 1)
        for lease_id in (7, 8):
            await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=lease_id)
        await client.release_lease(7)
    for disk in directory.disks["b"]:
        disk.crash()
    async with running_server(CONFIG, SimulatedStore(directory)) as restarted:
        (disk_now,) = restarted.catalog.disks.values()
        assert [row["id"] for row in result_of(disk_now.leases.list_held())] == [f"{8:016x}"]


@pytest.mark.parametrize("seed", range(3))
async def test_a_leased_range_is_read_after_lost_connections_and_a_restart(
    server: Server, directory: SimulatedDirectory, seed: int
) -> None:
    """The read continues inside a snapshot, also in a new history of the server."""
    rng = random.Random(seed)
    async with connect(server.url("b")) as client:
        await write(client, 1, 2, 3)
        lease = await client.acquire_lease(ALL, time_to_live_s=60, owner="me", lease_id=7)
        ends = {r.partition: r.end for r in lease.ranges}
        first = await read(server, 7, ends)
        assert await read(server, 7, ends, dial=cutting(rng, 6)) == first
    # A second server on the same disks, as after a crash of the first, begins a new history.
    for disk in directory.disks["b"]:
        disk.crash()
    async with running_server(CONFIG, SimulatedStore(directory)) as restarted:
        partition, rows = next(iter(first.items()))
        (log,) = [
            copy.failover_log
            for copy in restarted.catalog.bucket("b").partitions[partition : partition + 1]
        ]
        assert len(log) == 2
        assert await read(restarted, 7, ends) == first
        middle = rows[3].seq
        before = Position(log.up_to(SeqNo(0)), middle, middle, None)
        rows_read = await read(
            restarted, 7, {partition: ends[partition]}, starts={partition: before}
        )
        assert rows_read[partition] == rows[4:]
