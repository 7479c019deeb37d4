"""The results of the operations in a batch."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.client.core.retry import WRONG_NODE
from upr_protocol.errors import RemoteProtocolError, ServerError, Status, quoted_key
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import Message, MutateReply, Refusal


class WriteResult(msgspec.Struct, frozen=True):
    """One operation that succeeded.

    Attributes:
        history_id: The history that the sequence number belongs to.
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
        status: Why the server did not carry it out.
        sentence: Why it refused the whole batch, in its words; empty where it said the status only.
    """

    partition: PartitionId
    key: bytes
    operation: Operation
    status: Status
    sentence: str = ""

    def __str__(self) -> str:
        return str(self.error())

    def error(self) -> ServerError:
        """The failure as an exception."""
        reason = self.sentence or self.status.name.replace("_", " ").lower()
        operation = self.operation.name.lower()
        return ServerError(self.status, f"{operation} of {quoted_key(self.key)}: {reason}")


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


STATUS_OK: Final = Status.OK
"""An enum's attributes are slow to look up."""

_PARTITION: Final = itemgetter(0)
_STATUS: Final = itemgetter(1)

_STATUSES: Final = {status.value: status for status in Status}


class PartitionBatchResult(msgspec.Struct, frozen=True):
    """What became of a batch that a server applied.

    The operations that succeeded have consecutive sequence numbers and CAS values, in the order of
    the batch; those that failed have none.

    Attributes:
        history_id: The history that the sequence numbers belong to.
        first_seq: The first sequence number given; 0 when every operation failed.
        last_seq: The last sequence number given; 0 when every operation failed.
        failures: (index in the batch, status) of each operation that failed, by index.
        counters: (index in the batch, new value) of each increment and decrement that succeeded.
    """

    history_id: HistoryId
    first_seq: SeqNo
    last_seq: SeqNo
    first_cas: Cas
    failures: tuple[tuple[int, int], ...] = ()
    counters: tuple[tuple[int, int], ...] = ()

    def results(self, partition: PartitionId, count: int) -> Iterator[WriteResult | Status]:
        """The result of each of the `count` operations, in order; of one that failed, why."""
        failed_statuses, counts = dict(self.failures), dict(self.counters)
        seq, cas = self.first_seq, self.first_cas
        for index in range(count):
            if index in failed_statuses:
                yield status_of(failed_statuses[index])
            else:
                yield WriteResult(partition, self.history_id, seq, cas, counts.get(index))
                seq, cas = SeqNo(seq + 1), Cas(cas + 1)


def split_reply(
    reply: MutateReply, partitions: Sequence[PartitionId], bounds: Sequence[int]
) -> list[tuple[Status, PartitionBatchResult]]:
    """The result of each run of a bundle: its status, and with `OK` or `NOT_DURABLE_YET` what
    became of it. Raises `RemoteProtocolError` if the answer does not fit the bundle. O(runs +
    failures + counters).

    Args:
        reply: The server's answer.
        partitions: The partition of each run.
        bounds: The row at which each run begins, and the row behind the last one's end; it is not
            looked at if the answer names no row.

    Raises:
        RemoteProtocolError: The answer does not fit the bundle.
    """
    runs = reply.runs
    if list(map(_PARTITION, runs)) != list(partitions):
        raise RemoteProtocolError("MutateReply does not name the partitions of the bundle")
    answers = [
        (
            status_of(status) if status else STATUS_OK,
            PartitionBatchResult(history_id, first_seq, last_seq, first_cas),
        )
        for _, status, history_id, first_seq, last_seq, first_cas in runs
    ]
    if not reply.failures and not reply.counters:
        return answers
    failures = _rows_by_run(reply.failures, bounds)
    counters = _rows_by_run(reply.counters, bounds)
    for index in failures.keys() | counters.keys():
        status, result = answers[index]
        result = msgspec.structs.replace(
            result,
            failures=tuple(failures.get(index, ())),
            counters=tuple(counters.get(index, ())),
        )
        answers[index] = status, result
    return answers


def _rows_by_run(
    rows: Iterable[tuple[int, int]], bounds: Sequence[int]
) -> dict[int, list[tuple[int, int]]]:
    """Rows of a bundle, each with what is said of it, by the run that they belong to and as rows of
    that run."""
    by_run = defaultdict[int, list[tuple[int, int]]](list)
    for row, value in rows:
        if row >= bounds[-1]:
            raise RemoteProtocolError(f"MutateReply names row {row} of {bounds[-1]}")
        run = bisect_right(bounds, row) - 1
        by_run[run].append((row - bounds[run], value))
    return by_run


def is_wrong_node(message: Message) -> bool:
    """Whether a node refused something that another node may be able to do."""
    if isinstance(message, MutateReply):
        return not WRONG_NODE.isdisjoint(map(_STATUS, message.runs))
    return isinstance(message, Refusal) and message.status in WRONG_NODE


def failed_operations(
    partition: PartitionId, chunk: Chunk, result: PartitionBatchResult
) -> list[Failure]:
    """The operations of `chunk` that failed, by index. O(failures)."""
    operations = chunk.operations
    return [
        Failure(partition, chunk.key(index), Operation(operations[index]), status_of(status))
        for index, status in result.failures
    ]


def failures_of_refused(
    partition: PartitionId, chunk: Chunk, status: Status, sentence: str = ""
) -> list[Failure]:
    """Every operation of `chunk`, which the server refused as a whole. O(count)."""
    return [
        Failure(partition, key, Operation(operation), status, sentence)
        for key, operation in zip(chunk.keys(), chunk.operations, strict=True)
    ]


def results_of(
    partition: PartitionId, chunk: Chunk, result: PartitionBatchResult
) -> list[WriteResult | Failure]:
    """The result of each operation of `chunk`, in order. O(count)."""
    return [
        outcome
        if isinstance(outcome, WriteResult)
        else Failure(partition, chunk.key(index), Operation(chunk.operations[index]), outcome)
        for index, outcome in enumerate(result.results(partition, chunk.count))
    ]
