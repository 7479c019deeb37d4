"""What an answer promises: `persisted` is sent once the changes are on disk, and not while the disk
is slow, full or broken. With connections in memory, simulated disks and a mock clock."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any, Final

import pytest
import trio
import trio.testing

from tests.kit.held_store import HeldStore
from tests.kit.placed_keys import key_in
from tests.server.connected_peer import P0, QUOTA_BYTES, Peer, sets
from tests.server.served_bucket import (
    BUCKET,
    K0,
    K1,
    MEMORY,
    P1,
    PERSISTED,
    WRITER,
    answer_to,
    increment,
    log_of,
    send,
    serving,
    speaking,
    statistics,
    status_of,
    value_of,
)
from upr_protocol.chunk import Bundle, Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Durability, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.wire import (
    Await,
    AwaitReply,
    Barrier,
    BarrierReply,
    Credit,
    Go,
    Message,
    Mutate,
    MutateReply,
    PartitionChunk,
    Refusal,
    Seqnos,
    SeqnosReply,
)
from upr_server.app import Server
from upr_server.net import backlog
from upr_server.net.durability_waits import WAIT_BYTES
from upr_server.storage import bucket_maintenance
from upr_server.storage.calls import (
    Commit,
    DeleteLeases,
    LoadBuckets,
    Maintain,
    MarkCleanStop,
    StoreCall,
)
from upr_server.storage.errors import DiskFullError, StoreFailedError
from upr_server.storage.online import index_lag, maintenance
from upr_server.storage.online.flusher import FULL_DISK_RETRY_S
from upr_server.storage.simulated import SimulatedDirectory, SimulatedStore

K0B: Final = key_in(0, 2, b"b")
BEFORE: Final = key_in(0, 2, b"before")
AFTER: Final = key_in(0, 2, b"after")
APPLIED: Final = key_in(0, 2, b"taken in")


def numbered(suffix: int, partition: int = 0) -> bytes:
    """A key of a partition, another one for each number."""
    return key_in(partition, 2, b"%d" % suffix)


LONG_S: Final = 5.0


async def is_silent(peer: Peer) -> bool:
    """Whether the peer receives no answer within `LONG_S`."""
    with trio.move_on_after(LONG_S) as scope:
        while not isinstance(await peer.receive(Message), MutateReply | Refusal | AwaitReply):
            pass
    return scope.cancelled_caught


# When a batch is acknowledged.


async def test_the_level_memory_is_answered_before_the_commit_and_persisted_after_it(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer:
        commits = log_of(store).commits
        assert isinstance(await answer_to(peer, await send(peer, sets(K0), MEMORY)), MutateReply)
        opaque = await send(peer, sets(b"b"), PERSISTED)
        assert await is_silent(peer)
        assert log_of(store).commits == commits
        await peer.send(Seqnos(opaque=peer.opaque()))
        assert [row[2:4] for row in (await peer.receive(SeqnosReply)).rows] == [(2, 0), (0, 0)]
        store.released.set()
        reply = await answer_to(peer, opaque)
        assert isinstance(reply, MutateReply)
        assert (reply.runs[0].first_seq, reply.runs[0].last_seq) == (2, 2)
        assert log_of(store).commits > commits
        await peer.send(Seqnos(opaque=peer.opaque()))
        assert [row[2:4] for row in (await peer.receive(SeqnosReply)).rows] == [(2, 2), (0, 0)]


async def test_a_failed_batch_is_answered_when_the_item_that_made_it_fail_is_on_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer:
        await answer_to(peer, await send(peer, sets(b"k"), MEMORY))
        add = Chunk.build([Mutation(Operation.ADD, b"k", b"2")], SeqNo(0), SeqNo(0))
        opaque = await send(peer, add, PERSISTED)
        assert await is_silent(peer)
        store.released.set()
        reply = await answer_to(peer, opaque)
        assert isinstance(reply, MutateReply)
        assert reply.failures == ((0, Status.EXISTS),)


async def test_a_repeated_batch_is_answered_when_its_whole_partition_is_on_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer:
        store.released.set()
        first = await answer_to(peer, await send(peer, sets(K0), PERSISTED, counter=1))
        store.released = trio.Event()
        await answer_to(peer, await send(peer, sets(K0B), MEMORY))
        opaque = await send(peer, sets(K0), PERSISTED, counter=1)
        assert await is_silent(peer)
        store.released.set()
        again = await answer_to(peer, opaque)
        assert isinstance(first, MutateReply)
        assert isinstance(again, MutateReply)
        assert again.runs == first.runs


async def test_answers_keep_the_order_of_a_partitions_batches_and_delay_no_other_answer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer, speaking(server) as other_peer:
        levels = [PERSISTED, MEMORY, PERSISTED, MEMORY, MEMORY, PERSISTED]
        opaques = [await send(peer, sets(numbered(n)), level) for n, level in enumerate(levels)]
        assert await is_silent(peer)
        # A batch for another partition, a read, and another connection's batch for this partition.
        reply = await answer_to(peer, await send(peer, sets(K1), MEMORY, P1))
        assert isinstance(reply, MutateReply)
        assert await value_of(peer, key_in(0, 2, b"5")) == b"v"
        reply = await answer_to(other_peer, await send(other_peer, sets(b"k"), MEMORY))
        assert isinstance(reply, MutateReply)
        assert reply.runs[0].first_seq == 7
        store.released.set()
        replies = [await peer.receive(MutateReply) for _ in opaques]
        assert [reply.opaque for reply in replies] == opaques
        assert [reply.runs[0].first_seq for reply in replies] == [1, 2, 3, 4, 5, 6]


async def test_batches_that_arrive_during_a_commit_share_the_next_commit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    def delay(call: StoreCall[Any]) -> float:
        return 0.25 if isinstance(call, Commit) else 0.0

    store = SimulatedStore(delay=delay)
    async with serving(store) as server, speaking(server) as peer:
        first = await send(peer, sets(K0), PERSISTED)
        await trio.sleep(0.01)
        # The first commit is under way. These batches for both partitions go into the next commit.
        later = [
            await send(peer, sets(numbered(n, n % 2)), PERSISTED, PartitionId(n % 2))
            for n in range(9)
        ]
        figures = (await statistics(peer))["flusher"]
        assert (figures["lag_mutations"], figures["commits"]) == (10, 0)
        began = trio.current_time()
        assert (await peer.receive(MutateReply)).opaque == first
        opaques = {(await peer.receive(MutateReply)).opaque for _ in later}
        assert opaques == set(later)
        assert trio.current_time() - began == pytest.approx(0.49, abs=0.02)
        figures = (await statistics(peer))["flusher"]
        assert (figures["lag_mutations"], figures["commits"]) == (0, 2)
        assert figures["mutations_per_commit"] == 5
        assert figures["bytes_per_commit"] > 5 * len(b"1v")
        assert figures["last_commit_s"] == pytest.approx(0.25, abs=0.01)
        assert figures["longest_commit_s"] == pytest.approx(0.25, abs=0.01)


async def test_runs_of_a_task_behind_a_refused_run_are_not_applied(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Otherwise the server would answer the next attempt that the refused run is too old to
    recognise, and the task would take it as applied."""

    async def send_run(counter: int, durability: Durability, attempt: int) -> Status:
        key = numbered(counter)
        bundle = Bundle.of_one_run(P0, sets(key), counter)
        copies = 1 if durability is Durability.REPLICATED else 0
        opaque = peer.opaque()
        await peer.send(Mutate(bundle, WRITER, durability, copies, attempt, opaque=opaque))
        return status_of(await answer_to(peer, opaque))

    async with serving(SimulatedStore(SimulatedDirectory())) as server, speaking(server) as peer:
        assert await send_run(1, MEMORY, attempt=1) is Status.OK
        assert await send_run(2, Durability.REPLICATED, attempt=1) is Status.TOO_FEW_REPLICAS
        assert await send_run(3, MEMORY, attempt=1) is Status.TEMPORARY_FAILURE
        assert await send_run(4, MEMORY, attempt=1) is Status.TEMPORARY_FAILURE
        for counter in range(1, 5):
            assert await send_run(counter, MEMORY, attempt=2) is Status.OK
        assert await value_of(peer, numbered(2)) == b"v"


