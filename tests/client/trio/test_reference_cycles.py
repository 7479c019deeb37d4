"""What a client held is freed when it ends, without Python's collector.

A server has the collector look only at young objects (`collect_only_young`), where Python allows
that. It uses this client for its replicas and for its partition maps, so a client that ends in a
reference cycle would keep the server's memory for good.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.client.trio.replica_consumers import as_replica
from tests.kit.consuming import fill_one_partition, until_completed
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from tests.kit.reference_cycles import no_collections
from upr_protocol.address import Address
from upr_protocol.client import connect, consume, open_node, publisher
from upr_protocol.errors import UprError
from upr_protocol.session import ClientSession
from upr_server.runtime import keeps_ended_frames

URL: Final = "upr://fake/b"
BATCHES_OF_A_PUBLISHER: Final = "upr_protocol.client.core"
"""The batches of a publisher and the node that they are placed with refer to each other, also when
it has ended. Servers have no publisher."""


def alive() -> Counter[str]:
    """How many objects there are of each class of the client and of its sessions."""
    kinds = map(type, gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__name__}"
        for kind in kinds
        # Not every class has the name of its module as an attribute of its own.
        if str(kind.__module__).startswith("upr_protocol.client") or kind is ClientSession
    )


async def request(net: FakeNet, lose: Callable[[], Awaitable[None]]) -> None:
    async with connect(URL, dial=net.dial) as client:
        await client.set("k", "v")
        await lose()


async def stream(net: FakeNet, lose: Callable[[], Awaitable[None]]) -> None:
    async with consume(URL, dial=net.dial) as consumer:
        await until_completed(consumer)
        await lose()


async def replicate(net: FakeNet, lose: Callable[[], Awaitable[None]]) -> None:
    async with as_replica(net) as consumer:
        await until_completed(consumer)
        await lose()


async def publish(net: FakeNet, lose: Callable[[], Awaitable[None]]) -> None:
    async with publisher(URL, dial=net.dial) as changes:
        await changes.set("k", "v")
        await changes.flush()
        await lose()


async def ask_node(net: FakeNet, lose: Callable[[], Awaitable[None]]) -> None:
    async with open_node(Address.parse("upr://fake"), dial=net.dial) as node:
        await node.status("b")
        await lose()


Use = Callable[[FakeNet, Callable[[], Awaitable[None]]], Awaitable[None]]
"""Uses a client, and calls the function while it is connected."""


@pytest.mark.skipif(
    keeps_ended_frames(), reason="this Python keeps cancelled calls in reference cycles"
)
@pytest.mark.parametrize("use", [request, stream, replicate, publish, ask_node])
@pytest.mark.parametrize(
    "how",
    [
        "is closed",
        "is lost",
        "is lost and made again",
        "is cancelled",
        "cannot connect",
        "is refused",
    ],
)
async def test_nothing_of_a_client_is_left_when_it(
    how: str,
    use: Use,
    net: FakeNet,
    server: FakeServer,
    autojump_clock: MockClock,
) -> None:
    fill_one_partition(server, 3)

    async def lose() -> None:
        if how == "is closed":
            return
        if how == "is cancelled":
            scope.cancel()
            await trio.lowlevel.checkpoint()
        net.down = how == "is lost"
        net.cut()
        await trio.sleep(5)
        net.down = False

    with no_collections():
        before = alive()
        net.down = how == "cannot connect"
        if how == "is refused":
            net.budgets = iter([(1 << 20, 10)] * 3)
        with trio.CancelScope() as scope, suppress(UprError):
            await use(net, lose)
        net.forget()
        await wait_all_tasks_blocked()
        leaked = alive() - before
    if use is publish:
        leaked = Counter(kind for kind in leaked if not kind.startswith(BATCHES_OF_A_PUBLISHER))
    assert leaked == Counter()
