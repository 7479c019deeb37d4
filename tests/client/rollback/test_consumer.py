"""A consumer that remembers its received keys: cut and killed anywhere, with failovers at any
time."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.kit.branches import Branches
from tests.kit.consuming import fill_one_partition, until_completed
from tests.kit.drawn_schedule import FailoverSchedule
from tests.kit.effort import effort
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from tests.kit.mirror import apply_mutation
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.client import (
    ChunkReceived,
    Consumer,
    CycleCompleted,
    DamagedFileError,
    Event,
    Item,
    MemoryStore,
    ReceivedKeysLimits,
    ResumeState,
    RollbackConsumer,
    RolledBack,
    SaveLimits,
    SnapshotEnd,
    SnapshotStart,
    StreamAccepted,
    Undone,
    consume_with_rollback,
)
from upr_protocol.client.rollback import checksummed_file, received_keys_file
from upr_protocol.client.rollback.consumer import ABOVE_POSITION
from upr_protocol.client.rollback.planner import FOREIGN, RollbackPlanner
from upr_protocol.client.rollback.received_keys import ReceivedVersion
from upr_protocol.client.rollback.received_keys_file import ReceivedKeysFile
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import SEQ_MAX, Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import Get, Message

URL = "upr://fake/b"
Items = dict[bytes, tuple[int, bytes]]


class Crash(Exception):  # noqa: N818  it is one
    """The application was killed."""


class Copy:
    """A copy of a bucket that is on disk at once, while the resume state lags behind.

    It checks what is promised: at each end that is told it is what the server had there; and when a
    snapshot begins nothing is left of what neither its history nor a later one had.

    Args:
        branches: What every history of the server had.
        dies: Whether the application is killed now.
        skips_known: Whether it skips changes by their number: those up to its last `SnapshotEnd`,
            or up to a later `Undone.to` if that is lower.

    Attributes:
        items: By partition and key the number and the value.
    """

    def __init__(self, branches: Branches, dies: Callable[[], bool], *, skips_known: bool) -> None:
        self._branches = branches
        self._dies = dies
        self._skips_known = skips_known
        self._complete_seqs: dict[PartitionId, SeqNo] = {}
        """By partition the number up to which it lacks nothing. The highest that it has applied is
        none: a snapshot leaves out what is superseded at its end, and that may never come."""
        self.items: dict[PartitionId, Items] = {}
        self.ends = 0
        self.undone: list[Undone] = []
        self._histories: dict[PartitionId, HistoryId] = {}

    def contents(self) -> dict[bytes, bytes]:
        return {key: value for items in self.items.values() for key, (_, value) in items.items()}

    def deal_with(self, event: Event | Undone) -> None:
        if isinstance(event, SnapshotStart):
            self._histories[event.partition] = event.history_id
            self._check_nothing_foreign(event)
        elif isinstance(event, ChunkReceived):
            self._apply(event)
        elif isinstance(event, SnapshotEnd):
            self._check_end(event)
        elif isinstance(event, Undone):
            self._undo(event)

    def _perhaps_die(self) -> None:
        if self._dies():
            raise Crash

    def _apply(self, event: ChunkReceived) -> None:
        items = self.items.setdefault(event.partition, {})
        for mutation in event.chunk:
            self._perhaps_die()
            complete_seq = self._complete_seqs.get(event.partition, 0)
            if mutation.seq > complete_seq or not self._skips_known:
                apply_mutation(items, mutation)

    def _undo(self, event: Undone) -> None:
        self.undone.append(event)
        if not event.to:
            self._perhaps_die()
            self.items.pop(event.partition, None)
            self._complete_seqs.pop(event.partition, None)
            return
        items = self.items.setdefault(event.partition, {})
        for key, item in event.documents.items():
            self._perhaps_die()
            if item is None:
                items.pop(key, None)
            else:
                items[key] = (item.seq, item.value)
        complete_seq = self._complete_seqs.get(event.partition, SeqNo(0))
        self._complete_seqs[event.partition] = min(complete_seq, event.to)

    def _check_nothing_foreign(self, event: SnapshotStart) -> None:
        had = self._branches.had_since(event.partition, event.history_id)
        for key, (seq, value) in self.items.get(event.partition, {}).items():
            assert (key, seq, value) in had, (event, key, seq)

    def _check_end(self, event: SnapshotEnd) -> None:
        self.ends += 1
        expected = self._branches.contents(
            event.partition, self._histories[event.partition], event.end
        )
        items = self.items.get(event.partition, {})
        assert {key: value for key, (_, value) in items.items()} == expected, event
        self._complete_seqs[event.partition] = event.end


class Disk(MemoryStore):
    """A store to which nothing can be written once the process is killed."""

    off = False

    async def save(self, state: ResumeState) -> None:
        if not self.off:
            await super().save(state)


class Schedule(FailoverSchedule):
    """What happens to a copy and a server, by a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        dies, skips_known = partial(self._chance, 150), self._chance(2)
        self.copy = Copy(self.branches, dies, skips_known=skips_known)
        self._received_keys = folder / "received-keys"
        self._limits = ReceivedKeysLimits(entries=self._rng.choice([3, 12, 1000]))
        self._store = Disk()
        self._atomic = self._chance(3)

    def _resume(self) -> MemoryStore | ResumeState:
        if self._atomic:
            return self._store.state or ResumeState("b")
        return self._store

    def _consume(
        self, save_limits: SaveLimits | None = None
    ) -> AbstractAsyncContextManager[RollbackConsumer]:
        assert self._net is not None
        self._store.off = False
        return consume_with_rollback(
            URL,
            self._received_keys,
            resume=self._resume(),
            received_keys_limits=self._limits,
            dial=self._net.dial,
            draw=self._rng.random,
            save_limits=save_limits,
        )

    async def _follow_for_a_while(self) -> None:
        async with self._consume(SaveLimits(5, 20, 10_000)) as consumer:
            for _ in range(self._rng.randrange(60)):
                with trio.move_on_after(10):
                    event = await anext(consumer)
                    with self._killed_by_crash():
                        self.copy.deal_with(event)
                        if self._chance(15):
                            raise Crash
                    self._keep(consumer)
                self._disturb()
            # Leaving saves; whoever is killed does not.
            self._store.off = self._chance(2)

    @contextmanager
    def _killed_by_crash(self) -> Iterator[None]:
        try:
            yield
        except Crash:
            self._store.off = True
            raise

    def _keep(self, consumer: RollbackConsumer) -> None:
        state = consumer.resume_state
        for partition, position in state.positions.items():
            assert consumer.position(partition) == position
        if self._atomic:
            self._store.state = state

    def _tear(self) -> None:
        """What a crash may leave of the record that was being written."""
        if self._received_keys.exists() and self._chance(3):
            data = self._received_keys.read_bytes()
            self._received_keys.write_bytes(
                data + b"\x40\0\0\0\xbf\xff\xff\xffabcdefgh"[: self._rng.randrange(16)]
            )

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._net = FakeNet(nursery, self.server)
            for _ in range(8):
                self._change()
                self._net.budgets = self._budgets()
                with suppress(Crash, BrokenError):
                    await self._follow_for_a_while()
                self._tear()
            self._net.budgets = iter(())
            self._disasters = False
            self.copy._dies = lambda: False
            await self._catch_up()
            nursery.cancel_scope.cancel()

    async def _catch_up(self) -> None:
        async with self._consume() as consumer:
            async for event in consumer:
                self.copy.deal_with(event)
                if isinstance(event, CycleCompleted):
                    break


