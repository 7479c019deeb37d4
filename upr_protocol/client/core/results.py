"""What became of each operation of a batch."""

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
        history_id: The history in which the number holds.
        seq: The number that the change has there.
        cas: The item's version since.
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
        operation: What was to be done.
        status: Why it was not.
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
    """The change was made, and was not as durable as was asked when the server's time for that was
    over: it stays, unless a failover comes before it is.

    To find out, wait for `written` with `await_durable`. A publisher sends the batch again under
    its token, which has no second effect, for as long as its patience lasts.

    Attributes:
        written: The change; None when the server did not tell its number.
    """

    def __init__(self, written: WriteResult | None = None) -> None:
        super().__init__(Status.NOT_DURABLE_YET)
        self.written = written


def status_of(code: int) -> Status:
    """The status that `code` stands for; what this side does not know is `INTERNAL`."""
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
    """Every operation of `chunk`, which was refused whole. O(count)."""
    return [
        Failure(partition, key, Operation(operation), status)
        for key, operation in zip(chunk.keys(), chunk.operations, strict=True)
    ]


def outcomes(
    partition: PartitionId, chunk: Chunk, reply: MutateReply
) -> list[WriteResult | Failure]:
    """What became of each operation of `chunk`, in order. O(count).

    Those that succeeded have consecutive numbers and CAS values, in their order in the batch.
    """
    failed = dict(reply.failures)
    counts = dict(reply.counters)
    operations = chunk.operations
    seq, cas = reply.first_seq, reply.first_cas
    found: list[WriteResult | Failure] = []
    for index in range(chunk.count):
        status = failed.get(index)
        if status is not None:
            key = chunk.key(index)
            found.append(Failure(partition, key, Operation(operations[index]), status_of(status)))
            continue
        found.append(
            WriteResult(partition, reply.history_id, SeqNo(seq), Cas(cas), counts.get(index))
        )
        seq, cas = SeqNo(seq + 1), Cas(cas + 1)
    return found


def only_outcome(partition: PartitionId, chunk: Chunk, reply: MutateReply) -> WriteResult:
    """What became of the one operation of `chunk`.

    Raises:
        ServerError: It failed; the status says why.
    """
    (outcome,) = outcomes(partition, chunk, reply)
    if isinstance(outcome, Failure):
        raise outcome.error()
    return outcome
