"""Bundles at a server: each run is judged alone, and one reply tells of all."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from itertools import count, islice, pairwise
from typing import Any

import pytest
import trio
import trio.testing

from tests.kit.held_store import HeldStore
from tests.kit.placed_keys import key_in
from tests.kit.steps import LargestStep
from tests.server.connected_peer import P0, Peer, sets
from tests.server.granted_peer import ADMIN
from tests.server.modelled_partition import INDEXED_S, HeldReads, Model, evicted
from tests.server.served_bucket import (
    BUCKET,
    P1,
    WRITER,
    answer_to,
    increment,
    serving,
    speaking,
    value_of,
)
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.errors import Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import (
    Durability,
    HistoryId,
    Operation,
    PartitionId,
    PartitionState,
    SeqNo,
)
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, VALUE_BYTES_MAX
from upr_protocol.users import Grant, Right, User
from upr_protocol.wire import Get, GetReply, Mutate, MutateReply, Refusal, RunResult
from upr_server.app import Server
from upr_server.engine import batch_of
from upr_server.engine.evaluation_steps import EXPIRY_COST
from upr_server.engine.partition import EXPIRE_BEFORE_RUN_MAX, EXPIRE_MAX
from upr_server.engine.replica_progress import ReplicaProgress
from upr_server.net.access import Access
from upr_server.net.handlers.publishing import (
    AWAITED_RUNS,
    EXPIRING_RUN_COST,
    PLAIN_RUN_COST,
    RUN_COST,
    SLICE_COST,
)
from upr_server.net.replies import OrderedReply
from upr_server.storage.calls import FindItems
from upr_server.storage.simulated import SimulatedStore

A0 = key_in(0, 2, b"a")
B1 = key_in(1, 2, b"b")
N1 = key_in(1, 2, b"n")

pytestmark = pytest.mark.usefixtures("autojump_clock")


def bundle_of(*parts: tuple[PartitionId, Chunk], counter: int = 0) -> Bundle:
    return Bundle.of_parts([(partition, chunk, counter, 0) for partition, chunk in parts])


async def say(peer: Peer, bundle: Bundle, writer: bytes = bytes(16)) -> int:
    opaque = peer.opaque()
    await peer.send(Mutate(bundle, writer, opaque=opaque))
    return opaque


async def publish(peer: Peer, bundle: Bundle, writer: bytes = bytes(16)) -> MutateReply:
    reply = await answer_to(peer, await say(peer, bundle, writer))
    assert isinstance(reply, MutateReply)
    return reply


async def test_a_bad_key_or_value_fails_alone_also_when_it_is_sent_again() -> None:
    rows = [(A0, b"1"), (b"", b"2"), (b"k" * 251, b"3"), (b"b", bytes(VALUE_BYTES_MAX + 1))]
    plain = Chunk.build([Mutation(Operation.SET, key, value) for key, value in rows])
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        bundle = bundle_of((P0, plain), (P1, sets(b"c")), counter=1)
        reply = await publish(peer, bundle, WRITER)
        assert [(run.status, run.first_seq, run.last_seq) for run in reply.runs] == [
            (Status.OK, 1, 1),
            (Status.OK, 1, 1),
        ]
        assert reply.failures == (
            (1, Status.BAD_KEY),
            (2, Status.BAD_KEY),
            (3, Status.TOO_LARGE),
        )
        again = await publish(peer, bundle, WRITER)
        assert (again.runs, again.failures) == (reply.runs, reply.failures)


async def test_each_run_has_its_numbers_and_failures_are_named_by_rows_of_the_bundle() -> None:
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        await publish(peer, Bundle.of_one_run(P1, sets(b"there")))
        adds = Chunk.build(
            [Mutation(Operation.ADD, key, b"v") for key in (b"there", b"new", b"there")]
        )
        reply = await publish(peer, bundle_of((P0, increment(b"n", 5)), (P1, adds)))
        assert [(run.partition, run.status) for run in reply.runs] == [(P0, 0), (P1, 0)]
        assert [(run.first_seq, run.last_seq) for run in reply.runs] == [(1, 1), (2, 2)]
        assert reply.failures == ((1, Status.EXISTS), (3, Status.EXISTS))
        assert reply.counters == ((0, 5),)


async def test_a_refused_run_leaves_the_others_alone() -> None:
    async with serving(SimulatedStore(), 3) as server, speaking(server) as peer:
        partition = server.catalog.bucket("b").partitions[1]
        partition.change_state(PartitionState.PENDING, partition.failover_log)
        keys = {index: key_in(index, 3) for index in range(3)}
        parts = [
            (PartitionId(partition), sets(keys.get(partition, b"k"))) for partition in (0, 1, 2, 7)
        ]
        reply = await publish(peer, bundle_of(*parts))
        statuses = [Status(run.status) for run in reply.runs]
        not_here = Status.NOT_MY_PARTITION
        assert statuses == [Status.OK, not_here, Status.OK, not_here]
        assert reply.runs[1] == RunResult(P1, not_here)
        assert await value_of(peer, keys[2], PartitionId(2)) == b"v"


async def test_a_run_of_a_history_that_has_ended_does_not_count_as_replicated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The runs of a bundle are applied, and then waited for, in steps. In between a partition may
    be handed over, and come back in a history without the run: what replicas have of that says
    nothing of it."""
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        monkeypatch.setattr(server.partition_maps, "replicas", lambda *_arguments: ["r"])
        partitions = server.catalog.bucket("b").partitions
        call_when_reached = ReplicaProgress.call_when_reached

        def between_two_steps(*arguments: Any, **options: Any) -> None:
            monkeypatch.setattr(ReplicaProgress, "call_when_reached", call_when_reached)
            new_log = partitions[1].failover_log.with_branch(HistoryId(777), SeqNo(0))
            partitions[1].change_state(PartitionState.ACTIVE, new_log)
            for partition in partitions:
                partition.replicas.report("r", SeqNo(1), SeqNo(1))
            call_when_reached(*arguments, **options)

        monkeypatch.setattr(ReplicaProgress, "call_when_reached", between_two_steps)
        opaque = peer.opaque()
        bundle = bundle_of((P0, sets(A0)), (P1, sets(B1)))
        await peer.send(Mutate(bundle, bytes(16), Durability.REPLICATED, 1, opaque=opaque))
        reply = await answer_to(peer, opaque)
        assert isinstance(reply, MutateReply)
        assert [run.status for run in reply.runs] == [Status.OK, Status.NOT_DURABLE_YET]