@given(st.integers(0, 2**32))
@settings(max_examples=effort(25, 50), deadline=None)
def test_at_each_snapshot_end_the_copy_equals_what_the_server_had(
    seed: int,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(seed, Path(folder))
        schedule.run()
        assert schedule.copy.contents() == schedule.server.contents()


async def test_one_event_has_everything_to_undo(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 10, b"old")
    keys, file = tmp_path / "received-keys", tmp_path / "resume"
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        await until_completed(consumer)
        server.put(b"3", b"never had")
        await until_completed(consumer)
        net.cut()
        server.partitions[0].fail_over(77, 8)
        server.put(b"9", b"new")
        undone, start, chunk, end, *_ = await until_completed(consumer)
        assert isinstance(undone, Undone)
        assert (undone.ceiling, undone.to, undone.consistent_from) == (8, 8, 9)
        assert "diverge" in undone.reason
        values = {key: item and item.value for key, item in undone.documents.items()}
        assert values == {b"3": b"old", b"8": None, b"9": b"new"}
        assert isinstance(start, SnapshotStart)
        assert (start.history_id, start.start) == (77, 8)
        assert isinstance(chunk, ChunkReceived)
        assert end == SnapshotEnd(PartitionId(0), SeqNo(9))
    # It is over: nothing is told again.
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        assert await until_completed(consumer) == [CycleCompleted(1)]


async def test_undone_comes_first_though_the_server_begins_a_history_while_keys_are_read(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 10, b"old")
    partition = server.partitions[0]

    def fail_over_at_first_get(message: Message) -> None:
        if isinstance(message, Get) and partition.log.current == 77:
            partition.fail_over(78, 9)
            server.put(b"6", b"newest")
            net.cut()

    file = tmp_path / "resume"
    async with consume_with_rollback(
        URL, tmp_path / "keys", resume=file, dial=net.dial
    ) as consumer:
        await until_completed(consumer)
        server.put(b"3", b"never had")
        await until_completed(consumer)
        net.cut()
        partition.fail_over(77, 8)
        server.put(b"4", b"kept")
        server.put(b"5", b"lost with 77")
        server.refuse = fail_over_at_first_get
        events: list[Event | Undone] = []
        while not (events and isinstance(events[-1], SnapshotEnd)):
            event = await anext(consumer)
            if not isinstance(event, CycleCompleted):
                events.append(event)
        undone, start, chunk, undone_again, start_again, chunk_again, end = events
        assert isinstance(undone, Undone)
        assert (undone.ceiling, undone.to, undone.consistent_from) == (8, 8, SEQ_MAX)
        values = {key: item and item.value for key, item in undone.documents.items()}
        assert values == {b"3": b"old", b"8": None, b"9": None}
        assert isinstance(start, SnapshotStart)
        assert (start.history_id, start.start) == (77, 8)
        assert isinstance(chunk, ChunkReceived)
        assert isinstance(undone_again, Undone)
        assert (undone_again.ceiling, undone_again.to, undone_again.consistent_from) == (9, 9, 10)
        values = {key: item and item.value for key, item in undone_again.documents.items()}
        assert values == {b"3": b"old", b"5": b"old", b"8": None, b"9": None}
        assert isinstance(start_again, SnapshotStart)
        assert (start_again.history_id, start_again.start) == (78, 9)
        assert isinstance(chunk_again, ChunkReceived)
        assert end == SnapshotEnd(PartitionId(0), SeqNo(10))
        await consumer.save()
    async with consume_with_rollback(
        URL, tmp_path / "keys", resume=file, dial=net.dial
    ) as consumer:
        assert await until_completed(consumer) == [CycleCompleted(1)]


async def test_a_key_read_in_an_unknown_history_is_read_again_for_the_next_stream(
    tmp_path: Path,
) -> None:
    """Also if the stream brings it once more, and in the next process."""
    partition, asked = PartitionId(0), list[tuple[HistoryId, list[bytes]]]()

    async def read_newest(
        partition: PartitionId, keys: Sequence[bytes], history_id: HistoryId
    ) -> tuple[list[Item | None], SeqNo]:
        await trio.lowlevel.checkpoint()
        asked.append((history_id, list(keys)))
        if history_id == 2:
            raise ServerError(Status.HISTORY_CHANGED, "it is 3")
        return [None] * len(keys), SeqNo(0)

    file = ReceivedKeysFile(tmp_path / "keys", "b")
    planner = RollbackPlanner(file, read_newest)
    await file.receive(partition, [(b"a", SeqNo(12), HistoryId(1)), (b"b", SeqNo(9), HistoryId(1))])
    log = FailoverLog.of_pairs([(2, 10), (1, 0)])
    plan = await planner.compare(StreamAccepted(partition, log), SeqNo(10))
    assert plan is not None
    assert plan.event == Undone(partition, SeqNo(10), SeqNo(10), SEQ_MAX, FOREIGN, {b"a": None})
    assert not planner.is_consistent_at(SnapshotEnd(partition, SeqNo(11)))
    assert not planner.is_compared(partition)
    await file.confirm_rollback(partition, plan.versions)
    await file.receive(partition, [(b"a", SeqNo(13), HistoryId(2))])
    file.close()
    file = ReceivedKeysFile(tmp_path / "keys", "b")
    planner = RollbackPlanner(file, read_newest)
    log = log.with_branch(HistoryId(3), SeqNo(20))
    plan = await planner.compare(StreamAccepted(partition, log), SeqNo(13))
    assert plan is not None
    assert (plan.event.to, plan.event.documents) == (13, {b"a": None})
    assert planner.is_consistent_at(SnapshotEnd(partition, SeqNo(13)))
    assert asked == [(2, [b"a"]), (0, [b"a"]), (3, [b"a"])]
    file.close()


async def test_the_next_stream_tells_where_an_unsettled_partition_is_consistent(
    tmp_path: Path,
) -> None:
    """A local copy forgets that a key is foreign when the stream brings it."""

    async def read_newest(
        partition: PartitionId, keys: Sequence[bytes], history_id: HistoryId
    ) -> tuple[list[Item | None], SeqNo]:
        await trio.lowlevel.checkpoint()
        if history_id == 2:
            raise ServerError(Status.HISTORY_CHANGED, "it is 3")
        return [None] * len(keys), SeqNo(11)

    partition = PartitionId(0)
    file = ReceivedKeysFile(tmp_path / "keys", "b")
    planner = RollbackPlanner(file, read_newest)
    await file.receive(partition, [(b"a", SeqNo(12), HistoryId(1))])
    log = FailoverLog.of_pairs([(2, 10), (1, 0)])
    rollback = RolledBack(partition, SeqNo(10), SeqNo(10), "failover")
    assert planner.begin_rollback(rollback) is None
    plan = await planner.compare(StreamAccepted(partition, log), SeqNo(10))
    assert plan is not None
    assert plan.event.consistent_from == SEQ_MAX
    await file.confirm_rollback(partition, {b"a": ReceivedVersion(SeqNo(13), HistoryId(2))})
    accepted = StreamAccepted(partition, log.with_branch(HistoryId(3), SeqNo(20)))
    plan = await planner.compare(accepted, SeqNo(13))
    assert plan is not None
    assert plan.event == Undone(partition, SeqNo(10), SeqNo(13), SeqNo(13), "failover", {})
    assert await planner.compare(accepted, SeqNo(13)) is None
    file.close()


async def test_a_rollback_below_the_received_keys_starts_the_partition_at_0(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 40, b"old")
    async with consume_with_rollback(
        URL,
        tmp_path / "received-keys",
        resume=tmp_path / "resume",
        received_keys_limits=ReceivedKeysLimits(entries=20),
        dial=net.dial,
    ) as consumer:
        await until_completed(consumer)
        server.put(b"new", b"v")
        await until_completed(consumer)
        net.cut()
        server.partitions[0].fail_over(77, 5)
        undone, start, *_ = await until_completed(consumer)
        assert isinstance(undone, Undone)
        assert (undone.ceiling, undone.to, undone.documents) == (5, 0, {})
        assert "do not reach down to it" in undone.reason
        assert isinstance(start, SnapshotStart)
        assert (start.start, start.end) == (0, 5)


@pytest.mark.parametrize("start", [0, 9, 10, 11, 20, 25])
async def test_keys_are_kept_with_the_branches_in_which_they_were_written(start: int) -> None:
    """A chunk from the disk may have rows of several branches."""
    log = FailoverLog.of_pairs([(3, 20), (2, 10), (1, 0)])
    rows = [
        Mutation(Operation.SET, b"k%d" % seq, b"", SeqNo(seq), Cas(1))
        for seq in range(start + 1, start + 16)
    ]
    received: list[tuple[bytes, SeqNo, HistoryId]] = []

    class Keys:
        async def receive(
            self, _partition: PartitionId, keys: list[tuple[bytes, SeqNo, HistoryId]]
        ) -> None:
            received.extend(keys)

    consumer = RollbackConsumer(
        cast("Consumer", None),
        cast("RollbackPlanner", None),
        cast("ReceivedKeysFile", Keys()),
        (),
    )
    chunk = Chunk.build(rows, start=SeqNo(start))
    await consumer._keep_chunk(ChunkReceived(PartitionId(0), chunk), log)
    assert received == [(row.key, row.seq, log.branch_of(row.seq)) for row in rows]


async def resume_state_without_keys(
    net: FakeNet, server: FakeServer, folder: Path
) -> tuple[Path, Path]:
    """A consumer has received a partition, and its file of received keys is lost. Returns the paths
    of that file and of the resume state."""
    fill_one_partition(server, 10, b"old")
    keys, file = folder / "received-keys", folder / "resume"
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        await until_completed(consumer)
    keys.unlink()
    return keys, file


async def test_a_new_file_of_received_keys_knows_nothing_below_the_resume_state(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The keys above the ceiling were received and are not recorded: only 0 is right."""
    keys, file = await resume_state_without_keys(net, server, tmp_path)
    server.partitions[0].fail_over(77, 5)
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        undone, *_ = await until_completed(consumer)
        assert isinstance(undone, Undone)
        assert (undone.ceiling, undone.to, undone.documents) == (5, 0, {})


@pytest.mark.parametrize("written_before_crash", range(4))
async def test_a_crash_while_the_file_of_received_keys_is_begun_claims_no_keys(
    net: FakeNet,
    server: FakeServer,
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    written_before_crash: int,
) -> None:
    """With its header, and without where it begins, it looked as if it knew every key."""
    keys, file = await resume_state_without_keys(net, server, tmp_path)
    left = written_before_crash

    def crash(*_args: object, call: Callable[..., object], **options: object) -> object:
        nonlocal left
        if not left:
            raise Crash
        left -= 1
        return call(*_args, **options)

    with monkeypatch.context() as patch, suppress(Crash):
        for module, name in ((checksummed_file, "replace_file"), (os, "write")):
            patch.setattr(module, name, partial(crash, call=getattr(module, name)))
        async with consume_with_rollback(URL, keys, resume=file, dial=net.dial):
            raise Crash
    server.partitions[0].fail_over(77, 5)
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        undone, *_ = await until_completed(consumer)
        assert isinstance(undone, Undone)
        assert (undone.ceiling, undone.to, undone.documents) == (5, 0, {})


async def test_received_keys_beside_an_older_resume_state_start_the_partition_at_0(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """Keys between the old position and the floor were received, and are not recorded."""
    keys, file = await resume_state_without_keys(net, server, tmp_path)
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        assert await until_completed(consumer) == [CycleCompleted(1)]
    file.unlink()
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        undone, start, *_ = await until_completed(consumer)
        assert isinstance(undone, Undone)
        assert (undone.to, undone.reason) == (0, ABOVE_POSITION)
        assert isinstance(start, SnapshotStart)
        assert start.start == 0


class NotingStore:
    """A resume store that notes how many received keys are on disk when it is to save a state."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.recorded: list[int] = []

    async def load(self) -> ResumeState | None:
        await trio.lowlevel.checkpoint()
        return None

    async def save(self, state: ResumeState) -> None:
        await trio.lowlevel.checkpoint()
        self.recorded.append(recorded_keys(self._path, self._path.parent))


async def test_buffered_keys_are_recorded_before_the_position_is_saved(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """A position whose keys are not recorded could not be rolled back key by key."""
    fill_one_partition(server, 10, b"old")
    path = tmp_path / "received-keys"
    store = NotingStore(path)
    async with consume_with_rollback(
        URL, path, resume=store, buffer_received_keys=True, dial=net.dial
    ) as consumer:
        await until_completed(consumer)
        assert recorded_keys(path, tmp_path) == 0
        store.recorded.clear()
        await consumer.save()
        assert store.recorded == [10]


def recorded_keys(path: Path, folder: Path) -> int:
    """How many keys a crash at this moment would leave on disk."""
    copy = shutil.copy(path, folder / "copy")
    received_keys = ReceivedKeysFile(copy, "b")
    received_keys.close()
    return len(received_keys.keys)


async def test_a_restart_from_0_that_was_cut_short_begins_at_0_again(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """The application may have dropped half of the partition, while the file still has all keys."""
    fill_one_partition(server, 40, b"old")
    keys, file = tmp_path / "received-keys", tmp_path / "resume"
    limits = ReceivedKeysLimits(entries=20)
    async with consume_with_rollback(
        URL, keys, resume=file, received_keys_limits=limits, dial=net.dial
    ) as consumer:
        await until_completed(consumer)
        server.put(b"new", b"v")
        await until_completed(consumer)
        net.cut()
        server.partitions[0].fail_over(77, 5)
        undone = await anext(consumer)
        assert isinstance(undone, Undone)
        assert undone.to == 0
    async with consume_with_rollback(URL, keys, resume=file, dial=net.dial) as consumer:
        undone = await anext(consumer)
        assert isinstance(undone, Undone)
        assert (undone.to, undone.documents) == (0, {})


async def test_the_position_is_saved_before_keys_are_dropped(
    net: FakeNet,
    server: FakeServer,
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill_one_partition(server, 40)
    store, trim = MemoryStore(), ReceivedKeysFile.trim
    saved_and_droppable: list[tuple[SeqNo, SeqNo]] = []

    async def trim_after_save(
        received_keys: ReceivedKeysFile, droppable_seq: Callable[[PartitionId], SeqNo]
    ) -> None:
        state = store.state or ResumeState("b")
        saved_seq = state.position(PartitionId(0)).highest_received
        saved_and_droppable.append((saved_seq, droppable_seq(PartitionId(0))))
        await trim(received_keys, droppable_seq)

    monkeypatch.setattr(ReceivedKeysFile, "trim", trim_after_save)
    async with consume_with_rollback(
        URL,
        tmp_path / "received-keys",
        resume=store,
        received_keys_limits=ReceivedKeysLimits(entries=20),
        save_limits=SaveLimits(1e9, 1e9, 1e9),
        dial=net.dial,
    ) as consumer:
        await until_completed(consumer)
    assert saved_and_droppable
    assert all(saved >= droppable > 0 for saved, droppable in saved_and_droppable)


@pytest.mark.parametrize(("durable_seq", "saves"), [(30, False), (5, True)])
async def test_keys_are_forgotten_without_a_save_where_their_changes_are_durable(
    net: FakeNet,
    server: FakeServer,
    tmp_path: Path,
    autojump_clock: MockClock,
    durable_seq: int,
    saves: bool,
) -> None:
    fill_one_partition(server, 10)
    store = MemoryStore()
    async with consume_with_rollback(
        URL,
        tmp_path / "received-keys",
        resume=store,
        received_keys_limits=ReceivedKeysLimits(entries=20),
        save_limits=SaveLimits(1e9, 1e9, 1e9),
        dial=net.dial,
    ) as consumer:
        consumer.durable_seq = lambda _partition: SeqNo(durable_seq)
        await until_completed(consumer)
        saves_before = store.saves
        for index in range(10, 30):
            server.put(b"%d" % index, b"v")
        await until_completed(consumer)
        assert len(consumer._received_keys.keys) <= 20
        assert (store.saves > saves_before) == saves


async def test_the_file_of_a_few_keys_that_change_for_ever_stays_small(
    net: FakeNet,
    server: FakeServer,
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was written anew only when keys were forgotten, and of these none ever is."""
    monkeypatch.setattr(received_keys_file, "_GARBAGE_BYTES", 200)
    fill_one_partition(server, 3)
    path = tmp_path / "received-keys"
    sizes: list[int] = []
    async with consume_with_rollback(URL, path, resume=MemoryStore(), dial=net.dial) as consumer:
        for _ in range(50):
            await until_completed(consumer)
            sizes.append(path.stat().st_size)
            for index in range(3):
                server.put(b"%d" % index, b"v")
    assert sizes[0] < max(sizes) < 700
    assert not consumer._received_keys.keys.is_overfull


async def test_a_damaged_file_of_received_keys_raises_an_error(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    fill_one_partition(server, 10, b"old")
    keys = tmp_path / "received-keys"
    async with consume_with_rollback(
        URL, keys, resume=tmp_path / "resume", dial=net.dial
    ) as consumer:
        await until_completed(consumer)
    data = bytearray(keys.read_bytes())
    data[15] ^= 1
    keys.write_bytes(data)
    with pytest.raises(DamagedFileError, match="damaged at byte 0"):
        async with consume_with_rollback(URL, keys, resume=tmp_path / "resume", dial=net.dial):
            pass


class ConsumerAt:
    """A consumer that stands at a number, and has nothing to save."""

    def __init__(self, seq: int) -> None:
        self._position = Position(FailoverLog(), SeqNo(seq), SeqNo(seq), None)

    def position(self, partition: PartitionId) -> Position:
        return self._position

    async def save(self) -> None:
        await trio.lowlevel.checkpoint()


async def test_a_key_that_is_missing_now_was_deleted_at_any_number_up_to_the_highest(
    tmp_path: Path,
) -> None:
    """So no snapshot end below the highest number is a state of the server."""

    async def read_newest(
        partition: PartitionId, keys: Sequence[bytes], history_id: HistoryId
    ) -> tuple[list[Item | None], SeqNo]:
        await trio.lowlevel.checkpoint()
        return [None] * len(keys), SeqNo(20)

    partition = PartitionId(0)
    file = ReceivedKeysFile(tmp_path / "keys", "b")
    planner = RollbackPlanner(file, read_newest)
    await file.receive(partition, [(b"a", SeqNo(12), HistoryId(1))])
    log = FailoverLog.of_pairs([(2, 10), (1, 0)])
    plan = await planner.compare(StreamAccepted(partition, log), SeqNo(10))
    assert plan is not None
    assert plan.event.documents == {b"a": None}
    assert plan.event.consistent_from == planner.consistent_from(partition) == 20
    assert not planner.is_consistent_at(SnapshotEnd(partition, SeqNo(19)))
    assert planner.is_consistent_at(SnapshotEnd(partition, SeqNo(20)))
    file.close()


async def test_no_key_is_dropped_while_its_partition_is_about_to_roll_back(tmp_path: Path) -> None:
    """Before the partition's stream is accepted, the application may be given events of other
    partitions, and after each of them the received keys may be trimmed."""

    async def read_newest(
        partition: PartitionId, keys: Sequence[bytes], history_id: HistoryId
    ) -> tuple[list[Item | None], SeqNo]:
        await trio.lowlevel.checkpoint()
        raise AssertionError(f"{keys} of {partition} are foreign to {history_id}")

    partition, log = PartitionId(0), FailoverLog.of_pairs([(1, 0)])
    file = ReceivedKeysFile(tmp_path / "keys", "b", ReceivedKeysLimits(entries=1))
    planner = RollbackPlanner(file, read_newest)
    await file.receive(partition, [(b"a", SeqNo(9), HistoryId(1)), (b"b", SeqNo(10), HistoryId(1))])
    assert await planner.compare(StreamAccepted(partition, log), SeqNo(10)) is None
    assert planner.is_compared(partition)
    assert await planner.choose_target(partition, SeqNo(8), "failover") == 8
    assert not planner.is_compared(partition)
    consumer = RollbackConsumer(cast("Consumer", ConsumerAt(10)), planner, file, [])
    await consumer.save()
    assert len(file.keys) == 2
    assert await planner.compare(StreamAccepted(partition, log), SeqNo(10)) is None
    # They are looked at again when there are more.
    await file.receive(partition, [(b"c", SeqNo(10), HistoryId(1))])
    await consumer.save()
    assert len(file.keys) < 2
    file.close()
