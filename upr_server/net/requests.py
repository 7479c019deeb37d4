"""Answering requests: what a client's message does to the buckets.

What a request sees and does is one moment of the server: it is answered at once, between two
checkpoints, unless it needs something from disk. Then it is answered when that is there, and what
the same partition is asked meanwhile comes after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import trio

from upr_protocol.bucket_event import EventFilter
from upr_protocol.errors import ChunkError, ServerError, Status
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import Cas, Durability, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import (
    CONSUMER_NAME_BYTES_MAX,
    EVENT_PATTERN_BYTES_MAX,
    HEALTH_TIMEOUT_S_MAX,
    HEALTH_TIMEOUT_S_MIN,
    PARTITIONS_DEFAULT,
)
from upr_protocol.wire import (
    Await,
    AwaitReply,
    BucketDone,
    CreateBucket,
    DeleteBucket,
    EventsReply,
    Get,
    GetMap,
    GetReply,
    Join,
    Lease,
    LeaseAction,
    LeaseReply,
    ListBuckets,
    ListBucketsReply,
    MapReply,
    Message,
    Mutate,
    MutateReply,
    NextEvents,
    Open,
    Opened,
    PartitionLog,
    ReplicaAck,
    Seqnos,
    SeqnosReply,
    SetMap,
    Stats,
    StatsReply,
    Stream,
    StreamReply,
)
from upr_server.engine import (
    Fetched,
    FetchRequest,
    MutateResult,
    MutationBatch,
    Partition,
    WriterToken,
)
from upr_server.net.level import MAX_WAIT_S, Level
from upr_server.storage.calls import MeasureRanges
from upr_server.storage.errors import StorageError

if TYPE_CHECKING:
    from upr_server.net.connection import Connection

_NO_WRITER: Final = bytes(16)

GET_REPLY_BYTES: Final = 1024 * 1024
"""Where an answer to `Get` is cut; the client asks again for the rest. One value may exceed it."""

CONSUMER_NAME: Final = re.compile(rf"(?!\.)[A-Za-z0-9._-]{{1,{CONSUMER_NAME_BYTES_MAX}}}")
"""The name of a consumer of events. Those of the server's own begin with a dot."""

REPLICA: Final = "replica:"
"""What the identity of a replica begins with; the name of its node follows."""


def _owned(connection: Connection, partition: PartitionId) -> Partition:
    """The partition; `ServerError` when the bucket does not have it."""
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


def _active(connection: Connection, number: PartitionId) -> Partition:
    """The partition; `ServerError` when it is not this node that answers for it."""
    partition = _owned(connection, number)
    if partition.state is not PartitionState.ACTIVE:
        raise _not_active(partition)
    return partition


def _not_active(partition: Partition) -> ServerError:
    return ServerError(
        Status.NOT_MY_PARTITION,
        f"partition {partition.id} is {partition.state.name.lower()} here, not active",
    )


def _revision(connection: Connection) -> int:
    bucket = connection.bucket
    return 0 if bucket is None else connection.service.cluster.revision(bucket.name)


def _persisted(partition: Partition) -> SeqNo:
    return partition.manager.persistence.committed


def _open(connection: Connection, request: Open) -> None:
    bucket = connection.service.bucket(request.bucket)
    connection.open(bucket)
    send = connection.session.send
    for number in request.partitions or range(len(bucket.partitions)):
        partition = bucket.partitions[number] if number < len(bucket.partitions) else None
        if partition is None or partition.state is PartitionState.DEAD:
            # What is left here of a partition that was taken away is nobody's business any more.
            send(
                PartitionLog(
                    PartitionState.DEAD,
                    SeqNo(0),
                    SeqNo(0),
                    SeqNo(0),
                    FailoverLog(),
                    partition=PartitionId(number),
                    opaque=request.opaque,
                    status=Status.NOT_MY_PARTITION,
                )
            )
            continue
        send(
            PartitionLog(
                partition.state,
                partition.high_seq,
                _persisted(partition),
                partition.purge_seq,
                partition.failover_log,
                partition=partition.id,
                opaque=request.opaque,
            )
        )
    send(Opened(len(bucket.partitions), _revision(connection), opaque=request.opaque))
    connection.pay_credit()


def _stream(connection: Connection, request: Stream) -> None:
    try:
        partition = _owned(connection, request.partition)
        _check_replica(connection, request)
    except ServerError as error:
        connection.say(
            StreamReply(
                SeqNo(0),
                error.sentence,
                FailoverLog(),
                _revision(connection),
                partition=request.partition,
                opaque=request.opaque,
                status=error.status,
            )
        )
        return
    connection.streamer.open(connection.disk, partition, request, _revision(connection))


