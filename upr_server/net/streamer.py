"""The streams of one connection, read in the order of the partition cycle."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import Final

import attrs

from upr_protocol.chunk import Chunk
from upr_protocol.errors import Status
from upr_protocol.failover import Start
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.session import ServerSession, SessionState
from upr_protocol.session.states import StreamState
from upr_protocol.wire import (
    PartitionAnswers,
    PartitionEnd,
    PartitionStart,
    Stream,
    StreamEnd,
    StreamReply,
)
from upr_server.engine import CursorItem, Partition, SnapshotEndItem, SnapshotStartItem
from upr_server.net.stream_start import StreamRefusal, stream_start
from upr_server.storage.online.backfill import WAIT_FOR_DISK, ReaderWait, StreamBrokenError
from upr_server.storage.online.bucket_disk import BucketDisk
from upr_server.storage.online.leased_reader import LeasedReader
from upr_server.storage.online.partition_reader import PartitionReader
from upr_server.storage.online.unsaved_answers import STEP_ANSWERS

BATCH_BYTES: Final = 1024 * 1024
"""How much is handed to the socket at a time: large enough that the cost of each call is small,
small enough that answers to requests do not wait behind it."""

DISK_BATCH_BYTES: Final = 256 * 1024
"""`BATCH_BYTES` for chunks that were read from disk. Each connection has its own copy of them, so
this bounds the memory of a connection."""

ANSWERS_BYTES: Final = 256 * 1024
"""Bytes of answers to publishers in a message, about. A replica reads it in one step, and a MiB of
answers to increments costs it 10 ms."""

ITEM_BYTES: Final = 8 * 1024
"""What it costs to put an item into the session, as bytes beside its own: 20 µs and more, as a
snapshot is closed and encoded for its first reader. A consumer of 1,024 partitions, all of which
had a change, took 54 ms in one step."""

_REASON_MAX: Final = 900
"""Characters of the reason in a `StreamReply`: in any script they fit its frame."""

# An enum's attributes are slow to look up.
_STREAMING: Final = SessionState.STREAMING
_BETWEEN: Final = StreamState.BETWEEN

STEP_STREAMS: Final = 64
"""Streams that one step ends: at 14 µs each, 1 ms."""

ANSWER_OVERHEAD_BYTES: Final = 36
"""What a publisher's answer takes in a frame beside its own bytes."""

ANSWER_COST_BYTES: Final = BATCH_BYTES // STEP_ANSWERS
"""What it costs to put a publisher's answer into the session, as bytes beside its own: 1 µs. A
replica that begins gets up to 65,536 of a partition, which took 80 ms in one step."""


@attrs.define(eq=False)
class _UnsentEnd:
    """The end of a snapshot, before which a replica gets what publishers were answered.

    Attributes:
        answers: Some of those answers. More of them are taken when these were sent.
        end: Where the snapshot ends.
        snapshot: The whole snapshot where it is sent in one frame; None where only its end is.
        sent_count: How many of `answers` were sent.
    """

    answers: list[tuple[bytes, int, SeqNo, bytes]]
    end: SeqNo
    snapshot: Chunk | None
    sent_count: int = 0


@attrs.define(eq=False)
class _Stream:
    disk: BucketDisk
    partition: Partition
    reader: PartitionReader | LeasedReader
    opaque: int
    end_seq: SeqNo
    key_prefix: bytes = b""
    answers_from: SeqNo | None = None
    """From which number on answers to publishers are to be sent; None for none."""
    lacks_earlier_answers: bool = False
    """Whether those are to be sent, too, that a rollback may have taken from the replica."""
    unsent_end: _UnsentEnd | None = None
    """The snapshot's end that waits until all answers before it were sent."""
    snapshot_end: SeqNo = SeqNo(0)
    turn_end: SeqNo = SeqNo(0)
    """What its turn in the partition cycle must reach."""
    last_start: tuple[HistoryId, SeqNo] | None = None
    """The history and the purge number that its last `PartitionStart` named."""

    @property
    def only_end_is_missing(self) -> bool:
        """Whether all of the snapshot that has begun was sent."""
        return self.reader.is_reading and self.reader.seq == self.snapshot_end


def streams_in_steps(streams: Iterator[None]) -> Iterator[None]:
    """Ends `STEP_STREAMS` of the streams that `streams` ends one by one in each step; others may
    have their turn between the steps."""
    for count, _ in enumerate(streams, 1):
        if count % STEP_STREAMS == 0:
            yield


