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
"""

from __future__ import annotations

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
from upr_protocol.client.trio.consumer import Consumer, ConsumerStatistics, UndoCallback, consume
from upr_protocol.client.trio.event_feed import EventFeed, LookAtEverything, follow_events
from upr_protocol.client.trio.node_client import NodeClient, NodeConnection, NodeStatus, open_node
from upr_protocol.client.trio.publisher import (
    Publisher,
    PublishError,
    PublisherStatistics,
    publisher,
)
from upr_protocol.client.trio.replica_consumer import ReplicaConsumer, consume_as_replica
from upr_protocol.security import Credentials, Security, TlsSettings

__all__ = [
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