async def test_a_run_that_is_sent_again_in_another_bundle_has_no_second_effect() -> None:
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        first = await publish(
            peer, bundle_of((P0, increment(b"n", 1)), (P1, increment(N1, 1)), counter=1), WRITER
        )
        again = await publish(peer, bundle_of((P1, increment(N1, 1)), counter=1), WRITER)
        assert again.runs == first.runs[1:]
        assert (again.counters, first.counters) == (((0, 1),), ((0, 1), (1, 1)))
        assert await value_of(peer, N1, P1) == b"1"


async def test_a_run_that_waits_for_the_disk_holds_replies_about_its_partition_but_no_run() -> None:
    store = HeldReads(FindItems)
    async with serving(store) as server, speaking(server) as peer:
        await publish(peer, bundle_of((P0, increment(b"n", 100))))
        await evicted(server)
        store.released = trio.Event()
        waiting_opaque = await say(peer, bundle_of((P0, increment(b"n", 1)), (P1, sets(b"a"))))
        behind = await say(peer, bundle_of((P0, sets(b"n", value=b"7")), (P1, sets(B1))))
        last = await say(peer, bundle_of((P1, sets(b"c"))))
        # The runs for the other partition are applied; the replies keep their order.
        assert await value_of(peer, b"c", P1) == b"v"
        opaques = (waiting_opaque, behind, last)
        assert [type(message) for message in peer.received if message.opaque in opaques] == []
        store.released.set()
        replies = [await peer.receive(MutateReply) for _ in opaques]
        assert [reply.opaque for reply in replies] == [*opaques]
        assert replies[0].counters == ((0, 101),)
        assert replies[2].runs[0].first_seq == 3
        assert await value_of(peer, b"n") == b"7"


