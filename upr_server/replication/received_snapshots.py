"""What a replica has received of one partition, on its way to disk. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from upr_protocol.chunk import Chunk
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import Cas, HistoryId, PartitionState, SeqNo
from upr_server.storage.records import INDEXED_SEQ_MAX, PartialRecord, PartitionRecord

PublisherAnswer = tuple[bytes, int, SeqNo, bytes]
"""An answer to a publisher: writer, batch, the partition's high number then, the answer."""

RECEIVED_SEQ_MAX: Final = INDEXED_SEQ_MAX // 2
"""The highest sequence number that a replica takes. It may become active, and the key index must
have room for what it accepts then: otherwise it could neither write nor delete what expires."""

RECEIVED_CAS_MAX: Final = (1 << 63) - 1
"""The same for the CAS, which has 64 bits. Nanoseconds since 1970 come to this in the year 2262."""

ANSWER_OVERHEAD_BYTES: Final = 240
"""What a received answer takes in memory beside its own bytes, about."""


class ReceivedWrite(msgspec.Struct, frozen=True):
    """What goes to disk in one commit.

    Attributes:
        record: What is true of the partition afterwards.
        chunks: The mutations that lead there.
        ends: Where snapshots end in them.
        answers: Answers to publishers, of the snapshots that are complete.
        purge_seq: Tombstones at or below it may never have come.
        is_continuation: Whether the disk has the front of the first snapshot.
    """

    record: PartitionRecord
    chunks: Sequence[Chunk]
    ends: Sequence[SeqNo]
    answers: Sequence[PublisherAnswer]
    purge_seq: SeqNo
    is_continuation: bool


