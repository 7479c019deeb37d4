"""The results of the operations in a batch."""

from __future__ import annotations

from typing import Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import MutateReply


class WriteResult(msgspec.Struct, frozen=True):
    """One operation that succeeded.

    Attributes:
        partition: The key's partition.
        history_id: The history that the sequence number belongs to.
        seq: The sequence number of the change there.
        cas: The item's version since then.
        count: The counter's new value, when the operation was an increment or a decrement.
    """

    partition: PartitionId
    history_id: HistoryId
    seq: SeqNo
    cas: Cas
    count: int | None = None


class Failure(msgspec.Struct, frozen=True):
    """One operation that failed, alone.

    Attributes:
        partition: The key's partition.
        key: Its key.
        operation: The operation.
        status: Why the server did not carry it out.
    """

    partition: PartitionId
    key: bytes
    operation: Operation
    status: Status

    def __str__(self) -> str:
        return str(self.error())

    def error(self) -> ServerError:
        """The failure as an exception."""
        reason = self.status.name.replace("_", " ").lower()
        return ServerError(self.status, f"{self.operation.name.lower()} of {self.key!r}: {reason}")


class NotDurableError(ServerError):
    """The change was made, but did not reach the requested durability in the server's time for it.
    It stays, unless there is a failover before it does.

    To find out, wait for `written` with `await_durable`. A publisher sends the batch again with its
    token, which has no second effect, until its retry timeout.

    Attributes:
        written: The change; None when the server did not tell its sequence number.
    """

    def __init__(self, written: WriteResult | None = None) -> None:
        super().__init__(Status.NOT_DURABLE_YET)
        self.written = written


def status_of(code: int) -> Status:
    """The status with this code; `INTERNAL` for a code that this version does not know."""
    return _STATUSES.get(code, Status.INTERNAL)


_STATUSES: Final = {status.value: status for status in Status}


def failures(partition: PartitionId, chunk: Chunk, reply: MutateReply) -> list[Failure]:
    """The operations of `chunk` that failed, by index. O(failures)."""
    operations = chunk.operations
    return [
        Failure(partition, chunk.key(index), Operation(operations[index]), status_of(status))
        for index, status in reply.failures
        if index < chunk.count
    ]


def refused(partition: PartitionId, chunk: Chunk, status: Status) -> list[Failure]:
    """Every operation of `chunk`, which the server refused as a whole. O(count)."""
    return [
        Failure(partition, key, Operation(operation), status)
        for key, operation in zip(chunk.keys(), chunk.operations, strict=True)
    ]


def results_of(
    partition: PartitionId, chunk: Chunk, reply: MutateReply
) -> list[WriteResult | Failure]:
    """The result of each operation of `chunk`, in order. O(count).

    Successful operations have consecutive sequence numbers and CAS values, in their order in the
    batch.
    """
    failed = dict(reply.failures)
    counts = dict(reply.counters)
    operations = chunk.operations
    (run,) = reply.runs
    seq, cas = run.first_seq, run.first_cas
    results: list[WriteResult | Failure] = []
    for index in range(chunk.count):
        status = failed.get(index)
        if status is not None:
            operation = Operation(operations[index])
            results.append(Failure(partition, chunk.key(index), operation, status_of(status)))
            continue
        count = counts.get(index)
        results.append(WriteResult(partition, run.history_id, SeqNo(seq), Cas(cas), count))
        seq, cas = SeqNo(seq + 1), Cas(cas + 1)
    return results


def single_result(partition: PartitionId, chunk: Chunk, reply: MutateReply) -> WriteResult:
    """The result of the only operation of `chunk`.

    Raises:
        ServerError: It failed; the status says why.
    """
    (result,) = results_of(partition, chunk, reply)
    if isinstance(result, Failure):
        raise result.error()
    return result
