"""What a replica has received of one partition, on its way to disk. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import Cas, HistoryId, PartitionState, SeqNo
from upr_server.storage.records import PartialRecord, PartitionRecord

Answer = tuple[bytes, int, SeqNo, bytes]
"""An answer to a publisher: writer, batch, the partition's high number then, the answer."""


class Arrived(msgspec.Struct, frozen=True):
    """What is to be put on disk in one commit.

    Attributes:
        record: What is true of the partition afterwards.
        chunks: What leads there.
        ends: Where snapshots end in them.
        answers: Answers to publishers of the snapshots that are complete.
        purge_seq: Tombstones at or below it may never have come.
    """

    record: PartitionRecord
    chunks: Sequence[Chunk]
    ends: Sequence[SeqNo]
    answers: Sequence[Answer]
    purge_seq: SeqNo


class Incoming:
    """Follows one partition's stream.

    Args:
        log: The failover log, as it is on disk.
        high: The last complete snapshot's end on disk.
        last_cas: The highest CAS up to there.
        partial: The snapshot of which the disk has the front.

    Attributes:
        log: The master's failover log, as it said last.
        high: The last complete snapshot's end received.
        received: Everything up to here was received.
        last_cas: The highest CAS received.
        nbytes: Bytes of chunks that are to be put on disk.
    """

    def __init__(
        self,
        log: FailoverLog,
        high: SeqNo,
        last_cas: Cas,
        partial: PartialRecord | None = None,
    ) -> None:
        self.log = log
        self.high = high
        self.received = high if partial is None else partial.received
        self.last_cas = last_cas
        self.nbytes = 0
        self._partial = partial
        self._history_id = HistoryId(0)
        self._end = SeqNo(0)
        self._purge_seq = self._purge_of_snapshot = SeqNo(0)
        self._chunks: list[Chunk] = []
        self._ends: list[SeqNo] = []
        self._answers: list[Answer] = []
        self._answers_of_snapshot: list[Answer] = []
        self._is_news = False

    @classmethod
    def of(cls, record: PartitionRecord) -> Incoming:
        """Of what is on disk."""
        failover_log = FailoverLog.of(record.failover_log)
        return cls(failover_log, record.high, Cas(record.last_cas), record.partial)

    @property
    def position(self) -> Position:
        """From where the stream goes on."""
        partial = self._partial
        if partial is None:
            return Position(self.log, self.high, self.high, None)
        snapshot = PartialSnapshot(partial.history_id, partial.start, partial.end)
        return Position(self.log, self.high, self.received, snapshot)

    @property
    def has_news(self) -> bool:
        """Whether there is anything that the disk does not have."""
        return self._is_news

    # What comes.

    def accepted(self, log: FailoverLog) -> None:
        """The master has told its log."""
        if log != self.log:
            self.log = log
            self._is_news = True

    def begin(self, history_id: HistoryId, end: SeqNo, purge_seq: SeqNo) -> None:
        """A snapshot begins, or goes on."""
        self._history_id = history_id
        self._end = end
        # Who has a complete snapshot has seen every deletion up to there.
        self._purge_of_snapshot = SeqNo(0) if self.high else purge_seq

    def add(self, chunk: Chunk) -> None:
        """Some of it came."""
        if chunk.start != self.received:
            raise RemoteProtocolError(f"{chunk!r} does not follow {self.received}")
        self._chunks.append(chunk)
        self.nbytes += chunk.nbytes
        self.received = chunk.end
        if chunk.count:
            self.last_cas = max(self.last_cas, Cas(chunk.cas[-1]))
        self._partial = PartialRecord(self._history_id, self.high, self._end, chunk.end)
        self._is_news = True

    def add_answers(self, rows: Sequence[Answer]) -> None:
        """Answers to batches of the snapshot came."""
        self._answers_of_snapshot += rows

    def finish(self, end: SeqNo) -> None:
        """The snapshot is complete."""
        if end != self.received:
            raise RemoteProtocolError(
                f"a snapshot ends at {end}, where {self.received} was received"
            )
        self.high = end
        self._partial = None
        self._ends.append(end)
        self._answers += self._answers_of_snapshot
        self._answers_of_snapshot = []
        self._purge_seq = max(self._purge_seq, self._purge_of_snapshot)
        self._is_news = True

    def cut(self, to: SeqNo) -> None:
        """Everything above `to` is undone, here and on disk; with it what waits for its end."""
        self._chunks, self._ends, self._answers = [], [], []
        self.nbytes = 0
        self.log = self.log.until(to)
        self.high = self.received = to
        self._partial = None
        self._answers_of_snapshot = []
        self._purge_seq = self._purge_of_snapshot = SeqNo(0)
        self._is_news = False

    # Where it goes.

    def record(self, state: PartitionState = PartitionState.REPLICA) -> PartitionRecord:
        """What is known of the partition once all of it is on disk."""
        pairs = tuple(self.log.pairs())
        return PartitionRecord(state, pairs, self.high, self.last_cas, self._partial)

    def take(self) -> Arrived:
        """What is to be put on disk. The last chunk of a snapshot waits for its end, which comes at
        once: where a snapshot ends is noted with the chunk."""
        record = self.record()
        chunks, held = self._chunks, list[Chunk]()
        if record.partial is not None and self.received == self._end and chunks:
            held = [chunks.pop()]
            before = held[0].start
            partial = None
            if before > self.high:
                partial = msgspec.structs.replace(record.partial, received=before)
            record = msgspec.structs.replace(record, partial=partial)
        arrived = Arrived(record, chunks, self._ends, self._answers, self._purge_seq)
        self._chunks, self._ends, self._answers = held, [], []
        self._purge_seq = SeqNo(0)
        self.nbytes = sum(chunk.nbytes for chunk in held)
        self._is_news = bool(held)
        return arrived
