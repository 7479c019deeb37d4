"""The shelves of one node, by bucket, and the answers to calls.

It runs where the disk is: in a process of its own over LMDB, or in the server's loop over simulated
disks. There is one for calls that change something, and there may be others that only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

from upr_protocol.chunk import Chunk
from upr_server.storage.calls import (
    AnyCall,
    Begin,
    Commit,
    Create,
    Cut,
    Delete,
    DeleteLeases,
    Find,
    FindDue,
    Finish,
    Forget,
    ForgetIndex,
    Load,
    Measure,
    NewestEnd,
    PutLease,
    PutMap,
    Read,
    UpkeepStep,
)
from upr_server.storage.chunk_log import StoredBucket
from upr_server.storage.environment import Environment
from upr_server.storage.shelf import Shelf


class Room(Protocol):
    """Where the maps of buckets are kept."""

    def names(self) -> list[str]:
        """The buckets there are, sorted."""

    def open(self, name: str) -> tuple[Environment, Environment]:
        """Log and index of a bucket."""

    def create(self, name: str, fill: Callable[[Environment, Environment], None]) -> None:
        """Makes a bucket: it is there, filled, or not at all."""

    def delete(self, name: str) -> None:
        """Takes a bucket away."""


class Library:
    """Answers calls.

    Args:
        room: Where the maps are.
        copied: Copies a chunk that was read to where its reader takes it from.
    """

    def __init__(self, room: Room, copied: Callable[[Chunk], Chunk] = Chunk.copied) -> None:
        self._room = room
        self._copied = copied
        self._shelves: dict[str, Shelf] = {}

    def answer(self, call: AnyCall) -> Any:
        """Does what is asked.

        Raises:
            StorageError: It could not be done.
        """
        return self._ANSWERS[type(call)](self, call)

    def close(self) -> None:
        """Lets go of every bucket."""
        for shelf in self._shelves.values():
            shelf.close()
        self._shelves.clear()

    def _shelf(self, name: str) -> Shelf:
        shelf = self._shelves.get(name)
        if shelf is None:
            shelf = self._shelves[name] = Shelf(*self._room.open(name))
        return shelf

    def _load(self, _call: Load) -> list[StoredBucket]:
        return [self._shelf(name).open() for name in self._room.names()]

    def _create(self, call: Create) -> None:
        def fill(log: Environment, index: Environment) -> None:
            Shelf(log, index).log.create(call.record, call.partitions)

        self._room.create(call.record.name, fill)
        self._shelf(call.record.name).open()

    def _forget(self, call: Forget | Delete) -> None:
        shelf = self._shelves.pop(call.bucket, None)
        if shelf is not None:
            shelf.close()

    def _delete(self, call: Delete) -> None:
        self._forget(call)
        self._room.delete(call.bucket)

    def _begin(self, call: Begin) -> None:
        self._shelf(call.bucket).log.begin(call.records)

    def _finish(self, call: Finish) -> None:
        self._shelf(call.bucket).log.finish()

    def _commit(self, call: Commit) -> None:
        self._shelf(call.bucket).commit(call.writes)

    def _put_lease(self, call: PutLease) -> None:
        self._shelf(call.bucket).log.put_lease(call.lease)

    def _delete_leases(self, call: DeleteLeases) -> None:
        self._shelf(call.bucket).log.delete_leases(call.lease_ids)

    def _put_map(self, call: PutMap) -> None:
        self._shelf(call.bucket).put_map(call.document, call.records)

    def _cut(self, call: Cut) -> object:
        return self._shelf(call.bucket).cut(call.partition, call.record, call.tokens)

    def _forget_index(self, call: ForgetIndex) -> object:
        return self._shelf(call.bucket).forget(call.partition)

    def _newest_end(self, call: NewestEnd) -> object:
        log = self._shelf(call.bucket).log
        return log.newest_end(call.partition, call.ceiling, call.floor)

    def _upkeep(self, call: UpkeepStep) -> tuple[object, dict[str, object]]:
        shelf = self._shelf(call.bucket)
        done = shelf.upkeep(
            urgent=call.urgent,
            leases=call.leases,
            lapsed=call.lapsed,
            purge_before_cas=call.purge_before_cas,
            keep=call.keep,
        )
        return done, shelf.statistics()

    def _read(self, call: Read) -> object:
        log = self._shelf(call.bucket).log
        return log.read(
            call.partition,
            call.after,
            call.through,
            bytes_max=call.bytes_max,
            in_pieces=True,
            copied=self._copied,
        )

    def _measure(self, call: Measure) -> object:
        return self._shelf(call.bucket).log.measure(call.ranges)

    def _find(self, call: Find) -> object:
        return self._shelf(call.bucket).index.find(call.partition, call.wants, indexed=call.indexed)

    def _find_due(self, call: FindDue) -> object:
        return self._shelf(call.bucket).index.due(call.now, call.after, call.limit)

    _ANSWERS: ClassVar[Mapping[type, Callable[[Library, Any], Any]]] = {
        Load: _load,
        Create: _create,
        Delete: _delete,
        Forget: _forget,
        Begin: _begin,
        Finish: _finish,
        Commit: _commit,
        PutLease: _put_lease,
        DeleteLeases: _delete_leases,
        PutMap: _put_map,
        Cut: _cut,
        ForgetIndex: _forget_index,
        NewestEnd: _newest_end,
        UpkeepStep: _upkeep,
        Read: _read,
        Measure: _measure,
        Find: _find,
        FindDue: _find_due,
    }
