"""Reading keys, and how durable what was written is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, cast

import trio

from upr_protocol.chunk import Chunk, ChunkPieces
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_protocol.limits import GET_KEYS_MAX, GET_REPLY_KEYS_MAX, KEY_BYTES_MAX
from upr_protocol.wire import (
    Await,
    AwaitReply,
    Get,
    GetReply,
    Seqnos,
    SeqnosAt,
    SeqnosAtReply,
    SeqnosReply,
)
from upr_server.engine import (
    FetchedItems,
    FetchRequest,
    Partition,
)
from upr_server.net.handlers.durability import durability_target
from upr_server.net.refusals import check_partitions_differ, misplaced_error, not_active_error
from upr_server.net.request_context import RequestContext
from upr_server.storage.calls import FindSeqBefore

GET_REPLY_BYTES: Final = 1024 * 1024
"""Where an answer to `Get` is cut; the client asks again for the rest. One value may exceed it."""


def get(context: RequestContext, request: Get) -> None:
    """Reads keys."""
    if not 1 <= len(request.keys) <= GET_KEYS_MAX:
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"a Get names 1 to {GET_KEYS_MAX} keys, not {len(request.keys)}",
        )
    context.access.check_read_keys(request)
    partition = context.partition(request.partition)
    assert context.bucket is not None
    partition_count = len(context.bucket.partitions)
    keys = request.keys[:GET_REPLY_KEYS_MAX]
    for key in keys:
        is_key = 1 <= len(key) <= KEY_BYTES_MAX
        if is_key and partition_of(key, partition_count) != partition.id:
            raise misplaced_error(key, partition, partition_count)
    context.submit(partition, _KeysRequest(context, request, keys, partition))


class _KeysRequest:
    """A `Get`, as a request to its partition. It is answered for its first keys."""

    def __init__(
        self,
        context: RequestContext,
        request: Get,
        keys: Sequence[bytes],
        partition: Partition,
    ) -> None:
        self._context = context
        self._request = request
        self._keys = keys
        self._partition = partition
        self._generation = context.users.generation

    @property
    def nbytes(self) -> int:
        return sum(map(len, self._request.keys))

    def apply(self, fetched_items: FetchedItems) -> Sequence[FetchRequest]:
        context, request, partition = self._context, self._request, self._partition
        keys = self._keys
        if context.users.generation != self._generation:
            # The right may have been revoked while it waited.
            context.access.check_message(request)
            context.access.check_read_keys(request)
        if partition.state is not PartitionState.ACTIVE:
            raise not_active_error(partition)
        history_id = partition.failover_log.current
        if request.history_id not in (0, history_id):
            raise ServerError(
                Status.HISTORY_CHANGED,
                f"partition {partition.id} is in history {history_id:016x}, "
                f"not {request.history_id:016x}",
            )
        now = context.time()
        fetch_requests = partition.missing_keys(keys, now, fetched_items)
        if fetch_requests:
            return fetch_requests
        rows = partition.get(keys, now, GET_REPLY_BYTES, fetched_items)
        # It is only asked for its pieces.
        chunk = cast("Chunk", ChunkPieces(rows, SeqNo(0), partition.high_seq))
        context.send(
            GetReply(history_id, len(rows), chunk, partition=partition.id, opaque=request.opaque)
        )
        return ()

    def refuse(self, error: ServerError) -> None:
        self._context.refuse_for(self._request, error)

    def fail(self) -> None:
        self._context.fail(self._request)


def seqnos(context: RequestContext, request: Seqnos) -> None:
    """Tells how far partitions are."""
    # A copy that is not active may lag, or have been left behind: clients take these numbers for
    # everything that was acknowledged.
    find = context.partition if request.of_copies else context.active_partition
    partitions = _partitions_of(context, request.partitions, find)
    context.send(
        SeqnosReply(
            tuple(
                (
                    partition.id,
                    partition.failover_log.current,
                    partition.high_seq,
                    partition.manager.persistence.committed_seq,
                    partition.replicas.seq_reached_by(len(partition.replicas)),
                )
                for partition in partitions
            ),
            opaque=request.opaque,
        )
    )


def seqnos_at_time(context: RequestContext, request: SeqnosAt) -> None:
    """Finds where partitions stood at a time."""
    partitions = _partitions_of(context, request.partitions, context.active_partition)
    disk = context.disk

    async def find() -> None:
        rows = []
        for partition in partitions:
            history_id = partition.failover_log.current
            call = FindSeqBefore(disk.bucket.name, partition.id, request.time_ns)
            seq = await disk.ask(call)
            if partition.state is not PartitionState.ACTIVE:
                raise not_active_error(partition)
            if partition.failover_log.current != history_id:
                raise ServerError(
                    Status.HISTORY_CHANGED, f"partition {partition.id} began another history"
                )
            rows.append((partition.id, history_id, seq))
        context.send(SeqnosAtReply(tuple(rows), opaque=request.opaque))

    # One at a time: a connection has one of these reads at the disk.
    context.reply_in_order(request, find)


def _partitions_of(
    context: RequestContext,
    partition_ids: Sequence[int],
    find: Callable[[PartitionId], Partition],
) -> list[Partition]:
    """The partitions that a request names, or all for none."""
    if context.bucket is None:
        raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
    check_partitions_differ(partition_ids)
    ids = partition_ids or range(len(context.bucket.partitions))
    return [find(PartitionId(partition_id)) for partition_id in ids]


def await_durable(context: RequestContext, request: Await) -> None:
    """Waits until a number is as durable as asked for."""
    partition = context.active_partition(request.partition)
    target = durability_target(context, partition, request.durability, request.copies)
    if request.history_id != partition.failover_log.current:
        raise ServerError(Status.HISTORY_CHANGED, "the number belongs to another history")
    if request.seq > partition.high_seq:
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"partition {partition.id} has given no number above {partition.high_seq}",
        )
    reached = target.reached_seq(partition)
    if reached >= request.seq:
        context.send(AwaitReply(reached, partition=request.partition, opaque=request.opaque))
        return
    deadline = trio.current_time() + request.deadline_ms / 1000
    context.durability_waits.add(request, partition, target, deadline)
