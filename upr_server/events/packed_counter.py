"""What became of a bucket since a consumer looked last, packed into one number. Pure.

`value % 4` is the last creation or deletion (a `BucketFate`), `value // 4` counts updates::

    idle          2
    a creation    max(value, 3)
    an update     value + 4
    a deletion    min(value, 1)
    a poll        reads the value and resets it to 2

**The trap:** a maximum never lowers a value, so `max(value, 3)` leaves an updated value (6 or more)
as it is. If a bucket is deleted, then gets a late update, then is created again, one value for the
name would hide the creation. So a value belongs to one *incarnation* of a bucket: its creation
comes first, its deletion last, and the next creation begins with an idle value (`queues`).
"""

from __future__ import annotations

from typing import Final

from upr_protocol.bucket_event import BucketFate

IDLE: Final = 2
"""Nothing happened since the last poll."""
_DELETED: Final = 1
_CREATED: Final = 3
UPDATE: Final = 4
"""What each update adds."""


def with_creation(value: int) -> int:
    """The value after the bucket was created."""
    return max(value, _CREATED)


def with_deletion(value: int) -> int:
    """The value after the bucket was deleted. Updates before a deletion no longer count."""
    return min(value, _DELETED)


def unpack(value: int) -> tuple[BucketFate, int]:
    """What became of the bucket, and how many updates it had."""
    return BucketFate(value % UPDATE), value // UPDATE
