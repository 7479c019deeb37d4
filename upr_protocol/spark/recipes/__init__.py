"""Recipes: what most who use Spark with UPR want, made of the data source.

- `latest`: of changes, the newest row of each key.
- `LatestState` and `keep_latest_state`: a Delta table that holds what a bucket holds.
- `snapshot` and `read_snapshot`: what a bucket holds at one moment, as Parquet files.
- `backup` and `restore`: a chain of increments, and back into a bucket.
- `bulk_load`: any DataFrame into a bucket.
- `reprocess`: a bucket that holds what is computed from another.
- `join`: a bucket that holds the items of one bucket, each with the item of another that it names.

Each is a command, too (`python -m upr_protocol.spark --help`); docs/spark.md shows them.
"""

from __future__ import annotations

from upr_protocol.spark.recipes.backup import backup
from upr_protocol.spark.recipes.bulk_load import LoadResult, bulk_load
from upr_protocol.spark.recipes.join import join
from upr_protocol.spark.recipes.latest import latest
from upr_protocol.spark.recipes.latest_state import LatestState, keep_latest_state
from upr_protocol.spark.recipes.manifest import Manifest, PartitionPart
from upr_protocol.spark.recipes.reprocess import reprocess
from upr_protocol.spark.recipes.restore import RestoreResult, restore
from upr_protocol.spark.recipes.snapshot import read_snapshot, snapshot

__all__ = [
    "LatestState",
    "LoadResult",
    "Manifest",
    "PartitionPart",
    "RestoreResult",
    "backup",
    "bulk_load",
    "join",
    "keep_latest_state",
    "latest",
    "read_snapshot",
    "reprocess",
    "restore",
    "snapshot",
]