# A wait for a sequence number.


async def test_a_wait_for_a_sequence_number_ends_when_it_is_on_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer:
        reply = await answer_to(peer, await send(peer, sets(K0, K0B), MEMORY))
        assert isinstance(reply, MutateReply)

        async def wait(
            level: Durability, deadline_ms: int, seq: SeqNo = reply.runs[0].last_seq
        ) -> int:
            opaque = peer.opaque()
            await peer.send(
                Await(
                    reply.runs[0].history_id, seq, deadline_ms, level, partition=P0, opaque=opaque
                )
            )
            return opaque

        assert isinstance(await answer_to(peer, await wait(MEMORY, 0)), AwaitReply)
        # No mutation has the number 0. It is the number of a run in which every row failed.
        assert isinstance(await answer_to(peer, await wait(PERSISTED, 0, SeqNo(0))), AwaitReply)
        began = trio.current_time()
        refusal = await answer_to(peer, await wait(PERSISTED, 7_000))
        assert isinstance(refusal, Refusal)
        assert refusal.status == Status.TIMED_OUT
        assert trio.current_time() - began == pytest.approx(7, abs=0.1)
        # A wait delays neither the partition nor the connection.
        waiting_opaque = await wait(PERSISTED, 1_000_000)
        assert await is_silent(peer)
        assert await value_of(peer, K0) == b"v"
        store.released.set()
        answer = await answer_to(peer, waiting_opaque)
        assert isinstance(answer, AwaitReply)
        assert answer.seq == 2


