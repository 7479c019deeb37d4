"""The partition map: which nodes hold a bucket's partitions, and in which role.

A map is one value with a revision. A change makes the next revision, which the nodes get one by
one. A node replaces its map only if it has the one that the sender expects, and of two maps the one
with the higher revision counts. So a command that was delayed on its way changes nothing when it
arrives after a later one. (docs/adr/0010-replicas.md)
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping
from ipaddress import IPv6Address
from typing import Any, Final
from unicodedata import normalize

import msgspec

from upr_protocol.errors import UprError
from upr_protocol.ids import HistoryId, PartitionId, PartitionState, SeqNo
from upr_protocol.limits import (
    BUCKET_NAME_BYTES_MAX,
    NODES_MAX,
    PARTITIONS_MAX,
    REPLICAS_MAX,
)
from upr_protocol.steps import result_of

NODE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")

_PORT: Final = re.compile(r"[0-9]{1,5}")
_NUMBER: Final = re.compile(r"[0-9]{1,20}")

_NO_NAME: Final = re.compile(r"[\x00-\x20\x7f-\x9f#,/:?@\[\\\]]")
"""Characters that no host's name has; in an address most of them have a meaning."""


class PartitionMapError(UprError, ValueError):
    """A document is not a partition map, or a map contradicts itself."""


class HistoryPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A sequence number in one of a partition's histories.

    Attributes:
        history_id: The history.
        seq: The sequence number.
    """

    history_id: HistoryId
    seq: SeqNo


_JSON_NAMES: Final = {
    "continues_from": "keeps",
    "lost_active": "lost",
    "failover_revision": "chosen",
    "promotion_point": "floor",
}
"""Names in the JSON document, where they differ: nodes keep maps on disk."""

_POINTS: Final = (_JSON_NAMES["continues_from"], _JSON_NAMES["promotion_point"])
"""The fields of an assignment that are history points, as the document names them."""

_OBJECTS_MAX: Final = 2 + PARTITIONS_MAX * 4
"""Objects of a document: the map, its nodes, and of each partition itself, its replicas and its
two points."""

_COMMAS_MAX: Final = 5 + NODES_MAX + PARTITIONS_MAX * (12 + REPLICAS_MAX)
"""Commas of a document: one a field, at most, and one a partition."""

HOST_CHARACTERS_MAX: Final = 255
"""As long as a host's name may be. To check a longer one takes quadratic time."""

REVISION_MAX: Final = (1 << 53) - 1
"""The highest number that every reader of JSON knows exactly."""


class Assignment(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, rename=_JSON_NAMES
):
    """Which nodes hold one partition.

    Attributes:
        active: The node that accepts writes; empty while no node does.
        replicas: The replicas, each with the node that it follows. An empty name stands for the
            active node, or for the node in `handing_over`.
        handing_over: During a takeover, the node that was active. It accepts no more writes, and
            the replicas still follow it. Otherwise empty.
        continues_from: After a takeover, the point at which `active` continues the previous node's
            history. It must have exactly everything up to this point. Left out if it begins a new
            history. A node that is already active ignores it. A node that was active since, and
            was restarted, has more, and begins a new history.
        lost_active: During a failover, or when a command resumes an interrupted takeover: the node
            that was active before. It is also in the replicas, because it returns as a replica. But
            it does not count as a replica that acknowledged.
        promotion_point: The point up to which `active` had everything when a failover or takeover
            last made it active, or when a replica was added to others; left out before the first.
            A replica with less is copying the partition again, and may lack changes that it
            acknowledged earlier.
        failover_revision: The revision of the map in which a failover last chose `active` after
            comparing all copies; 0 if none did. If a node has crashed and restarted since then, a
            map that only restores earlier assignments must not make it active.
    """

    active: str = ""
    replicas: dict[str, str] = {}
    handing_over: str = ""
    continues_from: HistoryPoint | None = None
    lost_active: str = ""
    failover_revision: int = 0
    promotion_point: HistoryPoint | None = None

    def state_of(self, node: str) -> PartitionState:
        """The state that `node` should have for the partition."""
        if node == self.active:
            return PartitionState.ACTIVE
        if node == self.handing_over:
            return PartitionState.PENDING
        return PartitionState.REPLICA if node in self.replicas else PartitionState.DEAD

    def source_of(self, node: str) -> str:
        """The node that the replica `node` follows; empty for any other node, and while none is
        active."""
        if node not in self.replicas:
            return ""
        return self.replicas[node] or self.active or self.handing_over

    def followers_of(self, node: str) -> list[str]:
        """The replicas that follow `node`."""
        return [name for name in self.replicas if self.source_of(name) == node]

    def holders(self) -> list[str]:
        """Every node that holds the partition, the active first."""
        names = (self.active, self.handing_over, *self.replicas)
        return list(dict.fromkeys(name for name in names if name))


