"""The clients: over Trio, and over plain sockets.

- `connect` gives a `Client`: get, set, increment, …, and buckets.
- `publisher` gives a `Publisher`: many changes, in batches, each with exactly one effect.
- `consume` gives a `Consumer`: the changes of a bucket, as an async iterator of events;
  `consume_with_rollback` one that remembers its received keys and rolls back no more than it must;
  `keep_local_copy` a local copy of a bucket that follows by itself.
- `follow_events` gives an `EventFeed`: which buckets are created, deleted and updated.
- `IndexClient` asks an indexer, over HTTP.
- `BlockingClient`, `BlockingConsumer` and `BlockingRollbackConsumer` do the same in programs that
  block. `BoundedStreams` reads to the ends of ranges, without a thread of its own.

What both kinds of clients decide alike stands once, without I/O, in `core`. `trio` and `blocking`
drive it.

A name's module is imported when the name is first used: a server needs no client that blocks, and
most programs no local copy and no index. All of them took a third of the processor
time of a server's imports.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from upr_protocol.address import Address, AddressError
    from upr_protocol.client.blocking.bounded_streams import BoundedStreams
    from upr_protocol.client.blocking.client import BlockingClient
    from upr_protocol.client.blocking.consumer import BlockingConsumer
    from upr_protocol.client.blocking.rollback_consumer import BlockingRollbackConsumer
    from upr_protocol.client.core.calls import (
        BucketInfo,
        HeldLease,
        LeasedRange,
        PartitionInfo,
        PartitionNumbers,
        SeqnoAtTime,
    )
    from upr_protocol.client.core.delivery_tracker import SaveLimits
    from upr_protocol.client.core.events import (
        AnswersReceived,
        BarrierReached,
        ChunkReceived,
        CycleCompleted,
        Event,
        RolledBack,
        SnapshotEnd,
        SnapshotStart,
        StreamAccepted,
        StreamEnded,
        Undone,
    )
    from upr_protocol.client.core.key_lookup import Item, RefusedKeysError
    from upr_protocol.client.core.key_operations import (
        CasOptions,
        ChangeOptions,
        DurabilityOptions,
        ItemOptions,
        KeyOperations,
    )
    from upr_protocol.client.core.partition_batches import Batch
    from upr_protocol.client.core.results import (
        Failure,
        NotDurableError,
        PartitionBatchResult,
        WriteResult,
    )
    from upr_protocol.client.core.resume_state import ResumeState, ResumeStateError
    from upr_protocol.client.core.writer_identity import WriterIdentity
    from upr_protocol.client.credentials import is_read_once, read_password, resolve_credentials
    from upr_protocol.client.index_client import (
        DESIGN_BYTES_MAX,
        IndexClient,
        IndexRange,
        IndexSummary,
        PageOptions,
        ScanSelection,
    )
    from upr_protocol.client.index_lines import IndexEntry, IndexLines, IndexPage
    from upr_protocol.client.index_node import IndexerError
    from upr_protocol.client.local_copy.database import (
        LocalCopyError,
        LocalCopyReader,
        LocalCopyWriteError,
    )
    from upr_protocol.client.local_copy.follower import LocalCopyFollower, keep_local_copy
    from upr_protocol.client.resume_stores import FileStore, MemoryStore, ResumeStore
    from upr_protocol.client.rollback.checksummed_file import DamagedFileError
    from upr_protocol.client.rollback.consumer import RollbackConsumer, consume_with_rollback
    from upr_protocol.client.rollback.received_keys import ReceivedKeysLimits
    from upr_protocol.client.trio.client import Client, ClientStatistics, connect
    from upr_protocol.client.trio.connection import ConnectOptions
    from upr_protocol.client.trio.consumer import (
        Consumer,
        ConsumerStatistics,
        UndoCallback,
        consume,
    )
    from upr_protocol.client.trio.event_feed import EventFeed, LookAtEverything, follow_events
    from upr_protocol.client.trio.node_client import (
        NodeClient,
        NodeConnection,
        NodeStatus,
        open_node,
    )
    from upr_protocol.client.trio.publisher import (
        Publisher,
        PublishError,
        PublisherStatistics,
        publisher,
    )
    from upr_protocol.client.trio.replica_consumer import ReplicaConsumer, consume_as_replica
    from upr_protocol.security import Credentials, Security, TlsSettings

_NAMES_BY_MODULE: Final = {
    "upr_protocol.address": ("Address", "AddressError"),
    "upr_protocol.client.blocking.bounded_streams": ("BoundedStreams",),
    "upr_protocol.client.blocking.client": ("BlockingClient",),
    "upr_protocol.client.blocking.consumer": ("BlockingConsumer",),
    "upr_protocol.client.blocking.rollback_consumer": ("BlockingRollbackConsumer",),
    "upr_protocol.client.core.calls": (
        "BucketInfo",
        "HeldLease",
        "LeasedRange",
        "PartitionInfo",
        "PartitionNumbers",
        "SeqnoAtTime",
    ),
    "upr_protocol.client.core.delivery_tracker": ("SaveLimits",),
    "upr_protocol.client.core.events": (
        "AnswersReceived",
        "BarrierReached",
        "ChunkReceived",
        "CycleCompleted",
        "Event",
        "RolledBack",
        "SnapshotEnd",
        "SnapshotStart",
        "StreamAccepted",
        "StreamEnded",
        "Undone",
    ),
    "upr_protocol.client.core.key_lookup": ("Item", "RefusedKeysError"),
    "upr_protocol.client.core.key_operations": (
        "CasOptions",
        "ChangeOptions",
        "DurabilityOptions",
        "ItemOptions",
        "KeyOperations",
    ),
    "upr_protocol.client.core.partition_batches": ("Batch",),
    "upr_protocol.client.core.results": (
        "Failure",
        "NotDurableError",
        "PartitionBatchResult",
        "WriteResult",
    ),
    "upr_protocol.client.core.resume_state": ("ResumeState", "ResumeStateError"),
    "upr_protocol.client.core.writer_identity": ("WriterIdentity",),
    "upr_protocol.client.credentials": ("is_read_once", "read_password", "resolve_credentials"),
    "upr_protocol.client.index_client": (
        "DESIGN_BYTES_MAX",
        "IndexClient",
        "IndexRange",
        "IndexSummary",
        "PageOptions",
        "ScanSelection",
    ),
    "upr_protocol.client.index_lines": ("IndexEntry", "IndexLines", "IndexPage"),
    "upr_protocol.client.index_node": ("IndexerError",),
    "upr_protocol.client.local_copy.database": (
        "LocalCopyError",
        "LocalCopyReader",
        "LocalCopyWriteError",
    ),
    "upr_protocol.client.local_copy.follower": ("LocalCopyFollower", "keep_local_copy"),
    "upr_protocol.client.resume_stores": ("FileStore", "MemoryStore", "ResumeStore"),
    "upr_protocol.client.rollback.checksummed_file": ("DamagedFileError",),
    "upr_protocol.client.rollback.consumer": ("RollbackConsumer", "consume_with_rollback"),
    "upr_protocol.client.rollback.received_keys": ("ReceivedKeysLimits",),
    "upr_protocol.client.trio.client": ("Client", "ClientStatistics", "connect"),
    "upr_protocol.client.trio.connection": ("ConnectOptions",),
    "upr_protocol.client.trio.consumer": (
        "Consumer",
        "ConsumerStatistics",
        "UndoCallback",
        "consume",
    ),
    "upr_protocol.client.trio.event_feed": ("EventFeed", "LookAtEverything", "follow_events"),
    "upr_protocol.client.trio.node_client": (
        "NodeClient",
        "NodeConnection",
        "NodeStatus",
        "open_node",
    ),
    "upr_protocol.client.trio.publisher": (
        "Publisher",
        "PublishError",
        "PublisherStatistics",
        "publisher",
    ),
    "upr_protocol.client.trio.replica_consumer": ("ReplicaConsumer", "consume_as_replica"),
    "upr_protocol.security": ("Credentials", "Security", "TlsSettings"),
}
"""By each module the names of it that are offered here."""

_MODULES: Final = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

__all__ = [
    "DESIGN_BYTES_MAX",
    "Address",
    "AddressError",
    "AnswersReceived",
    "BarrierReached",
    "Batch",
    "BlockingClient",
    "BlockingConsumer",
    "BlockingRollbackConsumer",
    "BoundedStreams",
    "BucketInfo",
    "CasOptions",
    "ChangeOptions",
    "ChunkReceived",
    "Client",
    "ClientStatistics",
    "ConnectOptions",
    "Consumer",
    "ConsumerStatistics",
    "Credentials",
    "CycleCompleted",
    "DamagedFileError",
    "DurabilityOptions",
    "Event",
    "EventFeed",
    "Failure",
    "FileStore",
    "HeldLease",
    "IndexClient",
    "IndexEntry",
    "IndexLines",
    "IndexPage",
    "IndexRange",
    "IndexSummary",
    "IndexerError",
    "Item",
    "ItemOptions",
    "KeyOperations",
    "LeasedRange",
    "LocalCopyError",
    "LocalCopyFollower",
    "LocalCopyReader",
    "LocalCopyWriteError",
    "LookAtEverything",
    "MemoryStore",
    "NodeClient",
    "NodeConnection",
    "NodeStatus",
    "NotDurableError",
    "PageOptions",
    "PartitionBatchResult",
    "PartitionInfo",
    "PartitionNumbers",
    "PublishError",
    "Publisher",
    "PublisherStatistics",
    "ReceivedKeysLimits",
    "RefusedKeysError",
    "ReplicaConsumer",
    "ResumeState",
    "ResumeStateError",
    "ResumeStore",
    "RollbackConsumer",
    "RolledBack",
    "SaveLimits",
    "ScanSelection",
    "Security",
    "SeqnoAtTime",
    "SnapshotEnd",
    "SnapshotStart",
    "StreamAccepted",
    "StreamEnded",
    "TlsSettings",
    "UndoCallback",
    "Undone",
    "WriteResult",
    "WriterIdentity",
    "connect",
    "consume",
    "consume_as_replica",
    "consume_with_rollback",
    "follow_events",
    "is_read_once",
    "keep_local_copy",
    "open_node",
    "publisher",
    "read_password",
    "resolve_credentials",
]


if not TYPE_CHECKING:
    # A type checker would take each name for one that this gives.

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_MODULES[name]), name)
        # The next time it is found without this function.
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
