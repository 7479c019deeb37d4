"""The resume state: its rules, and consumers that are cut, killed and rolled back at any moment."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing
from hypothesis import assume, given, reject, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.kit.drawn_schedule import DrawnSchedule
from tests.kit.effort import effort
from tests.kit.fake_net import FakeNet
from tests.kit.fake_partition import FakePartition
from tests.kit.fake_server import FakeServer
from tests.kit.mirror import Mirror
from tests.protocol.strategies import HISTORY_IDS, SEQS
from upr_protocol.client import (
    BlockingConsumer,
    ChunkReceived,
    Consumer,
    CycleCompleted,
    Event,
    FileStore,
    MemoryStore,
    ResumeState,
    ResumeStateError,
    RolledBack,
    SaveLimits,
    SnapshotEnd,
    SnapshotStart,
    consume,
)
from upr_protocol.client.core import resume_state as rules
from upr_protocol.errors import BrokenError, ServerError
from upr_protocol.failover import (
    FailoverLog,
    PartialSnapshot,
    Position,
    Retry,
    RollBack,
    decide_start,
)
from upr_protocol.ids import SEQ_MAX, HistoryId, PartitionId, SeqNo

URL = "upr://fake/b"


# The rules, against what was received as a plain list.


@st.composite
def conversations(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """What a stream says, over several connections: (what, history or end, number)."""
    steps: list[tuple[str, int, int]] = []
    seq = complete = draw(st.integers(0, 3))
    history = 1
    steps.append(("begin", history, seq))
    for _ in range(draw(st.integers(0, 12))):
        end = max(seq, complete) + draw(st.integers(1, 6))
        while seq < end and draw(st.integers(0, 5)):
            seq = draw(st.integers(seq + 1, end))
            steps.append(("chunk", end, seq))
        if seq == end:
            complete = seq
            steps.append(("end", end, seq))
        else:
            # Cut inside: the same history goes on, with a snapshot that ends no earlier.
            steps.append(("cut", history, seq))
            steps.append(("chunk", end, end))
            steps.append(("end", end, end))
            seq = complete = end
        if not draw(st.integers(0, 4)):
            history += 1
            seq = complete = draw(st.integers(0, complete))
            steps.append(("roll back", history, seq))
    return steps


@given(conversations())
def test_a_position_covers_exactly_what_was_received(steps: list[tuple[str, int, int]]) -> None:
    """The naive model keeps all that was said and looks through it."""
    position = Position()
    history = HistoryId(0)
    log = FailoverLog()
    ends: list[int] = []
    highest = 0
    for step, history_number, seq in steps:
        if step == "begin":
            history = HistoryId(history_number)
            log = FailoverLog.of_pairs([(history_number, 0)])
            position = Position(log, SeqNo(seq), SeqNo(seq), None)
            ends, highest = [seq], seq
        elif step == "chunk":
            position = rules.position_after_chunk(
                position, history, SeqNo(history_number), SeqNo(seq)
            )
            highest = seq
            partial = PartialSnapshot(history, SeqNo(ends[-1]), SeqNo(history_number))
            assert position.partial == partial
        elif step == "end":
            position = rules.position_after_snapshot(position, SeqNo(history_number))
            ends.append(history_number)
            assert position.partial is None
        elif step == "cut":
            position = rules.position_after_acceptance(position, log)
        else:
            history = HistoryId(history_number)
            log = log.with_branch(history, SeqNo(seq))
            position = rules.position_after_acceptance(
                rules.position_after_rollback(position, SeqNo(seq)), log
            )
            ends, highest = [end for end in ends if end < seq] + [seq], seq
            assert position.partial is None
        assert position.last_complete == ends[-1]
        assert position.highest_received == highest
        assert position.log == log


def test_a_snapshot_that_lacked_only_its_end_is_complete_once_the_stream_is_accepted() -> None:
    log = FailoverLog.of_pairs([(7, 0)])
    position = Position(
        log, SeqNo(5), SeqNo(10), PartialSnapshot(HistoryId(7), SeqNo(5), SeqNo(10))
    )
    assert rules.position_after_acceptance(position, log) == Position(
        log, SeqNo(10), SeqNo(10), None
    )


# As bytes.


@st.composite
def positions(draw: st.DrawFn) -> Position:
    seqs = sorted(draw(st.lists(SEQS, min_size=3, max_size=6, unique=True)))
    ids = draw(st.lists(HISTORY_IDS, min_size=1, max_size=3, unique=True))
    log = FailoverLog.of_pairs(list(zip(ids, reversed(seqs[: len(ids)]), strict=True)))
    complete, highest, end = seqs[-3:]
    if draw(st.booleans()):
        return Position(log, complete, complete, None)
    return Position(log, complete, highest, PartialSnapshot(ids[0], complete, end))


@st.composite
def someone_elses_logs(draw: st.DrawFn, position: Position) -> FailoverLog:
    """Of a server that has some of the branches that led to a position, or all, and maybe more."""
    log = FailoverLog(position.log.entries[draw(st.integers(0, len(position.log))) :])
    if draw(st.booleans()):
        first = log.entries[0].seq if log.entries else 0
        log = log.with_branch(
            HistoryId(draw(HISTORY_IDS)), SeqNo(draw(st.integers(first, SEQ_MAX)))
        )
    return log


@given(st.data(), positions())
def test_every_server_orders_a_pending_rollback_again(
    data: st.DataObject, position: Position
) -> None:
    assume(position.highest_received)
    # It may lie inside a snapshot that was cut.
    ceiling = SeqNo(data.draw(st.integers(0, position.highest_received - 1)))
    assume(rules.ROLLBACK_PENDING not in [entry.history_id for entry in position.log])
    going = rules.position_during_rollback(position, ceiling)
    assert rules.position_during_rollback(going, ceiling) == going
    try:
        server = data.draw(someone_elses_logs(position))
    except ValueError:  # an ID twice
        reject()
    assume(server.current != rules.ROLLBACK_PENDING)
    high = SeqNo(data.draw(st.one_of(st.just(SEQ_MAX), SEQS)))
    decision = decide_start(server, high, SeqNo(0), going)
    assert isinstance(decision, Retry) or (
        isinstance(decision, RollBack) and decision.ceiling <= ceiling
    )
    assert rules.position_after_rollback(going, SeqNo(0)) == rules.position_after_rollback(
        position, SeqNo(0)
    )


def test_a_pending_rollback_into_a_cut_snapshot_gives_up_all_of_it() -> None:
    """Otherwise the server would let the stream continue inside the snapshot."""
    log = FailoverLog.of_pairs([(1, 0)])
    cut = PartialSnapshot(HistoryId(1), SeqNo(5), SeqNo(10))
    position = Position(log, SeqNo(5), SeqNo(8), cut)
    decision = decide_start(
        log, SeqNo(20), SeqNo(0), rules.position_during_rollback(position, SeqNo(7))
    )
    assert isinstance(decision, RollBack)
    assert decision.ceiling == 5


STATES = st.builds(
    ResumeState,
    st.text(max_size=20),
    st.dictionaries(st.integers(0, 1023).map(PartitionId), positions(), max_size=4),
    st.none() | st.binary(max_size=9),
)


@given(STATES)
def test_decode_is_the_reverse_of_encode(state: ResumeState) -> None:
    data = state.encode()
    decoded = ResumeState.decode(data)
    assert decoded == state
    assert decoded.encode() == data
    json.loads(data)


def test_the_same_state_is_the_same_bytes() -> None:
    state = ResumeState("b", {PartitionId(2): Position(), PartitionId(1): Position()})
    same_state = ResumeState("b", {PartitionId(1): Position(), PartitionId(2): Position()})
    assert state.encode() == same_state.encode()


@given(STATES, st.data())
def test_damaged_bytes_never_raise_an_unexpected_error(
    state: ResumeState, data: st.DataObject
) -> None:
    encoded = bytearray(state.encode())
    index = data.draw(st.integers(0, len(encoded) - 1))
    encoded[index] = data.draw(st.integers(0, 255))
    with suppress(ResumeStateError):
        ResumeState.decode(bytes(encoded))


def one_position(complete: int, highest: int, partial: str, log: str = "[]") -> bytes:
    position = (
        f'{{"log":{log},"last_complete":{complete},"highest_received":{highest},'
        f'"partial":{partial}}}'
    )
    return f'{{"version":1,"bucket":"b","partitions":{{"1":{position}}}}}'.encode()


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        pytest.param(b"[" * 5000, id="deep"),
        b"{}",
        b'{"version":2,"bucket":"b","partitions":{}}',
        b'{"version":1,"bucket":7,"partitions":{}}',
        b'{"version":1,"bucket":"b","partitions":[]}',
        b'{"version":1,"bucket":"b","partitions":{},"key_prefix":7}',
        b'{"version":1,"bucket":"b","partitions":{},"key_prefix":"x"}',
        b'{"version":1,"bucket":"b","partitions":{"1024":{}}}',
        b'{"version":1,"bucket":"b","partitions":{"01":{}}}',
        one_position(5, 6, "null"),
        one_position(-5, -5, "null"),
        one_position(5, 6, '{"history":"1","start":5,"end":5}'),
        one_position(5, 6, '{"history":"0","start":5,"end":6}', '[["0",1]]'),
        one_position(5, 5, "null", '[["1",1],["2",7]]'),
    ],
)
def test_bytes_that_are_not_a_resume_state_are_refused(text: bytes) -> None:
    with pytest.raises(ResumeStateError):
        ResumeState.decode(text)


# Kept.


def test_a_file_is_replaced_atomically(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "resume.json")
    assert store.load_now() is None
    state = ResumeState("b", {PartitionId(1): Position()})
    store.save_now(state)
    assert store.load_now() == state
    with store.path.open("rb") as earlier_file:
        store.save_now(ResumeState("b"))
        assert earlier_file.read() == state.encode(), "the earlier file was not written to"
    store.save_now(state)
    (tmp_path / ".resume.json").mkdir()
    with pytest.raises(OSError):  # noqa: PT011  which one depends on the system
        store.save_now(ResumeState("b"))
    assert store.load_now() == state


def test_the_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = FileStore(tmp_path / "resume.json")
    monkeypatch.setattr("os.fsync", fsync)
    with pytest.raises(OSError, match=f"No space left on device: '{store.path}'"):
        store.save_now(ResumeState("b"))


async def test_a_file_that_cannot_be_read_for_now_does_not_hold_up_who_stops(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """As a file on a server that is away, or a pipe that nobody writes to."""
    path = tmp_path / "resume.json"
    os.mkfifo(path)
    with trio.move_on_after(1) as scope:
        await FileStore(path).load()
    assert scope.cancelled_caught
    with path.open("wb"):
        pass  # ends the thread


async def test_a_file_is_read_and_written_by_the_consumer(
    net: FakeNet, server: FakeServer, tmp_path: Path
) -> None:
    path = tmp_path / "resume.json"
    for index in range(10):
        server.put(b"%d" % index, b"v")
    async with consume(URL, dial=net.dial, resume=path, end="now") as consumer:
        first = [event async for event in consumer]
    async with consume(URL, dial=net.dial, resume=str(path), end="now") as consumer:
        second = [event async for event in consumer]
    assert sum(event.chunk.count for event in first if isinstance(event, ChunkReceived)) == 10
    assert not any(isinstance(event, ChunkReceived) for event in second)
    assert not path.with_name(".resume.json").exists()


async def test_the_state_of_another_bucket_is_refused(
    net: FakeNet, autojump_clock: MockClock
) -> None:
    with pytest.raises(ResumeStateError, match="'other'"):
        async with consume(URL, dial=net.dial, resume=ResumeState("other")):
            pass


async def test_the_state_of_other_keys_is_refused(
    net: FakeNet, autojump_clock: MockClock, tmp_path: Path
) -> None:
    """Up to its positions the consumer would lack what was left out."""
    path = tmp_path / "resume.json"
    async with consume(URL, dial=net.dial, resume=path, key_prefix=b"a\xff") as consumer:
        saved_state = consumer.processed_state
    FileStore(path).save_now(saved_state)
    assert saved_state.key_prefix == b"a\xff"
    for key_prefix, text in [
        (b"", "not of all keys"),
        (b"a", "not of the keys that begin with 'a'"),
    ]:
        with pytest.raises(ResumeStateError, match=text):
            async with consume(URL, dial=net.dial, resume=path, key_prefix=key_prefix):
                pass
        with pytest.raises(ResumeStateError, match=r"keys that begin with 'a\\\\xff', not"):
            BlockingConsumer(URL, resume=path, key_prefix=key_prefix)
    async with consume(URL, dial=net.dial, resume=path, key_prefix=b"a\xff") as consumer:
        assert consumer.processed_state == saved_state


def test_a_state_that_does_not_say_which_keys_counts_for_any() -> None:
    """A release that did not save this made it, or a question for the numbers of a time."""
    state = ResumeState.decode(b'{"version":1,"bucket":"b","partitions":{}}')
    assert state.key_prefix is None
    assert state.of_stream("b", b"a").key_prefix == b"a"


async def test_only_processed_events_are_saved(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.partitions = server.partitions[:1]
    for index in range(9):
        server.put(b"%d" % index, b"v")
    store = MemoryStore()
    limits = SaveLimits(complete_interval_s=0, interval_s=0)
    async with consume(URL, dial=net.dial, resume=store, save_limits=limits) as consumer:
        positions: list[tuple[int, int]] = []
        before = Position(server.partitions[0].log)
        async for event in consumer:
            await trio.testing.wait_all_tasks_blocked()
            assert store.state is not None
            assert store.state.position(PartitionId(0)) == before
            after = consumer.resume_state.position(PartitionId(0))
            if isinstance(event, ChunkReceived):
                assert after.highest_received == event.chunk.end
            elif isinstance(event, SnapshotEnd):
                assert after == Position(after.log, SeqNo(9), SeqNo(9), None)
            else:
                assert after == before
            before = after
            positions.append((after.last_complete, after.highest_received))
            if isinstance(event, SnapshotEnd):
                break
    assert positions == [(0, 0), (0, 3), (0, 6), (0, 9), (9, 9)]
    assert store.state is not None
    # The snapshot's end was the current event, and not processed.
    assert store.state.position(PartitionId(0)).last_complete == 0
    assert store.state.position(PartitionId(0)).highest_received == 9


async def test_the_event_in_hand_can_be_saved_by_hand(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.put(b"k", b"v")
    store = MemoryStore()
    async with consume(URL, dial=net.dial, resume=store) as consumer:
        async for event in consumer:
            if isinstance(event, SnapshotEnd):
                await consumer.save()
                break
    partition = server.partition_of(b"k").id
    assert store.state is not None
    assert store.state.position(partition).last_complete == 1


class SlowStore(MemoryStore):
    """Takes a second for each save, and has one at a time. It keeps the state as it is at first."""

    def __init__(self) -> None:
        super().__init__()
        self._is_saving = False

    async def save(self, state: ResumeState) -> None:
        assert not self._is_saving, "two tasks save at once"
        self._is_saving = True
        first_state = state.copy()
        await trio.sleep(1)
        await super().save(first_state)
        self._is_saving = False


async def test_tasks_that_save_at_once_take_turns(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.partitions = server.partitions[:1]
    for index in range(9):
        server.put(b"%d" % index, b"v")
    store = SlowStore()
    limits = SaveLimits(complete_interval_s=1000, interval_s=1000)
    async with consume(URL, dial=net.dial, resume=store, save_limits=limits) as consumer:
        async with trio.open_nursery() as nursery:
            async for event in consumer:
                nursery.start_soon(consumer.save)
                await trio.testing.wait_all_tasks_blocked()
                if isinstance(event, SnapshotEnd):
                    break
        assert store.state is not None
        assert store.state == consumer.processed_state
        assert store.state.position(PartitionId(0)).last_complete == 9


async def test_what_is_processed_during_a_save_is_saved_by_the_next(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    server.partitions = server.partitions[:1]
    server.put(b"k", b"v")
    store = SlowStore()
    limits = SaveLimits(complete_interval_s=1000, interval_s=1000)
    async with consume(URL, dial=net.dial, resume=store, save_limits=limits) as consumer:
        async with trio.open_nursery() as nursery:
            async for event in consumer:
                if isinstance(event, ChunkReceived):
                    nursery.start_soon(consumer.save)
                    await trio.testing.wait_all_tasks_blocked()
                elif isinstance(event, CycleCompleted):
                    break
        assert store.state is not None
        assert store.state.position(PartitionId(0)).last_complete == 0
        await consumer.save()
        assert store.state.position(PartitionId(0)).last_complete == 1


async def test_saves_are_spread_in_time(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    store = MemoryStore()
    limits = SaveLimits(complete_interval_s=10, interval_s=100)

    async def follow(consumer: Consumer) -> None:
        async for _ in consumer:
            pass

    async with consume(URL, dial=net.dial, resume=store, save_limits=limits) as consumer:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follow, consumer)
            await trio.sleep(1)
            assert store.saves == 1  # the logs, before any data
            for index in range(200):
                server.put(b"k", b"%d" % index)
                await trio.sleep(0.5)
            assert 10 <= store.saves <= 12
            # Nothing more comes, and yet it is saved.
            await trio.sleep(10)
            assert store.state is not None
            assert store.state.position(server.partition_of(b"k").id).last_complete == 200
            saves = store.saves
            await trio.sleep(1000)
            assert store.saves == saves
            nursery.cancel_scope.cancel()
        assert consumer.statistics().saves == saves


async def test_a_failed_save_raises_its_error(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    class FullDisk(MemoryStore):
        async def save(self, state: ResumeState) -> None:
            await trio.lowlevel.checkpoint()
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        async with consume(URL, dial=net.dial, resume=FullDisk()) as consumer:
            await anext(consumer)
    assert net.open == 0


# Whole consumers, cut and killed anywhere, on servers that fail over.


class Crash(Exception):  # noqa: N818  it is one
    """The application was killed."""


class Application:
    """Keeps its data and the resume state in one transaction at each event, as a database would."""

    def __init__(self) -> None:
        self.mirror = Mirror()
        self.state = ResumeState("b")
        self.rolled_back = 0

    def deal_with(self, event: Event, state: ResumeState) -> None:
        self.mirror.apply(event)
        self.state = state
        self.rolled_back += isinstance(event, RolledBack)

    def restart(self) -> None:
        self.mirror = Mirror(self.mirror.items)


class Schedule(DrawnSchedule):
    """What happens to an application and a server, by a seed."""

    def __init__(self, seed: int, failovers: bool) -> None:
        super().__init__(seed, 3, keys=20, deletion_one_in=5)
        self.application = Application()
        self._failovers = failovers

    def _disturb(self, net: FakeNet) -> None:
        if self._chance(6):
            self._change()
        if self._chance(15):
            net.cut()
        if self._failovers and self._chance(25):
            # A client that streams from a partition that fails over loses the connection.
            net.cut()
            partition = self._rng.choice(self.server.partitions)
            partition.fail_over(self._rng.getrandbits(63) | 1, self._rng.randint(0, partition.high))

    async def _follow_for_a_while(self, net: FakeNet) -> None:
        """Until it is killed, while it deals with an event or between two."""
        state, draw = self.application.state, self._rng.random
        async with consume(URL, dial=net.dial, resume=state, draw=draw) as consumer:
            for _ in range(self._rng.randrange(40)):
                with trio.move_on_after(10):
                    event = await anext(consumer)
                    if self._chance(10):
                        raise Crash
                    self.application.deal_with(event, consumer.resume_state)
                self._disturb(net)

    async def _follow_to_the_end(self, net: FakeNet) -> None:
        state = self.application.state
        async with consume(URL, dial=net.dial, resume=state, end="now") as consumer:
            async for event in consumer:
                self.application.deal_with(event, consumer.resume_state)

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            net = FakeNet(nursery, self.server)
            for _ in range(6):
                self._change()
                net.budgets = self._budgets()
                # A first connection that is cut while it is made is told, and not tried again.
                with suppress(Crash, BrokenError):
                    await self._follow_for_a_while(net)
                self.application.restart()
            net.budgets = iter(())
            await self._follow_to_the_end(net)
            assert net.open == 0
            nursery.cancel_scope.cancel()


@given(st.integers(0, 2**32), st.booleans())
@settings(max_examples=effort(75, 150), deadline=None)
def test_a_consumer_cut_killed_and_rolled_back_ends_with_the_servers_contents(
    seed: int, failovers: bool
) -> None:
    schedule = Schedule(seed, failovers)
    schedule.run()
    assert schedule.application.mirror.contents == schedule.server.contents()
    for partition in schedule.server.partitions:
        position = schedule.application.state.position(partition.id)
        assert position == Position(partition.log, partition.high, partition.high, None)
    if not failovers:
        assert schedule.application.rolled_back == 0


async def test_a_partition_that_fails_over_below_what_was_received_starts_again(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    for index in range(30):
        server.put(b"%d" % index, b"v")
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, CycleCompleted):
                break
        net.cut()
        partition = server.partitions[2]
        high = partition.high
        partition.fail_over(77, high - 2)
        server.put(b"new", b"v")
        rollbacks = []
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, RolledBack):
                rollbacks.append(event)
            if isinstance(event, CycleCompleted):
                break
        (rollback,) = rollbacks
        assert (rollback.partition, rollback.ceiling, rollback.to) == (2, high - 2, 0)
        assert "diverge" in rollback.reason
        assert consumer.statistics().rollbacks == 1
    assert mirror.contents == server.contents()


async def test_a_consumer_cut_just_before_a_snapshots_end_gets_the_end(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    """With a server that has nothing new, the end would otherwise never come."""
    server.partitions = server.partitions[:1]
    for index in range(9):
        server.put(b"%d" % index, b"v")
    log = server.partitions[0].log
    partial = PartialSnapshot(log.current, SeqNo(0), SeqNo(9))
    state = ResumeState("b", {PartitionId(0): Position(log, SeqNo(0), SeqNo(9), partial)})
    async with consume(URL, dial=net.dial, resume=state) as consumer:
        start = await anext(consumer)
        assert isinstance(start, SnapshotStart)
        assert (start.start, start.end) == (9, 9)
        assert await anext(consumer) == SnapshotEnd(PartitionId(0), SeqNo(9))
        assert await anext(consumer) == CycleCompleted(1)
        position = consumer.resume_state.position(PartitionId(0))
        assert position == Position(log, SeqNo(9), SeqNo(9), None)
    # What was given is not changed.
    assert state.position(PartitionId(0)).partial == partial


async def test_partitions_that_a_new_bucket_does_not_have_are_rolled_back_to_0(
    net: FakeNet, server: FakeServer, autojump_clock: MockClock
) -> None:
    for index in range(30):
        server.put(b"%d" % index, b"v")
    mirror = Mirror()
    async with consume(URL, dial=net.dial) as consumer:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, CycleCompleted):
                break
        state = consumer.resume_state
        server.partitions = [FakePartition(partition, 7) for partition in range(2)]
        net.cut()
        with pytest.raises(ServerError, match="created again, with 2 partitions instead of 4"):
            await anext(consumer)
    server.put(b"new", b"v")
    mirror = Mirror(mirror.items)
    rolled_back = []
    async with consume(URL, dial=net.dial, resume=state, end="now") as consumer:
        async for event in consumer:
            mirror.apply(event)
            if isinstance(event, RolledBack):
                rolled_back.append(event.partition)
        assert consumer.resume_state.position(PartitionId(3)).highest_received == 0
    assert sorted(rolled_back) == [0, 1, 2, 3]
    assert mirror.contents == server.contents() == {b"new": b"v"}
