"""Partitions with a damaged record: a replica refuses them, and serves the others."""

from __future__ import annotations

from typing import Any, Final

import pytest
import structlog.testing
import trio
from trio.testing import MockClock

from tests.kit.fake_server import BUCKET
from tests.kit.placed_keys import key_in
from tests.kit.process import eventually
from tests.replication.fake_source import (
    NEW_HISTORY,
    OTHER_PARTITION,
    PARTITION,
    Replica,
    replica,
    trouble,
)
from upr_protocol.errors import Status
from upr_protocol.ids import (
    PartitionState,
    SeqNo,
)
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import (
    Stream,
)
from upr_server.storage.online.maintenance import REST_S
from upr_server.storage.records import (
    CLEAN_STOP,
    FLOOR,
    chunk_key,
    pack_record,
    partition_key,
)
from upr_server.storage.records import PARTITION as PARTITION_RECORD

REFUSED_EVENT: Final = "damaged partition; the others are served; run upr-server check"


async def test_changes_are_on_disk_with_their_history_though_another_partition_was_refused(
    autojump_clock: MockClock,
) -> None:
    """If the changes were stored with the failover log of the earlier history, a rollback would not
    undo them."""
    async with replica(partition_count=2) as follower:
        source = follower.source
        await follower.assign(*[Assignment("a", {"b": ""})] * 2)
        source.put(key_in(PARTITION, 2), b"value")
        await follower.persist()
        source.refuse = lambda message: (
            Status.WRONG_STATE
            if isinstance(message, Stream) and message.partition == OTHER_PARTITION
            else None
        )
        await follower.lose(1)
        source.refuse = lambda _message: None
        source.put(key_in(PARTITION, 2), b"newer value")
        await follower.persist()
        assert follower.partition.failover_log.current == NEW_HISTORY


async def test_a_partition_that_the_source_refuses_keeps_no_other_from_being_replicated(
    autojump_clock: MockClock,
) -> None:
    """The source's copy of that partition may be damaged; its other copies are not."""
    async with replica(partition_count=2) as follower:
        source = follower.source
        source.refuse = lambda message: (
            Status.NOT_MY_PARTITION
            if isinstance(message, Stream) and message.partition == OTHER_PARTITION
            else None
        )
        await follower.assign(*[Assignment("a", {"b": ""})] * 2)
        source.put(key_in(PARTITION, 2), b"value")
        await follower.persist()
        opens = source.bucket_opens
        await trio.sleep(20)
        source.put(key_in(PARTITION, 2), b"value")
        await follower.persist()
        assert "told to" in trouble(follower)
        source.refuse = lambda _message: None
        await trio.sleep(1)
        assert trouble(follower) == ""
        assert source.bucket_opens == opens, "the connection goes on"


async def wait_until_refused(follower: Replica) -> list[Any]:
    """Waits until the first partition is refused. Returns what is in the figures of the disk."""
    await eventually(lambda: bool(follower.partition.damage), "the partition is refused")
    assert follower.partition.state is PartitionState.DEAD
    await trio.sleep(2 * REST_S)
    figures: Any = follower.disk.statistics()["disk"]
    return list(figures["damaged_partitions"])


async def test_a_record_that_is_damaged_while_it_is_replicated_refuses_its_partition_alone(
    autojump_clock: MockClock,
) -> None:
    """The damage must not end the server."""
    with structlog.testing.capture_logs() as logged:
        async with replica(partition_count=2) as follower:
            await follower.assign(*[Assignment("a", {"b": ""})] * 2)
            source = follower.source
            other_partition = follower.disk.bucket.partitions[OTHER_PARTITION]
            source.put(key_in(PARTITION, 2), b"value")
            source.put(key_in(OTHER_PARTITION, 2), b"value")
            await follower.persist()
            log, _ = follower.store.directory.disks[BUCKET]
            log.flip_bit(partition_key(PARTITION_RECORD, PARTITION), 60)
            before = log.keys()
            # Both changes are in one commit.
            source.put(key_in(PARTITION, 2), b"lost")
            source.put(key_in(OTHER_PARTITION, 2), b"newer")
            assert await wait_until_refused(follower) == [PARTITION]
            assert other_partition.high_seq == 2
            for count in range(3):
                source.put(key_in(PARTITION, 2), b"more")
                source.put(key_in(OTHER_PARTITION, 2), b"more")
                await eventually(
                    lambda end=count + 3: other_partition.high_seq == end,  # type: ignore[misc]
                    "the other one is replicated",
                )
            assert trouble(follower) == ""
            assert follower.partition.high_seq == 1
            # A map with other changes is applied, and the partition stays refused.
            await follower.assign(*[Assignment("a", {"b": "", "c": ""})] * 2)
            source.put(key_in(OTHER_PARTITION, 2), b"last")
            await eventually(lambda: other_partition.high_seq == 6, "it goes on")
            assert follower.partition.state is PartitionState.DEAD
            chunks = [chunk_key(OTHER_PARTITION, end) for end in range(2, 7)]
            assert set(log.keys()) - set(before) <= set(chunks)
    events = [(event["event"], event.get("partition")) for event in logged]
    assert events.count((REFUSED_EVENT, PARTITION)) == 1
    assert not [event for event in logged if event["event"] == "replication interrupted; retrying"]
    assert CLEAN_STOP in log.keys()  # noqa: SIM118


@pytest.mark.parametrize("kind", [PARTITION_RECORD, FLOOR])
async def test_a_rollback_that_meets_a_damaged_record_refuses_its_partition_alone(
    autojump_clock: MockClock, kind: bytes
) -> None:
    """The other partitions of that source are still replicated."""
    async with replica(partition_count=2) as follower:
        await follower.assign(*[Assignment("a", {"b": ""})] * 2)
        source = follower.source
        await follower.receive_snapshots(3)
        log, _ = follower.store.directory.disks[BUCKET]
        key = partition_key(kind, PARTITION)
        if kind == FLOOR:
            with log.write() as transaction:
                transaction.put(key, pack_record(key, SeqNo(1)))
        log.flip_bit(key, 60)
        await follower.lose(2)
        assert await wait_until_refused(follower) == [PARTITION]
        other_partition = follower.disk.bucket.partitions[OTHER_PARTITION]
        for end in (1, 2):
            source.put(key_in(OTHER_PARTITION, 2), b"value")
            await eventually(lambda: other_partition.high_seq == end, "it goes on")  # noqa: B023
        assert trouble(follower) == ""


async def test_a_replica_whose_only_partition_is_refused_does_not_connect_again(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1")
        await follower.persist()
        log, _ = follower.store.directory.disks[BUCKET]
        log.flip_bit(partition_key(PARTITION_RECORD, PARTITION), 60)
        follower.source.put(b"2", b"value")
        assert await wait_until_refused(follower) == [PARTITION]
        opens = follower.source.bucket_opens
        await trio.sleep(60)
        assert follower.source.bucket_opens == opens
        assert trouble(follower) == ""
        await follower.assign(Assignment("c", {"b": ""}))
        assert follower.partition.state is PartitionState.DEAD
