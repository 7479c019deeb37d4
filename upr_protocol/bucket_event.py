"""The bucket event: tells a consumer of the event bus that a bucket changed, not what changed."""

from __future__ import annotations

from enum import IntEnum, IntFlag, unique
from fnmatch import translate
from functools import lru_cache
from re import Pattern
from re import compile as compile_expression

import msgspec

from upr_protocol.ids import DESIGN_PREFIX


@unique
class BucketFate(IntEnum):
    """What happened last to one incarnation of a bucket."""

    DELETED = 1
    """It was deleted. So were all earlier buckets of this name, perhaps without an event."""
    NONE = 2
    """It was neither created nor deleted."""
    CREATED = 3
    """It was created."""


class EventKind(IntFlag):
    """The kinds of event that a consumer subscribes to, in any combination."""

    CREATED = 1
    """A bucket was created."""
    DELETED = 2
    """A bucket was deleted."""
    UPDATED = 4
    """Something in a bucket changed."""
    DESIGN = 8
    """A design document changed: a key that begins with `_design/` was set or deleted."""


ALL_KINDS = EventKind.CREATED | EventKind.DELETED | EventKind.UPDATED | EventKind.DESIGN

ANY_DESIGN = DESIGN_PREFIX
"""Stands for all design documents: more have changed than an event names, or it is not known which
have."""


class BucketEvent(msgspec.Struct, frozen=True):
    """What became of a bucket since the consumer last asked.

    Attributes:
        bucket: The bucket's name.
        incarnation: Which bucket of that name; 0 for one from before there were incarnations.
        fate: Whether it was created or deleted; what happened last counts.
        updates: At least 1 if anything in the bucket changed; one update may cover many changes.
        designs: The keys of design documents that were set or deleted. `ANY_DESIGN` stands for all.
    """

    bucket: str
    incarnation: int
    fate: BucketFate
    updates: int = 0
    designs: tuple[bytes, ...] = ()

    def only(self, kinds: EventKind) -> BucketEvent | None:
        """The event reduced to these kinds; None when nothing of it remains."""
        fate = self.fate
        if (fate is BucketFate.CREATED and EventKind.CREATED not in kinds) or (
            fate is BucketFate.DELETED and EventKind.DELETED not in kinds
        ):
            fate = BucketFate.NONE
        updates = self.updates if EventKind.UPDATED in kinds else 0
        designs = self.designs if EventKind.DESIGN in kinds else ()
        if fate is BucketFate.NONE and not updates and not designs:
            return None
        return BucketEvent(self.bucket, self.incarnation, fate, updates, designs)


class EventFilter(msgspec.Struct, frozen=True):
    """Which events a consumer subscribes to.

    Attributes:
        kinds: The kinds of event.
        pattern: The buckets: a name, in which `*`, `?` and `[...]` are wildcards.
    """

    kinds: EventKind = ALL_KINDS
    pattern: str = "*"

    @property
    def expression(self) -> Pattern[str]:
        """Matches the buckets. To compile the longest pattern takes some 3 ms; of the last 256
        patterns the expressions are kept."""
        return _expression(self.pattern)

    def kinds_of(self, bucket: str) -> EventKind:
        """The kinds of event that it lets through from a bucket: all of its kinds, or none."""
        return self.kinds if self.expression.match(bucket) else EventKind(0)

    def apply(self, event: BucketEvent) -> BucketEvent | None:
        """What of `event` passes the filter; None when nothing does."""
        return event.only(self.kinds_of(event.bucket))


@lru_cache(maxsize=256)
def _expression(pattern: str) -> Pattern[str]:
    return compile_expression(translate(pattern))
