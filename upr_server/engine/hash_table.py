"""The hash table: each key's newest sequence number.

One table a partition serves everything that starts from a key: deduplication (a previous number
above the open snapshot's start means that the older event is in the open snapshot), existence, and
reads (the value is found by its number). Why it holds numbers and not values, and why there is no
second index for the open snapshot: docs/adr/0003-one-hash-table.md. The table itself is the
kernel's, which knows nothing of snapshots and memory accounts: docs/adr/0018-native-kernel.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from upr_kernel import KeyTable
from upr_protocol.chunk import Chunk, Mutation
from upr_protocol.ids import Operation
from upr_server.engine.memory_account import MemoryAccount


class HashTable:
    """Key to the number of its newest mutation, and whether that is a tombstone.

    Whether a key exists is told without a look at the mutation. Until a tombstone is persisted,
    only the table knows of it. What the disk's index knows may be evicted.

    Attributes:
        evicted_through: Keys were forgotten whose newest mutations had numbers up to this.
        kernel_table: The kernel's table. Code that changes it without a call here must account for
            its growth.
    """

    __slots__ = (
        "_empty_bytes",
        "_memory",
        "evicted_through",
        "holds_item",
        "kernel_table",
        "newest",
    )

    def __init__(self, memory: MemoryAccount) -> None:
        self._memory = memory
        self.kernel_table = KeyTable()
        self.evicted_through = 0
        # A table without keys counts nothing: a bucket has one for each partition from the start.
        self._empty_bytes = self.kernel_table.nbytes
        # Reads go to the kernel without a step of Python between.
        self.newest = self.kernel_table.newest
        self.holds_item = self.kernel_table.holds_item

    def __len__(self) -> int:
        """Keys known, with tombstones."""
        return len(self.kernel_table)

    def __iter__(self) -> Iterator[tuple[bytes, int, bool]]:
        """Each key, its newest mutation's number, and whether that is a tombstone. O(keys) for the
        first."""
        return iter(self.kernel_table.entries())

    @property
    def item_count(self) -> int:
        """Keys that exist: those whose newest mutation is not a tombstone."""
        return self.kernel_table.items

    @property
    def tombstone_count(self) -> int:
        """Keys whose newest mutation is a tombstone."""
        return len(self.kernel_table) - self.kernel_table.items

    def put(self, key: bytes, seq: int, *, is_tombstone: bool = False) -> int:
        """Enters one mutation. O(1).

        Args:
            key: The key.
            seq: The number of its newest mutation.
            is_tombstone: Whether that is a deletion.

        Returns:
            The number of the mutation that was its newest; 0 when the table did not know the key.
        """
        table = self.kernel_table
        nbytes_before = table.nbytes
        previous_seq = table.put(key, seq, is_tombstone)
        self._memory.table += table.nbytes - nbytes_before
        return previous_seq

    def put_all(self, rows: Sequence[Mutation]) -> list[int]:
        """Enters mutations of different keys, as `put` does. O(rows).

        Returns:
            For each row what `put` returns.
        """
        table = self.kernel_table
        nbytes_before, put, stores = table.nbytes, table.put, Operation.SET
        previous_seqs = [put(row.key, row.seq, row.op != stores) for row in rows]
        self._memory.table += table.nbytes - nbytes_before
        return previous_seqs

    def put_run(
        self,
        chunk: Chunk,
        low: int,
        high: int,
        first_seq: int,
        start: int,
        base: int,
        flags: bytearray,
    ) -> tuple[list[int], int]:
        """Enters rows of a chunk that all store values: the hot loop of the whole engine.

        O(rows). What the run supersedes in the open snapshot is mostly recent: where the skip flags
        cover it, it is flagged here; otherwise it is returned.

        Args:
            chunk: The chunk, checked; a key may occur again in it.
            low: The run's first row.
            high: One more than its last.
            first_seq: The number of the first; the others follow on.
            start: The open snapshot's start: numbers above it are in the open snapshot.
            base: The number of the first skip flag.
            flags: The skip flags; without any, nothing is flagged.

        Returns:
            Numbers of the open snapshot that were superseded and are not flagged yet, in no order,
            and how many keys had no earlier mutation in the open snapshot.

        Raises:
            MemoryError: There is no memory for the keys. The native table has entered none of them.
        """
        table = self.kernel_table
        nbytes_before = table.nbytes
        try:
            return table.put_run(chunk.encode(), low, high, first_seq, start, base, flags)
        finally:
            self._memory.table += table.nbytes - nbytes_before

    def evict(self, through: int, budget: int, *, tombstones_only: bool = False) -> int:
        """Looks at the `budget` keys that stand first, and forgets those that the disk knows.

        O(budget). The others are put at the end, so that the next call looks at others.

        Args:
            through: The disk knows the newest mutation of every key up to this number.
            budget: How many keys to look at.
            tombstones_only: Whether to forget only tombstones.

        Returns:
            How many were forgotten.
        """
        table = self.kernel_table
        nbytes_before = table.nbytes
        evicted_count = table.evict(through, budget, tombstones_only)
        self._memory.table += table.nbytes - nbytes_before
        if evicted_count:
            self.evicted_through = max(self.evicted_through, through)
        return evicted_count

    def clear(self) -> None:
        """Forgets every key."""
        nbytes_before = self.kernel_table.nbytes
        self.kernel_table.clear()
        self._memory.table += self.kernel_table.nbytes - nbytes_before

    @property
    def nbytes(self) -> int:
        """What the table takes, about."""
        return self.kernel_table.nbytes - self._empty_bytes

    def statistics(self) -> dict[str, int]:
        """Keys, keys that exist, and bytes."""
        return {"keys": len(self), "items": self.item_count, "bytes": self.nbytes}

    def check_invariants(self) -> None:
        """The kernel's, and that no number occurs twice. O(keys)."""
        self.kernel_table.check_invariants()
        assert len({seq for _, seq, _ in self}) == len(self), "two keys with one number"
