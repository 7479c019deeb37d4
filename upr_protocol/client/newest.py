"""The newest documents of keys that a server's history has left behind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs
import trio

from upr_protocol.client.address import Address
from upr_protocol.client.client import connect
from upr_protocol.client.keyvalue import Item
from upr_protocol.client.link import TrioOptions
from upr_protocol.client.retry import Patience
from upr_protocol.errors import UprError
from upr_protocol.ids import HistoryId, PartitionId, SeqNo


@attrs.frozen
class Newest:
    """What keys hold.

    Attributes:
        high: The number that the partition had come to when the last of them was read.
        documents: By key its item, or None for one that is missing.
    """

    high: SeqNo
    documents: dict[bytes, Item | None]


class Fetch(Protocol):
    """Asks a server for the newest documents of keys."""

    async def __call__(
        self, partition: PartitionId, keys: Sequence[bytes], history_id: HistoryId
    ) -> Newest:
        """The newest documents of `keys`, which are of `partition`, in a history.

        Raises:
            ServerError: `HISTORY_CHANGED`: the partition is in another history.
        """


@attrs.frozen
class Fetcher:
    """Asks with a connection of its own, as often as it takes.

    Attributes:
        address: The bucket.
        options: How to connect.
        patience: When to give up.
    """

    address: Address
    options: TrioOptions
    patience: Patience

    async def __call__(
        self, partition: PartitionId, keys: Sequence[bytes], history_id: HistoryId
    ) -> Newest:
        """See `Fetch`.

        Raises:
            UprError: There was no answer to be had for too long.
        """
        while True:
            try:
                found = await self._ask(partition, keys, history_id)
            except UprError as error:
                await trio.sleep(self.patience.wait_s(error, trio.current_time()))
            else:
                self.patience.progress()
                return found

    async def _ask(
        self, partition: PartitionId, keys: Sequence[bytes], history_id: HistoryId
    ) -> Newest:
        options = self.options
        async with connect(
            self.address,
            identity=options.identity,
            idle_interval_s=options.idle_interval_s,
            connect_timeout_s=options.connect_timeout_s,
            dial=options.dial,
        ) as client:
            items, high = await client.get_from(partition, keys, history_id)
            return Newest(high, dict(zip(keys, items, strict=True)))
