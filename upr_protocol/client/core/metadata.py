"""What a client knows of the partition map: where to ask for it, and where to go by it.

No I/O. While no node has told of a map, the bucket is taken for one that lies on one node: the one
at the address that the user gave. To those who ask, that is a map like any other.
"""

from __future__ import annotations

from upr_protocol.address import Address
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import PartitionMap


class ClusterMetadata:
    """The newest map of a bucket that any node told of.

    Args:
        address: What the user said; asked first, and always.
        by_map: Whether to go by what nodes tell of maps at all, and not to stay with the address.

    Attributes:
        address: See above.
        map: The map; None while no node has told one.
        wanted: The revision that some node has, as far as was heard: an older map is of no use.
    """

    __slots__ = ("_by_map", "address", "map", "wanted")

    def __init__(self, address: Address, *, by_map: bool = True) -> None:
        self.address = address
        self._by_map = by_map
        self.map: PartitionMap | None = None
        self.wanted = 0

    @property
    def revision(self) -> int:
        """The map's revision; 0 without one."""
        return self.map.revision if self.map is not None else 0

    @property
    def is_stale(self) -> bool:
        """Whether some node has a newer map."""
        return self.revision < self.wanted

    @property
    def is_alone(self) -> bool:
        """Whether one node holds the bucket, as far as is known."""
        return not self.wanted

    def note_revision(self, revision: int) -> None:
        """Some node has a map of this revision; 0 when it holds the bucket alone."""
        if self._by_map:
            self.wanted = max(self.wanted, revision)

    def take(self, found: PartitionMap) -> bool:
        """Takes in a node's map; whether it is newer than the one before, and goes by.

        Raises:
            RemoteProtocolError: It is that of another bucket.
        """
        if found.bucket != self.address.bucket:
            raise RemoteProtocolError(
                f"the map of {self.address.bucket!r} was asked for, and that of {found.bucket!r} "
                "came"
            )
        if not self._by_map or found.revision <= self.revision:
            return False
        self.map = found
        self.note_revision(found.revision)
        return True

    def known_nodes(self) -> list[Address]:
        """Every node that may know the map, those that the user named first."""
        found = self.address.each()
        if self.map is not None:
            found += [self.address.of_node(node) for node in self.map.nodes.values()]
        return list(dict.fromkeys(found))

    def holders(self, partition: PartitionId, state: PartitionState) -> list[Address]:
        """The nodes that have `partition` in `state`, the best first; none while there are none.
        What a node alone is for its partitions it knows itself."""
        if self.is_alone:
            return [self.address]
        if self.map is None or partition >= len(self.map.partitions):
            return []
        if state is PartitionState.ACTIVE:
            nodes = [self.map.active_of(partition)]
        elif state is PartitionState.REPLICA:
            nodes = self.map.replicas_of(partition)
        else:
            assignment = self.map.partitions[partition]
            nodes = [
                self.map.nodes[name]
                for name in assignment.holders()
                if assignment.state_of(name) is state
            ]
        return [self.address.of_node(node) for node in nodes if node]

    def no_holder_text(self, partition: PartitionId, state: PartitionState) -> str:
        """What to say of a partition that no node holds in `state`; empty when one does."""
        if self.map is None or self.holders(partition, state):
            return ""
        what = f"no node is {state.name.lower()} for partition {partition}"
        return (
            f"{what}, says the partition map (revision {self.revision}): see `upr partitions`; "
            "`upr failover` and `upr takeover` make a replica active, `upr replicas add` makes one"
        )