STEP_PARTITIONS: Final = 64
"""Partitions that one step of reading, checking or writing a map takes: below 2 ms with 16 replicas
each."""


class _BucketOfMap(msgspec.Struct, frozen=True):
    bucket: str


class _MapOfTexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A map whose assignments are not read yet."""

    bucket: str
    revision: int
    nodes: dict[str, str]
    partitions: list[msgspec.Raw]
    command: str = ""


class PartitionMap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which nodes hold a bucket's partitions.

    Attributes:
        bucket: The bucket.
        revision: Rises with each change, from 1.
        nodes: Every node's address, `HOST:PORT`, by its name. The host is a name, an IPv4 address,
            or an IPv6 address in brackets.
        partitions: The assignment of each partition, by its number.
        command: A name, drawn at random, of the takeover or failover that made the map; otherwise
            left out. Two commands that run at the same time give their maps the same revisions.
            With the names the maps differ, and a node takes the map of one of them only.
    """

    bucket: str
    revision: int
    nodes: dict[str, str]
    partitions: tuple[Assignment, ...]
    command: str = ""

    @classmethod
    def of_one_node(
        cls, bucket: str, partition_count: int, node: str, address: str, *, revision: int = 1
    ) -> PartitionMap:
        """The map of a bucket that one node holds alone. With revision 0 it stands for no map, and
        is never given to a node."""
        return cls(
            bucket=bucket,
            revision=revision,
            nodes={node: address},
            partitions=(Assignment(active=node),) * partition_count,
        )

    def with_assignments(
        self,
        assignments: Mapping[PartitionId, Assignment],
        revision: int = 0,
        command: str = "",
    ) -> PartitionMap:
        """The map with other assignments of some partitions, and with another revision; 0 stands
        for the next one. `command` has made it.

        Raises:
            PartitionMapError: The map would contradict itself.
        """
        partitions = list(self.partitions)
        for partition, assignment in assignments.items():
            partitions[partition] = assignment
        changed = msgspec.structs.replace(
            self,
            revision=revision or self.revision + 1,
            partitions=tuple(partitions),
            command=command,
        )
        changed.check()
        return changed

    def active_of(self, partition: PartitionId) -> str:
        """The address of the node that takes writes of `partition`; empty while none does."""
        return self.nodes.get(self.partitions[partition].active, "")

    def replicas_of(self, partition: PartitionId) -> list[str]:
        """The addresses of the nodes that have a replica of `partition`."""
        return [self.nodes[name] for name in self.partitions[partition].replicas]

    def encode(self) -> str:
        """The map as JSON. Equal maps give equal texts.

        The numbers of a history point are decimal text there: they need 64 bits, and many readers
        of JSON have 53.
        """
        return result_of(self.encode_in_steps())

    def encode_in_steps(self) -> Generator[None, None, str]:
        """The same, in steps between which others may have their turn."""
        head: dict[str, object] = {
            "bucket": self.bucket,
            "revision": self.revision,
            "nodes": self.nodes,
        }
        if self.command:
            head["command"] = self.command
        texts: list[str] = []
        for assignment in self.partitions:
            fields = msgspec.to_builtins(assignment)
            for name in _POINTS:
                if name in fields:
                    fields[name] = {key: str(value) for key, value in fields[name].items()}
            texts.append(msgspec.json.encode(fields).decode())
            if len(texts) % STEP_PARTITIONS == 0:
                yield
        front = msgspec.json.encode(head).decode().removesuffix("}")
        return f'{front},"partitions":[{",".join(texts)}]}}'

    @classmethod
    def decode(cls, document: str | bytes) -> PartitionMap:
        """The map that `encode` made `document` of.

        Raises:
            PartitionMapError: The document is not a valid map; the message says where.
        """
        return result_of(cls.decode_in_steps(document))

    @classmethod
    def decode_in_steps(cls, document: str | bytes) -> Generator[None, None, PartitionMap]:
        """The same, in steps between which others may have their turn.

        Raises:
            PartitionMapError: The document is not a valid map; the message says where.
        """
        place = ""
        try:
            data = document.encode() if isinstance(document, str) else document
            _check_size(data)
            texts = msgspec.json.decode(data, type=_MapOfTexts)
            _check_partition_count(len(texts.partitions))
            assignments: list[Assignment] = []
            for text in texts.partitions:
                place = f"partition {len(assignments)}: "
                fields = msgspec.json.decode(text)
                _read_points(fields)
                assignments.append(msgspec.convert(fields, Assignment))
                if len(assignments) % STEP_PARTITIONS == 0:
                    yield
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise PartitionMapError(f"not a partition map: {place}{error}") from error
        partition_map = cls(
            bucket=texts.bucket,
            revision=texts.revision,
            nodes=texts.nodes,
            partitions=tuple(assignments),
            command=texts.command,
        )
        yield from partition_map._check_in_steps()
        return partition_map

    @staticmethod
    def bucket_of(document: str) -> str:
        """The bucket that a document is about, if it is a map: the same as `decode` gives. The rest
        is not looked at, which takes a twentieth of the time.

        Raises:
            PartitionMapError: The document names no bucket.
        """
        try:
            data = document.encode()
            _check_size(data)
            return msgspec.json.decode(data, type=_BucketOfMap).bucket
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise PartitionMapError(f"not a partition map: {error}") from error

    def check(self) -> None:
        """Raises `PartitionMapError` if the map contradicts itself or exceeds a limit."""
        result_of(self._check_in_steps())

    def _check_in_steps(self) -> Generator[None, None, None]:
        if not 1 <= len(self.bucket.encode()) <= BUCKET_NAME_BYTES_MAX:
            raise PartitionMapError(f"{self.bucket!r} is not a bucket's name")
        if not 1 <= self.revision <= REVISION_MAX:
            raise PartitionMapError(f"a revision is 1 to {REVISION_MAX}, not {self.revision}")
        if self.command:
            _check_name("command", self.command)
        if not 1 <= len(self.nodes) <= NODES_MAX:
            raise PartitionMapError(f"a map names 1 to {NODES_MAX} nodes, not {len(self.nodes)}")
        _check_partition_count(len(self.partitions))
        for name, address in self.nodes.items():
            _check_node(name, address)
            # A long name of a host that is not ASCII takes 2 ms.
            yield
        for partition, assignment in enumerate(self.partitions):
            if partition % STEP_PARTITIONS == 0:
                yield
            try:
                self._check_assignment(assignment)
            except PartitionMapError as error:
                raise PartitionMapError(f"partition {partition}: {error}") from error

    def _check_assignment(self, assignment: Assignment) -> None:
        replicas = assignment.replicas
        if len(replicas) > REPLICAS_MAX:
            raise PartitionMapError(
                f"a partition has at most {REPLICAS_MAX} replicas, not {len(replicas)}"
            )
        names = {assignment.active, assignment.handing_over, *replicas, *replicas.values(), ""}
        if unknown := names - self.nodes.keys() - {""}:
            raise PartitionMapError(f"the map has no node {min(unknown)!r}")
        if assignment.active and assignment.handing_over:
            raise PartitionMapError("one node is active while another hands over")
        if assignment.lost_active and (
            assignment.active
            or assignment.handing_over
            or assignment.lost_active not in assignment.replicas
        ):
            raise PartitionMapError(
                "a node can be lost only as a replica of a partition without an active node"
            )
        _check_sources(assignment)


