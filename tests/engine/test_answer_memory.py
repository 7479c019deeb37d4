"""The bound on what answers to publishers take: they are forgotten in order, and however many
publishers there are, a bucket has room for changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.helpers import NOW, free
from tests.engine.naive_disk import NaiveDisk
from tests.kit.answer_rows import unpack_rows
from upr_protocol.chunk import Chunk, CounterDelta, Mutation, chunk_of_plain_sets
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, HistoryId, Operation
from upr_server.engine import (
    Bucket,
    MemoryAccount,
    MemoryAction,
    MutateResult,
    Partition,
    PartitionImage,
    WriterToken,
    batch_of,
)
from upr_server.engine.memory_policy import QUOTA_BYTES_MIN
from upr_server.engine.publisher_answers import (
    ANSWER_BYTES,
    BATCHES_MAX,
    WRITER_OVERHEAD_BYTES,
    WRITERS_MAX,
    PublisherAnswers,
)

MIB: Final = 1024 * 1024


def writer_id(number: int) -> bytes:
    return number.to_bytes(16, "little")


class NaiveAnswers:
    """What is remembered of each writer: the bytes of its answers by counter.

    Attributes:
        windows: The writers in the order in which they were heard from.
        reduced_writers: Those of whom only the newest answer is remembered.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.windows: dict[bytes, dict[int, int]] = {}
        self.reduced_writers: set[bytes] = set()

    def takes(self, writers: set[bytes] | None = None) -> int:
        """What these writers take; all, if none are named."""
        return sum(
            WRITER_OVERHEAD_BYTES + sum(window.values())
            for writer, window in self.windows.items()
            if writers is None or writer in writers
        )

    def remember(self, token: WriterToken, answer: bytes) -> None:
        window = self.windows.pop(token.writer, {})
        self.windows[token.writer] = window
        self.reduced_writers.discard(token.writer)
        window[token.counter] = ANSWER_BYTES + len(answer)
        if len(window) > BATCHES_MAX:
            del window[min(window)]
        while self.takes() > self._bytes_max and self._forget_something():
            pass

    def _forget_something(self) -> bool:
        recent_writers = [writer for writer in self.windows if writer not in self.reduced_writers]
        first_window = self.windows[recent_writers[0]]
        are_others_reduced = len(recent_writers) == len(first_window) == 1
        takes_half = self.takes(self.reduced_writers) > self._bytes_max // 2
        if self.reduced_writers and (are_others_reduced or takes_half):
            oldest_writer = next(iter(self.windows))
            del self.windows[oldest_writer]
            self.reduced_writers.discard(oldest_writer)
        elif len(first_window) > 1:
            del first_window[min(first_window)]
        elif not are_others_reduced:
            self.reduced_writers.add(recent_writers[0])
        else:
            return False
        return True


STEPS: Final = st.lists(
    st.tuples(
        st.integers(0, 7) | st.integers(0, 2),
        st.sampled_from([10, 10, 40, 300, 900, 2500]),
        st.integers(0, 1),
        st.booleans(),
    ),
    max_size=60,
)


@given(st.integers(1, 8000), STEPS)
@settings(max_examples=100)
def test_the_answers_over_the_bound_are_forgotten_in_order(
    bytes_max: int, steps: list[tuple[int, int, int, bool]]
) -> None:
    memory, model = MemoryAccount(), NaiveAnswers(bytes_max)
    answers = PublisherAnswers(memory, bytes_max)
    answers.track_unsaved()
    tokens: list[WriterToken] = []
    on_disk: dict[tuple[bytes, int], bytes | None] = {}
    high = 1
    for counter, (writer, size, rise, is_committed) in enumerate(steps, 1):
        high += rise
        token = WriterToken(writer_id(writer), counter)
        tokens.append(token)
        answers.remember(token, bytes(size), high)
        model.remember(token, bytes(size))
        answers.check_invariants()
        assert answers.nbytes == memory.writers
        for asked in tokens:
            window = model.windows.get(asked.writer, {})
            answer, may_be_forgotten = answers.answer_to(asked)
            assert (answer is not None) == (asked.counter in window)
            # Of a writer of whom anything is known, what is forgotten is not taken for new.
            assert may_be_forgotten == (bool(window) and asked.counter not in window)
        assert answers.answer_to(token)[0] is not None, "the newest is always there"
        if is_committed:
            rows, _ = answers.take_unsaved(high)
            on_disk |= unpack_rows(rows)
            assert answers.nbytes == model.takes()
            remembered_tokens = {
                (remembered_writer, remembered_counter)
                for remembered_writer, window in model.windows.items()
                for remembered_counter in window
            }
            assert {key for key, answer in on_disk.items() if answer} == remembered_tokens


@given(st.integers(1, 8000), STEPS, st.integers(0, 60))
@settings(max_examples=60)
def test_a_truncation_of_reduced_writers(
    bytes_max: int, steps: list[tuple[int, int, int, bool]], cut: int
) -> None:
    memory = MemoryAccount()
    answers = PublisherAnswers(memory, bytes_max)
    for counter, (writer, size, _, _) in enumerate(steps, 1):
        answers.remember(WriterToken(writer_id(writer), counter), bytes(size), counter)
    answers.truncate(cut)
    answers.check_invariants()
    # Their writers are heard from again.
    for counter, (writer, size, _, _) in enumerate(steps, 100):
        answers.remember(WriterToken(writer_id(writer), counter), bytes(size), counter)
        answers.check_invariants()
    assert memory.writers == answers.nbytes


