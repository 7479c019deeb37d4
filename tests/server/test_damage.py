"""Damage on disk, as clients of the server notice it: in the partition in which it is, alone."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.held_store import HeldStore
from tests.kit.placed_keys import key_in
from tests.server.connected_peer import P0, Peer, connected, make_server, name_replica, sets
from tests.server.served_bucket import (
    BUCKET,
    K0,
    K1,
    MEMORY,
    P1,
    PERSISTED,
    answer_to,
    send,
    serving,
    speaking,
    statistics,
    status_of,
    value_of,
)
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Operation
from upr_protocol.wire import (
    Await,
    Get,
    GetReply,
    Go,
    Message,
    MutateReply,
    PartitionChunk,
    PartitionEnd,
    PartitionSnapshot,
    Refusal,
    StreamEnd,
)
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.online import index_lag
from upr_server.storage.records import (
    CLEAN_STOP,
    PARTITION,
    chunk_key,
    index_entry_key,
    partition_key,
)
from upr_server.storage.simulated import SimulatedStore

OTHER: Final = key_in(0, 2, b"other")
NEVER: Final = key_in(0, 2, b"never")
INDEXED_S: Final = 5.0
"""After so long without a write everything is indexed."""
PROMPT_S: Final = 60.0


async def stored(is_index_damaged: bool) -> SimulatedStore:
    """A store with a bucket of two partitions. In the first, what the index lacks cannot be
    indexed: the chunk is damaged, or the entry of its key."""
    store = SimulatedStore()
    async with serving(store) as server, speaking(server) as peer:
        for key, partition in ((K0, P0), (K1, P1)):
            await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
        await trio.sleep(INDEXED_S)
        for key, partition in ((K0, P0), (K1, P1)):
            await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
    log, index = store.directory.disks[BUCKET]
    if is_index_damaged:
        index.flip_bit(index_entry_key(0, K0), 5)
    else:
        log.flip_bit(chunk_key(0, 2), 8 * 60)
    return SimulatedStore(store.directory)


async def statuses(peer: Peer, *keys: bytes) -> list[int | None]:
    """What a `Get` says of keys: None for one that has an item, otherwise the flags."""
    await peer.send(Get(keys, partition=P0, opaque=peer.opaque()))
    chunk = (await peer.receive(GetReply)).chunk
    assert chunk.keys() == list(keys)
    return [None if row.op == Operation.SET else row.flags for row in chunk]


@pytest.mark.parametrize("is_index_damaged", [False, True])
async def test_damage_is_reported_at_once_and_other_partitions_are_served(
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    is_index_damaged: bool,
) -> None:
    store = await stored(is_index_damaged)
    # Commits wait for an index that is behind, but not for one that cannot go on.
    monkeypatch.setattr(index_lag, "UNINDEXED_MAX", 0)
    with trio.fail_after(PROMPT_S):
        async with serving(store) as server, speaking(server) as peer:
            for key in (K0, NEVER):
                assert await statuses(peer, key) == [Status.DAMAGED]
            assert await value_of(peer, K1, P1) == b"v"
            for partition, key in ((P0, OTHER), (P1, key_in(1, 2, b"other")), (P0, K0)):
                answer = await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
                assert status_of(answer) is Status.OK
                assert await value_of(peer, key, partition) == b"v"
            # What is damaged refuses neither the other keys of a request, nor the other rows.
            keys = (NEVER, OTHER, b"", K0)
            assert await statuses(peer, *keys) == [Status.DAMAGED, None, Status.BAD_KEY, None]
            rows = [Mutation(Operation.APPEND, key, b"w") for key in (NEVER, OTHER)]
            answer = await answer_to(peer, await send(peer, Chunk.build(rows), PERSISTED, P0))
            assert isinstance(answer, MutateReply)
            assert status_of(answer) is Status.OK
            assert answer.failures == ((0, Status.DAMAGED),)
            assert await value_of(peer, OTHER, P0) == b"vw"
            figures = (await statistics(peer))["disk"]
            assert figures["damaged_partitions"] == [0]
            assert figures["damaged"]
            await trio.sleep(INDEXED_S)
            assert (await statistics(peer))["disk"]["unindexed_mutations"] == 0


@pytest.mark.parametrize("was_clean", [True, False])
async def test_a_stop_beside_a_damaged_partition_is_clean_if_the_stop_before_was(
    autojump_clock: trio.testing.MockClock, was_clean: bool
) -> None:
    """If its record is readable again, the partition must begin the new history that it has missed,
    and only an unclean stop has it do so."""
    store = SimulatedStore()
    async with serving(store) as server, speaking(server) as peer:
        for key, partition in ((K0, P0), (K1, P1)):
            await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
    log, _ = store.directory.disks[BUCKET]
    if not was_clean:
        ChunkLog(log).remove_clean_mark()
    log.flip_bit(partition_key(PARTITION, 0), 60)
    for _ in range(2):
        store = SimulatedStore(store.directory)
        async with serving(store) as server, speaking(server) as peer:
            await assert_refused(peer)
            assert await value_of(peer, K1, P1) == b"v"
        assert (CLEAN_STOP in log.keys()) == was_clean  # noqa: SIM118


async def test_a_partition_that_is_damaged_while_it_is_served_is_refused_and_no_other(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    log, key_1 = None, key_in(1, 2, b"other")
    with trio.fail_after(PROMPT_S):
        async with (
            serving(store) as server,
            speaking(server) as peer,
            speaking(server) as waiting,
            speaking(server) as consumer,
        ):
            store.released.set()
            for key, partition in ((K0, P0), (K1, P1)):
                await answer_to(peer, await send(peer, sets(key), PERSISTED, partition))
            await consumer.ask()
            await consumer.send(Go())
            await consumer.receive(PartitionEnd)
            store.released = trio.Event()
            log, _ = store.directory.disks[BUCKET]
            log.flip_bit(partition_key(PARTITION, 0), 60)
            in_memory = await answer_to(peer, await send(peer, sets(OTHER), MEMORY))
            assert isinstance(in_memory, MutateReply)
            (run,) = in_memory.runs
            wait = Await(
                run.history_id, run.last_seq, 1 << 31, PERSISTED, partition=P0,
                opaque=waiting.opaque(),
            )  # fmt: skip
            await waiting.send(wait)
            refused = await send(peer, sets(NEVER), PERSISTED)
            accepted = await send(peer, sets(key_1), PERSISTED, P1)
            store.released.set()
            answers: dict[int, Status] = {}
            while len(answers) < 2:
                answer = await peer.receive(Message)
                if isinstance(answer, MutateReply | Refusal):
                    answers[answer.opaque] = status_of(answer)
            assert answers == {refused: Status.TEMPORARY_FAILURE, accepted: Status.OK}
            refusal = await waiting.receive(Refusal)
            assert refusal.status == Status.DAMAGED
            # Its consumers are sent away, and told why when they come back.
            assert (await consumer.receive(StreamEnd)).status == Status.STATE_CHANGED
            assert (await consumer.ask()).status == Status.DAMAGED
            await assert_refused(peer)
            for level in (MEMORY, PERSISTED):
                answer = await answer_to(peer, await send(peer, sets(OTHER), level))
                assert status_of(answer) is Status.DAMAGED
                answer = await answer_to(peer, await send(peer, sets(K1), level, P1))
                assert status_of(answer) is Status.OK
            await trio.sleep(INDEXED_S)
            figures = (await statistics(peer))["disk"]
            assert figures["damaged_partitions"] == [0]
            assert figures["unindexed_mutations"] == 0
            # What cannot be put on disk can leave memory.
            (bucket,) = server.catalog.disks
            assert bucket.partitions[0].snapshots.can_free
            bucket.check_invariants()
    assert log is not None
    # Should the record be readable again, the partition must begin a new history.
    assert CLEAN_STOP not in log.keys()  # noqa: SIM118
    async with serving(SimulatedStore(store.directory)) as server, speaking(server) as peer:
        await assert_refused(peer)
        assert await value_of(peer, key_1, P1) == b"v"


async def test_a_replica_receives_what_a_damaged_partition_has_in_memory_only(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldStore()
    server = make_server(store, node="a")
    with trio.fail_after(PROMPT_S):
        async with connected(server, identity="replica:r") as replica, speaking(server) as peer:
            await name_replica(server)
            await replica.open()
            assert (await replica.ask(with_answers=True)).status == Status.OK
            log, _ = store.directory.disks[BUCKET]
            log.flip_bit(partition_key(PARTITION, 0), 60)
            refused = await send(peer, sets(K0), PERSISTED)
            store.released.set()
            assert status_of(await answer_to(peer, refused)) is Status.TEMPORARY_FAILURE
            await assert_refused(peer)
            await replica.send(Go())
            message = await replica.receive(Message)
            while not isinstance(message, PartitionChunk | PartitionSnapshot):
                message = await replica.receive(Message)
            assert message.chunk.keys() == [K0]


async def assert_refused(peer: Peer) -> None:
    """The first partition is not read."""
    await peer.send(Get((K0,), partition=P0, opaque=peer.opaque()))
    refusal = await peer.receive(Refusal)
    assert refusal.status == Status.DAMAGED
    assert "partition 0 is not served, because it is damaged" in refusal.sentence
