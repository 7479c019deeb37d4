"""Rights: what may be done with a bucket, or with some of its keys."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from enum import Enum, unique
from typing import Final

import msgspec

from upr_protocol.errors import quoted_key
from upr_protocol.ids import DESIGN_PREFIX
from upr_protocol.limits import BUCKET_NAME_BYTES_MAX, KEY_BYTES_MAX
from upr_protocol.users.names import UsersError, has_invisible_characters

GRANTS_MAX: Final = 64
"""Grants of one user, or of one role: a decision may look at each of them."""

EVERYTHING: Final = "*"
"""The pattern of every bucket, and of the server itself."""

SERVER: Final = ""
"""In the place of a bucket's name: the server itself. Only `EVERYTHING` matches it."""


@unique
class Right(Enum):
    """What a user may do with a bucket."""

    # That of `Enum` is a function in Python, and these are looked up for many messages.
    __hash__ = object.__hash__

    READ = "read"
    """Read keys, stream changes, and hold leases."""
    WRITE = "write"
    """Change keys, without design documents."""
    REPLICATE = "replicate"
    """Be a node: follow partitions as a replica, and exchange maps and users."""
    INDEX = "index"
    """Change design documents, which define indexes."""
    OPERATE = "operate"
    """Create and delete buckets, change partition maps, and read all figures."""
    SECURE = "secure"
    """Change users and what they may do. It is for the whole cluster."""


EVERY_RIGHT: Final = frozenset(Right)


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A right on the buckets whose names match a pattern, or on some of their keys.

    Attributes:
        right: The right.
        pattern: A bucket's name. Each `*` in it stands for any number of characters, and `*` alone
            for the server itself, too.
        prefix: For `READ` and `WRITE`: only keys that begin with it, and that are no design
            documents. Empty for the whole bucket.
    """

    right: Right
    pattern: str
    prefix: bytes = b""

    def matches(self, bucket: str) -> bool:
        """Whether the pattern matches `bucket`, or the server itself. O(pattern × name)."""
        prefix, *parts = self.pattern.split("*")
        if not parts:
            return bool(bucket) and bucket == prefix
        if not bucket:
            return self.pattern == EVERYTHING
        *middle, suffix = parts
        if len(bucket) < len(prefix) + len(suffix) or not bucket.startswith(prefix):
            return False
        # To take each part where it comes first leaves the most room for those after it.
        position, end = len(prefix), len(bucket) - len(suffix)
        for part in middle:
            position = bucket.find(part, position, end)
            if position < 0:
                return False
            position += len(part)
        return bucket.endswith(suffix)

    def __str__(self) -> str:
        keys = f", keys {quoted_key(self.prefix)}…" if self.prefix else ""
        return f"{self.right.value} on {self.pattern}{keys}"

    def check(self) -> None:
        """Raises `UsersError` if there can be no such grant."""
        if has_invisible_characters(self.pattern):
            raise UsersError(
                "a pattern of buckets has no control or format characters and no other ends of "
                "lines: nobody would see what it grants"
            )
        if not 1 <= len(self.pattern.encode()) <= BUCKET_NAME_BYTES_MAX:
            raise UsersError(
                f"a pattern of buckets has 1 to {BUCKET_NAME_BYTES_MAX} bytes; "
                f"write {EVERYTHING} for every bucket"
            )
        if self.right is Right.SECURE and self.pattern != EVERYTHING:
            raise UsersError(
                f"{Right.SECURE.value} is for the whole cluster: grant it on {EVERYTHING}, "
                f"not on {self.pattern!r}"
            )
        if self.prefix:
            self._check_prefix()

    def _check_prefix(self) -> None:
        if self.right not in _OF_KEYS:
            raise UsersError(
                f"only {Right.READ.value} and {Right.WRITE.value} can be granted on some of a "
                f"bucket's keys, not {self.right.value}"
            )
        if len(self.prefix) > KEY_BYTES_MAX:
            raise UsersError(f"a prefix of keys has at most {KEY_BYTES_MAX} bytes")
        if self.prefix.startswith(DESIGN_PREFIX):
            raise UsersError(
                "design documents belong to the whole bucket: read or index on the bucket, without "
                "a prefix, allows to read or to change them"
            )


_OF_KEYS: Final = (Right.READ, Right.WRITE)


class BucketRights(msgspec.Struct, frozen=True):
    """What somebody may do with one bucket, or with the server.

    Attributes:
        on_all_keys: The rights on all of it.
        read_prefixes: Keys that begin with one of these may be read, too; sorted, and none begins
            with another. Empty if all keys may be read.
        write_prefixes: The same for keys that may be changed.
    """

    on_all_keys: frozenset[Right] = frozenset()
    read_prefixes: tuple[bytes, ...] = ()
    write_prefixes: tuple[bytes, ...] = ()

    @property
    def on_some_keys(self) -> frozenset[Right]:
        """The rights on all of it, or on some of its keys."""
        if self.read_prefixes or self.write_prefixes:
            of_keys = zip(_OF_KEYS, (self.read_prefixes, self.write_prefixes), strict=True)
            return self.on_all_keys | {right for right, prefixes in of_keys if prefixes}
        return self.on_all_keys

    @classmethod
    def of(cls, grants: Iterable[Grant], bucket: str) -> BucketRights:
        """What these grants allow on a bucket, or on the server. O(grants)."""
        matching = [grant for grant in grants if grant.matches(bucket)]
        return cls._simplified(
            frozenset(grant.right for grant in matching if not grant.prefix),
            *(
                [grant.prefix for grant in matching if grant.right is right and grant.prefix]
                for right in _OF_KEYS
            ),
        )

    @classmethod
    def union(cls, several: Sequence[BucketRights]) -> BucketRights:
        """What one of these allows."""
        if len(several) == 1:
            return several[0]
        return cls._simplified(
            frozenset().union(*(rights.on_all_keys for rights in several)),
            [prefix for rights in several for prefix in rights.read_prefixes],
            [prefix for rights in several for prefix in rights.write_prefixes],
        )

    @classmethod
    def _simplified(
        cls,
        bucket_rights: frozenset[Right],
        read_prefixes: Iterable[bytes],
        write_prefixes: Iterable[bytes],
    ) -> BucketRights:
        return cls(
            bucket_rights,
            () if Right.READ in bucket_rights else _shortest(read_prefixes),
            () if Right.WRITE in bucket_rights else _shortest(write_prefixes),
        )


NO_RIGHTS: Final = BucketRights()
ALL_RIGHTS: Final = BucketRights(EVERY_RIGHT)


def _shortest(prefixes: Iterable[bytes]) -> tuple[bytes, ...]:
    """The prefixes, sorted, without those that begin with another."""
    shortest: list[bytes] = []
    for prefix in sorted(prefixes):
        if not shortest or not prefix.startswith(shortest[-1]):
            shortest.append(prefix)
    return tuple(shortest)


def first_key_outside(keys: Iterable[bytes], prefixes: Sequence[bytes]) -> bytes | None:
    """The first key that begins with none of the prefixes, or is a design document; None if there
    is none. O(keys × log prefixes), some 0.4 µs a key.

    Args:
        keys: The keys.
        prefixes: Sorted; none begins with another, and none is empty.
    """
    for key in keys:
        # All that is between a prefix and a key which begins with it begins with the prefix, too.
        place = bisect_right(prefixes, key)
        if not place or not key.startswith(prefixes[place - 1]) or key.startswith(DESIGN_PREFIX):
            return key
    return None
