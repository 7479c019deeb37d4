"""What replicas report, and in which steps those are answered who wait for it."""

from __future__ import annotations

import math
from itertools import count, pairwise
from types import SimpleNamespace
from typing import cast

import pytest
import trio.testing

from tests.server.connected_peer import P0, Peer, connected, make_server, sets
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.session import ServerSession
from upr_protocol.wire import ReplicaAck
from upr_server.engine import Bucket, batch_of
from upr_server.net.handlers.streams import SLICE_PARTITIONS, replica_ack
from upr_server.net.replica_reports import ReplicaReports
from upr_server.net.report_wait import ReportWait
from upr_server.net.request_context import RequestContext

PARTITIONS = SLICE_PARTITIONS
WAITING = 20
"""Publishers that wait for each partition."""

ONE = SeqNo(1)


def test_waits_for_replicas_in_many_partitions_are_answered_in_steps() -> None:
    """One message reports of all of them. Each answer takes as long as a report."""
    ids = count(1)
    bucket = Bucket("b", new_history_id=lambda: HistoryId(next(ids)), partition_count=PARTITIONS)
    answers: list[bool] = []
    rows: list[tuple[PartitionId, HistoryId, SeqNo, SeqNo]] = []
    for partition in bucket.partitions:
        chunk = Chunk.build([Mutation(Operation.SET, b"k", b"v")])
        partition.mutate(batch_of(chunk), now=1.0)
        for _ in range(WAITING):
            partition.replicas.call_when_reached(
                ONE, 1, persisted=False, deadline=math.inf, call=answers.append
            )
        rows.append((partition.id, partition.failover_log.current, ONE, SeqNo(0)))
    context = SimpleNamespace(
        bucket=bucket,
        partition_maps=SimpleNamespace(is_replica=lambda *_arguments: True),
        report_wait=ReportWait(),
        replica_reports=ReplicaReports(ServerSession("server", now=0.0), connection_number=1),
        disk=SimpleNamespace(progress=SimpleNamespace(notify=lambda: None)),
    )
    steps = replica_ack(cast("RequestContext", context), ReplicaAck(tuple(rows)))
    assert steps is not None
    counts = [0, len(answers)]
    counts += [len(answers) for _ in steps]
    assert answers == [True] * (WAITING * PARTITIONS)
    counts.append(len(answers))
    assert max(later - earlier for earlier, later in pairwise(counts)) <= SLICE_PARTITIONS + WAITING


@pytest.mark.parametrize("is_first", [False, True])
async def test_a_late_report_by_an_old_connection_does_not_count(
    monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Packets may come long after the replica has connected again, and rolled back, also the first
    that the old connection has. It counted as the newest report."""
    server = make_server()
    monkeypatch.setattr(server.partition_maps, "is_replica", lambda *_arguments: True)
    async with (
        connected(server, identity="replica:r") as old,
        connected(server, identity="replica:r") as new,
    ):
        for replica in (old, new):
            await replica.open()
            await replica.mutate(sets(b"k"))
        (bucket,) = server.catalog.buckets
        (partition,) = bucket.partitions
        history_id = partition.failover_log.current

        async def report(replica: Peer, seq: int) -> None:
            await replica.send(ReplicaAck(((P0, history_id, SeqNo(seq), SeqNo(0)),)))
            await trio.testing.wait_all_tasks_blocked()

        if not is_first:
            await report(old, 2)
        await report(new, 1)
        await report(old, 2)
        assert partition.replicas.seq_reached_by(1) == 1
        await report(new, 2)
        assert partition.replicas.seq_reached_by(1) == 2


async def test_a_late_report_does_not_count_though_the_newer_connection_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It named what the replica had given up before it connected again, and counted until the old
    connection ended, too."""
    server = make_server()
    monkeypatch.setattr(server.partition_maps, "is_replica", lambda *_arguments: True)
    async with connected(server, identity="replica:r") as old:
        await old.open()
        await old.mutate(sets(b"k"))
        await old.mutate(sets(b"k"))
        (bucket,) = server.catalog.buckets
        (partition,) = bucket.partitions
        history_id = partition.failover_log.current
        async with connected(server, identity="replica:r") as new:
            await new.open()
            await new.send(ReplicaAck(((P0, history_id, SeqNo(1), SeqNo(0)),)))
            await trio.testing.wait_all_tasks_blocked()
            assert partition.replicas.seq_reached_by(1) == 1
        await trio.testing.wait_all_tasks_blocked()
        await old.send(ReplicaAck(((P0, history_id, SeqNo(2), SeqNo(0)),)))
        await trio.testing.wait_all_tasks_blocked()
        assert partition.replicas.seq_reached_by(1) == 0
