"""A bucket's memory quota, and what is to be done when it runs short."""

from __future__ import annotations

from enum import Enum, unique
from typing import Final

import attrs

from upr_server.engine.memory import Memory

HIGH_MARK: Final = 0.85
"""The part of the quota above which memory is being freed."""

LOW_MARK: Final = 0.75
"""The part of the quota down to which it is then freed."""

FULL_MARK: Final = 0.88
"""The part of the quota from which publishers are granted nothing more: the rest is for what they
have on its way by then."""

QUOTA_BYTES_MIN: Final = 1024 * 1024
"""A smaller quota would not hold one batch and its snapshot."""


@unique
class Relief(Enum):
    """What to do about a bucket's memory; each is tried before the next."""

    NOTHING = "there is room"
    COLLAPSE = "collapse snapshots"
    FREE = "free what the disk has"
    DROP = "drop slow cursors"
    REFUSE_CREDIT = "grant publishers no credit"


@attrs.define
class Quota:
    """When a bucket's memory runs short, and until when.

    Attributes:
        limit_bytes: The quota.
    """

    limit_bytes: int
    _is_short: bool = False

    @property
    def high_bytes(self) -> int:
        """Above this, memory is being freed."""
        return int(self.limit_bytes * HIGH_MARK)

    @property
    def low_bytes(self) -> int:
        """Until it has come down to this."""
        return int(self.limit_bytes * LOW_MARK)

    @property
    def full_bytes(self) -> int:
        """Above this, nothing more may come in."""
        return int(self.limit_bytes * FULL_MARK)

    def is_short(self, memory: Memory) -> bool:
        """Whether memory is to be freed now: from the high mark down to the low one. O(1); to be
        asked after memory has changed."""
        self._is_short = memory.total > (self.low_bytes if self._is_short else self.high_bytes)
        return self._is_short

    def is_full(self, memory: Memory) -> bool:
        """Whether nothing more may come in before something was freed. O(1)."""
        return memory.total > self.full_bytes

    def statistics(self) -> dict[str, int]:
        """The quota and its marks, in bytes."""
        return {
            "limit": self.limit_bytes,
            "full": self.full_bytes,
            "high": self.high_bytes,
            "low": self.low_bytes,
        }