class ReceivedSnapshots:
    """Follows one partition's stream, and gives what came of it to the disk.

    Args:
        log: The failover log, as it is on disk.
        high: The last complete snapshot's end on disk.
        last_cas: The highest CAS up to there.
        partial: The snapshot of which the disk has the front.
        is_incomplete: Whether the disk may lack changes that this node once acknowledged.

    Attributes:
        log: The source's failover log, as it told last.
        high: The last complete snapshot's end received.
        received_seq: Everything up to here was received.
        last_cas: The highest CAS received.
        nbytes: Bytes of chunks that are to be put on disk, and of answers to publishers with them.
        has_unwritten: Whether anything is to be put on disk.
        written_record: What is true of the partition without what is to be put on disk.
    """

    def __init__(
        self,
        log: FailoverLog,
        high: SeqNo,
        last_cas: Cas,
        partial: PartialRecord | None = None,
        *,
        is_incomplete: bool = False,
    ) -> None:
        self.log = log
        self.high = high
        self.received_seq = high if partial is None else partial.received_seq
        self.last_cas = last_cas
        self.nbytes = 0
        self.has_unwritten = False
        self._partial = partial
        self._is_incomplete = is_incomplete
        # From here on the copy is complete; None while that is not known.
        self._complete_from: SeqNo | None = None
        self._history_id = HistoryId(0)
        self._snapshot_end = SeqNo(0)
        self._purge_seq = SeqNo(0)
        self._chunks: list[Chunk] = []
        self._ends: list[SeqNo] = []
        self._answers: list[PublisherAnswer] = []
        self._answers_of_snapshot: list[PublisherAnswer] = []
        self._answer_bytes_of_snapshot = 0
        self.written_record = self.record()

    @classmethod
    def from_record(cls, record: PartitionRecord) -> ReceivedSnapshots:
        """What is on disk, and no more."""
        failover_log = FailoverLog.of_pairs(record.failover_log)
        return cls(
            failover_log,
            record.high,
            Cas(record.last_cas),
            record.partial,
            is_incomplete=record.is_incomplete,
        )

    @property
    def position(self) -> Position:
        """From where the stream goes on: before a last chunk that waits for its snapshot's end, as
        the answers to publishers come between the two."""
        partial = self._partial
        if self._ends_with_last_chunk:
            partial = self._partial_through(self._chunks[-1].start)
        if partial is None:
            return Position(self.log, self.high, self.high, None)
        snapshot = PartialSnapshot(partial.history_id, partial.start, partial.end)
        return Position(self.log, self.high, SeqNo(partial.received_seq), snapshot)

    @property
    def _ends_with_last_chunk(self) -> bool:
        """Whether all chunks of a snapshot came, but not its end; the last one is in memory."""
        is_whole = self._partial is not None and self.received_seq == self._snapshot_end
        return is_whole and bool(self._chunks)

    def _partial_through(self, seq: SeqNo) -> PartialRecord | None:
        """The snapshot under way, of which everything up to `seq` is there; None if that is
        nothing."""
        assert self._partial is not None
        if seq <= self.high:
            return None
        return msgspec.structs.replace(self._partial, received_seq=seq)

    # From the stream.

    def set_log(self, log: FailoverLog) -> None:
        """The source has told its failover log."""
        if log != self.log:
            self.log = log
            self.has_unwritten = True

    def begin_snapshot(self, history_id: HistoryId, end: SeqNo, purge_seq: SeqNo) -> None:
        """A snapshot begins, or goes on."""
        self._history_id = history_id
        self._snapshot_end = end
        if not self.high:
            # Deletions up to there may be missing. That stays so if the stream is cut, and another
            # node sends the rest, which has forgotten less; so the disk hears of it with the front.
            # A replica that has a complete snapshot receives every deletion from there on.
            self._purge_seq = max(self._purge_seq, purge_seq)

    def add_chunk(self, chunk: Chunk) -> None:
        """A part of the snapshot came.

        Raises:
            RemoteProtocolError: It does not follow what was received, or cannot be stored.
        """
        if chunk.start != self.received_seq:
            raise RemoteProtocolError(
                f"the chunk ({chunk.start}, {chunk.end}] does not follow {self.received_seq}"
            )
        if chunk.end > RECEIVED_SEQ_MAX:
            raise RemoteProtocolError(
                f"the chunk ({chunk.start}, {chunk.end}] ends above {RECEIVED_SEQ_MAX}, the "
                "highest sequence number that a replica takes"
            )
        if chunk.count and chunk.cas[-1] > RECEIVED_CAS_MAX:
            raise RemoteProtocolError(
                f"the chunk ({chunk.start}, {chunk.end}] has the CAS {chunk.cas[-1]}, above "
                f"{RECEIVED_CAS_MAX}, the highest that a replica takes"
            )
        self._chunks.append(chunk)
        self.nbytes += chunk.nbytes
        self.received_seq = chunk.end
        if chunk.count:
            self.last_cas = max(self.last_cas, Cas(chunk.cas[-1]))
        self._partial = PartialRecord(self._history_id, self.high, self._snapshot_end, chunk.end)
        self.has_unwritten = True

    def add_answers(self, rows: Sequence[PublisherAnswer]) -> None:
        """Answers to batches of the snapshot under way, or of the next, came. They count once it is
        complete."""
        self._answers_of_snapshot += rows
        self._answer_bytes_of_snapshot += sum(ANSWER_OVERHEAD_BYTES + len(row[3]) for row in rows)

    def begin_stream(self) -> None:
        """The stream begins again at `position`, and sends the answers of the snapshot under way
        again. It may be another history's, in which those batches never were."""
        self._complete_from = None
        self._answers_of_snapshot = []
        self._answer_bytes_of_snapshot = 0
        if self._ends_with_last_chunk:
            # The chunk comes again, with the answers and the end.
            last_chunk = self._chunks.pop()
            self.nbytes -= last_chunk.nbytes
            self._partial = self._partial_through(last_chunk.start)
            self.received_seq = last_chunk.start

    def note_active_seq(self, seq: SeqNo) -> None:
        """The active node had everything up to `seq` in the stream's history, when this node
        acknowledged nothing more to others: with that the copy lacks nothing that this node
        acknowledged before."""
        self._complete_from = seq
        if self._is_incomplete and not self._lacks_changes:
            self.has_unwritten = True

    @property
    def _lacks_changes(self) -> bool:
        if not self._is_incomplete:
            return False
        return self._complete_from is None or self.high < self._complete_from

    def end_snapshot(self, end: SeqNo) -> None:
        """The snapshot is complete.

        Raises:
            RemoteProtocolError: What was received does not end there.
        """
        if end != self.received_seq:
            raise RemoteProtocolError(
                f"a snapshot ends at {end}, but {self.received_seq} was received last"
            )
        self.high = end
        self._partial = None
        self._ends.append(end)
        self._answers += self._answers_of_snapshot
        self.nbytes += self._answer_bytes_of_snapshot
        self._answers_of_snapshot = []
        self._answer_bytes_of_snapshot = 0
        self.has_unwritten = True

    def truncate(self, seq: SeqNo, *, is_incomplete: bool = False) -> None:
        """Everything above `seq` is undone, here and on disk, with what waits for its snapshot's
        end. `is_incomplete` says whether that is to come again."""
        self._is_incomplete = self._is_incomplete or is_incomplete
        self._chunks, self._ends, self._answers = [], [], []
        self.nbytes = 0
        self.log = self.log.up_to(seq)
        self.high = self.received_seq = seq
        self._partial = None
        self._complete_from = None
        self._answers_of_snapshot = []
        self._answer_bytes_of_snapshot = 0
        self._purge_seq = SeqNo(0)
        self.has_unwritten = False
        self.written_record = self.record()

    # To the disk.

    def record(self, state: PartitionState = PartitionState.REPLICA) -> PartitionRecord:
        """What is true of the partition once all of it is on disk."""
        pairs = tuple(self.log.pairs())
        return PartitionRecord(
            state, pairs, self.high, self.last_cas, self._partial, self._lacks_changes
        )

    def take_write(self) -> ReceivedWrite:
        """What is to be put on disk. The caller puts it there, or starts again `from_record`."""
        record = self.record()
        chunks, held_chunks = self._chunks, list[Chunk]()
        if self._ends_with_last_chunk:
            # The disk notes a snapshot's end with its last chunk, so that one waits for
            # `PartitionEnd`, which comes at once. The record describes what lies before it.
            held_chunks = [chunks.pop()]
            partial = self._partial_through(held_chunks[0].start)
            record = msgspec.structs.replace(record, partial=partial)
        is_continuation = self.written_record.partial is not None
        write = ReceivedWrite(
            record, chunks, self._ends, self._answers, self._purge_seq, is_continuation
        )
        self._chunks, self._ends, self._answers = held_chunks, [], []
        self._purge_seq = SeqNo(0)
        self.nbytes = sum(chunk.nbytes for chunk in held_chunks)
        self.has_unwritten = bool(held_chunks)
        self._is_incomplete = record.is_incomplete
        self.written_record = record
        return write