async def test_the_server_stops_reading_from_a_client_with_very_many_waits(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    """The memory of waits is bounded, as a client may wait for long."""
    monkeypatch.setattr(backlog, "OWED_BYTES_MAX", 10 * WAIT_BYTES)
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer:
        reply = await answer_to(peer, await send(peer, sets(K0), MEMORY))
        assert isinstance(reply, MutateReply)
        (run,) = reply.runs
        opaques = [peer.opaque() for _ in range(40)]
        for opaque in opaques:
            await peer.send(
                Await(
                    run.history_id, run.last_seq, 1_000_000, PERSISTED, partition=P0, opaque=opaque
                )
            )
        await trio.sleep(1)
        (connection,) = server.connections.connections
        assert len(connection.context.durability_waits) == 11
        store.released.set()
        answers = [await peer.receive(AwaitReply) for _ in opaques]
        assert sorted(answer.opaque for answer in answers) == opaques
        assert not connection.context.backlog.owed_bytes


async def test_streams_and_barriers_do_not_wait_for_the_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store, 1) as server, speaking(server) as peer:
        await answer_to(peer, await send(peer, sets(K0, K0B), MEMORY))
        await peer.ask()
        await peer.send(Go(), Barrier(b"all"))
        assert (await peer.receive(PartitionChunk)).chunk.count == 2
        assert (await peer.receive(BarrierReply)).ends == ((0, 2),)
        assert (await statistics(peer))["flusher"]["lag_mutations"] == 2
        store.released.set()


# A disk that is full.


