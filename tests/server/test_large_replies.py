"""Large replies that wait for durability: how many are sent at a time, and how many may wait."""

from __future__ import annotations

import tracemalloc
from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.held_store import HeldStore
from tests.kit.placed_keys import key_in
from tests.kit.steps import LargestStep
from tests.server.connected_peer import P0, Peer
from tests.server.served_bucket import answer_to, send, serving, speaking
from upr_protocol.chunk import Bundle, Chunk, CounterDelta, Mutation
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Durability, Operation, PartitionId
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, BUNDLE_RUNS_MAX
from upr_protocol.wire import Credit, Mutate, MutateReply
from upr_server.net.backlog import OWED_BYTES_MAX
from upr_server.net.handlers.publishing import OWED_ROW_BYTES
from upr_server.net.replies import STEP_ROWS

pytestmark = pytest.mark.usefixtures("autojump_clock")

COUNTER_BYTES: Final = 16
"""What an increment takes in the answer to its bundle."""


def increments(key: bytes, count: int) -> Chunk:
    """A batch that increments a key so many times."""
    delta = CounterDelta(1, 1).encode()
    return Chunk.build([Mutation(Operation.INCREMENT, key, delta)] * count)


async def wait_for_credit(peer: Peer) -> None:
    """Waits until the peer may publish. Nothing else is answered meanwhile."""
    while peer.session.credit.remaining_bytes <= 0:
        await peer.receive(Credit)


async def publish(peer: Peer, count: int, durability: Durability) -> int:
    """Sends a batch that increments one key so many times, once there is credit for it. Gives the
    number of the request."""
    await wait_for_credit(peer)
    return await send(peer, increments(key_in(0, 2), count), durability, P0)


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.PERSISTED])
async def test_large_replies_that_waited_are_sent_some_in_each_turn(
    durability: Durability, nursery: trio.Nursery
) -> None:
    """Whether they wait for the disk, or behind one that does."""
    store, bundle_count = HeldStore(), 20
    async with serving(store) as server, speaking(server) as peer:
        nursery.start_soon(server.connections.resources.reply_steps.run)
        (connection,) = server.connections.connections
        first_opaque = await publish(peer, 1, Durability.PERSISTED)
        opaques = [
            first_opaque,
            *[await publish(peer, BUNDLE_MUTATIONS_MAX, durability) for _ in range(bundle_count)],
        ]
        await trio.testing.wait_all_tasks_blocked()
        largest_step = LargestStep(
            lambda: connection._writer.bytes_out + connection.session.outgoing_bytes
        )
        trio.lowlevel.add_instrument(largest_step)
        store.released.set()
        replies = [await answer_to(peer, opaque) for opaque in opaques]
        trio.lowlevel.remove_instrument(largest_step)
        assert largest_step.added_count <= COUNTER_BYTES * 2 * (STEP_ROWS + BUNDLE_MUTATIONS_MAX)
        counts = [reply.counters[-1][1] for reply in replies if isinstance(reply, MutateReply)]
        assert counts == [1 + n * BUNDLE_MUTATIONS_MAX for n in range(bundle_count + 1)]


@pytest.mark.parametrize("durability", [Durability.MEMORY, Durability.PERSISTED])
async def test_a_connection_to_which_much_is_owed_is_not_read(durability: Durability) -> None:
    """What is known of replies that wait takes memory that no quota counts."""
    store = HeldStore()
    async with serving(store) as server, speaking(server) as peer:
        (connection,) = server.connections.connections
        backlog, opaques = connection.context.backlog, list[int]()
        opaques.append(await publish(peer, 1, Durability.PERSISTED))
        with trio.move_on_after(1):
            while len(opaques) < 100:
                opaques.append(await publish(peer, BUNDLE_MUTATIONS_MAX, durability))
        bundle_bytes = OWED_ROW_BYTES * BUNDLE_MUTATIONS_MAX
        assert OWED_BYTES_MAX < backlog.owed_bytes <= OWED_BYTES_MAX + 2 * bundle_bytes
        store.released.set()
        for opaque in opaques:
            assert isinstance(await answer_to(peer, opaque), MutateReply)
        assert not backlog.owed_bytes
        assert not backlog.is_full


@pytest.mark.parametrize("run_count", [1, BUNDLE_RUNS_MAX])
async def test_owed_replies_take_about_what_is_counted(run_count: int) -> None:
    store, bundle_count = HeldStore(), 4
    async with serving(store, run_count) as server, speaking(server) as peer:
        (connection,) = server.connections.connections
        backlog = connection.context.backlog
        keys = {partition_of(b"%d" % n, run_count): b"%d" % n for n in range(20 * run_count)}
        row_count = BUNDLE_MUTATIONS_MAX // run_count
        parts = [
            (partition, increments(keys[partition], row_count), 0, 0)
            for partition in map(PartitionId, range(run_count))
        ]
        bundle = Bundle.of_parts(parts)
        # The first takes what is taken once.
        held_bytes = list[int]()
        for _ in range(1 + bundle_count):
            await wait_for_credit(peer)
            await peer.send(Mutate(bundle, durability=Durability.PERSISTED, opaque=peer.opaque()))
            await trio.testing.wait_all_tasks_blocked()
            if not held_bytes:
                tracemalloc.start()
            held_bytes.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        store.released.set()
        counted_bytes = backlog.owed_bytes * bundle_count / (1 + bundle_count)
        assert 0.5 < (held_bytes[-1] - held_bytes[0]) / counted_bytes < 1.1
