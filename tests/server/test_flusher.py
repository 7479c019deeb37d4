"""The flusher: when it writes a bucket's changes to disk, which changes share a commit, and when it
answers waiting calls. It runs alone, with a store that records commits, and a mock clock."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sized
from contextlib import asynccontextmanager
from random import Random
from typing import Any, Final

import attrs
import pytest
import trio
from trio.testing import MockClock

from tests.engine.helpers import cursor_at, new_bucket, put
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_server.engine import Bucket, Partition
from upr_server.engine.publisher_answers import (
    WriterToken,
)
from upr_server.engine.snapshots import closed_snapshot, segment
from upr_server.engine.snapshots.collapse import JOINED_SNAPSHOTS_MAX
from upr_server.storage.api import Store
from upr_server.storage.calls import Commit, StoreCall
from upr_server.storage.errors import DiskFullError
from upr_server.storage.online import flusher as flusher_module
from upr_server.storage.online import index_lag
from upr_server.storage.online.flusher import (
    FLUSH_INTERVAL_S,
    FULL_DISK_RETRY_S,
    STEP_CALLS,
    TURN_CALLS,
    Flusher,
)
from upr_server.storage.records import PartialRecord

P0, P1 = PartitionId(0), PartitionId(1)


class CommitLog(Store):
    """A store that records commits, and when each began.

    Attributes:
        commits: For each commit, when it began and the call.
        commit_s: How long a commit takes.
        is_full: Whether the disk has no room for commits.
    """

    def __init__(self, commit_s: float = 0.0) -> None:
        super().__init__()
        self.commits: list[tuple[float, Commit]] = []
        self.commit_s = commit_s
        self.is_full = False

    async def execute(self, call: StoreCall[Any]) -> Any:
        assert isinstance(call, Commit)
        self.commits.append((trio.current_time(), call))
        await trio.sleep(self.commit_s)
        if self.is_full:
            raise DiskFullError("no room")
        return {}

    @property
    def begins(self) -> list[float]:
        return [begin for begin, _ in self.commits]

    def highs(self) -> list[dict[int, int]]:
        """For each commit, the highest number of each partition that it writes."""
        return [{w.partition: w.record.high for w in commit.writes} for _, commit in self.commits]


@attrs.frozen
class Running:
    """A running flusher.

    Attributes:
        bucket: Its bucket.
        store: Its disk.
        flusher: The flusher.
        commit_times: When it reported that a commit was complete.
        answers: The answers to waiting calls, in order: a name, and whether the number is on disk.
    """

    bucket: Bucket
    store: CommitLog
    flusher: Flusher
    commit_times: list[float]
    answers: list[tuple[str, bool]] = attrs.field(factory=list)

    @property
    def partition(self) -> Partition:
        return self.bucket.partitions[0]

    def wait_for(self, name: str, seq: int, partition: int = 0) -> None:
        """Adds a waiting call, whose answer is recorded."""
        self.flusher.call_when_persisted(
            self.bucket.partitions[partition],
            SeqNo(seq),
            lambda is_on_disk: self.answers.append((name, is_on_disk)),
        )


@asynccontextmanager
async def running(
    bucket: Bucket | None = None, *, partitions: int = 1, commit_s: float = 0.0
) -> AsyncIterator[Running]:
    """Runs the flusher of a bucket, for as long as the context."""
    bucket = bucket or new_bucket(partitions)
    store, commit_times = CommitLog(commit_s), list[float]()
    flusher = Flusher(
        store, bucket, lambda: commit_times.append(trio.current_time()), lambda _: iter(())
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flusher.run)
        yield Running(bucket, store, flusher, commit_times)
        nursery.cancel_scope.cancel()


def expected_begins(changes: list[float], commit_s: float) -> list[float]:
    """When commits begin: 0.1 s after the first change that is in no commit, one at a time."""
    begins: list[float] = []
    unwritten, free_at = list(changes), 0.0
    while unwritten:
        begin = max(unwritten[0] + FLUSH_INTERVAL_S, free_at)
        begins.append(begin)
        unwritten = [change for change in unwritten if change > begin]
        free_at = begin + commit_s
    return begins


@pytest.mark.parametrize("commit_s", [0.0, 0.03, 0.25])
async def test_a_commit_begins_100_ms_after_the_first_change_that_is_in_no_commit(
    autojump_clock: MockClock, commit_s: float
) -> None:
    draw = Random(7)
    changes = sorted(draw.random() * 3 for _ in range(25))
    async with running(commit_s=commit_s) as run:
        began = trio.current_time()
        for change in changes:
            await trio.sleep_until(began + change)
            put(run.partition, b"key %f" % change)
        await trio.sleep(1.0)
        begins = [begin - began for begin in run.store.begins]
        assert begins == pytest.approx(expected_begins(changes, commit_s), abs=1e-6)
        assert run.partition.manager.persistence.committed_seq == run.partition.high_seq
        assert len(run.commit_times) == len(begins)


@pytest.mark.parametrize("is_task", [False, True])
async def test_a_commit_begins_at_once_while_a_call_waits_for_it(
    autojump_clock: MockClock, is_task: bool
) -> None:
    async with running(commit_s=0.25) as run, trio.open_nursery() as nursery:
        began = trio.current_time()
        put(run.partition, b"a")
        await trio.sleep(0.03)
        if is_task:
            nursery.start_soon(run.flusher.wait_until_persisted, run.partition, SeqNo(1))
        else:
            run.wait_for("a", 1)
        await trio.sleep(0.1)
        # No call waits for this change, but it is due before the first commit ends.
        put(run.partition, b"b")
        await trio.sleep(2.0)
        begins = [begin - began for begin in run.store.begins]
        assert begins == pytest.approx([0.03, 0.28], abs=1e-6)
        assert run.answers == ([] if is_task else [("a", True)])


async def test_waiting_calls_are_answered_in_order_when_their_numbers_are_on_disk(
    autojump_clock: MockClock,
) -> None:
    async with running(partitions=2, commit_s=0.25) as run:
        put(run.partition, b"a")
        put(run.bucket.partitions[1], b"b")
        run.wait_for("first", 1)
        run.wait_for("other", 1, partition=1)
        await trio.sleep(0.2)
        put(run.partition, b"c")
        run.wait_for("second", 2)
        run.wait_for("late", 1)
        assert run.answers == []
        await trio.sleep(0.1)
        assert run.answers == [("first", True), ("other", True)]
        run.wait_for("at once", 1)
        assert run.answers[2:] == [("at once", True)]
        await trio.sleep(1.0)
        assert run.answers[3:] == [("second", True), ("late", True)]
        # No call waits any more, so the next commit begins after the usual interval.
        began = trio.current_time()
        put(run.partition, b"d")
        await trio.sleep(1.0)
        assert run.store.begins[-1] == pytest.approx(began + FLUSH_INTERVAL_S)


class LongestStep(trio.abc.Instrument):
    """The largest number of entries that one step of a task added to a list."""

    def __init__(self, added_to: Sized) -> None:
        self.longest = 0
        self._list = added_to
        self._length = len(added_to)

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.longest = max(self.longest, len(self._list) - self._length)
        self._length = len(self._list)


@pytest.mark.parametrize("is_full", [False, True])
async def test_thousands_of_waiting_calls_are_answered_some_in_each_step(
    autojump_clock: MockClock, is_full: bool
) -> None:
    async with running(partitions=4, commit_s=1.0) as run:
        step = LongestStep(run.answers)
        trio.lowlevel.add_instrument(step)
        run.store.is_full = is_full
        for partition in run.bucket.partitions:
            put(partition, b"a")
        for call in range(1000):
            run.wait_for(f"{call}", 1)
        for number in range(1, 4):
            run.wait_for(f"of partition {number}", 1, number)
        await trio.sleep(2.0)
        trio.lowlevel.remove_instrument(step)
        assert step.longest < STEP_CALLS + TURN_CALLS
        assert {is_on_disk for _, is_on_disk in run.answers} == {not is_full}
        names = [name for name, _ in run.answers]
        assert [name for name in names if name.isdigit()] == [f"{call}" for call in range(1000)]
        if not is_full:
            # Calls for other partitions do not wait for the thousand.
            assert max(names.index(f"of partition {number}") for number in range(1, 4)) < 50


async def test_waiting_calls_are_refused_while_the_disk_is_full(autojump_clock: MockClock) -> None:
    async with running() as run:
        run.store.is_full = True
        put(run.partition, b"a")
        run.wait_for("before", 1)
        await trio.sleep(0.5)
        assert run.flusher.disk_full_reason == "no room"
        run.wait_for("while it is full", 1)
        assert run.answers == [("before", False), ("while it is full", False)]
        await trio.sleep(2.6)
        assert len(run.store.commits) == 4, "it tries again each second"
        assert run.commit_times == []
        run.store.is_full = False
        await trio.sleep(FULL_DISK_RETRY_S)
        assert run.flusher.disk_full_reason == ""
        assert len(run.commit_times) == 1
        run.wait_for("after", 1)
        assert run.answers[2:] == [("after", True)]


async def test_changes_from_before_the_flusher_was_made_are_written(
    autojump_clock: MockClock,
) -> None:
    bucket = new_bucket(3)
    put(bucket.partitions[1], b"a")
    async with running(bucket) as run:
        await trio.sleep(1.0)
        assert run.store.highs() == [{1: 1}]
        assert run.store.begins == [pytest.approx(trio.current_time() - 1 + FLUSH_INTERVAL_S)]


async def test_commits_of_a_deleted_bucket_are_not_reported(autojump_clock: MockClock) -> None:
    async with running() as run:
        run.flusher.stop_notifying()
        put(run.partition, b"a")
        await trio.sleep(1.0)
        assert len(run.store.commits) == 1
        assert run.commit_times == []


class MostJoined(trio.abc.Instrument):
    """The largest number of snapshots of a partition that one step of a task joined."""

    def __init__(self, partition: Partition) -> None:
        self.most = 0
        self._partition = partition
        self._count = len(partition.snapshots)

    def after_task_step(self, _task: trio.lowlevel.Task) -> None:
        count = len(self._partition.snapshots)
        self.most = max(self.most, self._count - count)
        self._count = count


async def test_thousands_of_small_snapshots_are_joined_some_in_each_step(
    autojump_clock: MockClock,
) -> None:
    async with running() as run:
        reader = cursor_at(run.partition)
        for _ in range(2000):
            put(run.partition, b"a")
            while reader.poll():
                reader.next()
        joining = MostJoined(run.partition)
        trio.lowlevel.add_instrument(joining)
        await trio.sleep(1.0)
        trio.lowlevel.remove_instrument(joining)
        assert run.store.highs() == [{0: 2000}]
        assert 0 < joining.most <= 2 * JOINED_SNAPSHOTS_MAX


VALUE: Final = bytes(1000)

LARGE_VALUE: Final = bytes(30_000)
"""Three snapshots with such a value are written one by one."""


async def test_a_full_commit_takes_no_further_snapshot(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit ends with a whole snapshot. The next commit begins with the partitions that had no
    turn."""
    monkeypatch.setattr(flusher_module, "COMMIT_BYTES", 75_000)
    async with running(partitions=4) as run:
        first, *other_partitions = run.bucket.partitions
        # The partition has four closed snapshots and the open one.
        reader = cursor_at(first)
        for number in range(4):
            put(first, b"%d" % number, value=LARGE_VALUE)
            while reader.poll():
                reader.next()
        put(first, b"open", value=LARGE_VALUE)
        for partition in other_partitions:
            put(partition, b"a", value=LARGE_VALUE)
        await trio.sleep(1.0)
        assert run.store.highs() == [{0: 3}, {1: 1, 2: 1, 3: 1}, {0: 5}]
        ends = [[write.ends for write in commit.writes] for _, commit in run.store.commits]
        assert ends == [[[1, 2, 3]], [[1], [1], [1]], [[4, 5]]]