def _check_replica(connection: Connection, request: Stream) -> None:
    """A replica follows a node only while both have it so: this one may have lost its disk, and
    with it the map, and would have the replica give up all that it has."""
    bucket = connection.bucket
    if not request.with_answers or bucket is None:
        return
    name = connection.session.client_identity.removeprefix(REPLICA)
    if not connection.service.cluster.is_replica(bucket.name, request.partition, name):
        raise ServerError(
            Status.WRONG_STATE,
            f"this node does not know {name!r} as its replica for partition {request.partition}",
        )


def _level(
    connection: Connection, partition: Partition, durability: Durability, copies: int
) -> Level:
    """How durable something is to be; `ServerError` when it never will be."""
    if durability in (Durability.MEMORY, Durability.PERSISTED):
        return Level(durability)
    assert connection.bucket is not None
    there = len(connection.service.cluster.replicas(connection.bucket.name, partition.id))
    wanted = max(copies, 1)
    if wanted > there:
        raise ServerError(
            Status.TOO_FEW_REPLICAS,
            f"partition {partition.id} has {there} replicas that follow this node, not {wanted}",
        )
    if copies < 1:
        raise ServerError(Status.BAD_ARGUMENT, "replicated to how many: 1 or more")
    deadline = trio.current_time() + connection.service.replication_timeout_s
    return Level(durability, copies, deadline)


def _mutate(connection: Connection, request: Mutate) -> None:
    connection.published()
    partition = _owned(connection, request.partition)
    level = Level(Durability.MEMORY)
    if partition.state is PartitionState.ACTIVE:
        level = _level(connection, partition, request.durability, request.copies)
    # Else it is refused where it would be done, which notes that it was.
    flusher = connection.disk.flusher
    token = None
    if request.writer != _NO_WRITER:
        token = WriterToken(request.writer, request.counter)
    try:
        batch = MutationBatch(request.chunk, token, attempt=request.attempt, chain=request.chain)
    except ChunkError as error:
        raise ServerError(Status.BAD_ARGUMENT, str(error)) from error

    def apply(fetched: Fetched) -> Sequence[FetchRequest]:
        if flusher.full:
            partition.deduplicator.put_off(token)
            raise ServerError(Status.TEMPORARY_FAILURE, flusher.full)
        now = connection.service.time()
        missing = partition.missing(batch, now=now, fetched=fetched)
        if missing:
            # Should the disk not be readable, the batch is never applied: what its publisher has
            # sent behind it must not be applied either.
            partition.deduplicator.put_off(token)
            return missing
        result = partition.mutate(batch, now=now, fetched=fetched)
        _answer_mutate(connection, request, partition, result, level)
        return ()

    connection.line(partition).do(connection, request, apply)


def _answer_mutate(
    connection: Connection,
    request: Mutate,
    partition: Partition,
    result: MutateResult,
    level: Level,
) -> None:
    if result.status is Status.WRONG_STATE:
        raise _not_active(partition)
    if result.status is Status.TEMPORARY_FAILURE:
        raise ServerError(
            result.status, "an earlier batch of this writer is to be sent again first"
        )
    if result.status is not Status.OK:
        raise ServerError(result.status)
    succeeded = result.last_seq >= result.first_seq
    reply = MutateReply(
        result.history_id,
        result.first_seq if succeeded else SeqNo(0),
        result.last_seq if succeeded else SeqNo(0),
        result.first_cas if succeeded else Cas(0),
        tuple(result.failures),
        tuple(result.counters),
        partition=partition.id,
        opaque=request.opaque,
    )
    # What failed did so because of what was there: that must be as durable as what succeeded.
    seq = partition.high_seq if not succeeded or result.repeated else result.last_seq
    connection.replies.add(partition, reply, seq, level)


def _get(connection: Connection, request: Get) -> None:
    partition = _owned(connection, request.partition)

    def apply(fetched: Fetched) -> Sequence[FetchRequest]:
        if partition.state is not PartitionState.ACTIVE:
            raise _not_active(partition)
        history_id = partition.failover_log.current
        if request.history_id not in (0, history_id):
            raise ServerError(
                Status.HISTORY_CHANGED,
                f"partition {partition.id} is in history {history_id:x}, "
                f"not {request.history_id:x}",
            )
        now = connection.service.time()
        missing = partition.missing_keys(request.keys, now, fetched)
        if missing:
            return missing
        chunk = partition.get(request.keys, now, GET_REPLY_BYTES, fetched)
        connection.say(
            GetReply(history_id, chunk.count, chunk, partition=partition.id, opaque=request.opaque)
        )
        return ()

    connection.line(partition).do(connection, request, apply)


