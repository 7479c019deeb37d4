"""What the client of a connection reports as a replica."""

from __future__ import annotations

from typing import Final

from upr_protocol.ids import SeqNo
from upr_protocol.session import ServerSession
from upr_server.engine import Partition

REPLICA_PREFIX: Final = "replica:"
"""What the identity of a replica begins with; the name of its node follows."""


class ReplicaReports:
    """The reports that came by one connection. They count for as long as the connection lasts.

    Args:
        session: The connection's session.
        connection_number: The connection's number; newer ones have higher numbers.
    """

    __slots__ = ("_connection_number", "_names", "_session")

    def __init__(self, session: ServerSession, connection_number: int) -> None:
        self._session = session
        self._connection_number = connection_number
        self._names: dict[Partition, str] = {}
        """Partitions of which the client has reported what it has, with its name."""

    @property
    def name(self) -> str:
        """The name of the client's node, if the client is a replica."""
        return self._session.client_identity.removeprefix(REPLICA_PREFIX)

    def report(
        self, partition: Partition, name: str, received_seq: SeqNo, persisted_seq: SeqNo
    ) -> int:
        """The client has come so far in a partition; see `ReplicaProgress.report`, whose result it
        returns.

        Args:
            partition: The partition.
            name: The client's `name`.
            received_seq: The last complete snapshot end that it has received.
            persisted_seq: The last one that it has on disk.
        """
        self._names[partition] = name
        return partition.replicas.report(name, received_seq, persisted_seq, self._connection_number)

    def forget(self) -> None:
        """The connection is over. O(partitions that were reported of)."""
        for partition, name in self._names.items():
            partition.replicas.forget_replica(name, self._connection_number)
        self._names.clear()
