"""Links on which other nodes are asked for their maps, kept from one question to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs
import trio

from upr_protocol.client import Address
from upr_protocol.client.trio.connection import TrioOptions, open_connection
from upr_protocol.client.trio.node_client import NodeStatus, request_status
from upr_protocol.client.trio.request_channel import RequestChannel
from upr_protocol.errors import BrokenError


@attrs.frozen(eq=False)
class _Neighbour:
    """A link that is there, and how to end it."""

    asker: RequestChannel
    close: Callable[[], None]


class Neighbours:
    """See the module. A node asks each of the others every few seconds, for each bucket: a
    connection a question would be more work for both than the answer.

    Args:
        nursery: Where the links are.
        options: How to connect.
    """

    def __init__(self, nursery: trio.Nursery, options: TrioOptions) -> None:
        self._nursery = nursery
        self._options = options
        self._links: dict[Address, _Neighbour] = {}

    async def ask(self, address: Address) -> NodeStatus:
        """What the node at `address` says of itself and of the bucket that the address names, on
        the link that there is, or else on a new one. Cancelled, it closes the link: who does not
        answer in time may be gone.

        Raises:
            BrokenError: There is no connection to be had, or it was lost.
            ServerError: There is no such bucket.
            RemoteProtocolError: What is there is no map.
        """
        where = attrs.evolve(address, bucket="")
        kept = self._links.get(where)
        if kept is not None:
            try:
                return await self._ask(kept, address.bucket)
            except BrokenError:
                pass  # it may have been stopped and started since it was asked last
        return await self._ask(await self._connect(where), address.bucket)

    async def _ask(self, one: _Neighbour, bucket: str) -> NodeStatus:
        try:
            return await request_status(one.asker, bucket)
        except trio.Cancelled:
            one.close()
            raise

    def keep(self, addresses: Iterable[Address]) -> None:
        """Closes the links to all others than these."""
        wanted = {attrs.evolve(address, bucket="") for address in addresses}
        for where in self._links.keys() - wanted:
            self._links[where].close()

    async def _connect(self, where: Address) -> _Neighbour:
        found: _Neighbour = await self._nursery.start(self._hold, where)
        return found

    async def _hold(self, where: Address, task_status: trio.TaskStatus[_Neighbour]) -> None:
        asker = RequestChannel(where, self._options.connect_timeout_s)
        with trio.CancelScope() as scope:
            async with open_connection(where, self._options, asker) as link:
                here = self._links[where] = _Neighbour(asker, scope.cancel)
                task_status.started(here)
                try:
                    await link.ended.wait()
                finally:
                    if self._links.get(where) is here:
                        del self._links[where]
