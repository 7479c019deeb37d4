"""When a partition changes its state, a node ends its streams first, so that no client receives
outdated data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import trio

from tests.kit.cluster import TestCluster, cluster
from tests.kit.process import eventually
from upr_protocol.client import (
    ChunkReceived,
    Consumer,
    RolledBack,
    SnapshotStart,
    StreamAccepted,
    connect,
    consume,
)
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Operation, PartitionId, PartitionState, SeqNo
from upr_protocol.partition_map import Assignment
from upr_protocol.session import ServerSession
from upr_protocol.session.states import StreamState
from upr_protocol.wire import Message, StreamReply
from upr_server.engine import Partition
from upr_server.net.streamer import STEP_STREAMS
from upr_server.replication.local_server import streams_ended
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.records import PartitionRecord

PARTITION = PartitionId(0)
CONSUMER = "consumer"
REPLICA = "replica:b"


def open_streams(group: TestCluster, name: str) -> dict[str, int]:
    """The open streams of the partition at a node: the opaque number by the consumer's identity. A
    request that waits for its answer does not count."""
    return {
        session.client_identity: stream.opaque
        for session in sessions_of(group, name)
        if (stream := session.streams.get(PARTITION)) is not None
        and stream.state is not StreamState.REQUESTED
    }


def waiting_requests(group: TestCluster, name: str) -> int:
    """How many requests for streams a node has not answered yet."""
    return sum(
        stream.state is StreamState.REQUESTED
        for session in sessions_of(group, name)
        for stream in session.streams.values()
    )


def sessions_of(group: TestCluster, name: str) -> list[ServerSession]:
    server = group.nodes[name].server
    assert server is not None
    return [connection.session for connection in server.connections.connections]


async def write(group: TestCluster, name: str, key: str, count: int = 1) -> None:
    async with connect(group.nodes[name].url, follow_map=False) as client:
        for index in range(count):
            await client.set(f"{key} {index}", "value")


class Follower:
    """Consumes the partition at one node.

    Attributes:
        keys: The keys that it has.
        log: The failover log with which the node accepted its stream.
        unknown_histories: The histories of snapshots that are not in this log.
        rollbacks: How often it was told to roll back.
    """

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.log = FailoverLog()
        self.unknown_histories: list[int] = []
        self.rollbacks = 0

    async def follow(self, consumer: Consumer) -> None:
        async for event in consumer:
            if isinstance(event, StreamAccepted):
                self.log = event.log
            elif isinstance(event, SnapshotStart):
                if event.history_id not in [entry.history_id for entry in self.log.entries]:
                    self.unknown_histories.append(event.history_id)
            elif isinstance(event, RolledBack):
                self.rollbacks += 1
                self.keys.clear()
            elif isinstance(event, ChunkReceived):
                self.keys.update(row.key for row in event.chunk if row.op is Operation.SET)


@pytest.mark.parametrize(
    ("assignment", "remaining"),
    [
        (Assignment(replicas={"b": ""}, handing_over="a"), [REPLICA]),
        (Assignment("b", {"a": ""}), []),
    ],
    ids=["it hands over", "another is active at once"],
)
async def test_a_node_that_stops_being_active_ends_its_streams(
    assignment: Assignment, remaining: Sequence[str]
) -> None:
    """A barrier that returned from here would not cover what the next active node accepts. Only a
    replica keeps its stream, to the end, from a node that hands over."""
    async with cluster("ab", partitions=1) as group:
        await write(group, "a", "key")
        await group.quiet()
        async with (
            consume(
                group.nodes["a"].url, identity=CONSUMER, follow_map=False, with_logs=True
            ) as consumer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(Follower().follow, consumer)
            await eventually(lambda: len(open_streams(group, "a")) == 2, "both have a stream")
            before = open_streams(group, "a")
            assert sorted(before) == [CONSUMER, REPLICA]
            server = group.nodes["a"].server
            assert server is not None
            group.map = group.map.with_assignments({PARTITION: assignment})
            # Called directly, not over the network, so that no client can ask for another stream
            # before it returns.
            await server.partition_maps.set_map(group.map.revision - 1, group.map.encode())
            assert open_streams(group, "a") == {name: before[name] for name in remaining}
            nursery.cancel_scope.cancel()


async def test_a_replica_ends_its_streams_before_it_gives_data_of_a_new_history() -> None:
    """The replica's own state does not change: it receives the new history from its active node."""
    async with cluster("ab", partitions=1) as group:
        await write(group, "a", "early")
        await group.quiet()
        follower = Follower()
        async with (
            consume(
                group.nodes["b"].url, state=PartitionState.REPLICA, follow_map=False, with_logs=True
            ) as consumer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(follower.follow, consumer)
            await eventually(lambda: b"early 0" in follower.keys, "the consumer is up to date")
            (replica,) = group.nodes["b"].held
            log_before = replica.failover_log
            await group.share([Assignment(replicas={"a": "", "b": ""}, lost_active="a")])
            await group.share([Assignment("a", {"b": ""})])
            await write(group, "a", "late")
            await group.quiet()
            assert len(replica.failover_log) == len(log_before) + 1
            await eventually(
                lambda: b"late 0" in follower.keys, "the consumer receives the new change"
            )
            assert follower.log == replica.failover_log
            assert follower.unknown_histories == []
            assert follower.rollbacks == 0
            nursery.cancel_scope.cancel()


async def test_a_replica_that_rolls_back_leaves_no_stream_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends its streams before it undoes anything, and accepts none until it is done."""
    async with cluster(partitions=1) as group:
        await write(group, "a", "kept", 5)
        await group.quiet()
        behind = Assignment("a", {"b": "", "c": "b"})
        await group.give(group.map.with_assignments({PARTITION: behind}), "a")
        await group.nodes["c"].kill()
        await write(group, "a", "lost", 5)
        active, replica = group.nodes["a"].held[0], group.nodes["b"].held[0]
        await eventually(lambda: replica.high_seq == active.high_seq == 10, "b is ahead of c")
        follower = Follower()
        async with (
            consume(
                group.nodes["b"].url,
                identity=CONSUMER,
                state=PartitionState.REPLICA,
                follow_map=False,
            ) as consumer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(follower.follow, consumer)
            await eventually(lambda: len(follower.keys) == 10, "the consumer is up to date")
            first = open_streams(group, "b")[CONSUMER]
            had_ended: list[bool] = []
            open_at_the_end: list[dict[str, int]] = []
            answered: list[int] = []
            send = ServerSession.send

            def send_and_record(session: ServerSession, message: Message) -> None:
                if isinstance(message, StreamReply):
                    answered.append(message.status)
                send(session, message)

            truncate_disk, truncate_memory = BucketDisk.truncate, Partition.truncate

            async def truncate_after_new_request(
                disk: BucketDisk,
                partition: PartitionId,
                record: PartitionRecord,
                answers: Sequence[bytes],
            ) -> list[int]:
                had_ended.append(open_streams(group, "b").get(CONSUMER) != first)
                # The consumer asks for a stream again, and the request waits.
                await eventually(lambda: bool(waiting_requests(group, "b")), "it asked again")
                return await truncate_disk(disk, partition, record, answers)

            def truncate_and_record(partition: Partition, seq: SeqNo) -> None:
                open_at_the_end.append(open_streams(group, "b"))
                truncate_memory(partition, seq)

            monkeypatch.setattr(ServerSession, "send", send_and_record)
            monkeypatch.setattr(BucketDisk, "truncate", truncate_after_new_request)
            monkeypatch.setattr(Partition, "truncate", truncate_and_record)
            await group.nodes["a"].kill()
            await group.start("c")
            await group.give(
                group.map.with_assignments({PARTITION: Assignment("c", {"a": "", "b": ""})}),
                "c",
                "b",
            )
            await write(group, "c", "later")
            await eventually(
                lambda: b"later 0" in follower.keys, "the consumer receives the new change", 10
            )
            assert had_ended == [True]
            assert open_at_the_end == [{}]
            assert follower.rollbacks == 1
            assert follower.keys == {b"later 0", *(b"kept %d" % index for index in range(5))}
            assert Status.WRONG_STATE not in answered
            nursery.cancel_scope.cancel()


async def test_a_map_ends_streams_in_steps_and_none_begins_meanwhile() -> None:
    """The partitions change after the last step. Until then, data of the streams that are still
    open is not outdated."""
    async with cluster("a", partitions=3 * STEP_STREAMS) as group:
        server = group.nodes["a"].server
        assert server is not None
        bucket = server.catalog.bucket("b")
        async with (
            consume(group.nodes["a"].url, identity=CONSUMER, follow_map=False) as consumer,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(Follower().follow, consumer)
            await eventually(lambda: CONSUMER in open_streams(group, "a"), "it has streams")

            def streams() -> int:
                return sum(len(session.streams) for session in sessions_of(group, "a")) - (
                    waiting_requests(group, "a")
                )

            await eventually(lambda: streams() == len(bucket.partitions), "it has all streams")
            partitions = bucket.partitions[1:]
            open_counts: list[int] = []
            end_streams = server.end_streams

            def end_and_count(*args: Any, **options: Any) -> Iterator[None]:
                for _ in end_streams(*args, **options):
                    open_counts.append(streams())
                    yield

            object.__setattr__(server, "end_streams", end_and_count)
            async with streams_ended(server, bucket, partitions, Status.STATE_CHANGED):
                assert open_counts[0] >= 2 * STEP_STREAMS
                assert open_counts == sorted(open_counts, reverse=True)
                assert streams() == 1
                # The consumer asks for streams again, and the requests wait.
                await eventually(
                    lambda: waiting_requests(group, "a") == len(partitions), "it asked again"
                )
                assert streams() == 1
            await eventually(lambda: streams() == len(bucket.partitions), "it has them again")
            nursery.cancel_scope.cancel()