def test_the_default_bucket_remembers_all_writers_and_the_windows_of_the_last() -> None:
    """What `docs/guarantees.md` and `docs/protocol.in.md` say."""
    bucket = Bucket("b", new_history_id=lambda: HistoryId(1))
    assert bucket.memory_policy.answers_bytes(len(bucket.partitions)) == 2 * MIB
    answers = PublisherAnswers(MemoryAccount(), 2 * MIB)
    for number in range(WRITERS_MAX):
        for counter in range(1, BATCHES_MAX + 1):
            # A plain run's answer has 40 bytes at most.
            answers.remember(WriterToken(writer_id(number), counter), bytes(40))
    assert len(answers) == WRITERS_MAX
    windows = [
        sum(
            answers.answer_to(WriterToken(writer_id(number), counter))[0] is not None
            for counter in range(1, BATCHES_MAX + 1)
        )
        for number in range(WRITERS_MAX)
    ]
    assert windows[:900] == [1] * 900
    assert windows[-90:] == [BATCHES_MAX] * 90
    answers.check_invariants()


# Buckets.


def new_bucket(quota_bytes: int, images: list[PartitionImage] | None = None) -> Bucket:
    ids = count(1)
    bucket = Bucket(
        "b",
        new_history_id=lambda: HistoryId(next(ids)),
        partition_count=1,
        quota_bytes=quota_bytes,
        images=images,
    )
    bucket.partitions[0].repeated_batches.answers.track_unsaved()
    return bucket


def plain_sets(number: int) -> Chunk:
    return chunk_of_plain_sets([b"%d" % (number % 10)], [b"value"])


def increments(_: int) -> Chunk:
    value = CounterDelta(1).encode()
    return Chunk.build(
        [Mutation(Operation.INCREMENT, b"%d" % index, value) for index in range(1000)]
    )


def failing_sets(_: int) -> Chunk:
    return Chunk.build([Mutation(Operation.SET, b"missing", b"", cas=Cas(5))])


def publish(
    partition: Partition,
    disk: NaiveDisk,
    make_chunk: Callable[[int], Chunk],
    writers: range,
    batch_count: int,
) -> None:
    """Each writer sends its batches, and the disk takes what comes of them."""
    for writer in writers:
        for counter in range(1, batch_count + 1):
            token = WriterToken(writer_id(writer), counter)
            partition.mutate(batch_of(make_chunk(counter), token), now=NOW)
        store(partition, disk)


def store(partition: Partition, disk: NaiveDisk) -> None:
    disk.read(partition, 1000)
    disk.commit(partition, 1000)
    disk.advance_index(1000)
    disk.report(partition)


def relieve(bucket: Bucket) -> MemoryAction:
    """Frees whatever can be freed; what the bucket's memory calls for then."""
    free(bucket.partitions[0])
    for _ in range(100):
        if bucket.free_memory() in (MemoryAction.NOTHING, MemoryAction.REFUSE_CREDIT):
            break
    return bucket.memory_action()


PUBLISHERS: Final[Mapping[str, tuple[Callable[[int], Chunk], int, int]]] = {
    "one row each": (plain_sets, 60, BATCHES_MAX),
    "increments": (increments, 6, 16),
    "nothing but failures": (failing_sets, 60, BATCHES_MAX),
}
"""What each publisher sends, how many there are, and how many batches each of them sends."""

of_publishers = pytest.mark.parametrize(
    ("make_chunk", "writers", "batches"), PUBLISHERS.values(), ids=PUBLISHERS
)


@of_publishers
def test_a_small_bucket_takes_changes_after_any_number_of_publishers(
    make_chunk: Callable[[int], Chunk], writers: int, batches: int
) -> None:
    bucket, disk = new_bucket(QUOTA_BYTES_MIN), NaiveDisk()
    (partition,) = bucket.partitions
    # The disk knows of answers that failing batches then push out. No commit tells it of that.
    publish(partition, disk, plain_sets, range(1000, 1010), BATCHES_MAX)
    publish(partition, disk, make_chunk, range(writers), batches)
    assert relieve(bucket) is MemoryAction.NOTHING
    assert bucket.memory.writers < QUOTA_BYTES_MIN / 2
    bucket.check_invariants()
    # No publisher's batch has a second effect.
    high = partition.high_seq
    assert send_again(partition, make_chunk, writers - 1, batches).is_repeated
    assert send_again(partition, make_chunk, 0, batches).is_repeated
    assert send_again(partition, make_chunk, 0, 1).status is Status.TOKEN_TOO_OLD
    assert partition.high_seq == high


def send_again(
    partition: Partition, make_chunk: Callable[[int], Chunk], writer: int, counter: int
) -> MutateResult:
    token = WriterToken(writer_id(writer), counter)
    return partition.mutate(batch_of(make_chunk(counter), token), now=NOW)


@of_publishers
def test_a_small_bucket_takes_changes_after_a_restart_with_any_number_of_answers(
    make_chunk: Callable[[int], Chunk], writers: int, batches: int
) -> None:
    larger_bucket, disk = new_bucket(1024 * MIB), NaiveDisk()
    (partition,) = larger_bucket.partitions
    publish(partition, disk, make_chunk, range(writers), batches)
    publish(partition, disk, plain_sets, range(1000, 1001), 1)
    assert len(disk.answers) == writers * batches + 1
    bucket = new_bucket(QUOTA_BYTES_MIN, [disk.image(partition.failover_log)])
    assert relieve(bucket) is MemoryAction.NOTHING
    answers_bytes_max = bucket.memory_policy.answers_bytes(1)
    assert answers_bytes_max / 2 < bucket.memory.writers <= answers_bytes_max
    bucket.check_invariants()
    (recovered_partition,) = bucket.partitions
    assert send_again(recovered_partition, plain_sets, 1000, 1).is_repeated
