"""Drawn grants, and a naive model of what they allow."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from hypothesis import strategies as st

from upr_protocol.users import (
    EVERYTHING,
    SERVER,
    Grant,
    Right,
    User,
    UserRole,
    Users,
)

OF_KEYS: Final = (Right.READ, Right.WRITE)
BUCKETS: Final = ("a", "ab", "b", SERVER)
PATTERNS: Final = st.sampled_from(["a", "a*", "*b", EVERYTHING, "c"])
KEYS: Final = st.one_of(
    st.binary(min_size=1, max_size=4),
    st.text("ab/_", min_size=1, max_size=5).map(str.encode),
    st.sampled_from([b"_design/", b"_design/a", b"_desig", b"a/\xff", b"a/", b"a0", b"_"]),
)
PREFIXES: Final = KEYS.filter(lambda key: not key.startswith(b"_design/"))
GRANTS: Final = st.lists(
    st.one_of(
        st.builds(Grant, st.sampled_from(list(Right)), PATTERNS),
        st.builds(Grant, st.sampled_from(OF_KEYS), PATTERNS, PREFIXES),
    ),
    max_size=6,
).map(tuple)


def allows_all(grants: tuple[Grant, ...], right: Right, bucket: str) -> bool:
    return any(
        grant.right is right
        and not grant.prefix
        and (fnmatchcase(bucket, grant.pattern) if bucket else grant.pattern == EVERYTHING)
        for grant in grants
    )


def allows_key(grants: tuple[Grant, ...], right: Right, bucket: str, key: bytes) -> bool:
    """The naive model: each grant by itself."""
    return allows_all(grants, right, bucket) or any(
        grant.right is right
        and grant.prefix
        and fnmatchcase(bucket, grant.pattern)
        and key.startswith(grant.prefix)
        and not key.startswith(b"_design/")
        for grant in grants
        if bucket
    )


def users_with(own: tuple[Grant, ...], of_roles: list[tuple[Grant, ...]]) -> Users:
    """Bob, with grants of his own and of roles."""
    roles = {f"r{number}": UserRole(f"r{number}", grants) for number, grants in enumerate(of_roles)}
    return Users(1, {"bob": User("bob", None, own, roles=tuple(roles))}, roles=roles)
