"""Large replies that wait for durability: how many are sent at a time, and how many may wait."""

from __future__ import annotations

from typing import Final

import pytest
import trio
import trio.testing

from tests.kit.held_store import HeldStore
from tests.kit.placed_keys import key_in
from tests.kit.steps import LargestStep
from tests.server.test_connection import P0, Peer
from tests.server.test_durability import answer_to, send, serving, speaking
from upr_protocol.chunk import Chunk, CounterDelta, Mutation
from upr_protocol.ids import Durability, Operation
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX
from upr_protocol.wire import Credit, MutateReply
from upr_server.net.replies import STEP_ROWS

pytestmark = pytest.mark.usefixtures("autojump_clock")

COUNTER_BYTES: Final = 16
"""What an increment takes in the answer to its bundle."""


async def publish(peer: Peer, count: int, durability: Durability) -> int:
    """Sends a batch that increments one key so many times, once there is credit for it. Nothing is
    answered meanwhile. Gives the number of the request."""
    while peer.session.credit.remaining_bytes <= 0:
        await peer.hear(Credit)
    key, delta = key_in(0, 2), CounterDelta(1, 1).encode()
    chunk = Chunk.build([Mutation(Operation.INCREMENT, key, delta)] * count)
    return await send(peer, chunk, durability, P0)


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
            lambda: connection._bytes_out + connection.session.outgoing_bytes
        )
        trio.lowlevel.add_instrument(largest_step)
        store.released.set()
        replies = [await answer_to(peer, opaque) for opaque in opaques]
        trio.lowlevel.remove_instrument(largest_step)
        assert largest_step.added_count <= COUNTER_BYTES * 2 * (STEP_ROWS + BUNDLE_MUTATIONS_MAX)
        counts = [reply.counters[-1][1] for reply in replies if isinstance(reply, MutateReply)]
        assert counts == [1 + n * BUNDLE_MUTATIONS_MAX for n in range(bundle_count + 1)]