async def test_rights_are_checked_once_for_all_runs_that_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A check looks at all keys of the bundle. It was made for each run."""
    checked_opaques: list[int] = []
    check = Access.check_changed_keys

    def note_check(access: Access, message: Mutate) -> None:
        checked_opaques.append(message.opaque)
        check(access, message)

    bob = User("bob", None, (Grant(Right.WRITE, BUCKET),))
    runs = (P0, increment(b"n", 1)), (P1, increment(N1, 1))
    store = HeldReads(FindItems)
    async with serving(store) as server, speaking(server) as peer:
        (connection,) = server.connections.connections
        connection.context.access.user_name = bob.name
        await server.users.apply_change(lambda users: users.with_user(ADMIN).with_user(bob))
        await publish(peer, bundle_of(*runs))
        await trio.sleep(INDEXED_S)
        bucket = server.catalog.bucket(BUCKET)
        for partition in bucket.partitions:
            Model(server.catalog.disks[bucket], partition).forget()
        store.released = trio.Event()
        opaque = await say(peer, bundle_of(*runs))
        await trio.sleep(1)
        monkeypatch.setattr(Access, "check_changed_keys", note_check)
        granted = (Grant(Right.READ, BUCKET),)
        await server.users.apply_change(lambda users: users.granting(bob.name, granted))
        store.released.set()
        reply = await answer_to(peer, opaque)
        assert isinstance(reply, MutateReply)
        assert [value for _, value in reply.counters] == [2, 2]
    assert checked_opaques == [opaque]


async def test_nothing_of_an_answered_bundle_waits_for_a_garbage_collection() -> None:
    """The server collects rarely: what holds itself holds the bundle's bytes for long."""
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        await publish(peer, bundle_of((P0, sets(A0)), (P1, sets(B1))))
        gc.collect()
        gc.disable()
        try:
            for durability in (Durability.MEMORY, Durability.PERSISTED):
                bundle = bundle_of((P0, sets(A0)), (P1, sets(B1)))
                opaque = peer.opaque()
                await peer.send(Mutate(bundle, durability=durability, opaque=opaque))
                assert isinstance(await answer_to(peer, opaque), MutateReply)
            assert not [thing for thing in gc.get_objects() if isinstance(thing, OrderedReply)]
        finally:
            gc.enable()


