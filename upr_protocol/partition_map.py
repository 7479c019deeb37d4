"""The partition map: which nodes hold a bucket's partitions, and what each is for them.

A map is one value with a revision. Whoever changes it makes the next revision and gives that to the
nodes one by one; a node takes a map only in place of the one that the giver believes it has, and of
two maps the one with the higher revision counts. So a command that was held up on its way changes
nothing when it arrives after a later one. (docs/adr/0010-replicas.md)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import msgspec

from upr_protocol.errors import UprError
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import BUCKET_NAME_BYTES_MAX, NODES_MAX, PARTITIONS_MAX

NODE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")

_PORT: Final = re.compile(r"[0-9]{1,5}")


class PartitionMapError(UprError, ValueError):
    """It is no partition map, or one that cannot be."""


class HistoryPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place in a partition's histories, up to which somebody must have everything.

    Attributes:
        history_id: The newest history there.
        seq: The last number there.
    """

    history_id: HistoryId
    seq: SeqNo


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Which nodes hold one partition.

    Attributes:
        active: The node that takes writes; empty while none does.
        replicas: The nodes that follow, each with the node that it follows; empty for the active,
            or for the one that hands over.
        handing_over: The node that was active, takes no writes any more, and is still followed;
            empty for none.
        keeps: What `active` must have to become so in the history of the one before; None when it
            begins a new one. Means nothing to a node that is active already.
        lost: While a failover is under way, or a takeover that was interrupted is gone on with: the
            node that was active. It is one of the replicas, to come back as one; but never was one
            of those that acknowledged.
        floor: Up to where the node that a failover or takeover last made active had everything
            then; None before there was one. A replica that has less is being filled anew: what it
            acknowledged earlier it may have given up.
        chosen: The revision of the map in which a failover last named `active`, having compared all
            copies; 0 for none. A node that has lost its memory since an older map does not go on
            because a map says so that only puts back what was.
    """

    active: str = ""
    replicas: dict[str, str] = {}
    handing_over: str = ""
    keeps: HistoryPoint | None = None
    lost: str = ""
    chosen: int = 0
    floor: HistoryPoint | None = None

    def state_of(self, node: str) -> PartitionState:
        """What `node` is for the partition."""
        if node == self.active:
            return PartitionState.ACTIVE
        if node == self.handing_over:
            return PartitionState.PENDING
        return PartitionState.REPLICA if node in self.replicas else PartitionState.DEAD

    def source_of(self, node: str) -> str:
        """The node that the replica `node` follows; empty for none."""
        if node not in self.replicas:
            return ""
        return self.replicas[node] or self.active or self.handing_over

    def holders(self) -> list[str]:
        """Every node that holds it, the active first."""
        found = (self.active, self.handing_over, *self.replicas)
        return list(dict.fromkeys(name for name in found if name))


class PartitionMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Who holds a bucket's partitions.

    Attributes:
        bucket: The bucket.
        revision: Rises with each change, from 1.
        nodes: Every node's address, `HOST:PORT`, by its name.
        partitions: The owners of each partition, by its number.
    """

    bucket: str
    revision: int
    nodes: dict[str, str]
    partitions: tuple[Assignment, ...]

    def encode(self) -> str:
        """The map as JSON: the same map is always the same text."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, document: str | bytes) -> PartitionMap:
        """The reverse of `encode`.

        Raises:
            PartitionMapError: It is no map, with the place of the mistake.
        """
        try:
            found = msgspec.json.decode(document, type=cls)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise PartitionMapError(f"this is no partition map: {error}") from error
        found.check()
        return found

    def check(self) -> None:
        """Raises `PartitionMapError` when it says something that cannot be."""
        if not 1 <= len(self.bucket.encode()) <= BUCKET_NAME_BYTES_MAX:
            raise PartitionMapError(f"{self.bucket!r} is no bucket's name")
        if not 1 <= self.revision < 1 << 63:
            raise PartitionMapError(f"a revision is 1 or more, not {self.revision}")
        if not 1 <= len(self.nodes) <= NODES_MAX:
            raise PartitionMapError(f"a map names 1 to {NODES_MAX} nodes, not {len(self.nodes)}")
        if not 1 <= len(self.partitions) <= PARTITIONS_MAX:
            raise PartitionMapError(
                f"a bucket has 1 to {PARTITIONS_MAX} partitions, not {len(self.partitions)}"
            )
        for name, address in self.nodes.items():
            if not NODE_NAME.fullmatch(name):
                raise PartitionMapError(
                    f"{name!r} is no node's name: 1 to 100 letters, digits, dots, underscores or "
                    "hyphens"
                )
            host, _, port = address.rpartition(":")
            if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 1 << 16:
                raise PartitionMapError(f"node {name}: {address!r} is not HOST:PORT")
            try:
                host.strip("[]").encode("idna")
            except UnicodeError as error:
                raise PartitionMapError(f"node {name}: {host!r} is no host name") from error
        for number, assignment in enumerate(self.partitions):
            self._check_assignment(number, assignment)

    def _check_assignment(self, number: int, assignment: Assignment) -> None:
        for name in (*assignment.holders(), *filter(None, assignment.replicas.values())):
            if name not in self.nodes:
                raise PartitionMapError(f"partition {number}: there is no node {name!r}")
        if assignment.active and assignment.handing_over:
            raise PartitionMapError(f"partition {number}: who hands over is not active any more")
        if assignment.lost and (
            assignment.active
            or assignment.handing_over
            or assignment.lost not in assignment.replicas
        ):
            raise PartitionMapError(
                f"partition {number}: who was lost is a replica, of a partition that has no active"
            )
        # Those from whom one comes to the active: nobody is passed twice, however long a chain is.
        rooted: set[str] = set()
        for name in assignment.replicas:
            if name in (assignment.active, assignment.handing_over):
                raise PartitionMapError(f"partition {number}: {name} cannot be its own replica")
            seen, source = {name}, assignment.source_of(name)
            while source in assignment.replicas and source not in rooted:
                if source in seen:
                    raise PartitionMapError(f"partition {number}: replicas follow each other")
                seen.add(source)
                source = assignment.source_of(source)
            if source in rooted:
                source = ""
            rooted |= seen
            if source not in ("", assignment.active, assignment.handing_over):
                raise PartitionMapError(f"partition {number}: {source} is not one of its holders")

    # What clients and nodes ask.

    def active_of(self, partition: PartitionId) -> str:
        """The address of the node that takes writes of `partition`; empty while none does."""
        return self.nodes.get(self.partitions[partition].active, "")

    def replicas_of(self, partition: PartitionId) -> list[str]:
        """The addresses of the nodes from which a replica of `partition` can be read."""
        return [self.nodes[name] for name in self.partitions[partition].replicas]

    def held_by(self, node: str) -> list[PartitionId]:
        """The partitions that `node` holds, whatever it is for them."""
        return [
            PartitionId(number)
            for number, assignment in enumerate(self.partitions)
            if assignment.state_of(node) is not PartitionState.DEAD
        ]

    # Changes: each gives the map that comes next.

    def next(self, changed: dict[PartitionId, Assignment]) -> PartitionMap:
        """The next revision, with other owners of some partitions.

        Raises:
            PartitionMapError: It would be none.
        """
        partitions = list(self.partitions)
        for number, assignment in changed.items():
            partitions[number] = assignment
        return self._following(nodes=self.nodes, partitions=tuple(partitions))

    def with_node(self, name: str, address: str) -> PartitionMap:
        """The next revision, with one more node, or with another address of one."""
        return self._following(nodes={**self.nodes, name: address}, partitions=self.partitions)

    def without_node(self, name: str) -> PartitionMap:
        """The next revision, without a node that holds nothing.

        Raises:
            PartitionMapError: It holds something.
        """
        nodes = {one: address for one, address in self.nodes.items() if one != name}
        return self._following(nodes=nodes, partitions=self.partitions)

    def _following(
        self, *, nodes: dict[str, str], partitions: tuple[Assignment, ...]
    ) -> PartitionMap:
        following = PartitionMap(
            bucket=self.bucket, revision=self.revision + 1, nodes=nodes, partitions=partitions
        )
        following.check()
        return following

    @classmethod
    def of_one(
        cls, bucket: str, partition_count: int, node: str, address: str, *, revision: int = 1
    ) -> PartitionMap:
        """The map of a bucket that one node holds alone. With revision 0 it stands for no map, and
        is never given to a node."""
        assignment = Assignment(active=node)
        return cls(
            bucket=bucket,
            revision=revision,
            nodes={node: address},
            partitions=(assignment,) * partition_count,
        )


def newest(maps: Iterable[PartitionMap]) -> PartitionMap | None:
    """The map that counts, of several; None of none."""
    return max(maps, key=lambda one: one.revision, default=None)
