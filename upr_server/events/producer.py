"""The producer: gathers what the engine tells, and puts it into the queues now and then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import structlog
import trio

from upr_protocol.bucket_event import ANY_DESIGN
from upr_protocol.limits import DESIGNS_MAX
from upr_server.engine import Bucket
from upr_server.events import queues
from upr_server.events.queues import Telling
from upr_server.events.store import EventStore
from upr_server.storage.errors import StorageError

FLUSH_S: Final = 0.025
"""How long what was told is gathered. One transaction for each batch would be as much work as the
batch."""
FLUSH_S_MAX: Final = 0.25
"""How long at the most; a transaction takes long beside a busy loop, or with many buckets."""
PAUSES: Final = 50
"""So many times as long as the last flush took: ingest and polls have the rest."""

RETRY_S: Final = 1.0
"""When the store is full or has failed, how soon to try again. What is told meanwhile is gathered:
it takes one number a bucket."""

log = structlog.get_logger(__name__)


class Producer:
    """See the module. It is the engine's `Listener`.

    Args:
        store: Where the queues are.
        on_told: Called when something was put into queues.
    """

    def __init__(self, store: EventStore, on_told: Callable[[], None]) -> None:
        self._store = store
        self._on_told = on_told
        self._gathered: dict[Bucket, Telling] = {}
        # The design documents that were told of, by bucket: beyond so many they are not named.
        self._designs: dict[Bucket, set[bytes]] = {}
        self._wakeup = trio.Event()
        self._turn = trio.Lock()
        self._flushes = self._failures = 0
        self._last_flush_s = 0.0

    # The engine's side.

    def created(self, bucket: Bucket) -> None:
        """See `Listener`."""
        for other in [other for other in self._gathered if other.name == bucket.name]:
            # That this one is another bucket tells that the one before it is gone.
            del self._gathered[other]
        self._of(bucket).created = True

    def deleted(self, bucket: Bucket) -> None:
        """See `Listener`."""
        telling = self._of(bucket)
        telling.deleted = True
        telling.designs.clear()
        self._designs.pop(bucket, None)

    def updated(self, bucket: Bucket, designs: Sequence[bytes]) -> None:
        """See `Listener`."""
        telling = self._gathered.get(bucket)
        if telling is None:
            telling = self._of(bucket)
        telling.updates += 1
        if designs:
            self._note(bucket, telling, designs)

    def _of(self, bucket: Bucket) -> Telling:
        telling = self._gathered.get(bucket)
        if telling is None:
            telling = self._gathered[bucket] = Telling(bucket.name, bucket.incarnation)
            self._wakeup.set()
        return telling

    def _note(self, bucket: Bucket, telling: Telling, designs: Sequence[bytes]) -> None:
        known = self._designs.setdefault(bucket, set())
        for design in designs:
            if design not in known and len(known) >= DESIGNS_MAX:
                design = ANY_DESIGN
            else:
                known.add(design)
            telling.designs[design] = telling.designs.get(design, 0) + 1

    # The store's side.

    async def run(self) -> None:
        """Puts what was gathered into the queues, for ever."""
        while True:
            if not self._gathered:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
            await trio.sleep(min(max(FLUSH_S, PAUSES * self._last_flush_s), FLUSH_S_MAX))
            begun = trio.current_time()
            try:
                await self.flush()
            except StorageError as error:
                if not self._failures:
                    log.error("events wait: their store cannot be written", error=str(error))
                self._failures += 1
                await trio.sleep(RETRY_S)
            else:
                self._failures = 0
                self._last_flush_s = trio.current_time() - begun

    async def flush(self) -> None:
        """Puts what was gathered into the queues. Cancelled, or failed, it is still gathered.

        Raises:
            StorageError: The store failed, or was full.
        """
        async with self._turn:
            under_way, self._gathered = self._gathered, {}
            try:
                told = await queues.tell(self._store, list(under_way.values()))
            except BaseException:
                self._gather_again(under_way)
                raise
            self._flushes += 1
            if told:
                self._on_told()

    def _gather_again(self, earlier: dict[Bucket, Telling]) -> None:
        later, self._gathered = self._gathered, {}
        created = {telling.bucket for telling in later.values() if telling.created}
        for bucket, telling in earlier.items():
            newer = later.pop(bucket, None)
            if newer is None:
                if telling.bucket not in created:
                    self._gathered[bucket] = telling
                continue
            telling.updates += newer.updates
            telling.deleted |= newer.deleted
            for design, times in newer.designs.items():
                telling.designs[design] = telling.designs.get(design, 0) + times
            self._gathered[bucket] = telling
        self._gathered.update(later)

    def statistics(self) -> dict[str, object]:
        """Figures."""
        return {
            "gathered": len(self._gathered),
            "flushes": self._flushes,
            "last_flush_s": self._last_flush_s,
            "failures": self._failures,
        }
