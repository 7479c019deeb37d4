"""What a consumer of the event bus is told of a bucket: that it changed, not what changed."""

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
    """What became of one incarnation of a bucket; the values are those of the packed counter."""

    DELETED = 1
    """It is gone, and so is any earlier one of its name, whose end may not have been told."""
    NONE = 2
    """It was neither made nor deleted."""
    CREATED = 3
    """It was made."""


class EventKind(IntFlag):
    """What a consumer wants to hear of: any of these together."""

    CREATED = 1
    """A bucket was made."""
    DELETED = 2
    """A bucket was deleted."""
    UPDATED = 4
    """Something in a bucket changed."""
    DESIGN = 8
    """A design document changed: a key that begins with `_design/` was set or deleted."""


ALL_KINDS = EventKind.CREATED | EventKind.DELETED | EventKind.UPDATED | EventKind.DESIGN

ANY_DESIGN = DESIGN_PREFIX
"""Stands among design documents for all of them: more changed than are told one by one, or which
ones is not known."""


class BucketEvent(msgspec.Struct, frozen=True):
    """What became of a bucket since the consumer last asked.

    Attributes:
        bucket: The bucket's name.
        incarnation: Which bucket of that name; 0 for one from before there were incarnations.
        fate: Whether it was created or deleted; what happened last counts.
        updates: How often it was told that something changed: at least once, if it did, and less
            often than there were changes.
        designs: The keys of design documents that were set or deleted. `ANY_DESIGN` stands for all.
    """

    bucket: str
    incarnation: int
    fate: BucketFate
    updates: int = 0
    designs: tuple[bytes, ...] = ()

    def only(self, kinds: EventKind) -> BucketEvent | None:
        """As much of it as is of these kinds; None when that is nothing."""
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
    """What a consumer wants to be told.

    Attributes:
        kinds: Of what.
        pattern: Of which buckets: a name, in which `*`, `?` and `[...]` stand for others.
    """

    kinds: EventKind = ALL_KINDS
    pattern: str = "*"

    def apply(self, event: BucketEvent) -> BucketEvent | None:
        """As much of `event` as is wanted; None when that is nothing."""
        if not _expression(self.pattern).match(event.bucket):
            return None
        return event.only(self.kinds)


@lru_cache(maxsize=256)
def _expression(pattern: str) -> Pattern[str]:
    return compile_expression(translate(pattern))
