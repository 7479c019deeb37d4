"""Requests for keys that are only on disk, with simulated disks and a mock clock."""

from __future__ import annotations

from random import Random

import pytest
import trio
import trio.testing

from tests.kit.placed_keys import key_in
from tests.server.connected_peer import P0, Peer, sets
from tests.server.modelled_partition import (
    INDEXED_S,
    HeldReads,
    Model,
    evicted,
)
from tests.server.served_bucket import BUCKET, increment, serving, speaking, value_of
from upr_protocol.chunk import Bundle, Chunk, Mutation
from upr_protocol.errors import Status
from upr_protocol.ids import Cas, Operation, PartitionId, SeqNo
from upr_protocol.wire import Get, GetReply, Mutate, MutateReply
from upr_server.app import Server
from upr_server.storage.calls import FindItems
from upr_server.storage.simulated import SimulatedStore


async def ask_for(peer: Peer, key: bytes) -> None:
    await peer.send(Get((key,), partition=P0, opaque=peer.opaque()))


async def mutate(peer: Peer, chunk: Chunk) -> None:
    await peer.send(Mutate(Bundle.of_one_run(P0, chunk), opaque=peer.opaque()))


async def test_partitions_whose_index_is_behind_are_all_answered(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """After a restart each partition waits for its own index, and all of them at once."""
    store, partitions = SimulatedStore(), 5
    async with serving(store, partitions) as server, speaking(server) as peer:
        for partition_id in range(partitions):
            await peer.mutate(sets(key_in(partition_id, partitions)), PartitionId(partition_id))
    async with serving(SimulatedStore(store.directory)) as server, speaking(server) as peer:
        bucket = server.catalog.bucket(BUCKET)
        assert not any(partition.eviction.is_index_ready for partition in bucket.partitions)
        for partition_id in range(partitions):
            key = key_in(partition_id, partitions)
            await peer.send(Get((key,), partition=PartitionId(partition_id), opaque=peer.opaque()))
        for _ in range(partitions):
            with trio.fail_after(10 * INDEXED_S):
                reply = await peer.receive(GetReply)
            assert reply.chunk.mutation(0).value == b"v"


async def test_requests_for_an_evicted_key_keep_their_order(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldReads(FindItems)
    async with (
        serving(store, 1) as server,
        speaking(server) as first,
        speaking(server) as second,
    ):
        await first.mutate(sets(b"k", value=b"old"))
        await first.mutate(sets(b"l", value=b"other"))
        await evicted(server)
        store.released = trio.Event()
        await ask_for(first, b"k")
        await trio.testing.wait_all_tasks_blocked()
        # The requests of all connections wait behind the first one.
        await mutate(second, sets(b"k", value=b"new"))
        await trio.testing.wait_all_tasks_blocked()
        await ask_for(first, b"k")
        await trio.testing.wait_all_tasks_blocked()
        await mutate(second, sets(b"k", value=b"newest"))
        await ask_for(second, b"k")
        with trio.move_on_after(1) as scope:
            await first.receive(GetReply)
        assert scope.cancelled_caught
        store.released.set()
        values = [(await first.receive(GetReply)).chunk.mutation(0).value for _ in range(2)]
        assert values == [b"old", b"new"]
        assert (await second.receive(GetReply)).chunk.mutation(0).value == b"newest"
        await evicted(server)
        assert await value_of(first, b"k") == b"newest"
        assert await value_of(first, b"l") == b"other"


async def test_counters_and_expected_cas_of_evicted_keys_are_read_from_disk(
    autojump_clock: trio.testing.MockClock,
) -> None:
    store = HeldReads(FindItems)
    async with (
        serving(store, 1) as server,
        speaking(server) as first,
        speaking(server) as second,
    ):
        await first.mutate(increment(b"n", 100))
        cas = (await first.mutate(sets(b"k", value=b"0"))).runs[0].first_cas
        for turn in range(1, 6):
            await evicted(server)
            store.released = trio.Event()
            for peer in (first, second):
                await mutate(peer, increment(b"n", 1))
            swaps = [Mutation(Operation.SET, b"k", b"%d" % turn, SeqNo(0), Cas(cas))]
            for peer in (first, second):
                await mutate(peer, Chunk.build(swaps, SeqNo(0), SeqNo(0)))
            await trio.testing.wait_all_tasks_blocked()
            store.released.set()
            answers = [await peer.receive(MutateReply) for peer in (first, second)]
            values = sorted(value for reply in answers for _, value in reply.counters)
            # The first increment of a missing counter sets its initial value.
            assert values == [100 + 2 * turn - 1, 100 + 2 * turn]
            answers = [await peer.receive(MutateReply) for peer in (first, second)]
            assert sorted(reply.failures for reply in answers) == [(), ((0, Status.CAS_MISMATCH),)]
            cas = next(reply.runs[0].first_cas for reply in answers if not reply.failures)
            assert await value_of(first, b"k") == b"%d" % turn


@pytest.mark.parametrize("seed", range(12))
async def test_a_read_returns_no_version_older_than_an_acknowledged_one(
    autojump_clock: trio.testing.MockClock, seed: int
) -> None:
    """Three connections write, read and count a few keys, while memory is freed and the disk is
    slow."""
    draw = Random(seed)
    store = SimulatedStore(delay=lambda _call: draw.random() / 50)
    keys = [b"key %d" % index for index in range(4)]
    written_items = dict.fromkeys(keys, 0)
    acknowledged = dict.fromkeys(keys, 0)
    counted = reads = 0

    async def write(peer: Peer, own: list[bytes]) -> None:
        nonlocal counted
        for _ in range(60):
            key = draw.choice(own)
            written_items[key] += 1
            version = written_items[key]
            await peer.mutate(sets(key, value=b"%d" % version))
            acknowledged[key] = version
            reply = await peer.mutate(increment(b"n", 1))
            counted += 1
            assert [index for index, _ in reply.counters] == [0]
            await trio.sleep(draw.random() / 20)

    async def read(peer: Peer) -> None:
        nonlocal reads
        newest_versions = dict.fromkeys(keys, 0)
        while True:
            key = draw.choice(keys)
            floor = max(newest_versions[key], acknowledged[key])
            value = await value_of(peer, key)
            count = int(value or b"0")
            assert floor <= count <= written_items[key]
            newest_versions[key] = count
            reads += 1
            await trio.sleep(draw.random() / 50)

    async def forget(server: Server) -> None:
        bucket = server.catalog.bucket(BUCKET)
        model = Model(server.catalog.disks[bucket], bucket.partitions[0])
        while True:
            await trio.sleep(draw.random() * draw.choice((0.1, 1.0)))
            model.forget()

    async with (
        serving(store, 1) as server,
        speaking(server) as first,
        speaking(server) as second,
        speaking(server) as third,
        trio.open_nursery() as readers,
    ):
        readers.start_soon(read, third)
        readers.start_soon(forget, server)
        async with trio.open_nursery() as writers:
            writers.start_soon(write, first, keys[:2])
            writers.start_soon(write, second, keys[2:])
        await evicted(server)
        assert int(await value_of(first, b"n") or b"0") == counted == 120
        for key in keys:
            assert int(await value_of(first, key) or b"0") == written_items[key]
        bucket = server.catalog.bucket(BUCKET)
        fetched = server.catalog.disks[bucket].statistics()["fetch"]
        assert isinstance(fetched, dict)
        assert fetched["batches"] > 10
        assert reads > 50
        readers.cancel_scope.cancel()
