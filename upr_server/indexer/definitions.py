"""The indexes of a slice: made, built and dropped as their definitions change."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import inf
from pathlib import Path
from typing import Final

import attrs
import structlog
import trio

from upr_protocol.client import Address
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_server.indexer.builder import IndexBuilder
from upr_server.indexer.disk import RETRY_S
from upr_server.indexer.document_rows import DocumentRows
from upr_server.indexer.index_batch import DocumentChange
from upr_server.indexer.index_file import DiskFullError, IndexFile
from upr_server.indexer.moments import Moments
from upr_server.indexer.pipeline import BlockingRunner, Pipeline, PipelineMember, check_cancelled
from upr_server.indexer.pool import MemoryPool
from upr_server.indexer.pure.definition import (
    IndexDefinition,
    IndexName,
    fingerprint,
)
from upr_server.indexer.pure.extractor import Extractor
from upr_server.indexer.stream import IndexerStream

log = structlog.get_logger(__name__)


_INDEXES: Final = "indexes"
"""The folder of the indexes, in that of a slice."""

COLUMN_ROWS: Final = 500
"""How many documents are looked at in columns. A value that is not plain costs the others of its
column 0.2 µs each, and a round that is cancelled ends with them."""

TOGETHER_SHARE: Final = 0.9
"""Indexes are built together if none has less than this share of the partitions that another has.
After a crash they differ by those that the last round began."""


class NoIndexError(UprError):
    """No index has this name, or no design document."""


class _DefinedEntries:
    """Makes the entries of an index, as its definition says.

    Args:
        extractor: Makes them.
        check_cancelled: Called before each document; raises if the round is cancelled.

    Attributes:
        has_payloads: Whether entries have included values.
        key_prefix: Empty: any document may have entries.
    """

    key_prefix = b""

    def __init__(
        self, extractor: Extractor, check_cancelled: Callable[[], None], *, has_payloads: bool
    ) -> None:
        self._extractor = extractor
        self._check_cancelled = check_cancelled
        self.has_payloads = has_payloads

    @property
    def failure(self) -> str:
        """Why it makes no entries any more; empty while it does."""
        return self._extractor.failure

    def attempt(self) -> AbstractContextManager[None]:
        """A context for one commit; see `Extractor.attempt`."""
        return self._extractor.attempt()

    def single_entries(self, rows: DocumentRows) -> Sequence[bytes] | None:
        """The entry of each document, empty for a document without one; None if a document may have
        several."""
        if not self._extractor.is_plain:
            return None
        entries: list[bytes] = []
        for start in range(0, len(rows), COLUMN_ROWS):
            self._check_cancelled()
            keys = rows.keys[start : start + COLUMN_ROWS]
            documents = rows.documents[start : start + COLUMN_ROWS]
            entries += [
                encoded_key and encoded_key + key
                for encoded_key, key in zip(
                    self._extractor.plain_keys(keys, documents), keys, strict=True
                )
            ]
        return entries

    def entries(self, change: DocumentChange) -> tuple[Sequence[bytes], bytes]:
        """The encoded keys, each with the document's key behind it, and the included values."""
        self._check_cancelled()
        encoded, included = self._extractor.entries(change.key, change.document)
        return [encoded_key + change.key for encoded_key in encoded], included