@pytest.mark.parametrize("op", [Operation.SET, Operation.ADD])
async def test_a_bundle_of_many_runs_lets_others_have_their_turn(op: Operation) -> None:
    """Between its slices; and nothing else of its own peer is handled before it is done."""
    runs = 512
    rows = BUNDLE_MUTATIONS_MAX // runs
    async with serving(SimulatedStore(), runs) as server, speaking(server) as publisher:
        keys: list[list[bytes]] = [[] for _ in range(runs)]
        for index in range(8 * runs * rows):
            keys[partition_of(b"%d" % index, runs)].append(b"%d" % index)
        parts = [
            (
                PartitionId(partition),
                Chunk.build(Mutation(op, key, b"v") for key in keys[partition][:rows]),
            )
            for partition in range(runs)
        ]
        partitions = server.catalog.bucket("b").partitions
        # What the bucket had taken in at each turn of another task.
        totals = [0]

        async def watch() -> None:
            while totals[-1] < BUNDLE_MUTATIONS_MAX:
                await trio.lowlevel.checkpoint()
                totals.append(sum(partition.high_seq for partition in partitions))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            opaque = await say(publisher, bundle_of(*parts))
            await publisher.send(
                Get((keys[-1][0],), partition=PartitionId(runs - 1), opaque=publisher.opaque())
            )
        run_cost = PLAIN_RUN_COST if op is Operation.SET else RUN_COST
        slice_rows = rows * -(-SLICE_COST // (run_cost + rows))
        # Each task runs once in each step of the loop, in any order: twice in a row at most.
        assert max(after - before for before, after in pairwise(totals)) <= 2 * slice_rows
        reply = await answer_to(publisher, opaque)
        assert isinstance(reply, MutateReply)
        assert [run.last_seq for run in reply.runs] == [rows] * runs
        assert (await publisher.receive(GetReply)).chunk.value(0) == b"v"


@pytest.mark.parametrize("is_one_refused", [False, True])
async def test_many_runs_that_wait_for_the_disk_let_others_have_their_turn(
    is_one_refused: bool,
) -> None:
    """A slice applies some hundred of them, and to wait for each costs more than to apply it."""
    runs, store = 3 * AWAITED_RUNS, HeldStore()
    async with serving(store, runs) as server, speaking(server) as publisher:
        disk = server.catalog.disk_of(BUCKET)
        assert disk is not None
        keys = {partition_of(b"%d" % n, runs): b"%d" % n for n in range(20 * runs)}
        parts = [(partition, sets(keys[partition])) for partition in map(PartitionId, range(runs))]
        partition = disk.bucket.partitions[1]
        if is_one_refused:
            partition.change_state(PartitionState.PENDING, partition.failover_log)
        largest_step = LargestStep(lambda: len(disk.flusher._callbacks))
        trio.lowlevel.add_instrument(largest_step)
        opaque = publisher.opaque()
        mutate = Mutate(bundle_of(*parts), durability=Durability.PERSISTED, opaque=opaque)
        await publisher.send(mutate)
        await trio.testing.wait_all_tasks_blocked()
        trio.lowlevel.remove_instrument(largest_step)
        assert len(disk.flusher._callbacks) == runs - is_one_refused
        assert largest_step.added_count <= AWAITED_RUNS
        store.released.set()
        reply = await answer_to(publisher, opaque)
        assert isinstance(reply, MutateReply)
        assert sum(run.status == Status.OK for run in reply.runs) == runs - is_one_refused


@pytest.mark.parametrize("op", [Operation.SET, Operation.ADD])
async def test_what_has_expired_counts_among_what_a_slice_of_a_bundle_does(op: Operation) -> None:
    runs, expired_count = 64, 300
    async with serving(SimulatedStore(), runs) as server, speaking(server) as publisher:
        partitions = server.catalog.bucket("b").partitions
        for partition in partitions:
            rows = [Mutation(Operation.SET, b"%d" % n, expiry=10) for n in range(expired_count)]
            partition.mutate(batch_of(Chunk.build(rows)), now=0)
        totals = [expired_count * runs]

        async def watch() -> None:
            while True:
                await trio.lowlevel.checkpoint()
                totals.append(sum(partition.high_seq for partition in partitions))

        parts = [
            (
                PartitionId(partition),
                Chunk.build([Mutation(op, key_in(partition, runs, b"new"), b"v")]),
            )
            for partition in range(runs)
        ]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            assert isinstance(await publish(publisher, bundle_of(*parts)), MutateReply)
            nursery.cancel_scope.cancel()
        slice_runs = -(-SLICE_COST // (RUN_COST + EXPIRING_RUN_COST))
        if op is Operation.ADD:
            slice_runs = -(-SLICE_COST // (RUN_COST + EXPIRY_COST * EXPIRE_MAX))
        deleted_count = EXPIRE_BEFORE_RUN_MAX if op is Operation.SET else EXPIRE_MAX
        assert totals[-1] == runs * (expired_count + deleted_count + 1)
        # Each task runs once in each step of the loop, in any order: twice in a row at most.
        longest = max(after - before for before, after in pairwise(totals))
        assert longest <= 2 * slice_runs * (deleted_count + 1)


async def until_a_request_waits(server: Server) -> None:
    for _ in range(1000):
        if not server.connections.resources.queues.are_idle:
            return
        await trio.lowlevel.checkpoint()
    raise AssertionError("no request waits")


def increments_of(keys: Sequence[bytes]) -> Chunk:
    delta = CounterDelta(1).encode()
    return Chunk.build(Mutation(Operation.INCREMENT, key, delta) for key in keys)


async def test_a_long_run_lets_others_have_their_turn_and_is_applied_as_one_step() -> None:
    """Behind it its own partition waits; other partitions do not, and no reader sees a part."""
    async with (
        serving(SimulatedStore(), 2) as server,
        speaking(server) as publisher,
        speaking(server) as other_peer,
    ):
        partitions = server.catalog.bucket("b").partitions
        candidates = (b"n%d" % index for index in count())
        in_p0 = (key for key in candidates if partition_of(key, 2) == P0)
        keys = list(islice(in_p0, BUNDLE_MUTATIONS_MAX))
        highs: list[tuple[int, int]] = []

        async def watch() -> None:
            while partitions[0].high_seq <= BUNDLE_MUTATIONS_MAX:
                await trio.lowlevel.checkpoint()
                highs.append((partitions[0].high_seq, partitions[1].high_seq))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(watch)
            long = await say(publisher, bundle_of((P0, increments_of(keys)), counter=1))
            await until_a_request_waits(server)
            behind = await say(other_peer, bundle_of((P0, increment(keys[0], 1)), (P1, sets(B1))))
            assert isinstance(await answer_to(other_peer, behind), MutateReply)
        reply = await answer_to(publisher, long)
        assert isinstance(reply, MutateReply)
        assert reply.runs[0].last_seq == BUNDLE_MUTATIONS_MAX
        turns = [high for high, _ in highs]
        assert set(turns) <= {0, BUNDLE_MUTATIONS_MAX, BUNDLE_MUTATIONS_MAX + 1}
        assert turns.count(0) > 5, "others had their turns"
        assert (0, 1) in highs, "the other partition did not wait"
        assert await value_of(other_peer, keys[0]) == b"1"


async def test_a_long_run_of_a_connection_that_ends_has_no_effect() -> None:
    async with serving(SimulatedStore(), 1) as server:
        partition = server.catalog.bucket("b").partitions[0]
        async with speaking(server) as publisher:
            keys = [b"n%d" % index for index in range(BUNDLE_MUTATIONS_MAX)]
            bundle = bundle_of((P0, increments_of(keys)), counter=1)
            await say(publisher, bundle, WRITER)
            await until_a_request_waits(server)
        await trio.testing.wait_all_tasks_blocked()
        assert partition.high_seq == 0
        async with speaking(server) as publisher:
            reply = await publish(publisher, bundle, WRITER)
            assert reply.runs[0].last_seq == BUNDLE_MUTATIONS_MAX
            assert partition.high_seq == BUNDLE_MUTATIONS_MAX
            assert await value_of(publisher, b"n7") == b"0"


async def test_a_run_that_needs_too_many_bytes_of_values_is_refused_whole() -> None:
    async with serving(SimulatedStore(), 1) as server, speaking(server) as publisher:
        keys = [b"%d" % index for index in range(4)]
        for key in keys:
            await publish(publisher, bundle_of((P0, sets(key, value=bytes(17 << 20)))))
        appends = Chunk.build([Mutation(Operation.APPEND, key, b"x") for key in keys])
        opaque = await say(publisher, bundle_of((P0, appends)))
        refusal = await answer_to(publisher, opaque)
        assert isinstance(refusal, Refusal)
        assert refusal.status == Status.LIMIT_REACHED
        assert server.catalog.bucket("b").partitions[0].high_seq == 4


async def test_a_key_in_the_wrong_partition_refuses_its_run_alone() -> None:
    """A client that hashes otherwise than the server would never find such a key again."""
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        reply = await publish(peer, bundle_of((P0, sets(A0)), (P1, sets(B1, A0))))
        assert [run.status for run in reply.runs] == [Status.OK, Status.BAD_ARGUMENT]
        assert await value_of(peer, A0) == b"v"
        assert await value_of(peer, B1, P1) is None
        refusal = await answer_to(peer, await say(peer, Bundle.of_one_run(P1, sets(B1, A0))))
        assert isinstance(refusal, Refusal)
        assert refusal.status == Status.BAD_ARGUMENT
        assert refusal.sentence == f"key {A0.decode()!r} belongs to partition 0, not 1"


@pytest.mark.parametrize("op", [Operation.SET, Operation.ADD])
async def test_a_run_of_a_writer_with_the_counter_0_is_refused_alone(op: Operation) -> None:
    """Counters of a writer begin at 1: 0 is what a run without a writer has."""
    row_a, row_b = (Chunk.build([Mutation(op, key, b"v")]) for key in (A0, B1))
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        for _ in range(2):
            reply = await publish(
                peer, Bundle.of_parts([(P0, row_a, 0, 0), (P1, row_b, 1, 0)]), WRITER
            )
            assert [run.status for run in reply.runs] == [Status.BAD_ARGUMENT, Status.OK]
        assert await value_of(peer, A0) is None
        assert await value_of(peer, B1, P1) == b"v"
        refusal = await answer_to(peer, await say(peer, bundle_of((P0, row_a)), WRITER))
        assert isinstance(refusal, Refusal)
        assert refusal.status == Status.BAD_ARGUMENT
        assert refusal.sentence == "a writer's counters begin at 1: send the run with another one"
        assert (await publish(peer, bundle_of((P0, row_a), counter=1), WRITER)).runs[0].status == 0
        assert isinstance(await publish(peer, bundle_of((P0, row_a))), MutateReply)


async def test_a_read_of_a_key_in_the_wrong_partition_is_refused() -> None:
    async with serving(SimulatedStore()) as server, speaking(server) as peer:
        opaque = peer.opaque()
        await peer.send(Get((B1, A0), partition=P1, opaque=opaque))
        refusal = await answer_to(peer, opaque)
        assert isinstance(refusal, Refusal)
        assert refusal.status == Status.BAD_ARGUMENT
        assert refusal.sentence == f"key {A0.decode()!r} belongs to partition 0, not 1"