class Streamer:
    """Reads the partitions that one connection streams into its session.

    Args:
        session: The connection's session.
        name: The consumer's name, for statistics.
        wake: Called when a partition that had nothing to send has something again.

    Attributes:
        disk_streams: Streams of which something that was read from disk is being sent: then
            `note_sent` is to be called once it was.
        replica_end: The last snapshot that the last step has ended and a replica will report: its
            partition and end; None if there is none.
    """

    __slots__ = (
        "_current_stream",
        "_is_closed",
        "_item_bytes",
        "_left_out_bytes",
        "_name",
        "_session",
        "_streams",
        "_wake",
        "disk_streams",
        "replica_end",
    )

    def __init__(self, session: ServerSession, name: str, wake: Callable[[], None]) -> None:
        self._session = session
        self._name = name
        self._wake = wake
        self._streams: dict[PartitionId, _Stream] = {}
        self.disk_streams: dict[_Stream, None] = {}
        self.replica_end: tuple[PartitionId, SeqNo] | None = None
        self._is_closed = False
        self._current_stream: _Stream | None = None
        """The stream whose snapshot is being sent."""
        self._item_bytes = 0
        """What the items of this step have cost beside their bytes."""
        self._left_out_bytes = 0
        """What the rows would have taken, in this step, that no stream asks for."""

    def open(
        self, disk: BucketDisk, partition: Partition, request: Stream, map_revision: int
    ) -> None:
        """Answers `request` for `partition`: opens a stream, or says why not. Does nothing when the
        session has ended while the request waited."""
        if self._session.state is SessionState.CLOSED:
            return
        decision = stream_start(disk, partition, request)
        if isinstance(decision, StreamRefusal):
            status, reason = decision.status, decision.reason
        else:
            status, reason = Status.OK, decision.reason.value
        self._session.send(
            StreamReply(
                decision.seq,
                reason[:_REASON_MAX],
                partition.failover_log,
                map_revision,
                partition=partition.id,
                opaque=request.opaque,
                status=status,
            )
        )
        if isinstance(decision, StreamRefusal):
            return
        # A client whose connection broke inside a snapshot is consistent only at that snapshot's
        # end, whatever number it has: it may lack older values of keys that changed again later in
        # the snapshot.
        if max(request.end_seq, decision.end_at_least) <= decision.seq:
            self._session.send(
                StreamEnd(partition=partition.id, opaque=request.opaque, status=Status.END_REACHED)
            )
            return
        reader = self._reader(disk, partition, request, decision)
        stream = _Stream(
            disk, partition, reader, request.opaque, request.end_seq, request.key_prefix
        )
        if request.with_answers:
            # Answers count from a snapshot's end on. If the connection broke inside a snapshot, the
            # replica may have got some of its answers, but has taken in none.
            stream.answers_from = request.position.last_complete
            stream.lacks_earlier_answers = stream.answers_from > 0
        self._streams[partition.id] = stream
        if reader.poll():
            self._session.mark_ready(partition.id)

    def _reader(
        self, disk: BucketDisk, partition: Partition, request: Stream, decision: Start
    ) -> PartitionReader | LeasedReader:
        if request.lease_id:
            return LeasedReader(
                disk, partition, decision.seq, request.end_seq, request.lease_id, self._wake
            )

        def on_ready() -> None:
            self._session.mark_ready(partition.id)
            self._wake()

        return PartitionReader(
            disk,
            partition,
            self._name,
            decision.seq,
            end_at_least=decision.end_at_least,
            stream_end=request.end_seq,
            on_ready=on_ready,
            on_disk=self._wake,
        )

    def feeds_replica(self, partition: PartitionId) -> bool:
        """Whether the stream of a partition is that of a replica."""
        stream = self._streams.get(partition)
        return stream is not None and stream.answers_from is not None

    def end_stream(self, partition: PartitionId, status: Status) -> None:
        """Ends the stream of a partition and says why, if there is one."""
        stream = self._streams.pop(partition, None)
        if stream is not None:
            stream.reader.close()
            if self._current_stream is stream:
                self._current_stream = None
            if self._session.state is not SessionState.CLOSED:
                self._session.send(
                    StreamEnd(partition=partition, opaque=stream.opaque, status=status)
                )

    def end_each(
        self,
        status: Status,
        partitions: Container[PartitionId] | None = None,
        *,
        of_consumers: bool = True,
        of_replicas: bool = True,
    ) -> Iterator[None]:
        """Ends the streams of consumers, those of replicas, or both, and says why. Yields after
        each stream: give it to `streams_in_steps`.

        Args:
            status: Why.
            partitions: The partitions whose streams end; None for all.
            of_consumers: Whether those of consumers end.
            of_replicas: Whether those of replicas end.
        """
        for partition in list(self._streams):
            if (partitions is None or partition in partitions) and (
                of_replicas if self.feeds_replica(partition) else of_consumers
            ):
                self.end_stream(partition, status)
            yield

    def close(self) -> Iterator[None]:
        """Closes every reader; the connection is over, and `step` does nothing any more. Yields
        after each stream: give it to `streams_in_steps`. If that is given up, call it again."""
        self._is_closed = True
        self._current_stream = None
        while self._streams:
            _, stream = self._streams.popitem()
            stream.reader.close()
            yield

    def step(self) -> int:
        """Puts about `BATCH_BYTES` of what there is to stream into the session, as far as the
        consumer's window allows. Rows that are left out count like those that are sent, and each
        item counts as `ITEM_BYTES` more.

        With the window shut, what was sent whole is still ended and barriers come back; but no
        snapshot is begun, so that what arrives meanwhile is deduplicated.

        Returns:
            The bytes of the rows that were left out; and where the step ends before all was sent,
            what the items cost beside their bytes.
        """
        self.replica_end = None
        if self._is_closed:
            return 0
        self._item_bytes = self._left_out_bytes = 0
        self._fill()
        cost = self._left_out_bytes + self._item_bytes
        is_cut = self._session.outgoing_bytes + cost >= BATCH_BYTES
        return cost if is_cut else self._left_out_bytes

    def _fill(self) -> None:
        session = self._session
        while (
            session.state is _STREAMING
            and session.outgoing_bytes + self._left_out_bytes + self._item_bytes < BATCH_BYTES
        ):
            stream = self._current_stream
            if stream is None:
                partition = session.next_partition()
                if partition is None:
                    return
                stream = self._current_stream = self._streams[partition]
                # Fixed here: a partition that is written without pause must not keep the turn.
                stream.turn_end = SeqNo(stream.partition.rows.high)
            if stream.unsent_end is not None:
                self._send_answers(stream, stream.unsent_end)
                continue
            is_open = session.window.remaining_bytes > 0
            self._item_bytes += ITEM_BYTES
            if is_open and not stream.reader.is_reading and self._send_whole(stream):
                continue
            if not is_open and not stream.only_end_is_missing:
                # This partition keeps its turn, so that the cycle continues in order.
                return
            if not self._advance(stream):
                return
            nbytes = session.outgoing_bytes + self._left_out_bytes
            if stream.reader.reads_disk and nbytes >= DISK_BATCH_BYTES:
                return

    def note_sent(self) -> None:
        """Everything that was put into the session so far has left this process."""
        for stream in self.disk_streams:
            stream.reader.note_sent()
        self.disk_streams.clear()

    def _send_whole(self, stream: _Stream) -> bool:
        """Puts the next snapshot into the session in one frame, where it is one chunk in memory;
        returns whether it did. The window is open."""
        session, partition = self._session, stream.partition
        if (
            # One frame for the whole snapshot has neither of the two: the client takes them from
            # the stream's last `PartitionStart`.
            stream.last_start != (partition.failover_log.current, partition.purge_seq)
            # What replaces an interrupted snapshot has a start of its own.
            or session.streams[partition.id].state is not _BETWEEN
        ):
            return False
        chunk = stream.reader.next_whole_snapshot()
        if chunk is None:
            return False
        self._end_snapshot(stream, chunk.end, chunk)
        return True

    def _advance(self, stream: _Stream) -> bool:
        """Puts the next item into the session; False when it has yet to be read from disk."""
        try:
            item = stream.reader.next()
        except StreamBrokenError as error:
            self.end_stream(stream.partition.id, error.status)
            return True
        return self._put(stream, item)

    def _put(self, stream: _Stream, item: CursorItem | ReaderWait | None) -> bool:
        session, partition = self._session, stream.partition
        if stream.reader.reads_disk:
            # The disk reads on when the item has been sent, not now. Otherwise a consumer that does
            # not read would have its whole backfill in memory.
            self.disk_streams[stream] = None
        if isinstance(item, Chunk):
            session.send_chunk(partition.id, self._select(stream, item))
        elif isinstance(item, SnapshotStartItem):
            self._begin(stream, item)
        elif isinstance(item, SnapshotEndItem):
            self._end_snapshot(stream, item.end, None)
        elif item is WAIT_FOR_DISK:
            # The stream keeps its turn: a cycle that left it out would return barriers too early.
            return False
        else:
            self._end_turn(stream)
        return True

    def _select(self, stream: _Stream, chunk: Chunk) -> Chunk:
        """The rows of a chunk that the stream asks for. There may be none: the chunk says how far
        the stream is all the same."""
        if not stream.key_prefix:
            return chunk
        selected = chunk.with_prefix(stream.key_prefix)
        left_out_bytes = chunk.nbytes - selected.nbytes
        self._left_out_bytes += left_out_bytes
        stream.disk.rows_left_out += chunk.count - selected.count
        stream.disk.bytes_left_out += left_out_bytes
        return selected

    def _begin(self, stream: _Stream, start: SnapshotStartItem) -> None:
        partition = stream.partition
        stream.snapshot_end = start.end
        history_id, purge_seq = partition.failover_log.current, partition.purge_seq
        stream.last_start = history_id, purge_seq
        self._session.send(
            PartitionStart(
                history_id,
                start.start,
                start.end,
                purge_seq,
                start.kind,
                start.may_repeat,
                partition=partition.id,
                opaque=stream.opaque,
            )
        )

    def _note_ended(self, stream: _Stream, end: SeqNo) -> None:
        if end >= stream.end_seq:
            self.end_stream(stream.partition.id, Status.END_REACHED)
        elif end >= stream.turn_end:
            # Other cursors may have closed several snapshots: the turn ends after the newest.
            self._end_turn(stream)

    def _end_snapshot(self, stream: _Stream, end: SeqNo, snapshot: Chunk | None) -> None:
        """Sends a snapshot's end, or `snapshot` as a whole. A replica gets what publishers were
        answered before it, so that it has the answers as soon as the snapshot counts."""
        if stream.answers_from is not None:
            batches = stream.partition.repeated_batches
            answers = batches.too_old_answers(stream.answers_from, end)
            if stream.lacks_earlier_answers:
                answers = batches.earlier_answers(stream.answers_from) + answers
                stream.lacks_earlier_answers = False
            answers += batches.answers_between(stream.answers_from, end, STEP_ANSWERS)
            stream.answers_from = end
            if answers:
                stream.unsent_end = _UnsentEnd(answers, end, snapshot)
                self._send_answers(stream, stream.unsent_end)
                return
        self._send_end(stream, end, snapshot)

    def _send_answers(self, stream: _Stream, unsent_end: _UnsentEnd) -> None:
        """Sends `STEP_ANSWERS` of the answers at most, and behind the last one the end."""
        first, nbytes = unsent_end.sent_count, 0
        step_end = min(first + STEP_ANSWERS, len(unsent_end.answers))
        while unsent_end.sent_count < step_end and nbytes < ANSWERS_BYTES:
            nbytes += len(unsent_end.answers[unsent_end.sent_count][3]) + ANSWER_OVERHEAD_BYTES
            unsent_end.sent_count += 1
        rows = tuple(unsent_end.answers[first : unsent_end.sent_count])
        self._item_bytes += ANSWER_COST_BYTES * len(rows)
        self._session.send(
            PartitionAnswers(rows, partition=stream.partition.id, opaque=stream.opaque)
        )
        if unsent_end.sent_count == len(unsent_end.answers):
            self._take_answers(stream, unsent_end)

    def _take_answers(self, stream: _Stream, unsent_end: _UnsentEnd) -> None:
        """Takes the next answers before a snapshot's end, or sends the end if there are none."""
        batches, last_seq = stream.partition.repeated_batches, unsent_end.answers[-1][2]
        unsent_end.sent_count = 0
        unsent_end.answers = (
            []
            if len(unsent_end.answers) < STEP_ANSWERS
            else batches.answers_between(last_seq, unsent_end.end, STEP_ANSWERS, with_start=False)
        )
        if not unsent_end.answers:
            stream.unsent_end = None
            self._send_end(stream, unsent_end.end, unsent_end.snapshot)

    def _send_end(self, stream: _Stream, end: SeqNo, snapshot: Chunk | None) -> None:
        partition_id = stream.partition.id
        if stream.answers_from is not None:
            self.replica_end = partition_id, end
        if snapshot is None:
            self._session.send(PartitionEnd(end, partition=partition_id, opaque=stream.opaque))
        else:
            self._session.send_snapshot(partition_id, self._select(stream, snapshot))
        self._note_ended(stream, end)

    def _end_turn(self, stream: _Stream) -> None:
        self._current_stream = None
        self._session.end_turn()
        # After the turn's end: a partition that has more comes again in the next cycle, behind the
        # others, and the barriers of this cycle do not wait for it.
        if stream.reader.poll():
            self._session.mark_ready(stream.partition.id)