def _seqnos(connection: Connection, request: Seqnos) -> None:
    bucket = connection.bucket
    if bucket is None:
        raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
    # A copy that is not active may lag, or have been left behind: who asks takes these numbers for
    # everything that was acknowledged.
    find = _owned if request.of_copies else _active
    partitions = [
        find(connection, PartitionId(number))
        for number in request.partitions or range(len(bucket.partitions))
    ]
    connection.say(
        SeqnosReply(
            tuple(
                (
                    partition.id,
                    partition.failover_log.current,
                    partition.high_seq,
                    _persisted(partition),
                    partition.replicas.reached(len(partition.replicas)),
                )
                for partition in partitions
            ),
            opaque=request.opaque,
        )
    )


def _await(connection: Connection, request: Await) -> None:
    partition = _active(connection, request.partition)
    level = _level(connection, partition, request.durability, request.copies)
    if request.history_id != partition.failover_log.current:
        raise ServerError(Status.HISTORY_CHANGED, "the number belongs to another history")
    if request.seq > partition.high_seq:
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"partition {partition.id} has given no number above {partition.high_seq}",
        )
    level = msgspec.structs.replace(level, deadline=trio.current_time() + MAX_WAIT_S)
    if level.reached(partition) >= request.seq:
        connection.say(
            AwaitReply(level.reached(partition), partition=partition.id, opaque=request.opaque)
        )
        return

    async def wait() -> None:
        with trio.move_on_after(request.deadline_ms / 1000):
            await trio.lowlevel.checkpoint()
            if level.persists:
                await connection.disk.flusher.wait_until_persisted(partition, request.seq)
            if level.copies:
                await _replicated(partition, request.seq, level)
        if request.history_id != partition.failover_log.current:
            raise ServerError(Status.HISTORY_CHANGED, "the number belongs to another history now")
        reached = level.reached(partition)
        if reached < request.seq:
            raise ServerError(
                Status.TIMED_OUT,
                f"partition {partition.id} has reached {reached} at this level",
            )
        connection.say(AwaitReply(reached, partition=partition.id, opaque=request.opaque))

    connection.later(request, wait)


async def _replicated(partition: Partition, seq: SeqNo, level: Level) -> None:
    """Waits until so many replicas have a number, or none of them is promised any more."""
    called = trio.Event()
    partition.replicas.when(
        seq,
        level.copies,
        persisted=level.persists,
        deadline=level.deadline,
        call=lambda _: called.set(),
    )
    await called.wait()


def _replica_ack(connection: Connection, request: ReplicaAck) -> None:
    bucket = connection.bucket
    if bucket is None or request.partition >= len(bucket.partitions):
        return
    name = connection.session.client_identity.removeprefix(REPLICA)
    partition = bucket.partitions[request.partition]
    if (
        request.history_id == partition.failover_log.current
        and request.received <= partition.high_seq
        and connection.service.cluster.is_replica(bucket.name, partition.id, name)
    ):
        connection.reported(partition, name)
        partition.replicas.report(name, request.received, request.persisted, connection)


def _get_map(connection: Connection, request: GetMap) -> None:
    cluster = connection.service.cluster
    if request.bucket:
        connection.service.bucket(request.bucket)
    found = cluster.map_of(request.bucket)
    revision, document = (0, "") if found is None else (found.revision, found.encode())
    connection.say(MapReply(revision, document, cluster.node, opaque=request.opaque))


def _set_map(connection: Connection, request: SetMap) -> None:
    async def give() -> None:
        cluster = connection.service.cluster
        given = await cluster.set_map(request.expected_revision, request.document)
        connection.say(
            MapReply(given.revision, given.encode(), cluster.node, opaque=request.opaque)
        )

    connection.in_turn(request, give)


def _join(connection: Connection, request: Join) -> None:
    async def join() -> None:
        cluster = connection.service.cluster
        found = await cluster.join(request.bucket, request.address)
        connection.say(
            MapReply(found.revision, found.encode(), cluster.node, opaque=request.opaque)
        )

    connection.in_turn(request, join)


