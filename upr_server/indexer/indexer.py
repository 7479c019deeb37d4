"""The indexer as a whole: which indexes there are, who feeds them, and how they are asked."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import attrs
import structlog
import trio

from upr_protocol.client import Address, ReceivedKeysLimits, connect
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import Durability
from upr_server.indexer.announcements import Announcements, consumer_name
from upr_server.indexer.bell import Bell
from upr_server.indexer.builder import Builder
from upr_server.indexer.catalog import Catalog
from upr_server.indexer.definition import (
    Design,
    IndexDefinition,
    IndexName,
    design_key,
    fingerprint,
    parse_design,
)
from upr_server.indexer.extractor import Extractor
from upr_server.indexer.freshness import Barriers, has_all
from upr_server.indexer.index_file import IndexFile, IndexFileError, NotSettledError
from upr_server.indexer.overlay import Overlay
from upr_server.indexer.piece import Piece, Row
from upr_server.indexer.pipeline import Member, Pipeline, Work, worker_thread
from upr_server.indexer.pool import Pool
from upr_server.indexer.query import Answer, Query, answer
from upr_server.indexer.status import IndexStatus
from upr_server.indexer.stream import Stream

log = structlog.get_logger(__name__)

RINGS_DEFAULT: Final = 8

_NEVER: Final = -1


class NoIndexError(UprError):
    """There is no such index, or no such design."""


class BuildingError(UprError):
    """The index is being built: it would answer with a part of what there is.

    Attributes:
        retry_after_s: When to ask again.
    """

    def __init__(self, name: IndexName) -> None:
        self.retry_after_s = 1.0
        super().__init__(f"the index {name} is being built; its status tells how far it is")


class NotFreshError(UprError):
    """The index was not as fresh as was asked when the time for that was over."""


@attrs.frozen
class Settings:
    """How an indexer works.

    Attributes:
        address: The bucket.
        data_dir: Where indexes are kept; made when there is none.
        pool_bytes: The memory pool.
        ring_limits: How much the ring buffer keeps.
        rings: Queues of a pipeline.
    """

    address: Address
    data_dir: Path
    pool_bytes: int
    ring_limits: ReceivedKeysLimits = attrs.field(factory=ReceivedKeysLimits)
    rings: int = RINGS_DEFAULT


class _Entries:
    """The entries of an index: what its definition says."""

    def __init__(self, extractor: Extractor) -> None:
        self._extractor = extractor

    def entry(self, row: Row) -> tuple[bytes, bytes] | None:
        """See `Source`."""
        encoded = self._extractor.entry(row.key, row.document)
        return None if encoded is None else (encoded + row.key, b"")


@attrs.define(eq=False)
class Index:
    """One index.

    Attributes:
        name: What it is called.
        definition: What is in it.
        file: Where it is.
        extractor: What makes its entries.
        scans: How many scans read it just now.
        is_wanted: Whether it is still defined.
    """

    name: IndexName
    definition: IndexDefinition
    file: IndexFile
    extractor: Extractor
    scans: int = 0
    is_wanted: bool = True

    def member(self) -> Member:
        """It, for a pipeline."""
        return Member(self.file, _Entries(self.extractor))


class Indexer:
    """Indexes of one bucket; `running_indexer` makes one.

    Attributes:
        pool: The common memory pool.
        pipeline: The running indexes' queues.
        stream: Their stream.
        barriers: The barriers that scans wait for.
    """

    def __init__(self, settings: Settings, work: Work) -> None:
        self._settings = settings
        self._work = work
        address = settings.address
        self.pool = Pool(settings.pool_bytes)
        self._catalog = Catalog(
            IndexFile(settings.data_dir / "catalog", address.bucket), self._redefined
        )
        self.pipeline = Pipeline(self.pool, work, [self._catalog.member()], settings.rings)
        self.stream = Stream(
            address,
            self.pipeline,
            self.pool,
            settings.data_dir / "ring",
            settings.ring_limits,
            self._moved,
        )
        self.barriers = Barriers(self.stream.barrier, self.pipeline)
        self._overlay = Overlay(self.barriers.wait, self._redefined)
        self._announcements = Announcements(
            address, consumer_name(settings.data_dir), self._catalog, self._overlay
        )
        self._indexes: dict[IndexName, Index] = {}
        # Those that are open, also of indexes that are about to go.
        self._files: set[IndexFile] = set()
        self._mistakes: dict[str, str] = {}
        self._builders: dict[Builder, trio.CancelScope] = {}
        self._changed = Bell()
        self._is_redefined = False
        self._is_confirming = False
        self._is_swept = False
        # The stream's rollbacks when the catalog was known to be whole; see `_reconcile`.
        self._whole_at = _NEVER

    # Which indexes there are.

    async def run(self) -> None:
        """Keeps the indexes, for as long as the bucket is there.

        Raises:
            IndexFileError: One cannot be written.
            UprError: The server refused.
        """
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.pipeline.run)
            nursery.start_soon(self.barriers.run)
            await self._open()
            nursery.start_soon(self._keep_definitions, nursery)
            nursery.start_soon(self._overlay.run)
            nursery.start_soon(self._announcements.run)
            nursery.start_soon(self.stream.run)

    def close(self) -> None:
        """Lets go of the files."""
        self._catalog.file.close()
        for file in self._files:
            file.close()

    @property
    def _folder(self) -> Path:
        return self._settings.data_dir / "indexes"

    async def _open(self) -> None:
        """Opens the indexes that were there."""
        for name, definition in self._wanted(await self._catalog.current()).items():
            if self._path(name, definition).exists():
                index = await self._make(name, definition)
                if index.file.joined:
                    self.pipeline.members.append(index.member())

    def _path(self, name: IndexName, definition: IndexDefinition) -> Path:
        return self._folder / fingerprint(name, definition)

    def _wanted(self, texts: Mapping[str, bytes]) -> dict[IndexName, IndexDefinition]:
        """The indexes that design documents name; what is wrong with others is kept."""
        wanted: dict[IndexName, IndexDefinition] = {}
        self._mistakes = {}
        for design, text in texts.items():
            try:
                parsed = parse_design(design, text)
            except UprError as error:
                self._mistakes[design] = str(error)
                continue
            for index, definition in parsed.indexes.items():
                wanted[IndexName(design, index)] = definition
        return wanted

    async def _make(self, name: IndexName, definition: IndexDefinition) -> Index:
        bucket = self._settings.address.bucket
        file = await self._work(partial(IndexFile, self._path(name, definition), bucket))
        self._files.add(file)
        index = self._indexes[name] = Index(name, definition, file, Extractor(definition))
        return index

    def _redefined(self) -> None:
        self._is_redefined = True
        self._changed.ring()

    async def _keep_definitions(self, nursery: trio.Nursery) -> None:
        """Makes and drops indexes as design documents come and go."""
        while True:
            self._is_redefined = False
            await self._reconcile(nursery)
            await self._changed.until(lambda: self._is_redefined)

    async def _reconcile(self, nursery: trio.Nursery) -> None:
        told = self._overlay.texts
        texts = {**await self._catalog.current(), **told}
        # A partition that begins again has no design documents for a while: what is not in the
        # catalog then may be defined all the same. What was told by the server itself is not.
        is_whole = self._whole_at == self.stream.rollbacks
        wanted = self._wanted({name: text for name, text in texts.items() if text is not None})
        for index in self._unwanted(wanted):
            if is_whole or index.name.design in told:
                await self._drop(index)
        if not is_whole and not self._is_confirming:
            self._is_confirming = True
            nursery.start_soon(self._confirm)
        for name, definition in wanted.items():
            if name not in self._indexes:
                log.info("building", index=str(name))
                # One that was there and was not fed meanwhile is of no use.
                await self._work(partial(_remove, self._path(name, definition)))
                await self._make(name, definition)
        building = {member.file for builder in self._builders for member in builder.members}
        new = [
            index
            for index in self._indexes.values()
            if not index.file.joined and index.file not in building
        ]
        if new:
            builder = Builder(
                self._settings.address,
                self.pool,
                self._work,
                [index.member() for index in new],
                self.stream,
                self.pipeline,
                self._settings.rings,
            )
            self._builders[builder] = trio.CancelScope()
            nursery.start_soon(self._build, builder)
        if is_whole and not self._is_swept:
            self._is_swept = True
            await self._sweep()
        self._changed.ring()

    async def _confirm(self) -> None:
        """When a barrier is back the catalog is whole, unless something has been undone since."""
        rollbacks = self.stream.rollbacks
        await self.barriers.wait()
        self._whole_at = rollbacks
        self._is_confirming = False
        self._redefined()

    def _unwanted(self, wanted: Mapping[IndexName, IndexDefinition]) -> list[Index]:
        return [
            index for index in self._indexes.values() if wanted.get(index.name) != index.definition
        ]

    async def _sweep(self) -> None:
        """Removes what a crash has left of indexes that nobody wants."""
        kept = {index.file.path for index in self._indexes.values()}
        for path in await self._work(partial(_listed, self._folder)):
            if path not in kept:
                await self._work(partial(_remove, path))

    async def _build(self, builder: Builder) -> None:
        with self._builders[builder]:
            try:
                await builder.run()
                log.info("built", indexes=len(builder.members))
            finally:
                del self._builders[builder]
        self._changed.ring()

    async def _drop(self, index: Index) -> None:
        log.info("dropping", index=str(index.name))
        index.is_wanted = False
        del self._indexes[index.name]
        for builder, scope in list(self._builders.items()):
            for member in [each for each in builder.members if each.file is index.file]:
                builder.leave(member)
                if not builder.members:
                    scope.cancel()
        for member in [each for each in self.pipeline.members if each.file is index.file]:
            self.pipeline.members.remove(member)
        # Scans that wait for a batch need not wait for one to come.
        self.pipeline.applied.ring()
        await self._changed.until(lambda: not index.scans)
        # Behind the batch that may still be under way.
        await self._work(index.file.destroy)
        self._files.remove(index.file)

    def _moved(self, piece: Piece) -> None:
        for builder in self._builders:
            builder.moved(piece)

    # Design documents.

    async def create(self, name: str, text: bytes) -> Design:
        """Writes a design document.

        Raises:
            DefinitionError: It is none, and was not written.
            UprError: The server could not be reached, or refused.
        """
        design = parse_design(name, text)
        async with connect(self._settings.address, identity="upr-indexer") as client:
            await client.set(design_key(name), text, durability=Durability.PERSISTED)
        return design

    async def drop(self, name: str) -> None:
        """Removes a design document, and so its indexes.

        Raises:
            NoIndexError: There is none.
            UprError: The server could not be reached, or refused.
        """
        async with connect(self._settings.address, identity="upr-indexer") as client:
            try:
                await client.delete(design_key(name), durability=Durability.PERSISTED)
            except ServerError as error:
                if error.status is not Status.NOT_FOUND:
                    raise
                raise NoIndexError(f"there is no design {name}") from error

    # Questions.

    @property
    def mistakes(self) -> Mapping[str, str]:
        """By design document that is none, what is wrong with it."""
        return self._mistakes

    def names(self) -> list[IndexName]:
        """The indexes, in order."""
        return sorted(self._indexes)

    def find(self, name: IndexName) -> Index:
        """The index called `name`.

        Raises:
            NoIndexError: There is none.
        """
        index = self._indexes.get(name)
        if index is None:
            raise NoIndexError(f"there is no index {name}")
        return index

    async def status(self, name: IndexName) -> IndexStatus:
        """What is to be told of an index.

        Raises:
            NoIndexError: There is none.
        """
        index = self.find(name)
        file = index.file
        with self._read(index):
            entries, disk_bytes = await trio.to_thread.run_sync(
                lambda: (file.entry_count(), file.disk_bytes())
            )
        behind = sum(
            max(0, mark.seq - file.mark(partition).seq)
            for partition, mark in self.stream.marks.items()
        )
        return IndexStatus(
            str(name),
            "ready" if file.joined else "building",
            index.definition.key,
            index.definition.filter,
            entries,
            disk_bytes,
            index.extractor.too_long,
            behind,
        )

    def statistics(self) -> dict[str, Any]:
        """What the indexer can tell about itself."""
        return {
            "connected": self.stream.is_connected,
            "pool_bytes": self.pool.nbytes,
            "pool_used": self.pool.used,
            "pool_peak": self.pool.peak,
            "scans_refused": self.pool.refused,
            "queued_pieces": self.pipeline.length
            + sum(builder.pipeline.length for builder in self._builders),
            "mutations": self.pipeline.mutations,
            "batches": self.pipeline.batches,
            "building": sum(len(builder.members) for builder in self._builders),
            "rollbacks": self.stream.rollbacks,
            "barriers": self.barriers.sent,
            "barrier_scans": self.barriers.shared,
            "received": sum(mark.seq for mark in self.stream.marks.values()),
            "applied": sum(mark.seq for mark in self._catalog.file.marks.values()),
        }

    @contextmanager
    def _read(self, index: Index) -> Iterator[None]:
        """The index stays while it is read."""
        index.scans += 1
        try:
            yield
        finally:
            index.scans -= 1
            self._changed.ring()

    async def scan(self, name: IndexName, query: Query) -> Answer:
        """The answer to a question.

        Raises:
            NoIndexError: There is no such index.
            BuildingError: It is not complete yet.
            OverloadedError: There is no memory for it just now.
            QueryError: The question is wrong.
            WriteLostError: It is to have what a failover has undone.
            NotFreshError: It is not as fresh as was asked, and the time is over.
        """
        index = self.find(name)
        part_count = len(index.definition.key)
        range_ = query.range(part_count)
        at_least = query.at_least()
        with self.pool.scan():
            with trio.move_on_after(query.timeout_s) as scope:
                if not index.file.joined:
                    raise BuildingError(name)
                if query.consistency == "now":
                    # The index may go meanwhile: a stream that stands still brings no barrier.
                    await self.barriers.wait()
                with self._read(index):
                    await self._wait(index, partial(has_all, index.file, at_least))
                    while index.is_wanted:
                        heard = _Heard(self.pipeline)
                        settled = query.consistency != "any"
                        with suppress(NotSettledError):
                            if query.count:
                                count = partial(index.file.count, range_, settled=settled)
                                return Answer(count=await trio.to_thread.run_sync(count))
                            look = partial(
                                index.file.scan,
                                range_,
                                query.limit,
                                settled=settled,
                                with_timestamps=query.timestamps,
                            )
                            found = await trio.to_thread.run_sync(look)
                            has_all(index.file, at_least)
                            return answer(found, part_count)
                        await self._wait(index, heard)
                raise NoIndexError(f"the index {name} was dropped")
            assert scope.cancelled_caught
            raise NotFreshError(
                f"the index {name} was not as fresh as asked within {query.timeout_s:g} s"
            )

    async def _wait(self, index: Index, condition: Any) -> None:
        """Waits for batches until `condition`, or until the index is dropped."""
        await self.pipeline.applied.until(lambda: not index.is_wanted or condition())


class _Heard:
    """Whether a batch was applied since."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._batches = pipeline.batches

    def __call__(self) -> bool:
        return self._pipeline.batches > self._batches


def _listed(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Nobody else uses the folder.

    Raises:
        IndexFileError: Somebody does, or it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
    except BlockingIOError as error:
        raise IndexFileError(f"another indexer uses {folder}") from error


@asynccontextmanager
async def running_indexer(
    settings: Settings, *, work: Work | None = None
) -> AsyncIterator[Indexer]:
    """An indexer that runs for as long as the context.

    On leaving it, what was read is applied. Cancelled, or killed, it reads that again.

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
                await indexer.pipeline.drain()
                nursery.cancel_scope.cancel()
        finally:
            indexer.close()