def _is_host(host: str) -> bool:
    """Whether an `Address` may have this host: a name, an IPv4 address, or an IPv6 address in
    brackets. Nodes make one of each address of their maps, every few seconds."""
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        try:
            IPv6Address(host)
        except ValueError:
            return False
        host = host.replace(":", "")  # what is left may have a zone
    # Some characters stand for several, as U+2100 for "a/c".
    return not _NO_NAME.search(normalize("NFKC", host))


def _check_name(owner: str, name: str) -> None:
    if not NODE_NAME.fullmatch(name):
        raise PartitionMapError(
            f"{name!r} is not a {owner}'s name: use 1 to 100 letters, digits, dots, underscores or "
            "hyphens"
        )


def _check_node(name: str, address: str) -> None:
    _check_name("node", name)
    host, _, port = address.rpartition(":")
    if (
        not 1 <= len(host) <= HOST_CHARACTERS_MAX
        or not _PORT.fullmatch(port)
        or not 0 < int(port) < 1 << 16
        or not _is_host(host)
    ):
        raise PartitionMapError(f"node {name}: {address[:300]!r} is not HOST:PORT")
    try:
        host.strip("[]").encode("idna")
    except UnicodeError as error:
        raise PartitionMapError(f"node {name}: {host!r} is not a host name") from error


