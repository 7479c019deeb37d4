"""Eviction: which keys memory may forget, because the disk's index knows them."""

from __future__ import annotations

from itertools import count
from typing import Final

from upr_protocol.ids import SeqNo
from upr_server.engine.expiry import ExpiryIndex
from upr_server.engine.hash_table import HashTable

_NEVER: Final = SeqNo(0)


class KeyEviction:
    """Forgets keys of a partition's table, and keeps those that a fetch under way relies on.

    Args:
        table: The partition's hash table.
        expiries: When its items expire.
        restored: Where the partition began, with an empty table.
        indexed: The disk's index knows the newest mutation up to here of every key.

    Attributes:
        restored: The number with which the partition began here: the disk cannot be asked for a
            key until `indexed` has come to it.
        indexed: The disk's index knows the newest mutation up to here of every key.
        has_evicted: Whether the disk may know keys that the table does not.
    """

    __slots__ = (
        "_expiries",
        "_has_stale_expiries",
        "_next_pin",
        "_pins",
        "_sweep_left",
        "_sweep_through",
        "_table",
        "has_evicted",
        "indexed",
        "restored",
    )

    def __init__(
        self, table: HashTable, expiries: ExpiryIndex, restored: SeqNo, indexed: SeqNo
    ) -> None:
        self._table = table
        self._expiries = expiries
        self.indexed = indexed
        self.restored = restored
        self.has_evicted = restored > 0
        # Whether keys were evicted since their entries left the index of expiry times.
        self._has_stale_expiries = False
        # Keys that the sweep under way has still to look at, and what `indexed` was at its start.
        self._sweep_left = 0
        self._sweep_through = _NEVER
        # Fetches under way: what `indexed` was when each began.
        self._pins: dict[int, SeqNo] = {}
        self._next_pin = count()

    def restart_at(self, seq: SeqNo) -> None:
        """The table is empty, and the disk has everything up to `seq`."""
        self.restored = seq
        self.has_evicted = seq > 0
        self._sweep_left = 0

    @property
    def is_index_ready(self) -> bool:
        """Whether the disk's index knows every key that the table does not."""
        return self.indexed >= self.restored

    # Pins.

    def pin(self) -> int:
        """The disk is about to be asked for keys: until `unpin`, the table keeps every key that is
        newer than what the index knows now.

        So a key that changes during the fetch is found in the table, and what was fetched for it is
        not taken for its newest.

        Returns:
            The pin, for `unpin`.
        """
        pin = next(self._next_pin)
        self._pins[pin] = self.indexed
        return pin

    def unpin(self, pin: int) -> None:
        """The fetch is over, and what it read was used."""
        del self._pins[pin]

    @property
    def pin_count(self) -> int:
        """Fetches under way."""
        return len(self._pins)

    @property
    def pinned(self) -> SeqNo:
        """No key above this number may be evicted now."""
        return min(self._pins.values(), default=self.indexed)

    # Evicting.

    def evict(self, budget: int) -> int:
        """Goes on with a sweep of the table, or begins one: looks at `budget` keys, and forgets
        those that the disk's index knows.

        Returns:
            How many were looked at; 0 when no key can be forgotten until more is indexed.
        """
        if not self._sweep_left:
            through = self.pinned
            if through == self._sweep_through:
                return 0  # the last sweep forgot all that this one could
            self._sweep_through = through
            self._sweep_left = len(self._table)
        looked_at = min(budget, self._sweep_left, len(self._table))
        if not looked_at:
            self._sweep_left = 0
            return 0
        self._sweep_left -= looked_at
        # A pin given since the sweep began allows no less than those that were there then.
        if self._table.evict(self._sweep_through, looked_at):
            self.has_evicted = self._has_stale_expiries = True
        if not self._sweep_left and self._has_stale_expiries:
            self._has_stale_expiries = False
            self._expiries.clean()
        return looked_at