@pytest.mark.parametrize("is_one_partition", [False, True])
async def test_snapshots_without_room_in_a_commit_are_written_at_once_in_the_next(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, is_one_partition: bool
) -> None:
    monkeypatch.setattr(flusher_module, "COMMIT_BYTES", 20_000)
    async with running(partitions=3, commit_s=0.01) as run:
        began, first = trio.current_time(), run.partition
        reader = cursor_at(first)
        for number, partition in enumerate(run.bucket.partitions):
            put(first if is_one_partition else partition, b"%d" % number, value=LARGE_VALUE)
            while reader.poll():
                reader.next()
        await trio.sleep(1.0)
        if is_one_partition:
            assert run.store.highs() == [{0: 1}, {0: 2}, {0: 3}]
        else:
            assert run.store.highs() == [{0: 1}, {1: 1}, {2: 1}]
        begins = [begin - began for begin in run.store.begins]
        assert begins == pytest.approx([0.1, 0.11, 0.12], abs=1e-6)
        # Later changes are gathered for the usual interval, even if their commit is full.
        for _ in range(2):
            began = trio.current_time()
            put(first, b"later", value=LARGE_VALUE)
            await trio.sleep(0.05)
            put(first, b"later", value=LARGE_VALUE)
            await trio.sleep(1.0)
            assert run.store.begins[-1] == pytest.approx(began + FLUSH_INTERVAL_S)