@attrs.define(eq=False)
class Index:
    """One index.

    Attributes:
        name: Its name.
        definition: What is in it.
        file: Its file.
        extractor: Makes its entries.
        is_defined: Whether a design document still defines it.
        readers: How many scans read the file.
        released: Notified when a scan has read it.
    """

    name: IndexName
    definition: IndexDefinition
    file: IndexFile
    extractor: Extractor
    is_defined: bool = True
    readers: int = 0
    released: Notifier = attrs.field(factory=Notifier)

    def pipeline_member(
        self, check_cancelled: Callable[[], None] = check_cancelled
    ) -> PipelineMember:
        """The index as a member of a pipeline.

        Args:
            check_cancelled: Called before each document in the thread that makes the entries;
                raises if the round is cancelled, which may have minutes to go.
        """
        has_payloads = bool(self.definition.include)
        return PipelineMember(
            self.file, _DefinedEntries(self.extractor, check_cancelled, has_payloads=has_payloads)
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keeps the file for as long as the context, even if the index is dropped."""
        self.readers += 1
        try:
            yield
        finally:
            self.readers -= 1
            self.released.notify()


class Definitions:
    """Keeps the indexes of a slice as they are defined.

    Args:
        address: The bucket.
        data_dir: Where the slice is kept.
        queues: How many queues the pipeline of a new index has.
        work: Where indexes are written.
        pool: The memory pool.
        pipeline: The running indexes' pipeline.
        stream: The running indexes' stream.
        moments: The moments of indexes that are held.

    Attributes:
        is_open: Whether `open` has ended.
    """

    def __init__(
        self,
        address: Address,
        data_dir: Path,
        queues: int,
        *,
        work: BlockingRunner,
        pool: MemoryPool,
        pipeline: Pipeline,
        stream: IndexerStream,
        moments: Moments,
    ) -> None:
        self._address = address
        self._data_dir = data_dir
        self._folder = data_dir / _INDEXES
        self._queues = queues
        self._work = work
        self._pool = pool
        self._pipeline = pipeline
        self._stream = stream
        self._moments = moments
        self.is_open = False
        self._definitions: Mapping[IndexName, IndexDefinition] | None = None
        self._indexes: dict[IndexName, Index] = {}
        # The open files, also of indexes that are about to be removed.
        self._files: set[IndexFile] = set()
        self._builders: dict[IndexBuilder, trio.CancelScope] = {}
        self._is_redefined = False
        self._redefined = Notifier()

    # What there is.

    def names(self) -> list[IndexName]:
        """The indexes, in order."""
        return sorted(self._indexes)

    def find(self, name: IndexName) -> Index:
        """The index of this name.

        Raises:
            NoIndexError: No index has this name.
        """
        index = self._indexes.get(name)
        if index is None:
            raise NoIndexError(f"there is no index {name}; `upr index list` names all")
        return index

    @property
    def building_count(self) -> int:
        """How many indexes are being built."""
        return sum(len(builder.members) for builder in self._builders)

    def building_trouble(self, index: Index) -> str:
        """Why an index that is being built gets nothing just now; empty if it does."""
        return next(
            (
                builder.trouble
                for builder in self._builders
                if any(member.file is index.file for member in builder.members)
            ),
            "",
        )

    @property
    def queued_batches(self) -> int:
        """How many batches wait for indexes that are being built."""
        return sum(builder.pipeline.queued_batch_count for builder in self._builders)

    # Following definitions.

    def define(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        """Says which indexes there shall be."""
        self._definitions = definitions
        self._is_redefined = True
        self._redefined.notify()

    async def open(self) -> None:
        """Waits for the first definitions, and opens the indexes that were there at the last stop,
        before the stream begins. Removes others, which a crash may have left.

        Raises:
            IndexFileError: One cannot be opened.
        """
        await self._redefined.wait_until(lambda: self._definitions is not None)
        assert self._definitions is not None
        paths = {self._path(*item): item for item in self._definitions.items()}
        for path in await self._work(partial(_paths_in, self._folder)):
            if path in paths:
                make = partial(self._make, paths[path][0], paths[path][1])
                index = await self._pipeline.disk.retry(make)
                if index.file.is_built:
                    self._pipeline.members.append(index.pipeline_member())
            else:
                await self._work(partial(_remove_folder, path))
        self.is_open = True

    async def run(self) -> None:
        """Makes and drops indexes as they are defined, for ever.

        Raises:
            IndexFileError: An index cannot be written.
            UprError: The server refused.
        """
        async with trio.open_nursery() as nursery:
            while True:
                self._is_redefined = False
                has_all = await self._reconcile(nursery)
                with trio.move_on_after(inf if has_all else RETRY_S):
                    await self._redefined.wait_until(lambda: self._is_redefined)

    def close(self) -> None:
        """Closes the files."""
        self._moments.release_all()
        for file in self._files:
            file.close()

    def _path(self, name: IndexName, definition: IndexDefinition) -> Path:
        return index_path(self._data_dir, name, definition)

    async def _make(self, name: IndexName, definition: IndexDefinition) -> Index:
        path = self._path(name, definition)
        file = await self._work(partial(IndexFile, path, self._address.bucket))
        self._files.add(file)
        extractor = await trio.to_thread.run_sync(Extractor, definition, file.failure)
        index = self._indexes[name] = Index(name, definition, file, extractor)
        return index

    async def _reconcile(self, nursery: trio.Nursery) -> bool:
        """Drops and makes indexes. Returns whether there are all; the disk may be full."""
        definitions = dict(self._definitions or {})
        for index in list(self._indexes.values()):
            if definitions.get(index.name) != index.definition:
                await self._drop_index(index)
        has_all = await self._make_new(definitions)
        self._build_new(nursery)
        return has_all

    async def _make_new(self, definitions: Mapping[IndexName, IndexDefinition]) -> bool:
        """Makes the indexes that there are not yet. Returns whether there was room for them. If
        not, to drop another index may make some: this does not wait."""
        for name, definition in definitions.items():
            if name in self._indexes:
                continue
            # A file from before was not fed meanwhile, and is useless.
            remove = partial(_remove_folder, self._path(name, definition))
            await self._work(remove)
            try:
                await self._make(name, definition)
            except DiskFullError as error:
                self._pipeline.disk.note_full(self, error)
                # What was begun could not be opened at the next start.
                await self._work(remove)
                return False
            log.info("building index", index=str(name))
        self._pipeline.disk.note_room(self)
        return True

    def _build_new(self, nursery: trio.Nursery) -> None:
        building_files = {member.file for builder in self._builders for member in builder.members}
        new_indexes = [
            index
            for index in self._indexes.values()
            if not index.file.is_built and index.file not in building_files
        ]
        for indexes in _equally_far(new_indexes):
            builder = IndexBuilder(
                self._address,
                self._pool,
                self._work,
                [index.pipeline_member() for index in indexes],
                self._stream,
                self._pipeline,
                self._queues,
            )
            self._builders[builder] = trio.CancelScope()
            nursery.start_soon(self._build, builder)

    async def _build(self, builder: IndexBuilder) -> None:
        with self._builders[builder]:
            try:
                await builder.run()
                log.info("indexes built", indexes=len(builder.members))
            finally:
                del self._builders[builder]

    async def _drop_index(self, index: Index) -> None:
        log.info("dropping index", index=str(index.name))
        index.is_defined = False
        del self._indexes[index.name]
        for builder, scope in list(self._builders.items()):
            for member in [
                candidate for candidate in builder.members if candidate.file is index.file
            ]:
                builder.remove(member)
                if not builder.members:
                    scope.cancel()
        for member in [
            candidate for candidate in self._pipeline.members if candidate.file is index.file
        ]:
            self._pipeline.members.remove(member)
        # Scans that wait for the index learn that it is gone.
        self._pipeline.applied.notify()
        await index.released.wait_until(lambda: not index.readers)
        self._moments.release_all(index.file)
        # Runs after the round that may still be under way: `work` runs one function at a time.
        await self._work(index.file.destroy)
        self._files.remove(index.file)


def _equally_far(indexes: Iterable[Index]) -> list[list[Index]]:
    """Divides indexes into those that are to be built together: what one of them has nothing of, a
    builder begins again for all. After a start some may have most of the bucket, and others
    nothing. O(n log n)."""
    groups: list[list[Index]] = []
    for index in sorted(indexes, key=lambda index: -len(index.file.marks)):
        if groups and len(index.file.marks) >= TOGETHER_SHARE * len(groups[-1][0].file.marks):
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def index_path(folder: Path, name: IndexName, definition: IndexDefinition) -> Path:
    """Where an index is kept, of a slice that is kept in `folder`."""
    return folder / _INDEXES / fingerprint(name, definition)


def _paths_in(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.exists() else []


def _remove_folder(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
