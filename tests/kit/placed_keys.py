"""Keys that belong to a given partition."""

from __future__ import annotations

from itertools import count

from upr_protocol.hashing import partition_of


def key_in(partition: int, partition_count: int, name: bytes = b"k") -> bytes:
    """The first of `name`, `name-0`, `name-1` and so on that belongs to a partition."""
    if partition_of(name, partition_count) == partition:
        return name
    candidates = (b"%b-%d" % (name, index) for index in count())
    return next(key for key in candidates if partition_of(key, partition_count) == partition)
