"""What a replica has received, and when it writes which part to disk."""

from __future__ import annotations

import pytest

from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import RemoteProtocolError, Status
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import Cas, HistoryId, Operation, PartitionId, PartitionState, SeqNo
from upr_server.engine import Partition, PartitionImage, batch_of
from upr_server.replication.received_snapshots import (
    ANSWER_OVERHEAD_BYTES,
    RECEIVED_CAS_MAX,
    RECEIVED_SEQ_MAX,
    ReceivedSnapshots,
)

HISTORY = HistoryId(7)
LOG = FailoverLog.of_pairs([(7, 0)])


def chunk(*seqs: int) -> Chunk:
    """A chunk with a mutation for each of consecutive sequence numbers."""
    return Chunk.build(
        [Mutation(Operation.SET, b"k%d" % seq, b"v", SeqNo(seq), Cas(seq)) for seq in seqs],
        SeqNo(seqs[0] - 1),
        SeqNo(seqs[-1]),
    )


def received(end: int, *chunks: Chunk) -> ReceivedSnapshots:
    """A first snapshot that ends at `end`, with the chunks received so far."""
    snapshots = ReceivedSnapshots(LOG, SeqNo(0), Cas(0))
    snapshots.begin_snapshot(HISTORY, SeqNo(end), SeqNo(0))
    for part in chunks:
        snapshots.add_chunk(part)
    return snapshots


def test_the_last_chunk_of_a_snapshot_is_written_with_its_end() -> None:
    snapshots = received(4, chunk(1, 2), chunk(3, 4))
    first = snapshots.take_write()
    assert [(part.start, part.end) for part in first.chunks] == [(0, 2)]
    assert first.ends == []
    assert first.record.partial is not None
    assert first.record.partial.received_seq == 2
    assert snapshots.has_unwritten
    snapshots.end_snapshot(SeqNo(4))
    second = snapshots.take_write()
    assert [(part.start, part.end) for part in second.chunks] == [(2, 4)]
    assert second.ends == [4]
    assert (second.record.high, second.record.last_cas, second.record.partial) == (4, 4, None)
    assert not snapshots.has_unwritten


def test_the_written_record_does_not_include_the_chunk_that_is_held_back() -> None:
    snapshots = received(4, chunk(1, 2), chunk(3, 4))
    assert snapshots.written_record.received_seq == 0
    first = snapshots.take_write()
    assert snapshots.written_record == first.record
    assert ReceivedSnapshots.from_record(snapshots.written_record).received_seq == 2
    assert snapshots.received_seq == 4
    snapshots.end_snapshot(SeqNo(4))
    assert snapshots.written_record == first.record
    assert snapshots.take_write().record == snapshots.written_record
    snapshots.truncate(SeqNo(0))
    assert snapshots.written_record.received_seq == 0


def test_a_stream_continues_inside_an_interrupted_snapshot() -> None:
    snapshots = received(10, chunk(1, 2))
    partial = PartialSnapshot(HISTORY, SeqNo(0), SeqNo(10))
    assert snapshots.position == Position(LOG, SeqNo(0), SeqNo(2), partial)
    on_disk = ReceivedSnapshots.from_record(snapshots.take_write().record)
    assert on_disk.position == snapshots.position


@pytest.mark.parametrize("is_front_written", [False, True])
def test_a_stream_that_was_cut_before_a_snapshots_end_sends_the_last_chunk_again(
    is_front_written: bool,
) -> None:
    """The answers to publishers are sent between the last chunk and the end. With the chunk, but
    without the answers, a node that becomes active would apply the batches of this snapshot
    again."""
    snapshots = received(4, chunk(1, 2), chunk(3, 4))
    if is_front_written:
        snapshots.take_write()
    partial = PartialSnapshot(HISTORY, SeqNo(0), SeqNo(4))
    assert snapshots.position == Position(LOG, SeqNo(0), SeqNo(2), partial)
    snapshots.begin_stream()
    assert snapshots.position == Position(LOG, SeqNo(0), SeqNo(2), partial)
    front = snapshots.take_write()
    assert [part.end for part in front.chunks] == ([] if is_front_written else [2])
    assert front.record.received_seq == 2
    answer = (bytes(16), 1, SeqNo(4), b"answer")
    snapshots.begin_snapshot(HISTORY, SeqNo(4), SeqNo(0))
    snapshots.add_chunk(chunk(3, 4))
    snapshots.add_answers([answer])
    snapshots.end_snapshot(SeqNo(4))
    write = snapshots.take_write()
    assert ([part.start for part in write.chunks], write.ends) == ([2], [4])
    assert write.answers == [answer]


