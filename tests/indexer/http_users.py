"""Users with each right on the indexer's bucket and on another one."""

from __future__ import annotations

from typing import Final

from tests.server.users import USERS, VERIFIER
from upr_protocol.users import EVERYTHING, Grant, Right, User, Users

OF_SOME_KEYS: Final = "of some keys"
OWN, OTHER = "b", "other"


def name_of(right: Right, bucket: str) -> str:
    return f"{right.value}-{bucket}"


def users_of_the_table() -> Users:
    """One user for each right on each bucket, and one user who may read and write some keys."""
    users = dict(USERS.users)
    grants = tuple(
        Grant(right, OWN, prefix)
        for right in (Right.READ, Right.WRITE)
        for prefix in (b"_", *(bytes([first]) for first in b"acdk"))
    )
    users[OF_SOME_KEYS] = User(OF_SOME_KEYS, VERIFIER, grants)
    for right in Right:
        for bucket in (OWN, OTHER) if right is not Right.SECURE else (EVERYTHING,):
            name = name_of(right, bucket)
            users[name] = User(name, VERIFIER, (Grant(right, bucket),))
    return Users(1, users)
