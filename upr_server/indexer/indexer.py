"""The indexer of one bucket, put together."""

from __future__ import annotations

import fcntl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import trio

from upr_protocol.client import Address, ReceivedKeysLimits
from upr_server.indexer.catalog import Catalog
from upr_server.indexer.definitions import Definitions
from upr_server.indexer.freshness import Barriers
from upr_server.indexer.index_file import IndexFile, IndexFileError
from upr_server.indexer.moments import Moments
from upr_server.indexer.pipeline import Pipeline, Work, worker_thread
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.scanner import Scanner
from upr_server.indexer.server_progress import ServerProgress
from upr_server.indexer.stream import IndexerStream

QUEUES_DEFAULT: Final = 8

STOP_S: Final = 10.0
"""How long a stop applies what was read. The rest is read again at the next start."""


@attrs.frozen
class Settings:
    """How an indexer works.

    Attributes:
        address: The bucket.
        data_dir: Where indexes are kept; created if missing.
        pool_bytes: The memory pool.
        received_keys_limits: How many received keys are kept for rollbacks.
        queues: Queues of a pipeline.
    """

    address: Address
    data_dir: Path
    pool_bytes: int
    received_keys_limits: ReceivedKeysLimits = attrs.field(factory=ReceivedKeysLimits)
    queues: int = QUEUES_DEFAULT


class Indexer:
    """The indexes of one bucket; `running_indexer` makes one.

    Attributes:
        address: The bucket.
        pool: The common memory pool.
        catalog: The design documents that the stream has brought.
        pipeline: The running indexes' queues.
        stream: The running indexes' stream.
        barriers: The barriers that scans wait for.
        moments: The moments of indexes that are held.
        definitions: Which indexes there are.
        server_progress: How far the server is.
        scanner: Answers scans.
    """

    def __init__(self, settings: Settings, work: Work) -> None:
        address, data_dir = settings.address, settings.data_dir
        self.address = address
        self.pool = MemoryPool(settings.pool_bytes)
        self.catalog = Catalog(IndexFile(data_dir / "catalog", address.bucket))
        self.pipeline = Pipeline(self.pool, work, [self.catalog.member()], settings.queues)
        self.stream = IndexerStream(
            address, self.pipeline, self.pool, data_dir / "ring", settings.received_keys_limits
        )
        self.barriers = Barriers(self.stream.barrier, self.pipeline)
        self.moments = Moments(self.pool)
        self.definitions = Definitions(
            address,
            data_dir,
            settings.queues,
            work=work,
            pool=self.pool,
            catalog=self.catalog,
            pipeline=self.pipeline,
            stream=self.stream,
            barriers=self.barriers,
            moments=self.moments,
        )
        self.server_progress = ServerProgress(address)
        self.scanner = Scanner(
            self.definitions,
            self.pool,
            self.pipeline,
            self.stream,
            self.barriers,
            self.moments,
            self.server_progress,
        )

    async def run(self) -> None:
        """Keeps the indexes up to date, for as long as the bucket is there.

        Raises:
            IndexFileError: An index cannot be written.
            UprError: The server refused.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pipeline.run)
            nursery.start_soon(self.barriers.run)
            nursery.start_soon(self.moments.run)
            await self.definitions.open()
            nursery.start_soon(self.definitions.run)
            nursery.start_soon(self.stream.run)

    def close(self) -> None:
        """Closes the files."""
        self.catalog.file.close()
        self.definitions.close()

    def statistics(self) -> dict[str, Any]:
        """Figures of the indexer, for `GET /v1/status`."""
        return {
            "connected": self.stream.is_connected,
            "pool_bytes": self.pool.nbytes,
            "pool_used": self.pool.used,
            "pool_peak": self.pool.peak,
            "scan_bytes": self.pool.scan_bytes,
            "scans_refused": self.pool.refused,
            "moments": len(self.moments),
            "moments_given_up": self.moments.given_up,
            "queued_batches": self.pipeline.length + self.definitions.queued_batches,
            "mutations": self.pipeline.mutations,
            "rounds": self.pipeline.rounds,
            "building": self.definitions.building_count,
            "rollbacks": self.stream.rollbacks,
            "barriers": self.barriers.sent,
            "barrier_scans": self.barriers.waits,
            "received": sum(mark.seq for mark in self.stream.marks.values()),
            "applied": sum(mark.seq for mark in self.catalog.file.marks.values()),
        }


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other indexers from the folder.

    Raises:
        IndexFileError: Another indexer uses it, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise IndexFileError(
            f"another indexer uses {folder}; stop it, or choose another --data-dir"
        ) from error


@asynccontextmanager
async def running_indexer(
    settings: Settings, *, work: Work | None = None
) -> AsyncIterator[Indexer]:
    """An indexer that runs for as long as the context.

    On leaving it, what was read is applied, for `STOP_S` at most. What is not applied then, or when
    it is cancelled or killed, it reads again.

    Args:
        settings: How it works.
        work: Where indexes are written; by default a worker thread.

    Raises:
        IndexFileError: The data directory cannot be used.
        UprError: The server refused.
    """
    with _locked(settings.data_dir):
        indexer = Indexer(settings, work or worker_thread())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(indexer.run)
                yield indexer
                with trio.move_on_after(STOP_S):
                    await indexer.pipeline.drain()
                nursery.cancel_scope.cancel()
        finally:
            indexer.close()
