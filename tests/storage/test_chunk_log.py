"""The log of a bucket: commits of whole snapshots, reads, and what the log refuses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kit.answer_rows import pack_rows
from tests.storage.full_disk import FullDisk
from tests.storage.log_model import Model, chunk_of, read, record_of, row
from upr_protocol.chunk import Chunk
from upr_protocol.ids import Operation, SeqNo
from upr_server.storage.chunk_log import STORED_OVERHEAD_BYTES, ChunkLog
from upr_server.storage.errors import CorruptionError, DiskFullError, StoreFailedError
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.ordered_map import OrderedMap
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import (
    BUCKET,
    CHUNK_HEAD,
    PARTITION,
    BucketRecord,
    LeaseRecord,
    chunk_key,
    parse_record,
    partition_key,
    with_checksum,
)
from upr_server.storage.simulated_disk import SimulatedDisk
from upr_server.storage.stored_bucket import StoredAnswer

PARTITIONS: Final = 3
PLENTY: Final = 1 << 40
WRITER: Final = b"sixteen bytes id"

# Chunks of a commit, by partition: how many mutations each has, and numbers skipped before each.
COMMITS: Final = st.lists(
    st.dictionaries(
        st.integers(0, PARTITIONS - 1),
        st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2)), max_size=4),
        max_size=PARTITIONS,
    ),
    max_size=8,
)


def created(ordered_map: OrderedMap) -> ChunkLog:
    log = ChunkLog(ordered_map)
    log.create(BucketRecord("b", PARTITIONS, 0), [record_of(0)] * PARTITIONS)
    return log


@pytest.fixture(params=["lmdb", "simulated"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ChunkLog]:
    ordered_map: OrderedMap = SimulatedDisk()
    if request.param == "lmdb":
        ordered_map = LmdbOrderedMap(tmp_path, bytes_max=1 << 28, is_summed=True)
    yield created(ordered_map)
    ordered_map.close()


def some_chunk(start: int, count: int, skipped: int = 0) -> Chunk:
    seqs = [start + (skipped + 1) * (index + 1) for index in range(count)]
    rows = [row(Operation.SET, b"key %d" % (seq % 5), seq, seq) for seq in seqs]
    return chunk_of(rows, start, seqs[-1])


def write(partition: int, *chunks: Chunk, answers: tuple[StoredAnswer, ...] = ()) -> PartitionWrite:
    high = chunks[-1].end if chunks else 0
    rows = pack_rows((answer.writer, answer.counter, answer.answer) for answer in answers)
    return PartitionWrite(partition, record_of(high), chunks, [rows])


@settings(max_examples=60)
@given(commits=COMMITS, data=st.data())
def test_committed_mutations_are_read_between_any_two_numbers(
    commits: list[dict[int, list[tuple[int, int]]]], data: st.DataObject
) -> None:
    log, model = created(SimulatedDisk()), Model(PARTITIONS)
    sizes = [0] * PARTITIONS
    for commit in commits:
        writes = []
        for index, shapes in commit.items():
            high = model.highs[index]
            chunks = []
            for count, skipped in shapes:
                chunks.append(some_chunk(high, count, skipped))
                high = chunks[-1].end
                sizes[index] += chunks[-1].nbytes + STORED_OVERHEAD_BYTES
            writes.append(PartitionWrite(index, record_of(high), chunks))
        log.commit(writes)
        model.take(writes)
    measured = log.chunk_bytes()
    assert [measured.get(partition, 0) for partition in range(PARTITIONS)] == sizes
    for index, history in enumerate(model.histories):
        high = model.highs[index]
        assert log.high_seq(index) == high
        start = data.draw(st.integers(0, high))
        end = data.draw(st.integers(start, high))
        bytes_max = data.draw(st.sampled_from([1, 300, PLENTY]))
        rows = [row for row in history if start < row.seq <= end]
        assert read(log, index, start, end, bytes_max) == rows
        picked = data.draw(
            st.lists(st.sampled_from(history), max_size=6) if history else st.just([])
        )
        assert log.find_mutations(index, [row.seq for row in picked], PLENTY) == picked


@settings(max_examples=60)
@given(commits=COMMITS, chunks_max=st.integers(1, 5), data=st.data())
def test_ranges_measured_in_pieces_have_the_sizes_of_their_chunks(
    commits: list[dict[int, list[tuple[int, int]]]], chunks_max: int, data: st.DataObject
) -> None:
    log = created(SimulatedDisk())
    chunks: list[list[Chunk]] = [[] for _ in range(PARTITIONS)]
    for commit in commits:
        writes = []
        for partition, shapes in commit.items():
            for count, skipped in shapes:
                start = chunks[partition][-1].end if chunks[partition] else 0
                chunks[partition].append(some_chunk(start, count, skipped))
            new_chunks = chunks[partition][len(chunks[partition]) - len(shapes) :]
            if new_chunks:
                writes.append(write(partition, *new_chunks))
        log.commit(writes)
    ranges: list[tuple[int, int, int]] = []
    sizes: list[int] = []
    for partition in data.draw(st.lists(st.integers(0, PARTITIONS - 1), max_size=4)):
        boundaries = [0, *(chunk.end for chunk in chunks[partition])]
        start, end = sorted(data.draw(st.tuples(*[st.sampled_from(boundaries)] * 2)))
        ranges.append((partition, start, end))
        sizes.append(
            sum(
                chunk.nbytes + STORED_OVERHEAD_BYTES
                for chunk in chunks[partition]
                if start < chunk.end <= end
            )
        )
    measured = [0] * len(ranges)
    index = 0
    first_start: int | None = None
    while index < len(ranges):
        partition, start, end = ranges[index]
        rest = [(partition, start if first_start is None else first_start, end)]
        parts = log.measure_ranges(rest + ranges[index + 1 :], chunks_max)
        assert parts, "each call comes further"
        for nbytes, counted_through in parts:
            measured[index] += nbytes
            is_whole = counted_through == ranges[index][2]
            first_start = None if is_whole else counted_through
            index += is_whole
    assert measured == sizes


def test_a_chunk_that_reaches_beyond_a_range_counts_in_part(log: ChunkLog) -> None:
    chunk = some_chunk(0, 10)
    log.commit([write(0, chunk)])
    nbytes = chunk.nbytes + STORED_OVERHEAD_BYTES
    assert log.measure_ranges([(0, 0, 5), (0, 0, 10), (1, 0, 7)], 9) == [
        (nbytes // 2, 5),
        (nbytes, 10),
        (0, 7),
    ]


@settings(max_examples=200)
@given(commits=COMMITS, compacted=st.sets(st.integers(0, 60)), cas=st.integers(0, 700))
def test_the_number_before_a_cas_parts_the_mutations_by_it(
    commits: list[dict[int, list[tuple[int, int]]]], compacted: set[int], cas: int
) -> None:
    log, highs = created(SimulatedDisk()), [0] * PARTITIONS
    cas_of_seq: list[dict[int, int]] = [{} for _ in range(PARTITIONS)]
    for commit in commits:
        writes = []
        for partition, shapes in commit.items():
            chunks = []
            for count, skipped in shapes:
                start = highs[partition]
                end = highs[partition] = start + count * (skipped + 1)
                # A chunk without mutations after compaction still covers its range.
                seqs = set(range(start + skipped + 1, end + 1, skipped + 1)) - compacted
                rows = [row(Operation.SET, b"key", seq, 10 * seq + 5) for seq in sorted(seqs)]
                chunks.append(chunk_of(rows, start, end))
                cas_of_seq[partition].update((row.seq, row.cas) for row in rows)
            writes.append(PartitionWrite(partition, record_of(highs[partition]), chunks))
        log.commit(writes)
    for partition, high in enumerate(highs):
        seq_before = log.find_seq_before(partition, cas)
        assert 0 <= seq_before <= high
        for seq, row_cas in cas_of_seq[partition].items():
            assert (seq <= seq_before) == (row_cas < cas)


def test_a_damaged_chunk_is_not_searched_for_a_time(log: ChunkLog) -> None:
    log.commit([write(0, some_chunk(0, 3)), write(1, some_chunk(0, 3))])
    key = chunk_key(0, 3)
    with log.ordered_map.write() as transaction:
        transaction.put(key, bytes(CHUNK_HEAD.size) + bytes(some_chunk(0, 3)))
    with pytest.raises(CorruptionError, match="checksum"):
        log.find_seq_before(0, 2)
    assert log.find_seq_before(1, 2) == 1


def test_a_read_ends_with_the_chunk_that_reaches_its_limit(log: ChunkLog) -> None:
    chunks = [some_chunk(start, 5) for start in range(0, 50, 5)]
    log.commit([write(0, *chunks)])
    read_of = chunks[0].nbytes * 2 + 1
    assert log.read_chunks(0, 0, 50, bytes_max=read_of) == chunks[:3]
    assert log.read_chunks(0, 0, 50, bytes_max=chunks[0].nbytes) == chunks[:1]
    assert log.read_chunks(0, 0, 50, bytes_max=PLENTY, mutations_max=6) == chunks[:2]
    first, second = log.read_chunks(0, 3, 7, bytes_max=PLENTY)
    assert [(first.start, first.end), (second.start, second.end)] == [(3, 5), (5, 7)]


def test_a_read_returns_the_first_part_of_a_chunk_that_is_too_large(log: ChunkLog) -> None:
    first, second = some_chunk(0, 5), some_chunk(5, 5)
    log.commit([write(0, first, second)])
    for count in range(1, 5):
        front = first.slice(SeqNo(0), SeqNo(count))
        more = first.slice(SeqNo(0), SeqNo(count + 1))
        assert log.read_chunks(0, 0, 10, bytes_max=front.nbytes, in_pieces=True) == [front]
        assert log.read_chunks(0, 0, 10, bytes_max=more.nbytes - 1, in_pieces=True) == [front]
    # At least one mutation.
    assert log.read_chunks(0, 0, 10, bytes_max=1, in_pieces=True) == [
        first.slice(SeqNo(0), SeqNo(1))
    ]
    assert log.read_chunks(0, 7, 10, bytes_max=1, in_pieces=True) == [
        second.slice(SeqNo(7), SeqNo(8))
    ]
    assert log.read_chunks(0, 0, 10, bytes_max=1) == [first]


def test_chunks_are_valid_after_their_transaction_has_ended(log: ChunkLog) -> None:
    chunk = some_chunk(0, 5)
    log.commit([write(0, chunk)])
    (middle,) = log.read_chunks(0, 0, 5, bytes_max=PLENTY)
    for start in range(5, 500, 5):
        log.commit([write(0, some_chunk(start, 5))])
    assert middle == chunk
    middle.check(chunk.crc)


@pytest.mark.parametrize(
    "wrong",
    [
        PartitionWrite(1, record_of(8), [some_chunk(3, 5)]),
        PartitionWrite(1, record_of(6), [some_chunk(0, 5)]),
        PartitionWrite(1, record_of(10), [some_chunk(0, 5), some_chunk(6, 4)]),
        PartitionWrite(1, record_of(3)),
    ],
)
def test_a_commit_that_does_not_begin_at_the_end_changes_nothing(
    log: ChunkLog, wrong: PartitionWrite
) -> None:
    before = log.load()
    with pytest.raises(ValueError, match="partition 1"):
        log.commit([write(0, some_chunk(0, 5)), wrong])
    assert log.load() == before
    assert log.chunk_bytes() == {}
    log.commit([write(0, some_chunk(0, 5)), write(1, some_chunk(0, 5))])


def test_answers_are_stored_in_order_and_deleted(log: ChunkLog) -> None:
    tokens = tuple(StoredAnswer(WRITER, counter, b"answer %d" % counter) for counter in (300, 2, 1))
    log.commit([write(0, answers=tokens), write(2, answers=tokens[:1])])
    partitions = log.load().partitions
    assert list(partitions[0].tokens) == [tokens[2], tokens[1], tokens[0]]
    assert (list(partitions[1].tokens), list(partitions[2].tokens)) == ([], [tokens[0]])
    forgotten = (StoredAnswer(WRITER, 2, b""), StoredAnswer(WRITER, 7, b""))
    log.commit([write(0, answers=forgotten)])
    assert [token.counter for token in log.load().partitions[0].tokens] == [1, 300]


def test_the_mark_of_a_clean_stop_goes_together_with_the_records(log: ChunkLog) -> None:
    assert not log.load().is_clean
    log.mark_clean_stop()
    assert log.load().is_clean
    log.start_serving([(1, record_of(0))])
    assert not log.load().is_clean
    log.start_serving([])


def test_leases_are_stored_renewed_and_deleted(log: ChunkLog) -> None:
    lease = LeaseRecord(1 << 60, "a", ((0, 0, 9),), 60, 10.5)
    renewed = LeaseRecord(1 << 60, "a", ((0, 0, 9),), 60, 70.5)
    other_lease = LeaseRecord(2, "b", (), 1, 1.0)
    log.put_lease(lease)
    log.put_lease(other_lease)
    log.put_lease(renewed)
    assert list(log.load().leases) == [other_lease, renewed]
    log.delete_leases([2, 3])
    assert list(log.load().leases) == [renewed]


# Disks that are full, fail, or flip bits.


def test_a_commit_leaves_space_for_compaction() -> None:
    disk = SimulatedDisk()
    log = created(disk)
    disk.bytes_max = 1_000_000
    before = log.load()
    with pytest.raises(DiskFullError, match="compaction"):
        log.commit([write(0, some_chunk(0, 5))])
    assert log.load() == before
    disk.bytes_max = 1 << 40
    log.commit([write(0, some_chunk(0, 5))])


def test_a_full_disk_has_room_to_delete_answers_in_small_commits() -> None:
    """A start deletes the answers for which the bucket has no memory."""
    disk = FullDisk()
    log = created(disk)
    tokens = tuple(StoredAnswer(WRITER, counter, b"answer") for counter in range(1, 51))
    log.commit([write(0, answers=tokens)])
    disk.changes_max = 2
    log.delete_answers(0, tokens[1:])
    assert list(log.load().partitions[0].tokens) == [tokens[0]]
    disk.changes_max = 0
    with pytest.raises(DiskFullError):
        log.delete_answers(0, tokens)
    assert list(log.load().partitions[0].tokens) == [tokens[0]]


def test_a_full_disk_has_room_to_delete_leases_in_small_commits() -> None:
    """Compaction, which alone can free space, waits until lapsed leases are deleted."""
    disk = FullDisk()
    log = created(disk)
    leases = [LeaseRecord(lease_id, "a", (), 60, 1.0) for lease_id in range(1, 51)]
    for lease in leases:
        log.put_lease(lease)
    disk.changes_max = 2
    log.delete_leases(lease.lease_id for lease in reversed(leases[1:]))
    assert list(log.load().leases) == leases[:1]
    disk.changes_max = 0
    with pytest.raises(DiskFullError):
        log.delete_leases([1])
    assert list(log.load().leases) == leases[:1]


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_commit_that_fails_is_there_whole_or_not_at_all(is_kept: bool) -> None:
    disk = SimulatedDisk()
    log = created(disk)

    def fail() -> None:
        raise StoreFailedError("the disk failed")

    disk.fault, disk.keep_on_fault = fail, is_kept
    with pytest.raises(StoreFailedError):
        log.commit([write(0, some_chunk(0, 5)), write(2, some_chunk(0, 2), some_chunk(2, 2))])
    disk.crash()
    highs = [partition.record.high for partition in log.load().partitions]
    assert highs == ([5, 0, 4] if is_kept else [0, 0, 0])
    assert set(log.chunk_bytes()) == ({0, 2} if is_kept else set())


def test_every_flipped_bit_of_a_chunk_is_noticed() -> None:
    disk = SimulatedDisk()
    log = created(disk)
    log.commit([write(0, some_chunk(0, 5), some_chunk(5, 5))])
    for bit in range(8 * log.chunk_bytes()[0]):
        disk.flip_bit(chunk_key(0, 5), bit)
        with pytest.raises(CorruptionError):
            log.read_chunks(0, 0, 10, bytes_max=PLENTY)
        disk.flip_bit(chunk_key(0, 5), bit)
    assert len(log.read_chunks(0, 0, 10, bytes_max=PLENTY)) == 2


def test_every_flipped_bit_of_a_record_is_noticed() -> None:
    disk = SimulatedDisk()
    log = created(disk)
    intact = log.load()
    for bit in range(8 * 30):
        disk.flip_bit(BUCKET, bit)
        with pytest.raises(CorruptionError):
            log.load()
        disk.flip_bit(BUCKET, bit)
        disk.flip_bit(partition_key(PARTITION, 1), bit)
        stored_bucket = log.load()
        assert "mismatch" in stored_bucket.partitions[1].damage
        assert stored_bucket.partitions[0] == intact.partitions[0]
        disk.flip_bit(partition_key(PARTITION, 1), bit)
    assert log.load() == intact


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\x07p",  # more than one value
        b"\x81\xa4name\xa1\xff",  # a name that is no UTF-8
        b"\x81\xa1x" + b"\x91" * 5000 + b"\x01",  # nested too deeply for Python's recursion limit
    ],
)
def test_a_sealed_record_that_cannot_be_decoded_is_damage(packed: bytes) -> None:
    with pytest.raises(CorruptionError, match="cannot be decoded"):
        parse_record(BUCKET, with_checksum(BUCKET, packed), BucketRecord)


def test_a_chunk_that_is_missing_is_noticed(log: ChunkLog) -> None:
    log.commit([write(0, *(some_chunk(start, 5) for start in (0, 5, 10)))])
    with log.ordered_map.write() as transaction:
        transaction.delete(chunk_key(0, 10))
    with pytest.raises(CorruptionError):
        read(log, 0, 0, 15, PLENTY)
    before, damaged_text, behind = log.find_mutations(0, [3, 7, 13], PLENTY)
    assert isinstance(damaged_text, str)
    assert [before, behind] == log.find_mutations(0, [3, 13], PLENTY)
    with log.ordered_map.write() as transaction:
        transaction.delete(chunk_key(0, 15))
    assert len(read(log, 0, 0, 5, PLENTY)) == 5
    with pytest.raises(CorruptionError):
        log.read_chunks(0, 5, 15, bytes_max=PLENTY)
