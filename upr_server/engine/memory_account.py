"""What a bucket holds in memory, by kind: the numbers that its quota is compared with."""

from __future__ import annotations


class MemoryAccount:
    """Bytes held, kept as they come and go. Every change costs O(1).

    One object serves all structures of a bucket; each of them adds what it takes and takes away
    what it frees, and can recount what it holds: `check_invariants` of the bucket compares the two.

    Attributes:
        arrays: Document arrays of open snapshots and of closed ones not read yet.
        encoded: Encoded chunks, shared by all their readers.
        counters: Counters of open snapshots and of closed ones not read yet.
        table: Hash tables: as the kernel counts them.
        expiries: The indexes of items by expiry time, an estimate too.
        writers: Remembered answers to publishers, an estimate too.
        backfills: What was read from disk and is not sent yet.
    """

    __slots__ = ("arrays", "backfills", "counters", "encoded", "expiries", "table", "writers")

    def __init__(self) -> None:
        self.arrays = 0
        self.encoded = 0
        self.counters = 0
        self.table = 0
        self.expiries = 0
        self.writers = 0
        self.backfills = 0

    @property
    def total(self) -> int:
        """All kinds together."""
        return (
            self.arrays
            + self.encoded
            + self.counters
            + self.table
            + self.expiries
            + self.writers
            + self.backfills
        )

    def __iadd__(self, other: MemoryAccount) -> MemoryAccount:
        for kind in self.__slots__:
            setattr(self, kind, getattr(self, kind) + getattr(other, kind))
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MemoryAccount):
            return NotImplemented
        return self.statistics() == other.statistics()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"<Memory {self.statistics()}>"

    def statistics(self) -> dict[str, int]:
        """The bytes of each kind."""
        return {kind: getattr(self, kind) for kind in self.__slots__}
