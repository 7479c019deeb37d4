"""A map on disk that holds what a bucket holds."""

from __future__ import annotations

import math
import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, Self

import trio

from upr_protocol.client.address import Address
from upr_protocol.client.consumer import Consumer, ConsumerStatistics, consume
from upr_protocol.client.events import (
    ChunkReceived,
    Event,
    RolledBack,
    SnapshotEnd,
    StreamAccepted,
    Undone,
)
from upr_protocol.client.keyvalue import Item, Text, octets
from upr_protocol.client.link import Dial, TrioOptions, dial_tcp
from upr_protocol.client.map_file import DELETIONS_MAX, MapFile
from upr_protocol.client.newest import Fetcher
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.recall import Recall, Recalled
from upr_protocol.client.retry import PATIENCE_S_DEFAULT, Patience
from upr_protocol.client.saving import SaveLimits
from upr_protocol.client.wishes import End
from upr_protocol.failover import FailoverLog
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId

_LAST_COMMIT_S: Final = 10.0
"""How long the commit on leaving may take."""


class MaterialisedMap:
    """Follows a bucket, and keeps key -> item in a directory; `keep_map` makes one.

    It is an async iterator of the events that it has dealt with, `Undone` in place of `RolledBack`:
    iterating is what makes it follow. What the iterator gives is in the map already, though perhaps
    not on disk yet.
    """

    def __init__(
        self,
        consumer: Consumer,
        file: MapFile,
        recall: Recall,
        limits: SaveLimits,
    ) -> None:
        self._consumer = consumer
        self._file = file
        self._recall = recall
        self._limits = limits
        self._logs: dict[PartitionId, FailoverLog] = {}
        self._event: Event | None = None
        self._committed_at = trio.current_time()
        self._nbytes = 0
        self._dirty = False
        self._complete = False
        """Whether a complete snapshot waits to be committed."""

    # Following.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event | Undone:
        """The next event, dealt with. Cancelled, none is lost.

        Raises:
            StopAsyncIteration: Every stream has ended for good.
            UprError: See `Consumer.__anext__`.
            sqlite3.Error: The map cannot be written. From then on every call says so; what was
                committed is there, and a new `keep_map` goes on from it.
        """
        while True:
            if self._event is None:
                self._event = await self._next()
            told = await self._apply(self._event)
            self._event = None
            if told is not None:
                return told

    async def _next(self) -> Event:
        """The consumer's next event; when none comes in time, what was applied is committed."""
        while True:
            due_at = self._due_at()
            if due_at <= trio.current_time():
                await self.save()
                continue
            with trio.move_on_at(due_at):
                return await anext(self._consumer)

    async def _apply(self, event: Event) -> Event | Undone | None:
        file = self._file
        told: Event | Undone | None = event
        if isinstance(event, ChunkReceived):
            await file.put(event.partition, self._logs[event.partition], event.chunk)
            self._nbytes += event.chunk.nbytes
        elif isinstance(event, SnapshotEnd):
            if not self._recall.ends(event):
                told = None
            else:
                self._complete = True
        elif isinstance(event, RolledBack):
            told = await self._undo(self._recall.rolled_back(event))
        elif isinstance(event, StreamAccepted):
            self._logs[event.partition] = event.log
            reached = self._consumer.resume_state.position(event.partition).highest_received
            told = await self._undo(await self._recall.accepted(event, reached))
        partition = getattr(event, "partition", None)
        if partition is not None:
            position = self._consumer.resume_state.position(partition)
            file.move(partition, position, self._recall.settled(partition))
            self._dirty = True
        return told

    async def _undo(self, recalled: Recalled | None) -> Undone | None:
        if recalled is None:
            return None
        with trio.CancelScope(shield=True):
            await self._file.undo(recalled)
        return recalled.event

    def _due_at(self) -> float:
        if not self._dirty:
            return math.inf
        if self._nbytes >= self._limits.nbytes:
            return self._committed_at
        wait_s = self._limits.complete_interval_s if self._complete else self._limits.interval_s
        return self._committed_at + wait_s

    async def save(self) -> None:
        """Puts everything that the iterator gave on disk, where readers see it."""
        await self._file.commit()
        self._committed_at = trio.current_time()
        self._nbytes = 0
        self._complete = self._dirty = False

    # What is in it.

    async def get(self, key: Text) -> Item | None:
        """The item at `key`, as of the last event."""
        data = octets(key)
        return await self._file.get(partition_of(data, self._consumer.partition_count), data)

    async def count(self) -> int:
        """How many items it holds, as of the last event."""
        return await self._file.count()

    # The consumer's.

    def send_barrier(self, cookie: bytes | None = None) -> bytes:
        """See `Consumer.send_barrier`."""
        return self._consumer.send_barrier(cookie)

    def statistics(self) -> ConsumerStatistics:
        """See `Consumer.statistics`; the saves are commits of the map."""
        return self._consumer.statistics()


@asynccontextmanager
async def keep_map(
    target: str | Address,
    directory: str | os.PathLike[str],
    *,
    partitions: Sequence[int] | None = None,
    end: End = None,
    deletions_max: int = DELETIONS_MAX,
    identity: str = IDENTITY_DEFAULT,
    patience_s: float = PATIENCE_S_DEFAULT,
    commit_limits: SaveLimits | None = None,
    dial: Dial = dial_tcp,
    draw: Callable[[], float] = random.random,
) -> AsyncIterator[MaterialisedMap]:
    """A map of a bucket, kept in `directory`, which goes on where it was.

    Data and resume state are in one database and change in one transaction, so it may be killed at
    any moment. Leaving the context commits what was dealt with, unless the map could not be
    written before. `MapReader` reads it.

    Args:
        target: `upr://host:port/bucket`.
        directory: Where it is kept; made when there is none. One process at a time may follow.
        partitions: Those to follow; by default all.
        end: Where the streams end; see `consume`.
        deletions_max: How many deletions are remembered of a partition. What is rolled back below
            the newest one that was forgotten begins at 0.
        identity: `what:who`, for the server's logs and statistics.
        patience_s: How long it goes on without a connection that streams before it gives up.
        commit_limits: How much may be read again after a crash.
        dial: How to reach an address, where that is not plain TCP.
        draw: Gives numbers in [0, 1), for the waits between attempts.

    Raises:
        MapError: The directory holds something else, or another process follows.
        ResumeStateError: The map is of another bucket.
        UprError: See `consume`.
        OSError, sqlite3.Error: It cannot be read or written.
    """
    address = (Address.parse(target) if isinstance(target, str) else target).with_bucket()
    file = await trio.to_thread.run_sync(
        MapFile.open, Path(directory), address.bucket, deletions_max
    )
    try:
        options = TrioOptions(identity=identity, dial=dial)
        recall = Recall(file, Fetcher(address, options, Patience(patience_s, draw)))
        async with consume(
            address,
            partitions=partitions,
            resume=file.state,
            end=end,
            undo=recall,
            with_logs=True,
            identity=identity,
            patience_s=patience_s,
            dial=dial,
            draw=draw,
        ) as consumer:
            kept = MaterialisedMap(consumer, file, recall, commit_limits or SaveLimits())
            try:
                yield kept
            finally:
                deadline = trio.current_time() + _LAST_COMMIT_S
                with trio.CancelScope(shield=True, deadline=deadline):
                    if not file.broken:
                        await kept.save()
    finally:
        file.close()
