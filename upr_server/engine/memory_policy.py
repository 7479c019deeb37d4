"""The memory policy: when a bucket comes near its quota, and what is done then."""

from __future__ import annotations

from enum import Enum, unique
from typing import Final

import attrs

from upr_server.engine.memory_account import MemoryAccount

HIGH_MARK: Final = 0.85
"""The part of the quota above which memory is being freed."""

LOW_MARK: Final = 0.75
"""The part of the quota down to which it is then freed."""

FULL_MARK: Final = 0.88
"""The part of the quota from which publishers are granted nothing more: the rest is for what they
have on its way by then."""

ANSWERS_PART: Final = 1 / 8
"""The part of the quota that the remembered answers to publishers may take: nothing frees them.
What the disk does not know of them comes on top of that, up to 2.7 times as much where every
operation fails, and no commit comes. Together they must stay below the low mark, and leave room for
data."""

QUOTA_BYTES_MIN: Final = 1024 * 1024
"""A smaller quota would not hold one batch and its snapshot."""


@unique
class MemoryAction(Enum):
    """What a bucket does about its memory; each is tried before the next."""

    NOTHING = "memory is not short"
    COLLAPSE = "collapse snapshots"
    FREE = "free what the disk has"
    DROP = "drop slow cursors"
    REFUSE_CREDIT = "grant publishers no credit"


@attrs.define
class MemoryPolicy:
    """When a bucket's memory runs short, and until when.

    Attributes:
        limit_bytes: The quota.
    """

    limit_bytes: int
    _is_short: bool = False

    @property
    def high_bytes(self) -> int:
        """Above this, the bucket frees memory."""
        return int(self.limit_bytes * HIGH_MARK)

    @property
    def low_bytes(self) -> int:
        """The bucket frees memory down to this."""
        return int(self.limit_bytes * LOW_MARK)

    @property
    def full_bytes(self) -> int:
        """Above this, nothing more may come in."""
        return int(self.limit_bytes * FULL_MARK)

    def answers_bytes(self, partition_count: int) -> int:
        """What the remembered answers to publishers may take in each of so many partitions."""
        return int(self.limit_bytes * ANSWERS_PART) // partition_count

    def is_short(self, memory: MemoryAccount) -> bool:
        """Whether to free memory now: from the high mark down to the low one. O(1).

        The answer depends on the one before; ask after memory has changed.
        """
        self._is_short = memory.total > (self.low_bytes if self._is_short else self.high_bytes)
        return self._is_short

    def is_full(self, memory: MemoryAccount) -> bool:
        """Whether nothing more may come in before some memory is freed. O(1)."""
        return memory.total > self.full_bytes

    def statistics(self) -> dict[str, int]:
        """The quota and its marks, in bytes."""
        return {
            "limit": self.limit_bytes,
            "full": self.full_bytes,
            "high": self.high_bytes,
            "low": self.low_bytes,
        }
