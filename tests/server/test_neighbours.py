"""Links on which nodes ask each other: kept while they are of use, never trusted to be there."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.kit.memory_network import HOST, MemoryNetwork, node
from upr_protocol.client import Address
from upr_protocol.client.trio.node_client import node_options
from upr_protocol.errors import BrokenError, ServerError, Status
from upr_protocol.transport import dial_tcp
from upr_protocol.wire import GetMap, Message
from upr_server.net import connection
from upr_server.net.requests import HANDLERS
from upr_server.replication.neighbours import Neighbours

PORT = 77

THERE = Address(HOST, PORT, "b")


class Dials:
    """How often somebody connected."""

    def __init__(self) -> None:
        self.count = 0

    async def dial(self, address: Address) -> trio.abc.Stream:
        self.count += 1
        return await dial_tcp(address)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> MemoryNetwork:
    return MemoryNetwork(monkeypatch)


@pytest.fixture
def dials() -> Dials:
    return Dials()


@pytest.fixture
def neighbours(network: MemoryNetwork, dials: Dials, nursery: trio.Nursery) -> Neighbours:
    return Neighbours(nursery, node_options("node:a", 2.0, dials.dial))


async def test_a_link_serves_for_all_questions(
    network: MemoryNetwork, neighbours: Neighbours, dials: Dials, autojump_clock: MockClock
) -> None:
    async with node("z", "b", "c", port=PORT):
        for bucket in ("b", "c", "b"):
            found = await neighbours.ask(Address(HOST, PORT, bucket))
            assert (found.node, found.map) == ("z", None)
            await trio.sleep(100.0)
        with pytest.raises(ServerError) as refused:
            await neighbours.ask(Address(HOST, PORT, "nowhere"))
        assert refused.value.status is Status.NO_BUCKET
        assert (dials.count, network.open) == (1, 1)


async def test_who_was_stopped_and_started_is_asked_anew(
    neighbours: Neighbours, dials: Dials, autojump_clock: MockClock
) -> None:
    async with node("z", "b", port=PORT):
        await neighbours.ask(THERE)
    with pytest.raises(BrokenError, match="cannot connect"):
        await neighbours.ask(THERE)
    async with node("y", "b", port=PORT):
        assert (await neighbours.ask(THERE)).node == "y"
        assert dials.count == 3


async def test_a_link_that_breaks_over_a_question_is_made_anew(
    network: MemoryNetwork, neighbours: Neighbours, dials: Dials, autojump_clock: MockClock
) -> None:
    async with node("z", "b", port=PORT):
        await neighbours.ask(THERE)
        network.cut(PORT)
        # Nobody has noticed yet.
        assert (await neighbours.ask(THERE)).node == "z"
        assert (dials.count, network.open) == (2, 1)


async def test_a_link_is_given_up_with_a_question_that_nobody_answers(
    network: MemoryNetwork,
    neighbours: Neighbours,
    dials: Dials,
    monkeypatch: pytest.MonkeyPatch,
    autojump_clock: MockClock,
) -> None:
    async with node("z", "b", port=PORT):
        await neighbours.ask(THERE)
        silent: dict[type[Message], object] = {**HANDLERS, GetMap: lambda *_: None}
        with monkeypatch.context() as patch:
            patch.setattr(connection, "HANDLERS", silent)
            with trio.move_on_after(2.0) as patience:
                await neighbours.ask(THERE)
            assert patience.cancelled_caught
        await trio.sleep(1.0)
        assert network.open == 0
        assert (await neighbours.ask(THERE)).node == "z"
        assert dials.count == 2


async def test_a_connection_that_is_given_up_leaves_nothing(
    network: MemoryNetwork,
    neighbours: Neighbours,
    autojump_clock: MockClock,
) -> None:
    async with node("z", "b", port=PORT):
        with trio.CancelScope() as patience:
            patience.cancel()
            await neighbours.ask(THERE)
        await trio.sleep(5.0)
        assert network.open == 0


async def test_links_to_those_who_are_no_neighbours_any_more_are_closed(
    network: MemoryNetwork, neighbours: Neighbours, dials: Dials, autojump_clock: MockClock
) -> None:
    other = Address(HOST, PORT + 1, "b")
    async with node("y", "b", port=PORT + 1), node("z", "b", port=PORT):
        await neighbours.ask(THERE)
        await neighbours.ask(other)
        neighbours.keep([other])
        await trio.sleep(5.0)
        assert network.open == 1
        await neighbours.ask(other)
        assert dials.count == 2