def _check_sources(assignment: Assignment) -> None:
    """Checks that each replica's sources lead to the active node, without a circle."""
    roots = {"", assignment.active, assignment.handing_over}
    if roots.isdisjoint(assignment.replicas) and roots.issuperset(assignment.replicas.values()):
        return
    # Replicas whose path is known to reach a root: each is visited once, however long paths are.
    rooted: set[str] = set()
    for name in assignment.replicas:
        if name in roots:
            raise PartitionMapError(f"{name} cannot be its own replica")
        path, source = {name}, assignment.source_of(name)
        while source in assignment.replicas and source not in rooted:
            if source in path:
                raise PartitionMapError("replicas follow each other in a circle")
            path.add(source)
            source = assignment.source_of(source)
        if source not in rooted and source not in roots:
            raise PartitionMapError(f"{source} does not hold the partition, but is followed")
        rooted |= path


def _read_points(assignment: Any) -> None:
    """Turns the text in an assignment's history points into numbers, in place. What has another
    shape is left as it is: the conversion says what is wrong with it."""
    for name in _POINTS:
        point = assignment.get(name) if isinstance(assignment, dict) else None
        if isinstance(point, dict):
            for key, value in point.items():
                if isinstance(value, str) and _NUMBER.fullmatch(value):
                    point[key] = int(value)


def _check_partition_count(count: int) -> None:
    if not 1 <= count <= PARTITIONS_MAX:
        raise PartitionMapError(f"a bucket has 1 to {PARTITIONS_MAX} partitions, not {count}")


def _check_size(document: bytes) -> None:
    """Raises `PartitionMapError` for more objects or fields than a map can have, before they are
    made: a megabyte of them would hold the server's loop for up to 0.4 s."""
    if document.count(b"{") > _OBJECTS_MAX or document.count(b",") > _COMMAS_MAX:
        raise PartitionMapError(
            f"not a partition map: it has more than {PARTITIONS_MAX} partitions, {NODES_MAX} "
            f"nodes, or {REPLICAS_MAX} replicas of a partition"
        )


def newest_map(maps: Iterable[PartitionMap]) -> PartitionMap | None:
    """The map with the highest revision; None if there are no maps."""
    return max(maps, key=lambda partition_map: partition_map.revision, default=None)
