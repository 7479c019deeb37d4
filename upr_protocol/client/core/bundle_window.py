"""How many bundles of single changes are on their way to a server at a time."""

from __future__ import annotations

from typing import Final

BUNDLES_MAX: Final = 8
"""While so many bundles have no answer, changes gather instead of being sent. A bundle costs a
server as much as a dozen changes in it. Without a limit, changes that come faster than the server
takes bundles of one change fill its queue, and each waits for thousands of others. Gathered, they
are fewer bundles. Eight are enough to keep a server busy for some milliseconds."""

BUNDLE_S: Final = 0.020
"""After so long without an answer a bundle does not count any more: the server is not busy with it.
It waits for a disk, for a replica, or the network is slow. So a change waits about so long here at
most."""


class BundleWindow:
    """Says when the next bundle may be sent. For the bundles of one level of durability: the
    answers of another may take longer.

    It has no clock: callers pass the time, in seconds, which does not go back.
    """

    __slots__ = ("_sent_at",)

    def __init__(self) -> None:
        self._sent_at: dict[int, float] = {}
        """By the bundle's number, the oldest first."""

    def note_sent(self, number: int, now: float) -> None:
        """A bundle is sent. Its number differs from those without an answer. O(1)."""
        self._sent_at[number] = now

    def note_answered(self, number: int) -> None:
        """A bundle has its answer, or will have none. O(1)."""
        self._sent_at.pop(number, None)

    def opens_at(self, now: float) -> float:
        """From when on a bundle may be sent, if no answer arrives before: `now`, or later. O(1) for
        each bundle in all."""
        sent_at = self._sent_at
        while len(sent_at) >= BUNDLES_MAX:
            number, oldest = next(iter(sent_at.items()))
            if now < oldest + BUNDLE_S:
                return oldest + BUNDLE_S
            del sent_at[number]
        return now