def _lease(connection: Connection, request: Lease) -> None:
    disk = connection.disk

    async def settle() -> None:
        async with disk.maintenance.paused():
            if request.action is LeaseAction.RELEASE:
                await disk.leases.release(request.lease_id)
                connection.say(LeaseReply(request.lease_id, 0, opaque=request.opaque))
                return
            if request.action is LeaseAction.ACQUIRE:
                for number, _, _ in request.ranges:
                    # A copy may lag: what is persisted there is not all that was acknowledged.
                    if number < len(disk.bucket.partitions):
                        _active(connection, PartitionId(number))
                lease = await disk.leases.acquire(
                    request.lease_id, request.owner, request.ranges, request.time_to_live_s
                )
            else:
                lease = await disk.leases.renew(request.lease_id, request.time_to_live_s)
        try:
            sizes = await disk.store.ask(MeasureRanges(disk.bucket.name, lease.ranges))
        except StorageError:
            disk.maintenance.check_not_deleted()
            raise
        ranges = tuple(
            (number, disk.bucket.partitions[number].failover_log.current, start, end, nbytes)
            for (number, start, end), nbytes in zip(lease.ranges, sizes, strict=True)
        )
        connection.say(
            LeaseReply(lease.lease_id, lease.time_to_live_s, ranges, opaque=request.opaque)
        )

    # One at a time: each is a commit of the bucket's one writer, and others wait for that too.
    connection.in_turn(request, settle)


def _create_bucket(connection: Connection, request: CreateBucket) -> None:
    service = connection.service

    async def create() -> None:
        await service.create_bucket(
            request.name,
            request.partition_count or PARTITIONS_DEFAULT,
            request.quota_bytes or service.quota_bytes_default,
        )
        connection.say(BucketDone(opaque=request.opaque))

    connection.in_turn(request, create)


def _delete_bucket(connection: Connection, request: DeleteBucket) -> None:
    async def delete() -> None:
        await connection.service.delete_bucket(request.name)
        connection.say(BucketDone(opaque=request.opaque))

    connection.in_turn(request, delete)


def _list_buckets(connection: Connection, request: ListBuckets) -> None:
    buckets = connection.service.buckets

    async def answer() -> None:
        await trio.lowlevel.checkpoint()
        rows = [
            (bucket.name, len(bucket.partitions), bucket.quota.limit_bytes) for bucket in buckets
        ]
        connection.say(ListBucketsReply(tuple(rows), opaque=request.opaque))

    # Behind what the same client has asked to be made or deleted.
    connection.in_turn(request, answer)


def _next_events(connection: Connection, request: NextEvents) -> None:
    _check_next_events(request)
    if connection.asks_for_events:
        raise ServerError(
            Status.LIMIT_REACHED, "one question about events is open on this connection already"
        )
    connection.asks_for_events = True

    async def wait() -> None:
        try:
            batch, everything, events = await connection.service.events.next_events(
                request.consumer,
                EventFilter(request.kinds, request.pattern),
                timeout_s=request.timeout_s,
                acknowledged=request.acknowledged,
                # Who waits is alive: it must ask again before it would be taken for dead.
                wait_s=min(request.wait_ms / 1000, request.timeout_s / 2),
            )
        finally:
            connection.asks_for_events = False
        connection.say(EventsReply(batch, everything, events, opaque=request.opaque))

    connection.later(request, wait)


def _check_next_events(request: NextEvents) -> None:
    if not CONSUMER_NAME.fullmatch(request.consumer):
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"{request.consumer!r} is no name of a consumer: 1 to {CONSUMER_NAME_BYTES_MAX} letters"
            ", digits, dots, underscores or hyphens, not beginning with a dot",
        )
    if not HEALTH_TIMEOUT_S_MIN <= request.timeout_s <= HEALTH_TIMEOUT_S_MAX:
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"the timeout is {HEALTH_TIMEOUT_S_MIN} to {HEALTH_TIMEOUT_S_MAX} seconds, "
            f"not {request.timeout_s}",
        )
    if len(request.pattern.encode()) > EVENT_PATTERN_BYTES_MAX:
        raise ServerError(
            Status.BAD_ARGUMENT, f"a pattern is at most {EVENT_PATTERN_BYTES_MAX} bytes"
        )


def _stats(connection: Connection, request: Stats) -> None:
    statistics = connection.service.statistics(request.bucket)
    text = msgspec.json.encode(statistics, enc_hook=str).decode()
    connection.say(StatsReply(text, opaque=request.opaque))


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
    GetMap: _get_map,
    SetMap: _set_map,
    Join: _join,
    NextEvents: _next_events,
    ReplicaAck: _replica_ack,
}
"""How each request is answered. A handler that raises `ServerError` has its request refused."""
