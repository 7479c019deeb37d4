"""The names of things: partitions, sequence numbers, CAS values, histories.

All of them are plain integers on the wire; the new types keep one from being taken for another.
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import Final, NewType

PartitionId = NewType("PartitionId", int)
"""A partition's number in its bucket, 0 to 1,023."""

SeqNo = NewType("SeqNo", int)
"""A sequence number: unique in one history of one partition and strictly rising. The first mutation
has 1; 0 stands for "before everything"."""

Cas = NewType("Cas", int)
"""The version of one item, compared by writers that want to lose no update. 0 stands for "any"."""

HistoryId = NewType("HistoryId", int)
"""A random non-zero 64-bit number that names one branch of a partition's history. The same sequence
number in two histories means two different changes."""

NO_PARTITION: Final = PartitionId(0xFFFF)
"""The partition field of a frame that is about no partition, or about all of them."""

WRITER_BYTES: Final = 16
"""The length of a publisher's ID."""

NO_WRITER: Final = bytes(WRITER_BYTES)
"""The ID of a publisher that sends nothing again."""

PARTITIONS_END: Final = 1024
"""One more than the highest partition ID."""

SEQ_MAX: Final = SeqNo((1 << 64) - 1)
"""The end number of a stream that has no end."""


DESIGN_PREFIX: Final = b"_design/"
"""The prefix of a design document's key. Consumers that derive something from a bucket, as the
indexer does, hear of each changed design document by its key."""


@unique
class Operation(IntEnum):
    """What one mutation of a chunk does.

    The server stores and streams only the first three. The others are requests: the server stores
    the result as one of the first three, or refuses the request.
    """

    SET = 1
    """Store the value, whether or not the key exists."""
    DELETE = 2
    """Remove the key. The server stores and streams the deletion."""
    EXPIRE = 3
    """The server removes the key, because the item has expired."""
    ADD = 4
    """Store the value if the key does not exist."""
    REPLACE = 5
    """Store the value if the key exists."""
    INCREMENT = 6
    """Add to a decimal counter; wraps at 2**64."""
    DECREMENT = 7
    """Subtract from a decimal counter; stops at 0."""
    APPEND = 8
    """Add bytes to the end of the stored value."""
    PREPEND = 9
    """Add bytes to the beginning of the stored value."""
    TOUCH = 10
    """Give the item a new expiry time."""


STORED_OPERATIONS: Final = bytes((Operation.SET, Operation.DELETE, Operation.EXPIRE))
"""The operations a stored or streamed chunk may hold."""

PUBLISHED_OPERATIONS: Final = bytes(set(Operation) - {Operation.EXPIRE})
"""The operations a published chunk may hold: only a server expires."""


@unique
class PartitionState(IntEnum):
    """The state of one partition on one node."""

    ACTIVE = 1
    """Accepts writes."""
    REPLICA = 2
    """Follows the active node, or another replica."""
    PENDING = 3
    """Accepts no writes or reads, and is streamed to replicas only. Either the node hands the
    partition over to another node; or the map names the node as active, but after a restart the
    node is not yet sure that the map is the newest, or that its copy has everything."""
    DEAD = 4
    """Answers no requests and streams nothing."""


@unique
class SnapshotKind(IntEnum):
    """Where a snapshot is read from."""

    MEMORY = 1
    """From the snapshots in memory."""
    DISK = 2
    """From disk, by a backfill."""


@unique
class Durability(IntEnum):
    """How durable a run must be before the server answers."""

    MEMORY = 0
    """The active node has it in memory."""
    PERSISTED = 1
    """The active node has it on disk."""
    REPLICATED = 2
    """The active node and `copies` replicas have it in memory."""
    REPLICATED_AND_PERSISTED = 3
    """The active node and `copies` replicas have it on disk."""

    @property
    def is_replicated(self) -> bool:
        """Whether replicas must have it, too."""
        return self in (Durability.REPLICATED, Durability.REPLICATED_AND_PERSISTED)


DURABILITIES: Final = {level.name.lower().replace("_", "-"): level for level in Durability}
"""The levels by the words that commands and options have for them."""

REPLICATED_DURABILITIES: Final = " or ".join(
    word for word, level in DURABILITIES.items() if level.is_replicated
)
"""The words of the replicated levels, for errors."""
