"""A ring buffer in a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from upr_protocol.client.journal import Journal, JournalError
from upr_protocol.client.ring import Entry, Look, Ring, RingLimits
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo

_VERSION: Final = 1
_ENTRIES_PER_RECORD: Final = 10_000
_SPARE_BYTES: Final = 4 * 1024 * 1024
"""How much of the file may be of no use any more before it is written anew, beside as much again as
is of use."""


class RingFile:
    """A ring buffer that is on disk before the application sees what is in it.

    Args:
        path: The file; made when there is none. No two consumers may share it.
        bucket: The bucket that it is about.
        limits: How much it keeps.

    Attributes:
        ring: The ring buffer in memory.
        found: Whether the file was there before.

    Raises:
        JournalError: The file is damaged, of another bucket, or none of these.
        OSError: The file cannot be read or written.
    """

    def __init__(
        self, path: str | os.PathLike[str], bucket: str, limits: RingLimits | None = None
    ) -> None:
        self.ring = Ring(limits or RingLimits())
        self._bucket = bucket
        self._journal, records = Journal.open(Path(path))
        self.found = bool(records)
        try:
            self._read(records)
            if not records:
                self._journal.append(self._head())
        except BaseException:
            self._journal.close()
            raise
        self._compacted_bytes = self._journal.nbytes

    def _head(self) -> bytes:
        return msgspec.msgpack.encode(["ring", _VERSION, self._bucket])

    def _read(self, records: Iterable[bytes]) -> None:
        path = self._journal.path
        for index, record in enumerate(records):
            try:
                kind, *fields = msgspec.msgpack.decode(record)
                if not index:
                    if kind != "ring" or fields[0] != _VERSION:
                        raise JournalError(f"{path} is no ring buffer that this program reads")
                    if fields[1] != self._bucket:
                        raise JournalError(
                            f"{path} is the ring buffer of the bucket {fields[1]!r}, not of "
                            f"{self._bucket!r}"
                        )
                    continue
                self._apply(kind, *fields)
            except (msgspec.DecodeError, ValueError, TypeError, IndexError, KeyError) as error:
                if isinstance(error, JournalError):
                    raise
                raise JournalError(f"{path} is no ring buffer: {error!r}") from error

    def _apply(self, kind: str, partition: PartitionId, *fields: Any) -> None:
        ring = self.ring
        if kind == "received":
            ring.receive(partition, _rows(fields[0]))
        elif kind == "replaced":
            ring.replace(partition, {key: Entry(seq, h) for key, seq, h in _rows(fields[0])})
        elif kind == "dropped":
            ring.drop(partition)
        elif kind == "floor":
            ring.raise_floor(partition, SeqNo(fields[0]))
        else:
            raise ValueError(f"a record of the kind {kind!r}")

    # What it is told. Each is on disk when it returns.

    async def _append(self, *fields: Any) -> None:
        await trio.to_thread.run_sync(self._journal.append, msgspec.msgpack.encode(fields))
        # Only now: whoever is cancelled before has said nothing.
        self._apply(*fields)

    async def receive(
        self, partition: PartitionId, rows: Iterable[tuple[bytes, SeqNo, HistoryId]]
    ) -> None:
        """The keys of `rows` are about to be handed on."""
        await self._append("received", partition, list(rows))

    async def undone(self, partition: PartitionId, entries: Mapping[bytes, Entry] | None) -> None:
        """The application has undone what it was told to; see `Recalled`."""
        if entries is None:
            await self._append("dropped", partition)
        elif entries:
            rows = [(key, entry.seq, entry.history_id) for key, entry in entries.items()]
            await self._append("replaced", partition, rows)

    async def raise_floor(self, partition: PartitionId, seq: SeqNo) -> None:
        """Up to `seq` there may be keys that it does not know."""
        await self._append("floor", partition, seq)

    async def tidy(self, reached: Callable[[PartitionId], SeqNo]) -> None:
        """Lets go of what is too much, in memory and now and then in the file; see `Ring.trim`."""
        self.ring.trim(reached)
        if self._journal.nbytes > 2 * self._compacted_bytes + _SPARE_BYTES:
            await trio.to_thread.run_sync(self._journal.replace, list(self._compact()))
            self._compacted_bytes = self._journal.nbytes
        else:
            await trio.lowlevel.checkpoint()

    def _compact(self) -> Iterator[bytes]:
        yield self._head()
        for partition, seq in self.ring.floors().items():
            yield msgspec.msgpack.encode(("floor", partition, seq))
        rows: dict[PartitionId, list[tuple[bytes, int, int]]] = {}
        for partition, key, entry in self.ring.entries():
            rows.setdefault(partition, []).append((key, entry.seq, entry.history_id))
        for partition, found in rows.items():
            for at in range(0, len(found), _ENTRIES_PER_RECORD):
                some = found[at : at + _ENTRIES_PER_RECORD]
                yield msgspec.msgpack.encode(("replaced", partition, some))

    def close(self) -> None:
        """Closes the file."""
        self._journal.close()

    # What it is asked; see `Received`.

    async def floor(self, partition: PartitionId) -> SeqNo:
        """See `Received`."""
        await trio.lowlevel.checkpoint()
        return self.ring.floor(partition)

    async def look(self, partition: PartitionId, log: FailoverLog, seq: SeqNo) -> Look:
        """See `Received`."""
        await trio.lowlevel.checkpoint()
        return self.ring.look(partition, log, seq)


def _rows(rows: Iterable[tuple[bytes, int, int]]) -> list[tuple[bytes, SeqNo, HistoryId]]:
    return [(key, SeqNo(seq), HistoryId(history_id)) for key, seq, history_id in rows]