async def test_a_commit_counts_the_snapshots_of_all_its_partitions(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher_module, "COMMIT_BYTES", 75_000)
    async with running(partitions=2) as run:
        first, second = run.bucket.partitions
        put(first, b"a", value=LARGE_VALUE)
        reader = cursor_at(second)
        for number in range(4):
            put(second, b"%d" % number, value=LARGE_VALUE)
            while reader.poll():
                reader.next()
        await trio.sleep(1.0)
        assert run.store.highs() == [{0: 1, 1: 2}, {1: 4}]


async def test_a_full_commit_takes_no_further_snapshot_of_several_chunks(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flusher_module, "COMMIT_BYTES", 450_000)
    for module in (closed_snapshot, segment):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 500)
    async with running() as run:
        reader = cursor_at(run.partition)
        for number in range(4):
            for batch in range(2):
                keys = [b"%d %d %d" % (number, batch, row) for row in range(100)]
                put(run.partition, *keys, value=VALUE)
            while reader.poll():
                reader.next()
        await trio.sleep(1.0)
        writes = [write for _, commit in run.store.commits for write in commit.writes]
        assert [(len(write.chunks), write.ends) for write in writes] == [
            (6, [200, 400, 600]),
            (2, [800]),
        ]


def _make_commits_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits commits to some 200 kB, and chunks to 500 bytes."""
    monkeypatch.setattr(flusher_module, "COMMIT_BYTES", 200_000)
    monkeypatch.setattr(flusher_module, "COMMIT_BYTES_MAX", 250_000)
    for module in (closed_snapshot, segment):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 500)


async def test_a_snapshot_larger_than_a_commit_is_written_in_several_commits(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts as on disk with the last commit. Other partitions are written in between."""
    _make_commits_small(monkeypatch)
    async with running(partitions=2, commit_s=0.25) as run:
        partition, (_, other) = run.partition, run.bucket.partitions
        reader = cursor_at(partition)
        put(partition, b"before")
        while reader.poll():
            reader.next()
        for batch in range(9):
            put(partition, *(b"%d %d" % (batch, row) for row in range(100)), value=VALUE)
        put(other, b"a")
        answers = partition.repeated_batches.answers
        answers.remember(WriterToken(bytes(16), 1), b"answer", 500)
        run.wait_for("before", 1)
        run.wait_for("other", 1, partition=1)
        run.wait_for("large", 500)
        # Two commits of the large snapshot are on disk.
        await trio.sleep(0.6)
        assert run.answers == [("before", True), ("other", True)]
        assert partition.manager.persistence.committed_seq == 1
        partition.check_invariants()
        await trio.sleep(1.0)
        assert run.answers[2:] == [("large", True)]
        assert partition.manager.persistence.committed_seq == 901
        partition.check_invariants()
        commits = [commit.writes for _, commit in run.store.commits]
        assert [[write.partition for write in writes] for writes in commits] == [[0], [1, 0], [0]]
        *fronts, last = [writes[-1] for writes in commits]
        for front in fronts:
            assert sum(chunk.nbytes for chunk in front.chunks) < 400_000
            assert front.record.high == 1
            assert front.record.partial == PartialRecord(
                partition.failover_log.current, SeqNo(1), SeqNo(901), front.chunks[-1].end
            )
        assert [write.ends for write in (*fronts, last)] == [[1], [], [901]]
        assert (last.record.high, last.record.partial) == (901, None)
        assert [bool(write.answers) for write in (*fronts, last)] == [False, False, True]


