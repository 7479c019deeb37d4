"""Eviction: which keys memory may forget, because the disk's index knows them."""

from __future__ import annotations

from itertools import count
from typing import Final

from upr_protocol.ids import SeqNo
from upr_server.engine.expiry import ExpiryIndex
from upr_server.engine.hash_table import HashTable

_NEVER: Final = SeqNo(0)

TOMBSTONES_SHARE_MIN: Final = 1 / 16
"""A table is swept for tombstones when they are this part of its keys: a sweep looks at every key,
at 20 to 40 ns each."""


class KeyEviction:
    """Forgets keys of a partition's table, and keeps those that a fetch under way relies on.

    Args:
        table: The partition's hash table.
        expiries: When its items expire.
        restored_seq: Where the partition began, with an empty table.
        indexed_seq: The disk's index knows the newest mutation up to here of every key.

    Attributes:
        restored_seq: The number with which the partition began here: the disk cannot be asked for a
            key until `indexed_seq` has come to it.
        indexed_seq: The disk's index knows the newest mutation up to here of every key.
        has_evicted: Whether the disk may know items whose keys the table does not.
    """

    __slots__ = (
        "_broken_pins",
        "_expiries",
        "_has_stale_expiries",
        "_next_pin",
        "_pins",
        "_sweep_left",
        "_sweep_through",
        "_table",
        "_tombstones_left",
        "_tombstones_through",
        "has_evicted",
        "indexed_seq",
        "restored_seq",
    )

    def __init__(
        self, table: HashTable, expiries: ExpiryIndex, restored_seq: SeqNo, indexed_seq: SeqNo
    ) -> None:
        self._table = table
        self._expiries = expiries
        self.indexed_seq = indexed_seq
        self.restored_seq = restored_seq
        self.has_evicted = restored_seq > 0
        # Whether keys were evicted since their entries left the index of expiry times.
        self._has_stale_expiries = False
        # Keys that the sweep under way has still to look at, and what `indexed_seq` was at its
        # start.
        self._sweep_left = 0
        self._sweep_through = _NEVER
        # The same for the sweep for tombstones.
        self._tombstones_left = 0
        self._tombstones_through = _NEVER
        # Fetches under way: what `indexed_seq` was when each began.
        self._pins: dict[int, SeqNo] = {}
        # Those that began before the partition last began again.
        self._broken_pins: set[int] = set()
        self._next_pin = count()

    def restart_at(self, seq: SeqNo) -> None:
        """The table is empty, and the disk has everything up to `seq`. This breaks all pins: a key
        that has changed during a fetch is no longer found in the table."""
        self._broken_pins.update(self._pins)
        self._pins.clear()
        self.restored_seq = seq
        self.has_evicted = seq > 0
        self._sweep_left = self._tombstones_left = 0
        self._sweep_through = self._tombstones_through = _NEVER

    @property
    def is_index_ready(self) -> bool:
        """Whether the disk's index knows every key that the table does not."""
        return self.indexed_seq >= self.restored_seq

    # Pins.

    def pin(self) -> int:
        """The disk is about to be asked for keys: until `unpin`, the table keeps every key that is
        newer than what the index knows now.

        So a key that changes during the fetch is found in the table, and what was fetched for it is
        not taken for its newest. That is so for as long as `is_pinned` says.

        Returns:
            The pin, for `unpin`.
        """
        pin = next(self._next_pin)
        self._pins[pin] = self.indexed_seq
        return pin

    def is_pinned(self, pin: int) -> bool:
        """Whether what was read from disk since `pin` was given still counts. It does not once the
        partition has begun again: its node was a replica meanwhile, or has undone changes."""
        return pin in self._pins

    def unpin(self, pin: int) -> None:
        """The fetch is over, and what it read was used, or was of no use."""
        if pin in self._broken_pins:
            self._broken_pins.remove(pin)
        else:
            del self._pins[pin]

    @property
    def pin_count(self) -> int:
        """How many fetches are under way."""
        return len(self._pins) + len(self._broken_pins)

    @property
    def pinned_seq(self) -> SeqNo:
        """No key above this number may be evicted now."""
        return min(self._pins.values(), default=self.indexed_seq)

    # Evicting.

    def evict(self, budget: int) -> int:
        """Goes on with a sweep of the table, or begins one: looks at `budget` keys, and forgets
        those that the disk's index knows. After a sweep it removes their expiry times, too.

        Returns:
            How many were looked at; 0 when nothing can be forgotten until more is indexed.
        """
        if not self._sweep_left:
            looked_at = self._clean_expiries(budget)
            if looked_at:
                return looked_at
            through = self.pinned_seq
            if through == self._sweep_through:
                return 0  # the last sweep forgot all that this one could
            self._sweep_through = through
            self._sweep_left = len(self._table)
            # Two sweeps at once would put keys to the end that the other has not looked at.
            self._tombstones_left = 0
        looked_at = min(budget, self._sweep_left, len(self._table))
        if not looked_at:
            self._sweep_left = 0
            return 0
        self._sweep_left -= looked_at
        # Pins taken since the sweep began need no look: `indexed_seq` only rises, so they allow
        # this.
        if self._table.evict(self._sweep_through, looked_at):
            self.has_evicted = self._has_stale_expiries = True
        return looked_at

    def _clean_expiries(self, budget: int) -> int:
        """Goes on removing the evicted keys from the index of expiry times. Returns how many of
        `budget` entries it has looked at; 0 when there is nothing to remove."""
        if self._has_stale_expiries and not self._expiries.is_cleaning:
            self._has_stale_expiries = False
            self._expiries.begin_cleaning()
        return self._expiries.clean(budget)

    def evict_tombstones(self, budget: int, high_seq: SeqNo) -> int:
        """Goes on with a sweep of the table for tombstones, or begins one if the index knows all
        there is and the sweep is worth its cost: looks at `budget` keys, and forgets the tombstones
        that the disk's index knew when it began.

        Items stay, so that a key that the table does not know still needs no look at the disk,
        unless `evict` has forgotten items.

        Args:
            budget: How many keys to look at.
            high_seq: The partition's high number.

        Returns:
            How many were looked at; 0 when there is nothing to do now.
        """
        if not self._tombstones_left:
            through = self.pinned_seq
            # While writes come, a sweep would mostly pass tombstones that the index does not know,
            # and a table that grows would have to move its keys twice.
            is_due = self._tombstones_through < through and through >= high_seq
            tombstones = self._table.tombstone_count
            if not (is_due and tombstones > TOMBSTONES_SHARE_MIN * len(self._table)):
                return 0
            self._tombstones_through = through
            self._tombstones_left = len(self._table)
            self._sweep_left, self._sweep_through = 0, _NEVER
        looked_at = min(budget, self._tombstones_left, len(self._table))
        self._tombstones_left -= looked_at
        self._table.evict(self._tombstones_through, looked_at, tombstones_only=True)
        return looked_at