async def test_a_full_disk_is_reported_until_there_is_room_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = SimulatedStore()
    async with serving(store, 1) as server, speaking(server) as peer:
        await answer_to(peer, await send(peer, sets(BEFORE), PERSISTED))
        log = log_of(store)
        log.bytes_max = log.statistics()["bytes_used"]
        opaques = [
            await send(peer, sets(APPLIED), PERSISTED),
            await send(peer, sets(key_in(0, 2, b"behind")), MEMORY),
        ]
        first = await answer_to(peer, opaques[0])
        assert status_of(first) is Status.TEMPORARY_FAILURE
        assert isinstance(await answer_to(peer, opaques[1]), MutateReply)
        # From now on batches are refused, and the statistics have the reason.
        figures = (await statistics(peer))["flusher"]
        assert figures["full"]
        for level in MEMORY, PERSISTED:
            refusal = await answer_to(peer, await send(peer, sets(key_in(0, 2, b"no")), level))
            assert status_of(refusal) is Status.TEMPORARY_FAILURE
        assert await value_of(peer, APPLIED) == b"v"
        assert await value_of(peer, key_in(0, 2, b"no")) is None
        await peer.ask()
        await peer.send(Go(), Barrier(b"all"))
        keys: list[bytes] = []
        while not isinstance(message := await peer.receive(Message), BarrierReply):
            if isinstance(message, PartitionChunk):
                keys += message.chunk.keys()
        assert (keys, message.ends) == (
            [BEFORE, APPLIED, key_in(0, 2, b"behind")],
            ((0, 3),),
        )
        # A wait is not refused, and is answered only when the number is on disk.
        await peer.send(Seqnos(opaque=peer.opaque()))
        row = (await peer.receive(SeqnosReply)).rows[0]
        assert row[2:4] == (3, 1)
        history_id, high = HistoryId(row[1]), SeqNo(row[2])
        waiting_opaque = peer.opaque()
        await peer.send(
            Await(history_id, high, 1_000_000, PERSISTED, partition=P0, opaque=waiting_opaque)
        )
        assert await is_silent(peer)
        log.bytes_max = 1 << 62
        began = trio.current_time()
        answer = await answer_to(peer, waiting_opaque)
        assert isinstance(answer, AwaitReply)
        assert answer.seq == 3
        assert trio.current_time() - began <= 2 * FULL_DISK_RETRY_S + 0.1
        assert (await statistics(peer))["flusher"]["full"] == ""
        reply = await answer_to(peer, await send(peer, sets(AFTER), PERSISTED))
        assert isinstance(reply, MutateReply)
        assert reply.runs[0].first_seq == 4


