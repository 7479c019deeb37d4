"""A replica that follows a fake active node: what it receives, reports and has on disk."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from tests.kit.fake_server import BUCKET
from tests.kit.placed_keys import key_in
from tests.kit.process import eventually
from tests.replication.fake_source import (
    LOST,
    NOW,
    OTHER_PARTITION,
    PARTITION,
    replica,
)
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import (
    Cas,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
    SnapshotKind,
)
from upr_protocol.partition_map import Assignment
from upr_protocol.wire import (
    PartitionAnswers,
    PartitionChunk,
    PartitionStart,
    Stream,
)
from upr_server.engine import MutateResult, WriterToken, batch_of
from upr_server.engine.mutate_result import pack_result
from upr_server.replication.received_snapshots import ReceivedSnapshots
from upr_server.replication.replica_writer import (
    ReplicaWriter,
)
from upr_server.replication.replicator import (
    RECONNECT_S,
)
from upr_server.storage.online.maintenance import IDLE_S, REST_S


async def test_a_replica_that_receives_changes_does_not_count_as_idle(
    autojump_clock: MockClock,
) -> None:
    """Each commit must be reported to the maintenance. Otherwise it would index a few changes at a
    time, as for an idle bucket."""
    async with replica() as follower:
        await follower.receive(b"0")
        await follower.persist()
        progress = follower.disk.progress.next_event()
        follower.store.urgent_steps.clear()
        for count in range(20):
            await follower.receive(b"%d" % count)
            await follower.persist()
            await trio.sleep(IDLE_S / 2)
        assert progress.is_set()
        assert follower.store.urgent_steps
        assert not any(follower.store.urgent_steps)
        await trio.sleep(2 * REST_S)
        assert follower.store.urgent_steps[-1]


@pytest.mark.parametrize("lost_state", [PartitionState.ACTIVE, PartitionState.REPLICA])
async def test_a_replica_reports_one_state_while_it_does_not_reach_the_other(
    autojump_clock: MockClock, lost_state: PartitionState
) -> None:
    """The replica uses two connections to `a`: one for partitions that are active there, one for
    those that are replicas there. It must report what is on disk over either one, because
    publishers wait for it."""
    async with replica(partition_count=2) as follower:
        await follower.assign(Assignment("a", {"b": ""}), Assignment("c", {"a": "", "b": "a"}))
        source = follower.source

        def is_reported(partition: PartitionId) -> bool:
            rows = [row for report in source.reports for row in report.rows if row[0] == partition]
            return bool(rows) and rows[-1][3] == source.partitions[partition].high

        for partition in (PARTITION, OTHER_PARTITION):
            source.put(key_in(partition, 2, b"early"), b"value")
            await eventually(partial(is_reported, partition), "it is on disk and reported")
        lost_partition = PARTITION if lost_state is PartitionState.ACTIVE else OTHER_PARTITION
        reached = OTHER_PARTITION if lost_partition == PARTITION else PARTITION
        source.refuse = lambda message: (
            Status.WRONG_STATE
            if isinstance(message, Stream) and message.state is lost_state
            else None
        )
        (connection,) = (
            connection
            for connection in source.connections
            if lost_partition in connection.session.streams
        )
        connection.scope.cancel()
        await trio.sleep(2 * RECONNECT_S)
        source.put(key_in(reached, 2, b"late"), b"value")
        await eventually(partial(is_reported, reached), "it is on disk and reported")


@pytest.mark.parametrize("is_map_new", [False, True])
async def test_a_snapshot_that_lacks_only_its_end_counts_once_its_answers_came(
    autojump_clock: MockClock, is_map_new: bool
) -> None:
    """The stream ended after the last chunk. Without the answers, a batch of this snapshot would be
    applied a second time if this node became active."""
    assignment = Assignment("a", {"b": ""})
    async with replica(partition_count=2) as follower:
        source = follower.source
        await follower.receive(key_in(PARTITION, 2))
        await follower.persist()
        source.paused = True
        source.put(key_in(PARTITION, 2), b"newer value")
        (connection,) = (c for c in source.connections if PARTITION in c.session.streams)
        session = connection.session
        assert session.next_partition() == PARTITION
        place: dict[str, Any] = {"partition": PARTITION, "opaque": session.opaque_of(PARTITION)}
        (*_, row) = source.partitions[PARTITION].history
        history_id = source.partitions[PARTITION].log.current
        start = PartitionStart(
            history_id, SeqNo(1), row.seq, SeqNo(0), SnapshotKind.MEMORY, False, **place
        )
        session.send(start)
        session.send(PartitionChunk(Chunk.build([row], SeqNo(1), row.seq), **place))
        connection.wake()
        await trio.sleep(1.0)
        if is_map_new:
            # The next replication has the chunk in memory.
            await follower.assign(assignment, assignment)
        else:
            connection.scope.cancel()
        await trio.sleep(2 * RECONNECT_S)
        assert 1 in follower.starts[1:]
        assert row.seq not in follower.starts
        assert not any(row.seq in report[2:] for ack in source.reports for report in ack.rows)
        token = WriterToken(bytes(range(16)), 1)
        applied = MutateResult(HistoryId(1), row.seq, row.seq, row.cas)
        source.answers = ((token.writer, token.counter, row.seq, pack_result(applied)),)
        source.resume()
        await follower.persist()
        assert follower.partition.high_seq == row.seq
        batch = batch_of(Chunk.build([Mutation(Operation.SET, row.key, b"newer value")]), token)
        assert not follower.partition.repeated_batches.is_new(batch)


async def test_answers_of_a_snapshot_that_was_cut_off_are_dropped_with_it(
    autojump_clock: MockClock,
) -> None:
    """The next snapshot may belong to another history, which never had those batches."""
    async with replica() as follower:
        await follower.receive(b"1", b"2")
        await follower.persist()
        source = follower.source
        source.paused = True
        source.put(b"3", b"value")
        (connection,) = (c for c in source.connections if PARTITION in c.session.streams)
        session = connection.session
        assert session.next_partition() == PARTITION
        lost_answer = (bytes(16), 1, SeqNo(3), pack_result(LOST))
        session.send(
            PartitionAnswers(
                (lost_answer,), partition=PARTITION, opaque=session.opaque_of(PARTITION)
            )
        )
        connection.wake()
        await trio.sleep(1.0)
        source.paused = False
        await follower.lose(2)
        await follower.receive(b"4")
        await follower.persist()
        answers = follower.partition.repeated_batches.answers
        assert answers.answers_between(SeqNo(0), SeqNo(3)) == []


@pytest.mark.parametrize("assignment", [Assignment("a", {"b": ""}), Assignment("a")])
async def test_a_partition_that_is_no_longer_active_keeps_nothing_in_memory(
    autojump_clock: MockClock, assignment: Assignment
) -> None:
    async with replica() as follower:
        await follower.receive(b"1", b"2")
        await follower.persist()
        await follower.assign(Assignment("b", {"a": ""}))
        rows = [Mutation(Operation.SET, b"%d" % index, b"v") for index in range(3)]
        follower.partition.mutate(batch_of(Chunk.build(rows)), now=NOW)
        # The new active node has all of these changes, so nothing is undone.
        source = follower.source.partitions[PARTITION]
        source.mutate(Chunk.build(rows), bytes(16), 0)
        source.log = follower.partition.failover_log
        assert len(follower.partition.table) == 3
        await follower.assign(assignment)
        assert len(follower.partition.table) == 0
        assert follower.partition.snapshots.oldest_start == follower.partition.high_seq == 5


async def test_a_new_active_gives_higher_cas_values_than_the_old_one(
    autojump_clock: MockClock,
) -> None:
    async with replica() as follower:
        await follower.receive(b"1", b"2", b"3")
        await follower.persist()
        newest_cas = follower.source.partitions[PARTITION].history[-1].cas
        await follower.assign(Assignment("b", {"a": ""}))
        chunk = Chunk.build([Mutation(Operation.SET, b"4", b"v")])
        # The clock of `b` is behind.
        result = follower.partition.mutate(batch_of(chunk), now=0.0)
        assert result.first_cas > newest_cas


async def test_a_replica_that_copies_takes_the_purge_number_of_its_source(
    autojump_clock: MockClock,
) -> None:
    """The copy never had the deletions up to that number, so a consumer that missed them must roll
    back."""
    async with replica() as follower:
        follower.source.partitions[PARTITION].purge_seq = SeqNo(2)
        follower.source.paused = True
        for key in (b"1", b"2", b"3"):
            follower.source.put(key, b"value")
        follower.source.resume()
        await follower.persist()
        assert follower.partition.purge_seq == 2
        follower.source.partitions[PARTITION].purge_seq = SeqNo(4)
        await follower.receive(b"4", b"5")
        await follower.persist()
        assert follower.partition.purge_seq == 2, "it received the later deletions"


async def test_a_copy_is_completed_by_an_active_node_that_its_map_named_just_now(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket gets a map with one more node while active nodes of other buckets are asked. The
    node was not found in the map of before, and the server ended."""
    async with replica() as follower:
        await follower.assign(Assignment("c", {"a": "", "b": "a"}))
        partition_maps, latest_map = follower.server.partition_maps, follower.cluster.map
        nodes = {name: address for name, address in latest_map.nodes.items() if name != "c"}
        map_before = msgspec.structs.replace(latest_map, nodes=nodes)
        monkeypatch.setattr(partition_maps, "all_maps", lambda: [map_before])
        await follower.receive(b"1", b"2")
        await follower.persist()
        await follower.lose(0)
        await eventually(lambda: follower.partition.is_incomplete, "it is sent back to 0")
        follower.cluster.server("c").told_name = "c"
        await follower.receive(b"3")
        await eventually(lambda: not follower.partition.is_incomplete, "it is complete")


async def test_nobody_waits_for_a_commit_of_a_replication_that_has_ended(
    autojump_clock: MockClock,
) -> None:
    """A map waits for it. If it waited for ever, the node would apply no other map either."""
    async with replica() as follower:
        replicators = follower.server.partition_maps._buckets[BUCKET].replicators
        (replicator,) = replicators._replicators.values()
        received = {PARTITION: ReceivedSnapshots(FailoverLog(), SeqNo(0), Cas(0))}
        writer = ReplicaWriter(follower.server, follower.disk, received, replicator._streams)
        writer.mark_dirty(PARTITION)
        with trio.fail_after(60.0):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(writer.written.wait_until, lambda: writer.is_settled)
                await trio.testing.wait_all_tasks_blocked()
                writer.close()
