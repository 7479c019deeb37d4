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

QUOTA_BYTES_MIN: Final = 1024 * 1024
"""A smaller quota would not hold one batch and its snapshot."""


@unique
class Relief(Enum):
    """What to do about a bucket's memory; each is tried before the next (`3-engine.md`).

    Evicting clean values and dropping slow cursors come between, once there is a disk to read from.
    """

    NOTHING = "there is room"
    COLLAPSE = "collapse snapshots"
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

    def decide(self, memory: Memory, collapse_wanted: bool) -> Relief:
        """What to do now. O(1); to be asked after memory has changed.

        Args:
            memory: What the bucket holds.
            collapse_wanted: Whether there is anything to collapse.
        """
        used = memory.total
        self._is_short = used > (self.low_bytes if self._is_short else self.high_bytes)
        if not self._is_short:
            return Relief.NOTHING
        if collapse_wanted and used <= self.limit_bytes:
            return Relief.COLLAPSE
        return Relief.REFUSE_CREDIT

    def statistics(self) -> dict[str, int]:
        """The quota and its marks, in bytes."""
        return {"limit": self.limit_bytes, "high": self.high_bytes, "low": self.low_bytes}