async def test_a_stop_on_a_full_disk_writes_no_marker_of_a_clean_stop(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The marker of a clean stop would fit on the disk, but the mutation does not."""
    calls: list[StoreCall[Any]] = []

    class Recorded(SimulatedStore):
        async def execute(self, call: StoreCall[Any]) -> Any:
            # A process carries out a call even if its caller is cancelled.
            calls.append(call)
            return await super().execute(call)

    directory = SimulatedDirectory()
    store = Recorded(directory)
    large = Chunk.build([Mutation(Operation.SET, b"k", bytes(1 << 20))], SeqNo(0), SeqNo(0))

    async def live_and_stop() -> None:
        async with serving(store, 1) as server, speaking(server) as peer:
            await answer_to(peer, await send(peer, sets(key_in(0, 2, b"on disk")), PERSISTED))
            log = log_of(store)
            log.bytes_max = log.statistics()["bytes_used"] + len(large.encode()) // 2
            assert isinstance(await answer_to(peer, await send(peer, large, MEMORY)), MutateReply)

    with pytest.RaisesGroup(DiskFullError, flatten_subgroups=True):
        await live_and_stop()
    assert any(isinstance(call, Commit) for call in calls)
    assert not any(isinstance(call, MarkCleanStop) for call in calls)
    log_of(store).bytes_max = 1 << 62
    (stored_bucket,) = (await SimulatedStore(directory).ask(LoadBuckets())).buckets
    assert not stored_bucket.is_clean
    assert stored_bucket.partitions[0].record.high == 1


class _HeldIndex(SimulatedStore):
    """A store whose index gets no further until `released` is set, or has no room to."""

    def __init__(self) -> None:
        super().__init__()
        self.released = trio.Event()
        self.is_full = False

    async def execute(self, call: StoreCall[Any]) -> Any:
        if isinstance(call, Maintain):
            if self.is_full:
                raise DiskFullError("no room for the index")
            await self.released.wait()
        return await super().execute(call)


@pytest.mark.parametrize("is_full", [False, True])
async def test_commits_wait_for_an_index_that_is_far_behind_if_it_can_be_written(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch, is_full: bool
) -> None:
    monkeypatch.setattr(index_lag, "UNINDEXED_MAX", 10)
    store = _HeldIndex()
    store.is_full = is_full
    async with serving(store, 1) as server, speaking(server) as peer:
        for index in range(11):
            await answer_to(peer, await send(peer, sets(numbered(index)), PERSISTED))
        waiting_opaque = await send(peer, sets(key_in(0, 2, b"far behind")), PERSISTED)
        if not is_full:
            assert await is_silent(peer)
            assert await value_of(peer, key_in(0, 2, b"far behind")) == b"v"
            store.released.set()
        assert isinstance(await answer_to(peer, waiting_opaque), MutateReply)
        store.is_full = False
        store.released.set()


async def test_commits_do_not_wait_for_mutations_that_stay_unindexed_for_an_undo(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_lag, "UNINDEXED_MAX", 10)
    async with serving(SimulatedStore(), 1) as server, speaking(server) as peer:
        disk = server.catalog.disk_of(BUCKET)
        assert disk is not None
        disk.maintenance.undo_mutations = 50
        with trio.fail_after(20):
            for index in range(40):
                await answer_to(peer, await send(peer, sets(numbered(index)), PERSISTED))
        assert disk.flusher.index_lag.unindexed_count() == 40


class _CountedSteps(SimulatedStore):
    """A store that counts the steps of maintenance."""

    step_count = 0

    async def execute(self, call: StoreCall[Any]) -> Any:
        self.step_count += isinstance(call, Maintain)
        return await super().execute(call)


async def test_commits_do_not_wake_maintenance_for_mutations_that_stay_unindexed_for_an_undo(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Maintenance would find nothing to do after each commit."""
    for module in bucket_maintenance, maintenance:
        monkeypatch.setattr(module, "INDEX_LAG_MUTATIONS", 10)
    store = _CountedSteps()
    async with serving(store, 1) as server, speaking(server) as peer:
        disk = server.catalog.disk_of(BUCKET)
        assert disk is not None
        disk.maintenance.undo_mutations = 30
        await trio.sleep(1.0)
        steps_before = store.step_count
        for index in range(39):
            await answer_to(peer, await send(peer, sets(numbered(index)), PERSISTED))
        assert store.step_count - steps_before <= 1
        assert disk.flusher.index_lag.unindexed_count() == 39
        await answer_to(peer, await send(peer, sets(numbered(39)), PERSISTED))
        await trio.testing.wait_all_tasks_blocked()
        assert disk.flusher.index_lag.unindexed_count() == 30


async def test_a_batch_that_a_full_disk_refused_after_it_was_applied_is_not_applied_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The server refuses it, and its publisher sends it again when there is room."""
    store = SimulatedStore()
    async with serving(store) as server, speaking(server) as peer:
        log = log_of(store)
        log.bytes_max = log.statistics()["bytes_used"]
        refusal = await answer_to(peer, await send(peer, increment(b"n", 5), PERSISTED, P0, 1))
        assert status_of(refusal) is Status.TEMPORARY_FAILURE
        log.bytes_max = 1 << 62
        await trio.sleep(2 * FULL_DISK_RETRY_S)
        reply = await answer_to(peer, await send(peer, increment(b"n", 5), PERSISTED, P0, 1))
        assert isinstance(reply, MutateReply)
        assert (reply.counters, reply.runs[0].last_seq) == (((0, 5),), 1)
        assert await value_of(peer, b"n") == b"5"


# A disk that fails.


def break_down() -> None:
    raise StoreFailedError("the disk failed")


async def test_requests_queued_behind_a_failed_write_are_not_acknowledged(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The failed write may be on disk or not, so nothing after it is acknowledged."""

    class FailsOnce(SimulatedStore):
        async def execute(self, call: StoreCall[Any]) -> Any:
            async with self._call_lock:
                await trio.sleep(1)
                if isinstance(call, MarkCleanStop):
                    raise StoreFailedError("the disk failed")
                return None

    store = FailsOnce()
    refusals: list[str] = []

    async def delete() -> None:
        await trio.sleep(0.5)
        try:
            await store.ask(DeleteLeases("b", [1]))
        except StoreFailedError as error:
            refusals.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(delete)
        with pytest.raises(StoreFailedError):
            await store.ask(MarkCleanStop("b"))
    assert refusals == ["the disk failed"]


@pytest.mark.parametrize("is_kept", [False, True])
async def test_nothing_is_acknowledged_after_a_failed_write(
    autojump_clock: trio.testing.MockClock, is_kept: bool
) -> None:
    """The server ends. The failed write may be on disk afterwards. Writes that were acknowledged
    before are on disk."""
    store = SimulatedStore(delay=lambda _call: 0.01)
    messages: list[Message] = []

    async def listen(peer: Peer) -> None:
        while True:
            message = await peer.receive(Message)
            if isinstance(message, MutateReply | AwaitReply | Refusal):
                messages.append(message)

    with pytest.RaisesGroup(StoreFailedError, flatten_subgroups=True, allow_unwrapped=True):
        async with (
            serving(store) as server,
            speaking(server) as peer,
            speaking(server) as other_peer,
            trio.open_nursery() as nursery,
        ):
            await answer_to(peer, await send(peer, sets(BEFORE), PERSISTED))
            log_of(store).fault, log_of(store).keep_on_fault = break_down, is_kept
            nursery.start_soon(listen, peer)
            nursery.start_soon(listen, other_peer)
            await send(peer, sets(b"k"), PERSISTED)
            await send(other_peer, sets(K1), PERSISTED, P1)
            await trio.sleep(LONG_S)
    assert trio.current_time() < 1
    assert [message for message in messages if status_of(message) is Status.OK] == []
    assert (store.failed.is_set(), store.failure) == (True, "the disk failed")
    for disk in store.directory.disks[BUCKET]:
        disk.crash()
    async with (
        serving(SimulatedStore(store.directory)) as server,
        speaking(server) as peer,
    ):
        assert await value_of(peer, BEFORE) == b"v"
        assert await value_of(peer, b"k") == (b"v" if is_kept else None)
        reply = await answer_to(peer, await send(peer, sets(AFTER), PERSISTED))
        assert isinstance(reply, MutateReply)


# What a restart leaves.


async def crashed(store: SimulatedStore, live: Callable[[Server], Any]) -> None:
    """Runs a server, which then ends as in a crash."""
    with trio.CancelScope() as scope:
        async with serving(store) as server:
            await live(server)
            scope.cancel()
            await trio.lowlevel.checkpoint()


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_batch_that_is_sent_again_after_a_crash_has_one_effect(
    autojump_clock: trio.testing.MockClock, is_answered: bool
) -> None:
    directory = SimulatedDirectory()
    first: list[MutateReply] = []

    async def live(server: Server) -> None:
        async with speaking(server) as peer:
            for index in (1, 2, 3):
                opaque = await send(peer, increment(b"n", index), PERSISTED, P0, index)
                if is_answered:
                    reply = await answer_to(peer, opaque)
                    assert isinstance(reply, MutateReply)
                    first.append(reply)
            # The commit takes place even if no answer is received.
            await trio.sleep(1)

    await crashed(SimulatedStore(directory), live)
    async with serving(SimulatedStore(directory)) as server, speaking(server) as peer:
        counters, numbers = [], []
        for index in (1, 2, 3, 4):
            opaque = await send(peer, increment(b"n", index), PERSISTED, P0, index)
            reply = await answer_to(peer, opaque)
            assert isinstance(reply, MutateReply)
            counters += [value for _, value in reply.counters]
            numbers.append(reply.runs[0][3:])
        assert counters == [1, 3, 6, 10]
        assert [seqs[0] for seqs in numbers] == [1, 2, 3, 4]
        if is_answered:
            assert [r.runs[0][3:] for r in first] == numbers[:3]
        assert await value_of(peer, b"n") == b"10"


async def test_a_batch_that_a_crash_lost_is_applied_when_it_is_sent_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The batch and its writer token are lost together."""
    directory = SimulatedDirectory()

    async def live(server: Server) -> None:
        async with speaking(server) as peer:
            await answer_to(peer, await send(peer, increment(b"n", 1), MEMORY, P0, 1))

    await crashed(HeldStore(directory), live)
    async with serving(SimulatedStore(directory)) as server, speaking(server) as peer:
        assert await value_of(peer, b"n") is None
        for _ in range(2):
            reply = await answer_to(peer, await send(peer, increment(b"n", 1), PERSISTED, P0, 1))
            assert isinstance(reply, MutateReply)
            assert reply.counters == ((0, 1),)


@pytest.mark.parametrize("is_plain", [True, False])
async def test_replies_that_wait_for_the_disk_do_not_keep_rows_in_memory(
    autojump_clock: trio.testing.MockClock, is_plain: bool
) -> None:
    """Thousands of replies may wait for a slow disk, and the quota does not count them."""
    store, count, nbytes = HeldStore(), 40, 256 * 1024
    rows = [Mutation(Operation.SET, K0, bytes(nbytes))]
    if not is_plain:
        rows.append(Mutation(Operation.REPLACE, K0B, b"is not there"))
    async with serving(store) as server, speaking(server) as peer:
        await send(peer, sets(K0), PERSISTED)
        tracemalloc.start()
        try:
            for _ in range(count):
                while not peer.session.credit.is_open:
                    await peer.receive(Credit)
                await send(peer, Chunk.build(rows), MEMORY)
            await trio.testing.wait_all_tasks_blocked()
            held_bytes, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held_bytes < count * nbytes // 4
        store.released.set()
        for _ in range(count + 1):
            await peer.receive(MutateReply)


# A bucket that is deleted.


async def test_batches_are_refused_when_their_bucket_is_deleted_during_a_commit(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer:
        opaques = [
            await send(peer, sets(numbered(n, n % 2)), PERSISTED, PartitionId(n % 2))
            for n in range(6)
        ]
        await peer.send(Seqnos(opaque=peer.opaque()))
        history_id = HistoryId((await peer.receive(SeqnosReply)).rows[0][1])
        waiting_opaque = peer.opaque()
        await peer.send(
            Await(history_id, SeqNo(1), 20_000, PERSISTED, partition=P0, opaque=waiting_opaque)
        )
        await trio.testing.wait_all_tasks_blocked()
        await server.catalog.delete_bucket(BUCKET)
        refusals = [await peer.receive(Refusal) for _ in (*opaques, waiting_opaque)]
        assert sorted(refusal.opaque for refusal in refusals) == [*opaques, waiting_opaque]
        assert set(map(status_of, refusals)) == {Status.NO_BUCKET}
        assert store.directory.disks == {}
        store.released.set()
        await server.catalog.create_bucket(BUCKET, 2, QUOTA_BYTES)
        async with speaking(server) as again:
            assert await value_of(again, key_in(0, 2, b"0")) is None
            reply = await answer_to(again, await send(again, sets(key_in(0, 2, b"0")), PERSISTED))
            assert isinstance(reply, MutateReply)
            assert reply.runs[0].first_seq == 1
        assert not store.failed.is_set()


@pytest.mark.parametrize("seed", range(10))
async def test_a_bucket_created_again_under_load_has_only_its_own_acknowledged_writes(
    autojump_clock: trio.testing.MockClock, seed: int
) -> None:
    """Each bucket has every write that it acknowledged, and none of an earlier bucket."""
    draw = Random(seed)
    store = SimulatedStore(delay=lambda _call: draw.random() / 100)
    acknowledged = 0

    def key_of(life: int, suffix: int) -> bytes:
        return key_in(0, 2, b"%d-%d" % (life, suffix))

    async with serving(store) as server:
        for life in range(8):
            written_keys: set[bytes] = set()
            answered: set[bytes] = set()

            async def load(life: int, written_keys: set[bytes], answered: set[bytes]) -> None:
                async with speaking(server) as peer:
                    while True:
                        key = key_of(life, len(written_keys))
                        written_keys.add(key)
                        opaque = await send(peer, sets(key), PERSISTED)
                        if status_of(await answer_to(peer, opaque)) is not Status.OK:
                            return
                        answered.add(key)

            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(load, life, written_keys, answered)
                await trio.sleep(draw.random() / 4)
                async with speaking(server) as peer:
                    for key in sorted(answered):
                        assert await value_of(peer, key) == b"v"
                    for index in range(20):
                        assert await value_of(peer, key_of(life - 1, index)) is None
                await server.catalog.delete_bucket(BUCKET)
            acknowledged += len(answered)
            await server.catalog.create_bucket(BUCKET, 2, QUOTA_BYTES)
    assert acknowledged > 50
    assert not store.failed.is_set()
