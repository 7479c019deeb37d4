"""What became of a bucket, packed into one number that atomic operations change (seed 004).

`value mod 4` is the last of creation and deletion, `value div 4` counts updates::

    a creation    max(value, 3)
    an update     value + 4
    a deletion    min(value, 1)
    a poll        reads it, and puts 2

A key that is not there counts as 0 for maximum and addition, as in FoundationDB. So 0 is idle as 2
is, and nobody has to write a 2 before the first update.

**The trap:** a maximum never lowers. `max(value, 3)` leaves alone what was updated since the last
poll. Were there one value for a bucket's name, then of a bucket that was deleted, of which a late
update was told, and which was created again, the creation would be lost. What makes this safe is
the incarnation in the key: each creation begins a value of its own, in which it comes first and the
deletion last.
"""

from __future__ import annotations

from typing import Final

from upr_protocol.bucket_event import BucketFate

IDLE: Final = 2
"""What a poll leaves."""
DELETED: Final = 1
"""The operand of the minimum."""
CREATED: Final = 3
"""The operand of the maximum."""
UPDATED: Final = 4
"""What is added for each update."""


def unpack(value: int) -> tuple[BucketFate, int]:
    """What became of the bucket, and how many updates were told."""
    return BucketFate(value % UPDATED or IDLE), value // UPDATED


def is_idle(value: int) -> bool:
    """Whether nothing was told since the last poll."""
    return value in (0, IDLE)


def pack(fate: BucketFate, updates: int) -> int:
    """The value that says this."""
    return fate + updates * UPDATED


def merged(earlier: int, later: int) -> int:
    """The value that tells of both, in this order.

    For what was taken out of a queue and goes back, where something newer may stand by now.
    """
    fates = {unpack(earlier)[0], unpack(later)[0]}
    updates = unpack(earlier)[1] + unpack(later)[1]
    for fate in (BucketFate.DELETED, BucketFate.CREATED):
        if fate in fates:
            return pack(fate, updates)
    return pack(BucketFate.NONE, updates)
