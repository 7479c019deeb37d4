"""A user, a role, and what proves who a user is."""

from __future__ import annotations

from typing import Final

import msgspec

from upr_protocol.limits import SCRAM_ITERATIONS_MAX, SCRAM_ITERATIONS_MIN
from upr_protocol.users.names import UsersError, check_name
from upr_protocol.users.rights import GRANTS_MAX, Grant

ROLES_OF_USER_MAX: Final = 8
"""Roles of one user: a decision may look at the grants of each."""

BYTES_A_SECOND_MIN: Final = 1024 * 1024
"""The lowest limit of a user's bytes: what a connection sends at a time then takes a quarter of a
second, so that several connections still have their turn before one counts as silent."""

REVISION_MAX: Final = (1 << 53) - 1
"""The highest number that every reader of JSON knows exactly."""


class Verifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a server keeps of a password: it can check the password, and cannot tell it (RFC 5802).

    Attributes:
        salt: Random bytes.
        iterations: How often the password was hashed.
        stored_key: The hash of the key that the client proves to have; 32 bytes.
        server_key: The key that the server proves to have; 32 bytes.
    """

    salt: bytes
    iterations: int
    stored_key: bytes
    server_key: bytes

    def __repr__(self) -> str:
        # A person who reads a log must not be able to try passwords.
        return f"Verifier(iterations={self.iterations})"

    def check(self) -> None:
        """Raises `UsersError` if it is not a verifier for SHA-256."""
        if not 8 <= len(self.salt) <= 64:
            raise UsersError(f"a salt has 8 to 64 bytes, not {len(self.salt)}")
        if not SCRAM_ITERATIONS_MIN <= self.iterations <= SCRAM_ITERATIONS_MAX:
            raise UsersError(
                f"there are {SCRAM_ITERATIONS_MIN:,} to {SCRAM_ITERATIONS_MAX:,} iterations, not "
                f"{self.iterations}"
            )
        if len(self.stored_key) != 32 or len(self.server_key) != 32:
            raise UsersError("the keys of a verifier have 32 bytes each")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much a user may have of a node at a time; 0 for no limit.

    Attributes:
        connections: Connections.
        streams: Streams of all connections together.
        leases: Leases that were acquired or renewed at the node since it was started.
        bytes_in: Bytes that the node reads in a second, of all connections together.
        bytes_out: Bytes that it writes in a second.
    """

    connections: int = 0
    streams: int = 0
    leases: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def check(self) -> None:
        """Raises `UsersError` if there can be no such limits."""
        for name, number in msgspec.structs.asdict(self).items():
            if not 0 <= number <= REVISION_MAX:
                raise UsersError(f"a limit is 0 to {REVISION_MAX}, not {number}")
            if name.startswith("bytes") and 0 < number < BYTES_A_SECOND_MIN:
                raise UsersError(
                    f"a limit of bytes is at least {BYTES_A_SECOND_MIN:,} a second: with less, "
                    "connections would be silent for so long that they end"
                )

    def __str__(self) -> str:
        numbers_by_name = msgspec.structs.asdict(self).items()
        return " ".join(f"{name}={number}" for name, number in numbers_by_name if number)


NO_LIMITS: Final = Limits()


class UserRole(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name for grants that several users have.

    Attributes:
        name: The name, normalised. A user may have the same one.
        grants: What each user with the role may do, sorted.
    """

    name: str
    grants: tuple[Grant, ...] = ()

    def check(self) -> None:
        """Raises `UsersError` if there can be no such role."""
        check_name(self.name, "a role's name")
        _check_grants(f"role {self.name}", self.grants)


class User(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A user.

    Attributes:
        name: The name, normalised.
        verifier: Checks the password; None for a user who shows a certificate with this name.
        grants: What the user may do beside what the roles allow, sorted.
        limits: How much of a node the user may have.
        roles: The names of the user's roles, sorted.
    """

    name: str
    verifier: Verifier | None = None
    grants: tuple[Grant, ...] = ()
    limits: Limits = NO_LIMITS
    roles: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises `UsersError` if there can be no such user. Whether its roles are there is left to
        `Users`."""
        check_name(self.name, "a user's name")
        _check_grants(f"user {self.name}", self.grants)
        if len(self.roles) > ROLES_OF_USER_MAX:
            raise UsersError(
                f"user {self.name} would have {len(self.roles)} roles, and {ROLES_OF_USER_MAX} are "
                "possible; grant more to fewer roles"
            )
        if self.verifier is not None:
            self.verifier.check()
        self.limits.check()


def _check_grants(owner: str, grants: tuple[Grant, ...]) -> None:
    if len(grants) > GRANTS_MAX:
        raise UsersError(
            f"{owner} would have {len(grants)} grants, and {GRANTS_MAX} are possible; use "
            "patterns, as in orders-*"
        )
    for grant in grants:
        grant.check()