async def test_large_snapshots_of_similar_size_are_written_one_after_the_other(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If they took turns, all would be complete only near the end, and no memory would be freed
    before. A much smaller snapshot does not wait."""
    _make_commits_small(monkeypatch)
    async with running(partitions=3, commit_s=0.25) as run:
        for partition, batches in zip(run.bucket.partitions, (12, 12, 3), strict=True):
            for batch in range(batches):
                put(partition, *(b"%d %d" % (batch, row) for row in range(100)), value=VALUE)
        began = trio.current_time()
        await trio.sleep(5.0)
        commits = [commit.writes for _, commit in run.store.commits]
        order = [write.partition for writes in commits for write in writes]
        assert order == [0, 2, 0, 0, 0, 1, 1, 1, 1]
        assert [writes[-1].ends for writes in commits if writes[-1].ends] == [[300], [1200], [1200]]
        # A snapshot that waited for another one is written without a further interval.
        assert run.store.begins == pytest.approx(
            [began + FLUSH_INTERVAL_S + 0.25 * number for number in range(len(commits))]
        )
        for partition in run.bucket.partitions:
            partition.check_invariants()


async def test_a_large_snapshot_does_not_wait_for_a_partition_that_was_restarted(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    _make_commits_small(monkeypatch)
    async with running(partitions=2) as run:
        first, second = run.bucket.partitions
        second.restart_at(SeqNo(5))
        run.flusher._unfinished_partitions[P1] = None
        for batch in range(12):
            put(first, *(b"%d %d" % (batch, row) for row in range(100)), value=VALUE)
        await trio.sleep(5.0)
        assert first.manager.persistence.committed_seq == first.high_seq == 1200
        assert not run.flusher._unfinished_partitions


async def test_changes_that_arrive_while_a_commit_is_collected_go_into_the_next(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Other tasks run after each chunk.
    monkeypatch.setattr(flusher_module, "STEP_BYTES", 0)
    async with running() as run:
        partition, checkpoint = run.partition, trio.lowlevel.checkpoint

        async def have_turns() -> None:
            if partition.manager.persistence.seq == partition.high_seq == 1:
                put(partition, b"b")
            await checkpoint()

        monkeypatch.setattr(trio.lowlevel, "checkpoint", have_turns)
        put(partition, b"a")
        await trio.sleep(1.0)
        assert run.store.highs() == [{0: 1}, {0: 2}]
        # The second commit begins after the usual interval.
        first, second = run.store.begins
        assert second - first == pytest.approx(FLUSH_INTERVAL_S)


async def test_commits_wait_for_the_index_only_while_it_can_be_written(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_lag, "UNINDEXED_MAX", 5)
    async with running(partitions=2) as run:
        first, second = run.bucket.partitions
        flusher = run.flusher

        async def is_written() -> bool:
            """Whether a change of the second partition is written to disk."""
            put(second, b"%d" % second.high_seq)
            await trio.sleep(1.0)
            return second.manager.persistence.committed_seq == second.high_seq

        put(first, *(b"%d" % number for number in range(6)))
        await trio.sleep(1.0)
        assert flusher.index_lag.unindexed_count() == 6
        assert not await is_written()
        # Commits do not wait for a partition whose index is damaged.
        flusher.index_lag.set_stuck(P0, True)
        assert flusher.index_lag.unindexed_count() == 0
        await trio.sleep(1.0)
        assert second.manager.persistence.committed_seq == 1
        flusher.index_lag.set_stuck(P0, False)
        assert not await is_written()
        flusher.index_lag.set_can_move(False)
        await trio.sleep(1.0)
        assert second.manager.persistence.committed_seq == 2
        flusher.index_lag.set_can_move(True)
        assert not await is_written()
        first.note_index_progress(SeqNo(6), 6)
        flusher.index_lag.set_can_move(True)
        await trio.sleep(1.0)
        assert second.manager.persistence.committed_seq == 3


async def test_commits_do_not_wait_for_the_index_of_what_a_replica_loads(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another node's data arrives as fast as the disk can write it, for minutes."""
    monkeypatch.setattr(index_lag, "UNINDEXED_MAX", 5)
    async with running(partitions=2) as run:
        first, second = run.bucket.partitions
        first.change_state(PartitionState.REPLICA, first.failover_log)
        first.restart_at(SeqNo(1000))
        assert run.flusher.index_lag.unindexed_count() == 1000
        put(second, b"k")
        await trio.sleep(1.0)
        assert second.manager.persistence.committed_seq == 1
        # When the partition is active, its own changes stay in memory until they are indexed.
        first.change_state(PartitionState.ACTIVE, first.failover_log)
        put(second, b"k")
        await trio.sleep(1.0)
        assert second.manager.persistence.committed_seq == 1


async def test_a_partition_that_is_handed_over_does_not_wait_for_the_index(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No node accepts its writes meanwhile, and after ten seconds it is active again."""
    monkeypatch.setattr(index_lag, "UNINDEXED_MAX", 5)
    async with running(partitions=2) as run:
        first, second = run.bucket.partitions
        put(first, *(b"%d" % number for number in range(6)))
        await trio.sleep(1.0)
        put(second, b"k")
        await trio.sleep(1.0)
        assert second.manager.persistence.committed_seq == 0
        second.change_state(PartitionState.PENDING, second.failover_log)
        with trio.fail_after(1.0):
            await run.flusher.wait_until_persisted(second, SeqNo(1))
        # A change of the other partition waits again.
        put(first, b"k")
        await trio.sleep(1.0)
        assert first.manager.persistence.committed_seq == 6


async def test_a_stop_writes_everything_at_once_though_the_index_is_far_behind(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_lag, "UNINDEXED_MAX", 0)
    store, bucket = CommitLog(), new_bucket(2)
    flusher = Flusher(store, bucket, lambda: None, lambda _: iter(()))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(flusher.run)
        put(bucket.partitions[0], b"a")
        await trio.sleep(1.0)
        put(bucket.partitions[1], b"b")
        await trio.sleep(1.0)
        began = trio.current_time()
        flusher.stop()
    assert trio.current_time() == began
    assert store.highs() == [{0: 1}, {1: 1}]
