"""The design documents of a bucket, and which indexes they define."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import structlog
import trio

from upr_protocol.client import Address, connect
from upr_protocol.concurrency import Notifier
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import Durability
from upr_server.indexer.announcements import Announcements
from upr_server.indexer.catalog import CATALOG_BYTES_MAX
from upr_server.indexer.definitions import NoIndexError
from upr_server.indexer.definitions_file import DefinitionsFile
from upr_server.indexer.overlay import DesignOverlay
from upr_server.indexer.pool import OverloadedError
from upr_server.indexer.pure.definition import (
    DefinitionError,
    Design,
    IndexDefinition,
    IndexName,
    design_key,
    parse_design,
)
from upr_server.indexer.slices import CatalogReport, SliceHolder, SliceMissingError

log = structlog.get_logger(__name__)

ALL_INDEXES_MAX: Final = 256
"""How many indexes all designs together may define. A slice has three open files for each: where
1,024 are allowed, it could not open the 340th, and would end at each start."""

PARSES_AT_ONCE: Final = 2
"""How many documents that somebody wants to write are parsed at once. The longest take 15 s, and
the threads share an interpreter with the event loop: it waits for each of them in turn."""

CONFIRM_RETRY_S: Final = 1.0
"""The pause before a slice that did not answer is asked again."""


class Designs:
    """Decides which indexes there are, and has every slice keep them.

    The documents come from the slices' catalogs, which the streams feed: each document is in the
    catalog of one slice. Over them lies what the event bus announced and the streams have yet to
    bring.

    Args:
        address: The bucket.
        consumer: The indexer's name as a consumer of the event bus.
        holders: The slices, by their numbers.
        file: Has the definitions for the next start; None to keep none.
    """

    def __init__(
        self,
        address: Address,
        consumer: str,
        holders: Sequence[SliceHolder],
        file: DefinitionsFile | None = None,
    ) -> None:
        self._address = address
        self._holders = holders
        self._file = file
        self._reports: dict[int, CatalogReport] = {}
        # By slice, the count of rollbacks when its catalog was known to be whole.
        self._whole_at: dict[int, int] = {}
        # The slices that have begun to run and have yet to be told of definitions.
        self._new_slices: set[int] = set()
        self._overlay = DesignOverlay(self.wait_until_current, self._redefine)
        self._announcements = Announcements(address, consumer, self._streamed_texts, self._overlay)
        self._definitions: dict[IndexName, IndexDefinition] = {}
        self._is_known = False
        self._was_whole = False
        """Whether all catalogs were known to be whole since the start."""
        self._mistakes: dict[str, str] = {}
        self._is_redefined = False
        self._redefined = Notifier()
        self._is_confirming = False
        self._parse_turns = trio.CapacityLimiter(PARSES_AT_ONCE)

    # What there is.

    @property
    def mistakes(self) -> Mapping[str, str]:
        """What is wrong with design documents, by name."""
        return self._mistakes

    def names(self) -> list[IndexName]:
        """The indexes, in order."""
        return sorted(self._definitions)

    def check_known(self) -> None:
        """Makes sure that it is known which indexes there are.

        Raises:
            SliceMissingError: Not every slice has said which there are.
        """
        if not self._is_known:
            silent_holders = (h for h in self._holders if h.slice_id.index not in self._reports)
            holder = next(silent_holders, self._holders[0])
            raise SliceMissingError(holder.title, "has yet to say which indexes there are")

    def find(self, name: IndexName) -> IndexDefinition:
        """The definition of the index of this name.

        Raises:
            NoIndexError: No index has this name.
            SliceMissingError: That is not known yet: not every slice has said which there are, or
                a slice has yet to catch up since the start, and may lack design documents.
        """
        definition = self._definitions.get(name)
        if definition is None:
            self.check_known()
            if not self._was_whole:
                partial_slices = (h for h in self._holders if not self._is_whole(h.slice_id.index))
                holder = next(partial_slices, self._holders[0])
                raise SliceMissingError(
                    holder.title, "has yet to say whether there are more indexes"
                )
            raise NoIndexError(f"there is no index {name}; `upr index list` names all")
        return definition

    def is_defined(self, name: IndexName) -> bool:
        """Whether there is an index of this name."""
        return name in self._definitions

    # Design documents.

    async def create(self, name: str, text: bytes, address: Address | None = None) -> Design:
        """Writes a design document.

        Args:
            name: Its name.
            text: The document.
            address: The bucket, with the user's credentials; None for the indexer's.

        Raises:
            DefinitionError: The text is not a design document, or the indexer would have too many
                indexes; nothing was written.
            UprError: The server could not be reached, or refused.
        """
        design = await trio.to_thread.run_sync(
            parse_design, name, text, limiter=self._parse_turns, abandon_on_cancel=True
        )
        other_indexes = sum(index.design != name for index in self._definitions)
        if other_indexes + len(design.indexes) > ALL_INDEXES_MAX:
            raise DefinitionError("indexes", _too_many_reason(other_indexes, design))
        async with connect(address or self._address, identity="upr-indexer") as client:
            await client.set(design_key(name), text, durability=Durability.PERSISTED)
        return design

    async def drop(self, name: str, address: Address | None = None) -> None:
        """Removes a design document, and so its indexes.

        Args:
            name: Its name.
            address: The bucket, with the user's credentials; None for the indexer's.

        Raises:
            NoIndexError: No design document has this name.
            UprError: The server could not be reached, or refused.
        """
        async with connect(address or self._address, identity="upr-indexer") as client:
            try:
                await client.delete(design_key(name), durability=Durability.PERSISTED)
            except ServerError as error:
                if error.status is not Status.NOT_FOUND:
                    raise
                raise NoIndexError(
                    f"there is no design {name}; `upr index list` names all"
                ) from error

    # Following them.

    def slice_restarted(self, index: int) -> None:
        """A slice has begun to run: it knows of no definitions, and its catalog may be older than
        what it reported before."""
        self._whole_at.pop(index, None)
        self._new_slices.add(index)
        self._redefine()

    def catalog_read(self, index: int, report: CatalogReport) -> None:
        """A slice has read its catalog."""
        self._reports[index] = report
        self._redefine()

    async def run(self) -> None:
        """Tells the slices of definitions as design documents come and go, for ever.

        Raises:
            UprError: The server refused.
        """
        await self._redefined.wait_until(lambda: len(self._reports) == len(self._holders))
        if self._file is not None:
            # Kept like others that a catalog lacks, until all of them are known to be whole.
            self._definitions = await trio.to_thread.run_sync(
                self._file.load, self._streamed_texts().keys(), abandon_on_cancel=True
            )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._overlay.run)
            nursery.start_soon(self._announcements.run)
            while True:
                self._is_redefined = False
                await self._reconcile(nursery)
                await self._redefined.wait_until(lambda: self._is_redefined)

    async def wait_until_current(self) -> None:
        """Waits until the catalogs have all that was acknowledged before the call, and were
        reported since. It asks a slice that does not answer again."""
        async with trio.open_nursery() as nursery:
            for holder in self._holders:
                nursery.start_soon(self._confirm_slice, holder)

    async def _confirm_slice(self, holder: SliceHolder) -> None:
        while True:
            try:
                rollbacks = await holder.confirm()
            except (SliceMissingError, OverloadedError):
                await trio.sleep(CONFIRM_RETRY_S)
                continue
            self._whole_at[holder.slice_id.index] = rollbacks
            return

    def _redefine(self) -> None:
        self._is_redefined = True
        self._redefined.notify()

    def _streamed_texts(self) -> dict[str, bytes]:
        """The design documents that the streams have brought."""
        texts: dict[str, bytes] = {}
        for report in self._reports.values():
            texts.update(report.texts)
        return texts

    def _left_out(self) -> dict[str, str]:
        """What is wrong with design documents that the slices do not report."""
        reason = f"all design documents of a slice have at most {CATALOG_BYTES_MAX:,} bytes"
        return {name: reason for report in self._reports.values() for name in report.left_out}

    async def _reconcile(self, nursery: trio.Nursery) -> None:
        # The overlay first: what has left it by then is in the catalogs.
        announced_texts = self._overlay.texts
        texts = {**self._streamed_texts(), **announced_texts}
        # While a partition is streamed again from its beginning, a catalog lacks design documents
        # that are still there. So an index is dropped for its absence from the catalogs only once a
        # barrier after the last rollback has come back. The overlay needs no such care: it was read
        # from the server.
        is_whole = all(map(self._is_whole, self._reports))
        # Not in the loop: compiling long expressions takes seconds, for which a stop does not wait.
        designs, mistakes = await trio.to_thread.run_sync(
            _parse_all,
            {name: text for name, text in texts.items() if text is not None},
            abandon_on_cancel=True,
        )
        running_designs = {name.design for name in self._definitions}
        kept_definitions = {
            name: definition
            for name, definition in self._definitions.items()
            if not (is_whole or name.design in announced_texts)
        }
        definitions, surplus = _within_limit(designs, running_designs, kept_definitions)
        self._mistakes = mistakes | surplus | self._left_out()
        merged_definitions = {
            name: definition
            for name, definition in self._definitions.items()
            if definitions.get(name) == definition or name in kept_definitions
        }
        for name, definition in definitions.items():
            merged_definitions.setdefault(name, definition)
        is_changed = merged_definitions != self._definitions
        self._definitions = merged_definitions
        self._is_known = True
        self._was_whole = self._was_whole or is_whole
        new_slices, self._new_slices = self._new_slices, set()
        for holder in self._holders:
            if is_changed or holder.slice_id.index in new_slices:
                holder.define(merged_definitions)
        if not is_whole and not self._is_confirming:
            self._is_confirming = True
            nursery.start_soon(self._confirm_catalogs)
        if is_changed:
            await self._save(merged_definitions)

    async def _save(self, definitions: Mapping[IndexName, IndexDefinition]) -> None:
        if self._file is None:
            return
        try:
            await trio.to_thread.run_sync(self._file.save, definitions)
        except OSError as error:
            log.warning("the definitions cannot be saved", error=str(error))

    def _is_whole(self, index: int) -> bool:
        """Whether the report of a slice lacks no design document."""
        return self._whole_at.get(index) == self._reports[index].rollbacks

    async def _confirm_catalogs(self) -> None:
        await self.wait_until_current()
        self._is_confirming = False
        self._redefine()


def _parse_all(texts: Mapping[str, bytes]) -> tuple[list[Design], dict[str, str]]:
    """The design documents, and by name what is wrong with those that are none."""
    designs: list[Design] = []
    mistakes: dict[str, str] = {}
    for name, text in texts.items():
        try:
            designs.append(parse_design(name, text))
        except UprError as error:
            mistakes[name] = str(error)
    return designs, mistakes


def _within_limit(
    designs: Collection[Design],
    running_designs: Collection[str],
    kept_indexes: Iterable[IndexName],
) -> tuple[dict[IndexName, IndexDefinition], dict[str, str]]:
    """The indexes that design documents define, and by name what is wrong with those that would
    make too many of them: new ones before others.

    Args:
        designs: The design documents.
        running_designs: The names of those that have indexes already.
        kept_indexes: What stays although the catalogs may lack its design for a while.
    """
    names = {design.name for design in designs}
    count = sum(name.design not in names for name in kept_indexes)
    definitions: dict[IndexName, IndexDefinition] = {}
    mistakes: dict[str, str] = {}
    for design in sorted(designs, key=lambda item: (item.name not in running_designs, item.name)):
        if count + len(design.indexes) > ALL_INDEXES_MAX:
            mistakes[design.name] = f"indexes: {_too_many_reason(count, design)}"
            continue
        count += len(design.indexes)
        for index, definition in design.indexes.items():
            definitions[IndexName(design.name, index)] = definition
    return definitions, mistakes


def _too_many_reason(count: int, design: Design) -> str:
    return (
        f"{len(design.indexes)} indexes beside the {count} of other designs; all together may have "
        f"{ALL_INDEXES_MAX}"
    )