def test_an_interrupted_snapshot_of_one_chunk_may_be_longer_when_sent_again() -> None:
    snapshots = received(2, chunk(1, 2))
    assert snapshots.position == Position(LOG, SeqNo(0), SeqNo(0), None)
    snapshots.begin_stream()
    snapshots.begin_snapshot(HISTORY, SeqNo(3), SeqNo(0))
    snapshots.add_chunk(chunk(1, 2, 3))
    snapshots.end_snapshot(SeqNo(3))
    assert snapshots.take_write().record.high == 3


def test_answers_to_publishers_wait_for_the_end_of_their_snapshot() -> None:
    snapshots = received(4, chunk(1, 2))
    answer = (bytes(16), 1, SeqNo(2), b"answer")
    snapshots.add_answers([answer])
    assert snapshots.take_write().answers == []
    snapshots.add_chunk(chunk(3, 4))
    snapshots.end_snapshot(SeqNo(4))
    assert snapshots.take_write().answers == [answer]


def test_answers_that_wait_for_the_disk_count_as_used_memory() -> None:
    """The answer to a batch of one change needs several times the memory of the change."""
    snapshots = received(2, chunk(1, 2))
    chunk_bytes = snapshots.nbytes
    answer = (bytes(16), 1, SeqNo(2), bytes(1000))
    snapshots.add_answers([answer])
    snapshots.begin_stream()
    assert snapshots.nbytes == 0
    snapshots.add_chunk(chunk(1, 2))
    snapshots.add_answers([answer])
    snapshots.end_snapshot(SeqNo(2))
    assert snapshots.nbytes == chunk_bytes + 1000 + ANSWER_OVERHEAD_BYTES
    snapshots.take_write()
    assert snapshots.nbytes == 0


def test_answers_without_their_snapshot_are_dropped_when_a_stream_starts() -> None:
    """The next source may have another history, with other mutations under these sequence
    numbers."""
    snapshots = received(2, chunk(1, 2))
    snapshots.end_snapshot(SeqNo(2))
    snapshots.add_answers([(bytes(16), 1, SeqNo(4), b"of a snapshot that never came")])
    snapshots.begin_stream()
    answer = (bytes(16), 1, SeqNo(3), b"answer")
    snapshots.add_answers([answer])
    snapshots.begin_snapshot(HISTORY, SeqNo(3), SeqNo(0))
    snapshots.add_chunk(chunk(3))
    snapshots.end_snapshot(SeqNo(3))
    assert snapshots.take_write().answers == [answer]


def test_a_source_that_leaves_out_chunks_is_refused() -> None:
    snapshots = received(10, chunk(1, 2))
    with pytest.raises(RemoteProtocolError, match="does not follow 2"):
        snapshots.add_chunk(chunk(4, 5))
    with pytest.raises(RemoteProtocolError, match="ends at 10, but 2"):
        snapshots.end_snapshot(SeqNo(10))


def test_a_sequence_number_that_leaves_no_room_in_the_index_is_refused() -> None:
    """A replica that stored a number too high for the index would fail as soon as it indexed the
    change, and again after each start; and with the highest number of the index it could store
    nothing more once it is active."""
    snapshots = ReceivedSnapshots(LOG, SeqNo(RECEIVED_SEQ_MAX - 1), Cas(0))
    snapshots.begin_snapshot(HISTORY, SeqNo(RECEIVED_SEQ_MAX + 1), SeqNo(0))
    snapshots.add_chunk(chunk(RECEIVED_SEQ_MAX))
    with pytest.raises(RemoteProtocolError, match="highest sequence number that a replica takes"):
        snapshots.add_chunk(chunk(RECEIVED_SEQ_MAX + 1))


def test_a_cas_that_leaves_no_room_for_higher_ones_is_refused() -> None:
    def row(seq: int, cas: int) -> Chunk:
        mutation = Mutation(Operation.SET, b"k", b"v", SeqNo(seq), Cas(cas))
        return Chunk.build([mutation], SeqNo(seq - 1), SeqNo(seq))

    snapshots = received(2, row(1, RECEIVED_CAS_MAX))
    with pytest.raises(RemoteProtocolError, match="the highest that a replica takes"):
        snapshots.add_chunk(row(2, RECEIVED_CAS_MAX + 1))


