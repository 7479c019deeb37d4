"""Limits made small, so that what takes gigabytes elsewhere happens in a simulation, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from tests.simulation.bugs.patch import replaced
from upr_server.engine import partition, publisher_answers
from upr_server.engine.snapshots import closed_snapshot, collapse, segment
from upr_server.storage import bucket_maintenance, compaction
from upr_server.storage.online import backfill

SMALL: Final = (
    (bucket_maintenance, "GARBAGE_BYTES", 4096),
    (bucket_maintenance, "COMPACTION_BYTES", 1024),
    (compaction, "CHUNK_BYTES", 1024),
    (partition, "ARRAY_BYTES_MAX", 256),
    (publisher_answers, "BATCHES_MAX", 16),
    (closed_snapshot, "SEGMENT_BYTES", 256),
    (segment, "SEGMENT_BYTES", 256),
    (collapse, "CHUNK_BYTES", 256),
    (collapse, "COLLAPSE_SNAPSHOTS_MIN", 3),
    (collapse, "COLLAPSE_BYTES_MIN", 512),
    (backfill, "READ_BYTES", 2048),
    (backfill, "READ_BYTES_MIN", 1024),
    (backfill, "QUEUE_BYTES", 8192),
)


@contextmanager
def small_limits() -> Iterator[None]:
    """Compaction and collapsing begin early, and go in small steps; a backfill takes many reads;
    the answers to a writer are soon forgotten."""
    with ExitStack() as stack:
        for module, name, value in SMALL:
            stack.enter_context(replaced(module, name, value))
        yield
