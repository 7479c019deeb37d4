"""Answering requests: what a client's message does to the buckets.

Every answer is made at once, between two checkpoints, so that what a request sees and does is one
moment of the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

import msgspec

from upr_protocol.errors import ChunkError, ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, Durability, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import PARTITIONS_DEFAULT
from upr_protocol.wire import (
    Await,
    AwaitReply,
    BucketDone,
    CreateBucket,
    DeleteBucket,
    Get,
    GetReply,
    Lease,
    ListBuckets,
    ListBucketsReply,
    Message,
    Mutate,
    MutateReply,
    Open,
    Opened,
    PartitionLog,
    Seqnos,
    SeqnosReply,
    Stats,
    StatsReply,
    Stream,
    StreamReply,
)
from upr_server.engine import Partition, WriterToken
from upr_server.net.streamer import NOTHING_PURGED

if TYPE_CHECKING:
    from upr_server.net.connection import Connection

_NO_WRITER: Final = bytes(16)

GET_REPLY_BYTES: Final = 1024 * 1024
"""Where an answer to `Get` is cut; the client asks again for the rest. One value may exceed it."""

NOTHING_PERSISTED: Final = SeqNo(0)
"""The persisted snapshot end of a server without a disk."""

MAP_REVISION: Final = 1
"""The partition map of a server without peers never changes."""


def _owned(connection: Connection, partition: PartitionId) -> Partition:
    bucket = connection.bucket
    if bucket is None:
        raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
    if partition >= len(bucket.partitions):
        raise ServerError(
            Status.NOT_MY_PARTITION,
            f"bucket {bucket.name} has partitions 0 to {len(bucket.partitions) - 1}, "
            f"not {partition}",
        )
    return bucket.partitions[partition]


def _open(connection: Connection, request: Open) -> None:
    bucket = connection.service.bucket(request.bucket)
    connection.bucket = bucket
    send = connection.session.send
    for number in request.partitions or range(len(bucket.partitions)):
        partition = PartitionId(number)
        if number >= len(bucket.partitions):
            send(
                PartitionLog(
                    PartitionState.DEAD,
                    SeqNo(0),
                    SeqNo(0),
                    SeqNo(0),
                    FailoverLog(),
                    partition=partition,
                    opaque=request.opaque,
                    status=Status.NOT_MY_PARTITION,
                )
            )
            continue
        found = bucket.partitions[number]
        send(
            PartitionLog(
                found.state,
                found.high_seq,
                NOTHING_PERSISTED,
                NOTHING_PURGED,
                found.failover_log,
                partition=partition,
                opaque=request.opaque,
            )
        )
    send(Opened(len(bucket.partitions), MAP_REVISION, opaque=request.opaque))
    connection.pay_credit()


def _stream(connection: Connection, request: Stream) -> None:
    try:
        partition = _owned(connection, request.partition)
    except ServerError as error:
        connection.session.send(
            StreamReply(
                SeqNo(0),
                str(error),
                FailoverLog(),
                partition=request.partition,
                opaque=request.opaque,
                status=Status.NOT_MY_PARTITION,
            )
        )
        return
    connection.streamer.open(partition, request)


def _mutate(connection: Connection, request: Mutate) -> None:
    connection.published()
    partition = _owned(connection, request.partition)
    if request.durability is not Durability.MEMORY:
        raise ServerError(
            Status.UNSUPPORTED,
            f"durability {request.durability.name.lower()} is not offered: this server keeps its "
            "data in memory only",
        )
    writer = None
    if request.writer != _NO_WRITER:
        writer = WriterToken(request.writer, request.counter)
    try:
        result = partition.mutate(request.chunk, now=connection.service.time(), writer=writer)
    except ChunkError as error:
        raise ServerError(Status.BAD_ARGUMENT, str(error)) from error
    if result.status is Status.WRONG_STATE:
        raise ServerError(Status.NOT_MY_PARTITION, f"partition {partition.id} is not active here")
    if result.status is not Status.OK:
        raise ServerError(result.status)
    succeeded = result.last_seq >= result.first_seq
    connection.session.send(
        MutateReply(
            result.history_id,
            result.first_seq if succeeded else SeqNo(0),
            result.last_seq if succeeded else SeqNo(0),
            result.first_cas if succeeded else Cas(0),
            tuple(result.failures),
            tuple(result.counters),
            partition=partition.id,
            opaque=request.opaque,
        )
    )


def _get(connection: Connection, request: Get) -> None:
    partition = _owned(connection, request.partition)
    history_id = partition.failover_log.current
    if request.history_id not in (0, history_id):
        raise ServerError(
            Status.HISTORY_CHANGED,
            f"partition {partition.id} is in history {history_id:x}, not {request.history_id:x}",
        )
    chunk = partition.get_many(request.keys, connection.service.time(), GET_REPLY_BYTES)
    connection.session.send(
        GetReply(history_id, chunk.count, chunk, partition=partition.id, opaque=request.opaque)
    )


def _seqnos(connection: Connection, request: Seqnos) -> None:
    bucket = connection.bucket
    if bucket is None:
        raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
    found = bucket.partitions
    if request.partitions:
        found = tuple(_owned(connection, PartitionId(number)) for number in request.partitions)
    connection.session.send(
        SeqnosReply(
            tuple(
                (
                    partition.id,
                    partition.failover_log.current,
                    partition.high_seq,
                    NOTHING_PERSISTED,
                    SeqNo(0),
                )
                for partition in found
            ),
            opaque=request.opaque,
        )
    )


def _await(connection: Connection, request: Await) -> None:
    partition = _owned(connection, request.partition)
    if request.durability is not Durability.MEMORY:
        raise ServerError(
            Status.UNSUPPORTED,
            f"durability {request.durability.name.lower()} is not offered: this server keeps its "
            "data in memory only",
        )
    if request.history_id != partition.failover_log.current:
        raise ServerError(Status.HISTORY_CHANGED, "the number belongs to another history")
    if request.seq > partition.high_seq:
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"partition {partition.id} has given no number above {partition.high_seq}",
        )
    connection.session.send(
        AwaitReply(partition.high_seq, partition=partition.id, opaque=request.opaque)
    )


def _lease(_connection: Connection, _request: Lease) -> None:
    raise ServerError(
        Status.UNSUPPORTED, "leases are not offered: this server keeps its data in memory only"
    )


def _create_bucket(connection: Connection, request: CreateBucket) -> None:
    service = connection.service
    service.buckets.create(
        request.name,
        request.partition_count or PARTITIONS_DEFAULT,
        request.quota_bytes or service.quota_bytes_default,
    )
    connection.session.send(BucketDone(opaque=request.opaque))


def _delete_bucket(connection: Connection, request: DeleteBucket) -> None:
    connection.service.delete_bucket(request.name)
    connection.session.send(BucketDone(opaque=request.opaque))


def _list_buckets(connection: Connection, request: ListBuckets) -> None:
    buckets = connection.service.buckets
    connection.session.send(
        ListBucketsReply(
            tuple(
                (bucket.name, len(bucket.partitions), bucket.quota.limit_bytes)
                for bucket in buckets
            ),
            opaque=request.opaque,
        )
    )


def _stats(connection: Connection, request: Stats) -> None:
    statistics = connection.service.statistics(request.bucket)
    text = msgspec.json.encode(statistics, enc_hook=str).decode()
    connection.session.send(StatsReply(text, opaque=request.opaque))


HANDLERS: Final[Mapping[type[Message], Callable[[Connection, Any], None]]] = {
    Open: _open,
    Stream: _stream,
    Mutate: _mutate,
    Get: _get,
    Seqnos: _seqnos,
    Await: _await,
    Lease: _lease,
    CreateBucket: _create_bucket,
    DeleteBucket: _delete_bucket,
    ListBuckets: _list_buckets,
    Stats: _stats,
}
"""How each request is answered. A handler that raises `ServerError` has its request refused."""
