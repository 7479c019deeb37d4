"""The client's view of its cluster: the newest partition map, and whether it is stale.

While no node has told of a map, the metadata takes the bucket for one that lies on a single node,
the one at the user's address. Callers see no difference: that node holds every partition.

Of two maps the one with the higher revision counts, with one exception. The map of a bucket that
was deleted and created again begins with a low revision, and nothing in it says that the bucket is
another one. But a node never goes back to an older map, unless the bucket was deleted there, or
restored from a backup. So if every node of the newest map has answered, and none of them has that
map any more, then the map is of a bucket that is gone, and the newest of the answers counts. While
one of the nodes does not answer, the map stays: an older one may come from a node that has missed a
failover.
"""

from __future__ import annotations

from collections.abc import Container, Generator

from upr_protocol.address import Address
from upr_protocol.errors import RemoteProtocolError
from upr_protocol.ids import PartitionId, PartitionState
from upr_protocol.partition_map import PartitionMap, PartitionMapError
from upr_protocol.steps import result_of
from upr_protocol.wire import MapReply


def partition_map_of(reply: MapReply, bucket: str) -> PartitionMap | None:
    """The map in a node's answer; None when the node holds the bucket alone.

    Raises:
        RemoteProtocolError: The answer is not a valid map, or is the map of another bucket.
    """
    return result_of(partition_map_in_steps(reply, bucket))


def partition_map_in_steps(
    reply: MapReply, bucket: str
) -> Generator[None, None, PartitionMap | None]:
    """The same, in steps between which others may have their turn.

    Raises:
        RemoteProtocolError: The answer is not a valid map, or is the map of another bucket.
    """
    if not reply.revision:
        return None
    try:
        partition_map = yield from PartitionMap.decode_in_steps(reply.document)
    except PartitionMapError as error:
        raise RemoteProtocolError(str(error)) from error
    if partition_map.bucket != bucket:
        raise RemoteProtocolError(
            f"asked for the map of bucket {bucket!r}, the node sent that of "
            f"{partition_map.bucket!r}"
        )
    return partition_map


class ClusterMetadata:
    """The newest map of a bucket that any node has told.

    Args:
        address: The address that the user gave; always asked first.
        follow_map: Whether to follow maps; otherwise every request goes to `address`.

    Attributes:
        map: The map; None while no node has told one.
        newest_revision: The newest revision that some node has said it has. An older map is stale.
    """

    __slots__ = ("_follow_map", "_older_answers", "address", "map", "newest_revision")

    def __init__(self, address: Address, *, follow_map: bool = True) -> None:
        self.address = address
        self.map: PartitionMap | None = None
        self.newest_revision = 0
        self._follow_map = follow_map
        # What those nodes have answered that do not have the newest map. They were asked when it
        # was known already.
        self._older_answers: dict[Address, PartitionMap | None] = {}

    @property
    def revision(self) -> int:
        """The map's revision; 0 without a map."""
        return self.map.revision if self.map is not None else 0

    @property
    def is_stale(self) -> bool:
        """Whether some node has a newer map."""
        return self.revision < self.newest_revision

    @property
    def is_single_node(self) -> bool:
        """Whether one node holds the bucket, as far as the client knows."""
        return not self.newest_revision

    def note_revision(self, revision: int) -> None:
        """Notes the revision that a node says it has; 0 when it holds the bucket alone."""
        if self._follow_map and revision > self.newest_revision:
            self.newest_revision = revision
            self._older_answers.clear()

    def update(self, partition_map: PartitionMap) -> bool:
        """Takes in a node's map of the bucket; whether it replaces the one before."""
        if not self._follow_map or partition_map.revision <= self.revision:
            return False
        self.map = partition_map
        self.note_revision(partition_map.revision)
        return True

    def learn(self, node: Address, partition_map: PartitionMap | None, asked_revision: int) -> bool:
        """A node answers when it is asked for its map of the bucket: None if it has no map, or no
        such bucket. `newest_revision` was `asked_revision` when it was asked. Gives whether another
        map counts now."""
        is_newer = partition_map is not None and self.update(partition_map)
        has_newest_map = not self.is_stale and partition_map == self.map
        if has_newest_map or self.is_single_node:
            self._older_answers.pop(node, None)
            return is_newer
        if asked_revision != self.newest_revision:
            # It may have taken the newest map since: answers overtake each other if a node is asked
            # on several connections.
            return is_newer
        self._older_answers[node] = partition_map
        return (self._is_map_gone() and self._take_newest_older_map()) or is_newer

    def forget_answers(self) -> None:
        """Forgets which nodes have older maps: they answered long ago."""
        self._older_answers.clear()

    def _is_map_gone(self) -> bool:
        """Whether no node has the newest map any more."""
        if self.map is None:
            nodes = self.address.each_node()
        else:
            nodes = [self.address.of_node(node) for node in self.map.nodes.values()]
        return self._older_answers.keys() >= set(nodes)

    def _take_newest_older_map(self) -> bool:
        """Takes the newest of the older maps; False if there is none."""
        older_maps = list(filter(None, self._older_answers.values()))
        if not older_maps:
            return False
        self.map = max(older_maps, key=lambda older_map: older_map.revision)
        self.newest_revision = self.map.revision
        self._older_answers.clear()
        return True

    def known_nodes(self) -> list[Address]:
        """Every node that may know the map; the nodes that the user named come first."""
        addresses = self.address.each_node()
        if self.map is not None:
            addresses += [self.address.of_node(node) for node in self.map.nodes.values()]
        return list(dict.fromkeys(addresses))

    def holders(self, partition: PartitionId, state: PartitionState) -> list[Address]:
        """The nodes that hold `partition` in `state`, the best first.

        A single node is given for every state: what it is for its partitions, only the node itself
        can say.
        """
        if self.is_single_node:
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

    def choose_holder(
        self,
        partition: PartitionId,
        state: PartitionState,
        *,
        down: Container[Address],
        current: Address | None = None,
    ) -> Address | None:
        """The node to use for `partition`; None while the map names none.

        The current node stays if it will do: a change costs a connection and a resend. A node that
        is down is chosen only when every holder is.
        """
        holders = self.holders(partition, state)
        usable = [address for address in holders if address not in down]
        if current in usable:
            return current
        return next(iter(usable or holders), None)

    def explain_no_holder(self, partition: PartitionId, state: PartitionState) -> str:
        """A sentence for a partition that no node holds in `state`; empty when one does."""
        if self.map is None or self.holders(partition, state):
            return ""
        return (
            f"no node is {state.name.lower()} for partition {partition} in the partition map "
            f"(revision {self.revision}): see `upr partitions`; `upr failover` and `upr takeover` "
            "make a replica active, `upr replicas add` makes one"
        )
