"""Which keys a consumer received lately, and under which sequence numbers.

A rollback asks one question: which keys may hold a change from above a sequence number? So each key
is kept once, under the highest sequence number that the application was given for it. A key that is
not here was received at or below the floor, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Final, Protocol

import attrs
import msgspec

from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo

RECEIVED_KEY_BYTES: Final = 64
"""The assumed cost of an entry beside its key."""

TRIM_STEP: Final = 1000
"""How many keys a step of `ReceivedKeys.trim` looks at, or of `drop`: some 1 ms."""

COMPARE_STEP: Final = 10_000
"""How many keys a step of `ReceivedKeys.foreign_keys` compares: some 1 ms."""


@attrs.frozen
class ReceivedKeysLimits:
    """How many received keys are kept; the oldest are dropped first.

    Attributes:
        entries: Keys, over all partitions.
        nbytes: Bytes of these keys, plus 64 for each.
    """

    entries: int = 200_000
    nbytes: int = 32 * 1024 * 1024


class ReceivedVersion(msgspec.Struct, frozen=True):
    """The version of a key that the application was given, and a history that has it: see
    `FailoverLog.history_with`; 0 if none is known, so that the key is foreign to every history."""

    seq: SeqNo
    history_id: HistoryId


@attrs.frozen
class ForeignKeys:
    """What a stream's history says of the received keys of its partition.

    Attributes:
        keys: Keys that were received under sequence numbers outside the history.
        highest_seq: The highest sequence number of the keys that are part of the history, or the
            stream's start if none is above it.
    """

    keys: list[bytes]
    highest_seq: SeqNo


class ReceivedKeysSource(Protocol):
    """What a rollback must know of the keys that a consumer received."""

    async def floor(self, partition: PartitionId) -> SeqNo:
        """The sequence number above which every received key is known."""

    async def foreign_keys(
        self, partition: PartitionId, log: FailoverLog, seq: SeqNo
    ) -> ForeignKeys:
        """The received keys, compared with a stream that starts after `seq` in the history of
        `log`."""


class ReceivedKeys:
    """The received keys in memory."""

    def __init__(self, limits: ReceivedKeysLimits) -> None:
        self._limits = limits
        self._versions: dict[PartitionId, dict[bytes, ReceivedVersion]] = {}
        self._floors: dict[PartitionId, SeqNo] = {}
        self._order: dict[tuple[PartitionId, bytes], None] = {}
        """The keys in the order of their last receipt, oldest first."""
        self._nbytes = 0
        self._trim_above = limits
        """With more keys than this they are trimmed."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def is_overfull(self) -> bool:
        """Whether there are more keys than the limits allow; or, if `trim` could not drop enough of
        them, an eighth of that more than it left."""
        return len(self) > self._trim_above.entries or self._nbytes > self._trim_above.nbytes

    def floor(self, partition: PartitionId) -> SeqNo:
        """The sequence number above which every received key is known."""
        return self._floors.get(partition, SeqNo(0))

    def floors(self) -> Mapping[PartitionId, SeqNo]:
        """The floors that are not 0."""
        return self._floors

    def order(self) -> list[tuple[PartitionId, bytes]]:
        """The keys in the order of their last receipt, oldest first. O(keys), 10 ns each."""
        return list(self._order)

    def version(self, partition: PartitionId, key: bytes) -> ReceivedVersion | None:
        """What was received last of a key; None if it is not known."""
        versions = self._versions.get(partition)
        return None if versions is None else versions.get(key)

    def versions(self) -> Iterable[tuple[PartitionId, bytes, ReceivedVersion]]:
        """Every key, the one received longest ago first."""
        for partition, key in self._order:
            yield partition, key, self._versions[partition][key]

    def foreign_keys(
        self, partition: PartitionId, log: FailoverLog, seq: SeqNo
    ) -> Generator[None, None, ForeignKeys]:
        """See `ReceivedKeysSource.foreign_keys`. O(the partition's keys), in steps of
        `COMPARE_STEP`, between which the keys must not change."""
        keys: list[bytes] = []
        highest_seq = seq
        for place, (key, version) in enumerate(self._versions.get(partition, {}).items(), 1):
            if not place % COMPARE_STEP:
                yield
            if not log.contains(version.history_id, version.seq):
                keys.append(key)
            elif version.seq > highest_seq:
                highest_seq = version.seq
        return ForeignKeys(keys, highest_seq)

    def raise_floor(self, partition: PartitionId, seq: SeqNo) -> None:
        """Records that keys received at or below `seq` may be missing here."""
        if seq > self.floor(partition):
            self._floors[partition] = seq

    def receive(
        self, partition: PartitionId, rows: Iterable[tuple[bytes, SeqNo, HistoryId]]
    ) -> None:
        """Adds the keys that the application is about to be given. A key that is here under a
        higher sequence number keeps that. A key whose history is not known stays foreign until it
        is read again: its application was told that another rollback follows."""
        versions, order = self._versions.setdefault(partition, {}), self._order
        for key, seq, history_id in rows:
            version = versions.get(key)
            partition_key = partition, key
            if version is None:
                self._nbytes += len(key) + RECEIVED_KEY_BYTES
            elif version.seq < seq:
                history_id = history_id if version.history_id else HistoryId(0)
                del order[partition_key]
            else:
                continue
            versions[key] = ReceivedVersion(seq, history_id)
            order[partition_key] = None

    def replace(
        self, partition: PartitionId, reread_versions: Mapping[bytes, ReceivedVersion]
    ) -> None:
        """Sets the versions of keys that were read again: the application has undone its own."""
        for key, version in reread_versions.items():
            self._set(partition, key, version)

    def drop(self, partition: PartitionId) -> Generator[None, None, None]:
        """Drops the keys of a partition that the application has dropped, in steps of `TRIM_STEP`,
        and then its floor."""
        for place, key in enumerate(list(self._versions.get(partition, {})), 1):
            if not place % TRIM_STEP:
                yield
            self._delete(partition, key)
        self._floors.pop(partition, None)

    def trim(
        self, droppable_seq: Callable[[PartitionId], SeqNo], *, in_order: bool = False
    ) -> Generator[None, None, bool]:
        """Drops the oldest keys, but none above its partition's `droppable_seq`: the next accepted
        stream has to be compared with those.

        Leaves an eighth less than the limits allow, so that it seldom has work. O(dropped and kept
        back), in steps of `TRIM_STEP` keys; after each step the keys are as good as before it.

        Args:
            droppable_seq: Up to which number the keys of a partition may be dropped.
            in_order: Whether it ends at the first key that it must keep, and drops no later one.

        Returns:
            Whether it has left so few.
        """
        for place, (partition, key) in enumerate(list(self._order), 1):
            if self._is_trimmed():
                break
            version = self._versions[partition].get(key)
            if version is not None and version.seq <= droppable_seq(partition):
                self.raise_floor(partition, version.seq)
                self._delete(partition, key)
            elif version is not None and in_order:
                return False
            if not place % TRIM_STEP:
                yield
        # Where a node is down, many keys may have to be kept, and each event would look at them.
        limits = self._limits
        self._trim_above = ReceivedKeysLimits(
            max(limits.entries, len(self) + limits.entries // 8),
            max(limits.nbytes, self._nbytes + limits.nbytes // 8),
        )
        return self._is_trimmed()

    def _is_trimmed(self) -> bool:
        limits = self._limits
        return len(self) <= limits.entries * 7 // 8 and self._nbytes <= limits.nbytes * 7 // 8

    def _set(self, partition: PartitionId, key: bytes, version: ReceivedVersion) -> None:
        versions = self._versions.setdefault(partition, {})
        if key in versions:
            del self._order[partition, key]
        else:
            self._nbytes += len(key) + RECEIVED_KEY_BYTES
        versions[key] = version
        self._order[partition, key] = None

    def _delete(self, partition: PartitionId, key: bytes) -> None:
        del self._versions[partition][key]
        del self._order[partition, key]
        self._nbytes -= len(key) + RECEIVED_KEY_BYTES

    def check_invariants(self) -> None:
        """Asserts that the order and the byte count match the versions; for tests."""
        assert set(self._order) == {
            (partition, key) for partition, keys in self._versions.items() for key in keys
        }
        assert self._nbytes == sum(len(key) + RECEIVED_KEY_BYTES for _, key in self._order)
