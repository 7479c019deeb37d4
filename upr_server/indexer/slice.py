"""One slice of the indexes of a bucket, put together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from math import inf
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from upr_protocol.client import Address, ReceivedKeysLimits
from upr_protocol.concurrency import Notifier
from upr_protocol.ids import PartitionId, SeqNo
from upr_server.indexer.catalog import DesignCatalog
from upr_server.indexer.connection_log import log_connection
from upr_server.indexer.definitions import Definitions
from upr_server.indexer.directory import locked_folder
from upr_server.indexer.freshness import ScanBarriers
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.moments import Moments
from upr_server.indexer.pipeline import BlockingRunner, Pipeline
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.slice_scanner import SliceScanner
from upr_server.indexer.slices import (
    CatalogReport,
    SliceAnswer,
    SliceId,
    SliceObserver,
    SliceScan,
    SliceStatus,
)
from upr_server.indexer.stream import IndexerStream

QUEUES_DEFAULT: Final = 8


@attrs.frozen
class SliceSettings:
    """How a slice works.

    Attributes:
        address: The bucket.
        data_dir: Where the indexer's slices are kept.
        received_keys_limits: How many received keys are kept for rollbacks.
        queues: Queues of a pipeline.
    """

    address: Address
    data_dir: Path
    received_keys_limits: ReceivedKeysLimits = attrs.field(factory=ReceivedKeysLimits)
    queues: int = QUEUES_DEFAULT


class Slice:
    """A slice of the indexes, in this process.

    Args:
        slice_id: The slice.
        settings: How it works.
        pool: The memory pool of this process.
        work: Where indexes are written.

    Attributes:
        slice_id: The slice.
        heard_at: `inf`: it always answers.
        catalog: The design documents that the stream has brought.
        pipeline: The running indexes' queues.
        stream: The running indexes' stream.
        barriers: The barriers that scans wait for.
        moments: The moments of indexes that are held.
        definitions: Which indexes there are.
        scanner: Answers scans.

    Raises:
        IndexFileError: The data directory cannot be used.
    """

    def __init__(
        self, slice_id: SliceId, settings: SliceSettings, pool: MemoryPool, work: BlockingRunner
    ) -> None:
        address = settings.address
        self.heard_at = inf
        data_dir = settings.data_dir / slice_id.folder
        self.slice_id = slice_id
        with ExitStack() as undo:
            undo.enter_context(locked_folder(data_dir))
            self.catalog = DesignCatalog(IndexFile(data_dir / "catalog", address.bucket))
            self._unlock = undo.pop_all()
        self.pipeline = Pipeline(pool, work, [self.catalog.pipeline_member()], settings.queues)
        self.stream = IndexerStream(
            address,
            self.pipeline,
            pool,
            data_dir / "ring",
            settings.received_keys_limits,
            slice_id,
        )
        self.barriers = ScanBarriers(self.stream.barrier, self.pipeline)
        self.moments = Moments(pool)
        self.definitions = Definitions(
            address,
            data_dir,
            settings.queues,
            work=work,
            pool=pool,
            pipeline=self.pipeline,
            stream=self.stream,
            moments=self.moments,
        )
        self.scanner = SliceScanner(
            slice_id, self.definitions, self.pipeline, self.stream, self.barriers, self.moments
        )
        self._catalog_changed = Notifier()
        self._is_reported = False
        self._reporting = trio.Lock()
        self._observer: SliceObserver | None = None
        self.catalog.on_change = self._note_catalog

    @property
    def title(self) -> str:
        """The slice."""
        return str(self.slice_id)

    async def run(self, observer: SliceObserver) -> None:
        """Keeps the slice up to date, for as long as the bucket is there.

        Raises:
            IndexFileError: An index cannot be written.
            UprError: The server refused.
        """
        self._observer = observer
        observer.slice_restarted(self.slice_id.index)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pipeline.run)
            nursery.start_soon(self.barriers.run)
            nursery.start_soon(self.moments.run)
            nursery.start_soon(self._keep_reporting)
            await self.definitions.open()
            nursery.start_soon(self.definitions.run)
            nursery.start_soon(self.stream.run)
            nursery.start_soon(log_connection, self.stream.lost_reason)

    def _note_catalog(self) -> None:
        self._is_reported = False
        self._catalog_changed.notify()

    async def _keep_reporting(self) -> None:
        while True:
            await self._report()
            await self._catalog_changed.wait_until(lambda: not self._is_reported)

    async def _report(self) -> None:
        # One at a time: an older report must not follow on a newer one.
        async with self._reporting:
            self._is_reported = True
            try:
                designs = await self.catalog.current_designs()
            except trio.Cancelled:
                # A question whose asker has gone. `_keep_reporting` may have left the report to it.
                self._note_catalog()
                raise
            # After the reading: a rollback that begins meanwhile is counted.
            report = CatalogReport(
                dict(designs.texts), self.stream.rollbacks, list(designs.left_out)
            )
            if self._observer is not None:
                self._observer.catalog_read(self.slice_id.index, report)

    async def stop(self) -> None:
        """Applies what was read, unless the disk is full."""
        await trio.lowlevel.checkpoint()
        if not self.pipeline.disk.full_reason:
            await self.pipeline.drain()

    def close(self) -> None:
        """Closes the files."""
        self.catalog.file.close()
        self.definitions.close()
        self._unlock.close()

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Says which indexes there shall be."""
        self.definitions.define(definitions)

    async def ping(self) -> None:
        """Answers at once."""
        await trio.lowlevel.checkpoint()

    async def confirm(self) -> int:
        """Waits until the catalog has all that was acknowledged before the call, and reports it.
        Gives the count of rollbacks at the call."""
        rollbacks = self.stream.rollbacks
        await self.barriers.wait_until_applied()
        await self._report()
        return rollbacks

    async def scan(self, scan: SliceScan) -> SliceAnswer:
        """Answers a query; see `SliceScanner.scan`."""
        return await self.scanner.scan(scan)

    async def release(self, token: str) -> None:
        """Lets a moment go.

        Raises:
            MomentGoneError: It is not held.
        """
        await trio.lowlevel.checkpoint()
        self.scanner.release(token)

    async def status(
        self, name: IndexName, definition: IndexDefinition, newest_seqs: Mapping[PartitionId, SeqNo]
    ) -> SliceStatus:
        """What can be told of an index; see `SliceScanner.status`."""
        return await self.scanner.status(name, definition, newest_seqs)

    async def statistics(self) -> dict[str, Any]:
        """Figures of the slice."""
        await trio.lowlevel.checkpoint()
        return self.figures()

    def figures(self) -> dict[str, Any]:
        """Figures of the slice, for `GET /v1/status`, and a `failure` while the disk is full."""
        full_reason = self.pipeline.disk.full_reason
        return {
            "connected": self.stream.is_connected,
            "moments": len(self.moments),
            "moments_given_up": self.moments.given_up,
            "queued_batches": self.pipeline.queued_batch_count + self.definitions.queued_batches,
            "mutations": self.pipeline.mutations,
            "rounds": self.pipeline.rounds,
            "building": self.definitions.building_count,
            "rollbacks": self.stream.rollbacks,
            "barriers": self.barriers.sent_count,
            "barrier_scans": self.barriers.waits,
            "received": sum(mark.seq for mark in self.stream.marks.values()),
            "applied": sum(mark.seq for mark in self.catalog.file.marks.values()),
            **({"failure": full_reason} if full_reason else {}),
        }
