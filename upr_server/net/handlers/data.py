"""Writing and reading keys, and how durable what was written is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import trio

from upr_protocol.errors import ChunkError, ServerError, Status
from upr_protocol.ids import Cas, Durability, PartitionId, PartitionState, SeqNo
from upr_protocol.wire import (
    Await,
    AwaitReply,
    Get,
    GetReply,
    Mutate,
    MutateReply,
    RunResult,
    Seqnos,
    SeqnosReply,
)
from upr_server.engine import (
    Fetched,
    FetchRequest,
    MutateResult,
    MutationBatch,
    Partition,
    WriterToken,
)
from upr_server.net.replies import NO_DEADLINE_S, DurabilityTarget
from upr_server.net.request_context import RequestContext, not_active_error

GET_REPLY_BYTES: Final = 1024 * 1024
"""Where an answer to `Get` is cut; the client asks again for the rest. One value may exceed it."""

_NO_WRITER: Final = bytes(16)


def _target(
    context: RequestContext, partition: Partition, durability: Durability, copies: int
) -> DurabilityTarget:
    """How durable a change must be; `ServerError` when it never can be."""
    if durability in (Durability.MEMORY, Durability.PERSISTED):
        return DurabilityTarget(durability)
    assert context.bucket is not None
    replica_count = len(context.partition_maps.replicas(context.bucket.name, partition.id))
    if max(copies, 1) > replica_count:
        raise ServerError(
            Status.TOO_FEW_REPLICAS,
            f"partition {partition.id} has {replica_count} replicas that follow this node, "
            f"not {max(copies, 1)}",
        )
    if copies < 1:
        raise ServerError(
            Status.BAD_ARGUMENT, f"a replicated level needs 1 or more copies, not {copies}"
        )
    deadline = trio.current_time() + context.replication_timeout_s
    return DurabilityTarget(durability, copies, deadline)


def mutate(context: RequestContext, request: Mutate) -> None:
    """Takes a batch in."""
    context.credit.spend()
    (run,) = request.bundle.runs
    chunk = request.bundle.chunk
    partition = context.partition(run.partition)
    target = DurabilityTarget(Durability.MEMORY)
    if partition.state is PartitionState.ACTIVE:
        target = _target(context, partition, request.durability, request.copies)
    # Otherwise the partition refuses the batch, and notes for its writer that it did.
    flusher = context.disk.flusher
    token = None
    if request.writer != _NO_WRITER:
        token = WriterToken(request.writer, run.counter)
    try:
        batch = MutationBatch(chunk, token, attempt=request.attempt, chain=run.chain)
    except ChunkError as error:
        raise ServerError(Status.BAD_ARGUMENT, str(error)) from error

    def apply(fetched: Fetched) -> Sequence[FetchRequest]:
        if flusher.full:
            partition.repeated_batches.note_refused(token)
            raise ServerError(Status.TEMPORARY_FAILURE, flusher.full)
        now = context.time()
        missing = partition.missing(batch, now=now, fetched=fetched)
        if missing:
            # Should the disk not be readable, the batch is never applied: what its publisher has
            # sent behind it must not be applied either.
            partition.repeated_batches.note_refused(token)
            return missing
        result = partition.mutate(batch, now=now, fetched=fetched)
        _reply_to_batch(context, request, partition, result, target)
        return ()

    context.reply_when_fetched(partition, request, apply)


def _reply_to_batch(
    context: RequestContext,
    request: Mutate,
    partition: Partition,
    result: MutateResult,
    target: DurabilityTarget,
) -> None:
    if result.status is Status.WRONG_STATE:
        raise not_active_error(partition)
    if result.status is Status.TEMPORARY_FAILURE:
        raise ServerError(result.status, "send the earlier batch of this writer again first")
    if result.status is not Status.OK:
        raise ServerError(result.status)
    succeeded = result.last_seq >= result.first_seq
    run_result = RunResult(
        partition.id,
        Status.OK,
        result.history_id,
        result.first_seq if succeeded else SeqNo(0),
        result.last_seq if succeeded else SeqNo(0),
        result.first_cas if succeeded else Cas(0),
    )
    reply = MutateReply(
        0,
        (run_result,),
        tuple(result.failures),
        tuple(result.counters),
        opaque=request.opaque,
    )
    # An operation that failed did so because of another change: that must be as durable as what
    # succeeded.
    seq = partition.high_seq if not succeeded or result.repeated else result.last_seq
    context.replies.send_when_durable(reply, partition, context.disk.flusher, seq, target)


def get(context: RequestContext, request: Get) -> None:
    """Reads keys."""
    partition = context.partition(request.partition)

    def apply(fetched: Fetched) -> Sequence[FetchRequest]:
        if partition.state is not PartitionState.ACTIVE:
            raise not_active_error(partition)
        history_id = partition.failover_log.current
        if request.history_id not in (0, history_id):
            raise ServerError(
                Status.HISTORY_CHANGED,
                f"partition {partition.id} is in history {history_id:x}, "
                f"not {request.history_id:x}",
            )
        now = context.time()
        missing = partition.missing_keys(request.keys, now, fetched)
        if missing:
            return missing
        chunk = partition.get(request.keys, now, GET_REPLY_BYTES, fetched)
        context.send(
            GetReply(history_id, chunk.count, chunk, partition=partition.id, opaque=request.opaque)
        )
        return ()

    context.reply_when_fetched(partition, request, apply)


def seqnos(context: RequestContext, request: Seqnos) -> None:
    """Tells how far partitions are."""
    if context.bucket is None:
        raise ServerError(Status.NO_BUCKET, "the bucket was deleted")
    # A copy that is not active may lag, or have been left behind: clients take these numbers for
    # everything that was acknowledged.
    find = context.partition if request.of_copies else context.active_partition
    partitions = [
        find(PartitionId(number))
        for number in request.partitions or range(len(context.bucket.partitions))
    ]
    context.send(
        SeqnosReply(
            tuple(
                (
                    partition.id,
                    partition.failover_log.current,
                    partition.high_seq,
                    partition.manager.persistence.committed,
                    partition.replicas.reached(len(partition.replicas)),
                )
                for partition in partitions
            ),
            opaque=request.opaque,
        )
    )


def await_durable(context: RequestContext, request: Await) -> None:
    """Waits until a number is as durable as asked for."""
    partition = context.active_partition(request.partition)
    target = _target(context, partition, request.durability, request.copies)
    if request.history_id != partition.failover_log.current:
        raise ServerError(Status.HISTORY_CHANGED, "the number belongs to another history")
    if request.seq > partition.high_seq:
        raise ServerError(
            Status.BAD_ARGUMENT,
            f"partition {partition.id} has given no number above {partition.high_seq}",
        )
    target = msgspec.structs.replace(target, deadline=trio.current_time() + NO_DEADLINE_S)
    if target.reached(partition) >= request.seq:
        _reply_to_await(context, request, target.reached(partition))
        return

    async def wait() -> None:
        with trio.move_on_after(request.deadline_ms / 1000):
            await trio.lowlevel.checkpoint()
            if target.persists:
                await context.disk.flusher.wait_until_persisted(partition, request.seq)
            if target.copies:
                await _wait_for_replicas(partition, request.seq, target)
        if request.history_id != partition.failover_log.current:
            raise ServerError(Status.HISTORY_CHANGED, "the number belongs to another history now")
        reached = target.reached(partition)
        if reached < request.seq:
            raise ServerError(
                Status.TIMED_OUT,
                f"partition {partition.id} has reached {reached} at this level",
            )
        _reply_to_await(context, request, reached)

    context.reply_later(request, wait)


def _reply_to_await(context: RequestContext, request: Await, reached: SeqNo) -> None:
    context.send(AwaitReply(reached, partition=request.partition, opaque=request.opaque))


async def _wait_for_replicas(partition: Partition, seq: SeqNo, target: DurabilityTarget) -> None:
    """Waits until so many replicas have a number, or none of them is expected to any more."""
    done = trio.Event()
    partition.replicas.call_when_reached(
        seq,
        target.copies,
        persisted=target.persists,
        deadline=target.deadline,
        call=lambda _: done.set(),
    )
    await done.wait()
