"""What replicas report, and in which steps those are answered who wait for it."""

from __future__ import annotations

import math
from itertools import count, pairwise
from types import SimpleNamespace
from typing import cast

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import ReplicaAck
from upr_server.engine import Bucket, batch_of
from upr_server.net.handlers.streams import SLICE_PARTITIONS, replica_ack
from upr_server.net.report_wait import ReportWait
from upr_server.net.request_context import RequestContext

PARTITIONS = SLICE_PARTITIONS
WAITING = 20
"""Publishers that wait for each partition."""

ONE = SeqNo(1)


def test_who_waits_for_many_partitions_is_answered_in_steps() -> None:
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
        replica_name="r",
        bucket=bucket,
        partition_maps=SimpleNamespace(is_replica=lambda *_arguments: True),
        report_wait=ReportWait(),
        note_replica=lambda _partition: None,
        disk=SimpleNamespace(progress=SimpleNamespace(notify=lambda: None)),
    )
    steps = replica_ack(cast("RequestContext", context), ReplicaAck(tuple(rows)))
    assert steps is not None
    counts = [0, len(answers)]
    counts += [len(answers) for _ in steps]
    assert answers == [True] * (WAITING * PARTITIONS)
    counts.append(len(answers))
    assert max(later - earlier for earlier, later in pairwise(counts)) <= SLICE_PARTITIONS + WAITING
