"""The ring buffer: which keys a consumer received lately, and under which numbers (seed 002).

It answers one question: which keys may hold something from above a number? So it needs each key
once, under the highest number that the application was handed for it. What it does not know any
more lies at or below its floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Protocol

import attrs

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo

ENTRY_BYTES: Final = 64
"""What an entry is taken to cost beside its key."""


@attrs.frozen
class RingLimits:
    """How much a ring buffer keeps; the oldest go first.

    Attributes:
        entries: Keys, over all partitions.
        nbytes: Bytes of these, each with 64 for the rest.
    """

    entries: int = 200_000
    nbytes: int = 32 * 1024 * 1024


@attrs.frozen
class Entry:
    """What a key was received under.

    Attributes:
        seq: The number.
        history_id: The branch in which the number was given.
    """

    seq: SeqNo
    history_id: HistoryId


@attrs.frozen
class Look:
    """What is known of a partition, seen from a history and a number.

    Attributes:
        foreign: Keys that were received under numbers that are not part of the history.
        ahead: The highest number that is, of those above the number; or the number.
    """

    foreign: list[bytes]
    ahead: SeqNo


class Received(Protocol):
    """What a consumer received, as far as it must know to undo it."""

    async def floor(self, partition: PartitionId) -> SeqNo:
        """Every key that was received under a number above this is known."""

    async def look(self, partition: PartitionId, log: FailoverLog, seq: SeqNo) -> Look:
        """The stream goes on behind `seq`, in the history of `log`."""


class Ring:
    """The ring buffer in memory.

    Args:
        limits: How much it keeps.
    """

    def __init__(self, limits: RingLimits) -> None:
        self._limits = limits
        self._entries: dict[PartitionId, dict[bytes, Entry]] = {}
        self._floors: dict[PartitionId, SeqNo] = {}
        self._order: dict[tuple[PartitionId, bytes], None] = {}
        """The keys, those received last at the end."""
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def overfull(self) -> bool:
        """Whether it keeps more than it may."""
        return len(self) > self._limits.entries or self._nbytes > self._limits.nbytes

    def floor(self, partition: PartitionId) -> SeqNo:
        """See `Received`."""
        return self._floors.get(partition, SeqNo(0))

    def floors(self) -> Mapping[PartitionId, SeqNo]:
        """The floors that are not 0."""
        return self._floors

    def entries(self) -> Iterable[tuple[PartitionId, bytes, Entry]]:
        """Everything, those received first in front."""
        for partition, key in self._order:
            yield partition, key, self._entries[partition][key]

    def look(self, partition: PartitionId, log: FailoverLog, seq: SeqNo) -> Look:
        """See `Received`. O(the partition's entries)."""
        foreign: list[bytes] = []
        ahead = seq
        for key, entry in self._entries.get(partition, {}).items():
            if not log.holds(entry.history_id, entry.seq):
                foreign.append(key)
            elif entry.seq > ahead:
                ahead = entry.seq
        return Look(foreign, ahead)

    def raise_floor(self, partition: PartitionId, seq: SeqNo) -> None:
        """Up to `seq` there may be keys that it does not know."""
        if seq > self.floor(partition):
            self._floors[partition] = seq

    def receive(
        self, partition: PartitionId, rows: Iterable[tuple[bytes, SeqNo, HistoryId]]
    ) -> None:
        """The keys of `rows` are about to be handed on; what is known of them from above stays."""
        known = self._entries.setdefault(partition, {})
        for key, seq, history_id in rows:
            entry = known.get(key)
            if entry is None or entry.seq < seq:
                self._put(partition, key, Entry(seq, history_id))

    def replace(self, partition: PartitionId, fetched: Mapping[bytes, Entry]) -> None:
        """The application has undone what it had of these keys, and has what was read again."""
        for key, entry in fetched.items():
            self._put(partition, key, entry)

    def drop(self, partition: PartitionId) -> None:
        """The application has nothing of the partition any more."""
        self._floors.pop(partition, None)
        for key in list(self._entries.get(partition, {})):
            self._drop(partition, key)

    def trim(self, reached: Callable[[PartitionId], SeqNo]) -> None:
        """Lets go of what is too much, but of nothing above what a partition has `reached` for
        good: whether that is still the server's is looked at when its stream is accepted again.

        An eighth more goes than must, so that it is seldom done. O(what goes and what is above).
        """
        if not self.overfull:
            return
        entries = len(self) - self._limits.entries * 7 // 8
        nbytes = self._nbytes - self._limits.nbytes * 7 // 8
        gone: list[tuple[PartitionId, bytes]] = []
        for partition, key in self._order:
            if entries <= 0 and nbytes <= 0:
                break
            seq = self._entries[partition][key].seq
            if seq <= reached(partition):
                self.raise_floor(partition, seq)
                gone.append((partition, key))
                entries -= 1
                nbytes -= len(key) + ENTRY_BYTES
        for partition, key in gone:
            self._drop(partition, key)

    def _put(self, partition: PartitionId, key: bytes, entry: Entry) -> None:
        known = self._entries.setdefault(partition, {})
        if key in known:
            del self._order[partition, key]
        else:
            self._nbytes += len(key) + ENTRY_BYTES
        known[key] = entry
        self._order[partition, key] = None

    def _drop(self, partition: PartitionId, key: bytes) -> None:
        del self._entries[partition][key]
        del self._order[partition, key]
        self._nbytes -= len(key) + ENTRY_BYTES

    def check_invariants(self) -> None:
        """For tests."""
        assert set(self._order) == {(p, key) for p, known in self._entries.items() for key in known}
        assert self._nbytes == sum(len(key) + ENTRY_BYTES for _, key in self._order)
