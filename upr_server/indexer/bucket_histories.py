"""Which bucket a node of an indexer follows: another server may have a bucket of the same name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import trio

from upr_protocol.client import Address, connect
from upr_protocol.concurrency import first_failure
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import PartitionId

MAX_AGE_S: Final = 5.0
"""How long an answer is used again: a node opens many links at once."""

RETRY_S: Final = 1.0
"""The pause between two questions to a server that has not answered yet."""

TIMEOUT_S: Final = 2.0
"""How long the server may take to answer: less than a node waits for a link."""


class OtherBucketError(UprError):
    """A node asks that follows another bucket of the same name."""


class BucketHistories:
    """The failover logs of a bucket. A partition's histories have random names, so two nodes follow
    the same bucket if they have met a history of some partition both.

    Args:
        address: The bucket.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._logs: dict[PartitionId, FailoverLog] = {}
        self._ask_at = 0.0
        """When to ask again."""
        self._failure = ""
        self._asking = trio.Lock()

    async def statement(self) -> str:
        """What a node says of its bucket: `PARTITION.HISTORY.HISTORY…`, of a partition whose log it
        knows; the histories in hexadecimal, the newest first.

        Raises:
            BrokenError: The server has not answered yet.
        """
        logs = await self._known_logs()
        partition = min(logs)
        histories = [f"{entry.history_id:x}" for entry in logs[partition]]
        return ".".join([str(partition), *histories])

    async def check(self, statement: str, node: str) -> None:
        """Checks what another node says of its bucket.

        Args:
            statement: What the other node's `statement` returned.
            node: The name of this node, for the error.

        Raises:
            OtherBucketError: It follows another bucket, or says nothing that can be compared.
            BrokenError: The server has not answered yet.
        """
        logs = await self._known_logs()
        try:
            partition, *histories = (
                int(part, 16 if place else 10) for place, part in enumerate(statement.split("."))
            )
        except ValueError:
            raise OtherBucketError(
                f"{node} links to nodes that say which bucket they follow, and not {statement!r}"
            ) from None
        own_log = logs.get(PartitionId(partition))
        if own_log is None:
            raise OtherBucketError(
                f"{node} knows no histories of partition {partition} of {self._address.bucket}, so "
                "it cannot tell whether it follows the same bucket; it looks again"
            )
        if not {int(entry.history_id) for entry in own_log}.intersection(histories):
            raise OtherBucketError(
                f"{node} follows another bucket of the name {self._address.bucket}: it has met no "
                f"history of partition {partition} that the node that asks has met; name the same "
                "cluster in the setting bucket of every node"
            )

    async def _known_logs(self) -> Mapping[PartitionId, FailoverLog]:
        """By partition, its log: at most some seconds old, or the last one if the server does not
        answer."""
        async with self._asking:
            if trio.current_time() >= self._ask_at:
                await self._renew()
        if not self._logs:
            raise BrokenError(
                f"which bucket {self._address} is cannot be told before the server answers: "
                f"{self._failure}"
            )
        return self._logs

    async def _renew(self) -> None:
        self._failure = "it has not answered in time"
        try:
            with trio.move_on_after(TIMEOUT_S):
                async with connect(self._address, identity="upr-indexer") as client:
                    infos = client.partitions()
                self._logs.update({info.partition: info.log for info in infos if info.is_held})
                self._failure = "it has none of the bucket's partitions"
        except* UprError as errors:
            self._failure = str(first_failure(errors))
        self._ask_at = trio.current_time() + (MAX_AGE_S if self._logs else RETRY_S)