def test_a_partition_that_replicated_the_highest_numbers_accepts_writes() -> None:
    log = FailoverLog.of_pairs([(7, 0)])
    image = PartitionImage(
        PartitionState.ACTIVE, log, SeqNo(RECEIVED_SEQ_MAX), Cas(RECEIVED_CAS_MAX)
    )
    partition = Partition(PartitionId(0), lambda: HISTORY, image=image)
    batch = batch_of(Chunk.build([Mutation(Operation.SET, b"k", b"v", expiry=5)]))
    assert partition.mutate(batch, now=0.0).status is Status.OK
    assert partition.expire(5.0) == 1
    assert (partition.high_seq, partition.last_cas) == (RECEIVED_SEQ_MAX + 2, RECEIVED_CAS_MAX + 2)
    partition.check_invariants()


def test_a_rollback_drops_the_chunk_that_waits_for_its_end() -> None:
    snapshots = received(1, chunk(1))
    assert snapshots.take_write().chunks == []
    assert snapshots.nbytes
    snapshots.truncate(SeqNo(0))
    assert (snapshots.nbytes, snapshots.received_seq, snapshots.take_write().chunks) == (0, 0, [])


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("later_purge_seq", [0, 1])
def test_the_purge_number_of_a_first_snapshot_is_kept_after_its_stream_ends(
    is_restarted: bool, later_purge_seq: int
) -> None:
    """The first part of the snapshot lacks deletions up to that number, whatever sends the rest.
    That may be another node, which has purged less. Or nothing is sent, because only the end was
    missing."""
    snapshots = ReceivedSnapshots(LOG, SeqNo(0), Cas(0))
    snapshots.begin_snapshot(HISTORY, SeqNo(4), SeqNo(3))
    snapshots.add_chunk(chunk(1, 2))
    front = snapshots.take_write()
    if is_restarted:
        snapshots = ReceivedSnapshots.from_record(front.record)
    snapshots.begin_snapshot(HISTORY, SeqNo(4), SeqNo(later_purge_seq))
    snapshots.add_chunk(chunk(3, 4))
    snapshots.end_snapshot(SeqNo(4))
    assert max(front.purge_seq, snapshots.take_write().purge_seq) == 3
    snapshots.begin_snapshot(HISTORY, SeqNo(5), SeqNo(5))
    snapshots.add_chunk(chunk(5))
    snapshots.end_snapshot(SeqNo(5))
    assert snapshots.take_write().purge_seq == 0, "it received the later deletions"


def incomplete(end: int, *chunks: Chunk) -> ReceivedSnapshots:
    """Like `received`, at a node that has lost its data."""
    snapshots = ReceivedSnapshots(LOG, SeqNo(0), Cas(0), is_incomplete=True)
    snapshots.begin_stream()
    snapshots.begin_snapshot(HISTORY, SeqNo(end), SeqNo(0))
    for part in chunks:
        snapshots.add_chunk(part)
    return snapshots


def test_a_copy_is_complete_once_it_has_what_the_active_node_had() -> None:
    snapshots = incomplete(2, chunk(1, 2))
    snapshots.note_active_seq(SeqNo(4))
    snapshots.end_snapshot(SeqNo(2))
    assert snapshots.take_write().record.is_incomplete
    snapshots.begin_snapshot(HISTORY, SeqNo(5), SeqNo(0))
    snapshots.add_chunk(chunk(3, 4, 5))
    assert snapshots.take_write().record.is_incomplete, "its snapshot has not ended"
    snapshots.end_snapshot(SeqNo(5))
    assert not snapshots.take_write().record.is_incomplete
    # The copy stays complete, though the active node has more by now.
    snapshots.begin_stream()
    snapshots.note_active_seq(SeqNo(9))
    assert not snapshots.record().is_incomplete
    assert not snapshots.has_unwritten


def test_a_copy_that_has_everything_already_is_written_as_complete() -> None:
    snapshots = incomplete(2, chunk(1, 2))
    snapshots.end_snapshot(SeqNo(2))
    assert snapshots.take_write().record.is_incomplete, (
        "the active node's sequence number is unknown"
    )
    snapshots.begin_stream()
    assert not snapshots.has_unwritten
    snapshots.note_active_seq(SeqNo(2))
    assert snapshots.has_unwritten
    assert not snapshots.take_write().record.is_incomplete


def test_the_active_nodes_number_from_one_stream_does_not_count_in_the_next() -> None:
    snapshots = incomplete(2, chunk(1, 2))
    snapshots.note_active_seq(SeqNo(2))
    snapshots.begin_stream()
    snapshots.add_chunk(chunk(1, 2))
    snapshots.end_snapshot(SeqNo(2))
    assert snapshots.record().is_incomplete
    snapshots.note_active_seq(SeqNo(2))
    snapshots.truncate(SeqNo(0))
    assert snapshots.record().is_incomplete
