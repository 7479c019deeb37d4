"""The engine: partitions, mutation managers, cursors, quotas. Pure and synchronous.

All of it belongs to one thread, and none of it does I/O, reads a clock or makes random numbers:
callers pass the time as a number and random numbers as a function. Between two calls every
structure is consistent.
"""

from upr_server.engine.batch import (
    BundleBatches,
    CheckedChunk,
    CheckedSets,
    MutationBatch,
    batch_of,
)
from upr_server.engine.bucket import (
    STEP_PARTITIONS,
    Bucket,
    BucketError,
    BucketObserver,
    Buckets,
    check_bucket,
)
from upr_server.engine.evaluation import Evaluation
from upr_server.engine.lookup import (
    NOTHING_FETCHED,
    FetchedItems,
    FetchRequest,
    damaged_item,
    is_damaged,
)
from upr_server.engine.memory_account import MemoryAccount
from upr_server.engine.memory_policy import QUOTA_BYTES_MIN, MemoryAction, MemoryPolicy
from upr_server.engine.mutate_result import MutateResult, unpack_result
from upr_server.engine.partition import Partition
from upr_server.engine.partition_image import PartitionImage
from upr_server.engine.plain_runs import LONG_RUN_ROWS, AppliedRuns, apply_set_runs
from upr_server.engine.publisher_answers import WriterToken
from upr_server.engine.snapshots import (
    BackfillNeeded,
    Cursor,
    CursorItem,
    MutationManager,
    NotInMemory,
    PersistenceCursor,
    Registration,
    SnapshotEndItem,
    SnapshotStartItem,
)

__all__ = [
    "LONG_RUN_ROWS",
    "NOTHING_FETCHED",
    "QUOTA_BYTES_MIN",
    "STEP_PARTITIONS",
    "AppliedRuns",
    "BackfillNeeded",
    "Bucket",
    "BucketError",
    "BucketObserver",
    "Buckets",
    "BundleBatches",
    "CheckedChunk",
    "CheckedSets",
    "Cursor",
    "CursorItem",
    "Evaluation",
    "FetchRequest",
    "FetchedItems",
    "MemoryAccount",
    "MemoryAction",
    "MemoryPolicy",
    "MutateResult",
    "MutationBatch",
    "MutationManager",
    "NotInMemory",
    "Partition",
    "PartitionImage",
    "PersistenceCursor",
    "Registration",
    "SnapshotEndItem",
    "SnapshotStartItem",
    "WriterToken",
    "apply_set_runs",
    "batch_of",
    "check_bucket",
    "damaged_item",
    "is_damaged",
    "unpack_result",
]
