"""The users of a cluster, as one value.

The users of a cluster are one value with a revision, as a partition map is. A change makes the next
revision, and of two values the one with the higher revision counts. Nobody may do anything that no
grant allows, of the user or of one of its roles. Only before the first user was made, at revision
0, everybody may do everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container, Generator, Iterable, Iterator
from functools import cached_property
from typing import Final

import msgspec

from upr_protocol.steps import result_of
from upr_protocol.users.names import UsersError, normalised_name
from upr_protocol.users.rights import (
    ALL_RIGHTS,
    BucketRights,
    Grant,
    Right,
)
from upr_protocol.users.user import (
    NO_LIMITS,
    REVISION_MAX,
    Limits,
    User,
    UserRole,
    Verifier,
)

USERS_MAX: Final = 1000
"""Users of a cluster: nodes have them all in memory, and send them to each other as one text."""

ROLES_MAX: Final = 100
"""Roles of a cluster: an operator must have an overview of them."""

USERS_BYTES_MAX: Final = 1024 * 1024
"""All of them as JSON, in one frame."""


STEP_GRANTS: Final = 256
"""Grants that one step of reading users and roles takes, about a millisecond. A user or a role
counts as many as `OWNER_GRANTS` besides."""

OWNER_GRANTS: Final = 8


class _UsersOfTexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Users, each of which is not read yet."""

    revision: int = 0
    users: dict[str, msgspec.Raw] = {}
    secret: bytes = b""
    roles: dict[str, UserRole] = {}


class Users(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, dict=True):
    """The users of a cluster.

    Attributes:
        revision: Rises with each change; 0 before the first user was made.
        users: Each user, by name.
        secret: Random bytes that no stranger knows, the same on all nodes. What a node tells a
            stranger of a user who does not exist is made of them. Drawn with the first change.
        roles: Each role, by name.
    """

    revision: int = 0
    users: dict[str, User] = {}
    secret: bytes = b""
    roles: dict[str, UserRole] = {}

    def __repr__(self) -> str:
        return f"Users(revision={self.revision}, users={self.users}, roles={self.roles})"

    @property
    def is_open(self) -> bool:
        """Whether everybody may do everything, because no user was ever made."""
        return self.revision == 0

    def get(self, name: str) -> User | None:
        """The user of this name, or None."""
        return self.users.get(name)

    def grants_of(self, name: str | None) -> tuple[Grant, ...]:
        """The grants of a user and of its roles; none for somebody who is no user. O(grants)."""
        user = None if name is None else self.users.get(name)
        if user is None:
            return ()
        return (*user.grants, *(grant for role in user.roles for grant in self.roles[role].grants))

    def rights_of(self, name: str | None, bucket: str) -> BucketRights:
        """What a user may do with a bucket. O(grants).

        Args:
            name: The user; None for somebody who did not log in.
            bucket: The bucket, or `SERVER` for the server itself.
        """
        return ALL_RIGHTS if self.is_open else BucketRights.of(self.grants_of(name), bucket)

    def allows(self, name: str | None, right: Right, bucket: str) -> bool:
        """Whether a user has a right on a whole bucket, or on the server. O(grants)."""
        return right in self.rights_of(name, bucket).on_all_keys

    # Changes of users. Each makes the next revision.

    def with_user(self, user: User) -> Users:
        """With one more user.

        Raises:
            UsersError: The name is taken, or there can be no such user.
        """
        _check_new_name("user", user.name, self.users)
        return self._with_user(user)

    def with_verifier(self, name: str, verifier: Verifier | None) -> Users:
        """With another password of a user, or with none.

        Raises:
            UsersError: There is no such user.
        """
        return self._with_user(msgspec.structs.replace(self._user(name), verifier=verifier))

    def with_limits(self, name: str, limits: Limits) -> Users:
        """With other limits of a user.

        Raises:
            UsersError: There is no such user, or there can be no such limits.
        """
        return self._with_user(msgspec.structs.replace(self._user(name), limits=limits))

    def granting(self, name: str, grants: tuple[Grant, ...]) -> Users:
        """With more grants of a user; those that the user has already change nothing.

        Raises:
            UsersError: There is no such user, or there can be no such grant.
        """
        user = self._user(name)
        merged_grants = _sorted_grants({*user.grants, *grants})
        return self._with_user(msgspec.structs.replace(user, grants=merged_grants))

    def revoking(self, name: str, grants: tuple[Grant, ...]) -> Users:
        """Without some grants of a user.

        Raises:
            UsersError: There is no such user, the user has no such grant, or nobody would be left
                who may change users.
        """
        user = self._user(name)
        remaining_grants = _without_grants(f"user {name}", user.grants, grants)
        return self._with_user(msgspec.structs.replace(user, grants=remaining_grants))

    def assigning(self, name: str, roles: tuple[str, ...]) -> Users:
        """With more roles of a user; those that the user has already change nothing.

        Raises:
            UsersError: There is no such user or role, or the user would have too many.
        """
        user = self._user(name)
        merged_roles = tuple(sorted({*user.roles, *roles}))
        return self._with_user(msgspec.structs.replace(user, roles=merged_roles))

    def withdrawing(self, name: str, roles: tuple[str, ...]) -> Users:
        """Without some roles of a user.

        Raises:
            UsersError: There is no such user, the user has no such role, or nobody would be left
                who may change users.
        """
        user = self._user(name)
        for role in roles:
            if role not in user.roles:
                raise UsersError(f"user {name} does not have the role {role}")
        fewer = tuple(role for role in user.roles if role not in roles)
        return self._with_user(msgspec.structs.replace(user, roles=fewer))

    def without_user(self, name: str) -> Users:
        """Without a user.

        Raises:
            UsersError: There is no such user, or nobody would be left who may change users.
        """
        self._user(name)
        users = {key: user for key, user in self.users.items() if key != name}
        return self._next(users, self.roles)

    # Changes of roles.

    def with_role(self, role: UserRole) -> Users:
        """With one more role.

        Raises:
            UsersError: The name is taken, or there can be no such role.
        """
        _check_new_name("role", role.name, self.roles)
        return self._with_role(role)

    def granting_to_role(self, name: str, grants: tuple[Grant, ...]) -> Users:
        """With more grants of a role; those that it has already change nothing.

        Raises:
            UsersError: There is no such role, or there can be no such grant.
        """
        return self._with_role(UserRole(name, _sorted_grants({*self._role(name).grants, *grants})))

    def revoking_from_role(self, name: str, grants: tuple[Grant, ...]) -> Users:
        """Without some grants of a role.

        Raises:
            UsersError: There is no such role, it has no such grant, or nobody would be left who may
                change users.
        """
        fewer = _without_grants(f"role {name}", self._role(name).grants, grants)
        return self._with_role(UserRole(name, fewer))

    def without_role(self, name: str) -> Users:
        """Without a role; no user has it any more.

        Raises:
            UsersError: There is no such role, or nobody would be left who may change users.
        """
        self._role(name)
        users = {
            user.name: msgspec.structs.replace(
                user, roles=tuple(role for role in user.roles if role != name)
            )
            for user in self.users.values()
        }
        return self._next(users, {key: role for key, role in self.roles.items() if key != name})

    # What is common to them.

    def _user(self, name: str) -> User:
        user = self.users.get(name)
        if user is None:
            raise UsersError(f"there is no user {name}")
        return user

    def _role(self, name: str) -> UserRole:
        role = self.roles.get(name)
        if role is None:
            raise UsersError(f"there is no role {name}")
        return role

    # The others were checked when they were new, and to check 1,000 of them again would hold a
    # server's loop.

    def _with_user(self, user: User) -> Users:
        user.check()
        self._check_roles_of(user)
        return self._next({**self.users, user.name: user}, self.roles)

    def _with_role(self, role: UserRole) -> Users:
        role.check()
        return self._next(self.users, {**self.roles, role.name: role})

    def _next(self, users: dict[str, User], roles: dict[str, UserRole]) -> Users:
        changed = Users(
            self.revision + 1, dict(sorted(users.items())), self.secret, dict(sorted(roles.items()))
        )
        changed._check_limits()
        return changed

    def check(self) -> None:
        """Raises `UsersError` if the users contradict themselves, exceed a limit, or lock everybody
        out of changing them."""
        for _ in self._check_in_steps():
            pass

    def _check_in_steps(self) -> Iterator[None]:
        size = 0
        for name, role in self.roles.items():
            if name != role.name:
                raise UsersError(f"the role {role.name!r} stands under the name {name!r}")
            role.check()
            size += OWNER_GRANTS + len(role.grants)
            if size >= STEP_GRANTS:
                size = 0
                yield
        for name, user in self.users.items():
            if name != user.name:
                raise UsersError(f"the user {user.name!r} stands under the name {name!r}")
            user.check()
            self._check_roles_of(user)
            size += OWNER_GRANTS + len(user.grants) + len(user.roles)
            if size >= STEP_GRANTS:
                size = 0
                yield
        self._check_limits()

    def _check_roles_of(self, user: User) -> None:
        for name in user.roles:
            self._role(name)

    def _check_limits(self) -> None:
        if not 0 <= self.revision <= REVISION_MAX:
            raise UsersError(f"a revision is 0 to {REVISION_MAX}, not {self.revision}")
        if len(self.users) > USERS_MAX:
            raise UsersError(f"a cluster has at most {USERS_MAX} users")
        if len(self.roles) > ROLES_MAX:
            raise UsersError(f"a cluster has at most {ROLES_MAX} roles")
        nbytes = len(self._json)
        if nbytes > USERS_BYTES_MAX:
            raise UsersError(
                f"the users would take {nbytes:,} bytes, and {USERS_BYTES_MAX:,} are possible; use "
                "roles, and patterns in place of many grants"
            )
        if self.is_open:
            if self.users or self.roles:
                raise UsersError("users have a revision of 1 or more")
        elif not self._has_somebody_secure():
            raise UsersError(
                f"nobody would have {Right.SECURE.value} any more, and nobody could change users; "
                "grant it to somebody first"
            )

    def _has_somebody_secure(self) -> bool:
        """Whether somebody may change users."""
        secure_roles = {role.name for role in self.roles.values() if _is_secure(role.grants)}
        return any(
            _is_secure(user.grants) or not secure_roles.isdisjoint(user.roles)
            for user in self.users.values()
        )

    # As JSON.

    @cached_property
    def digest(self) -> bytes:
        """32 bytes, by which users can be compared that have the same revision."""
        return hashlib.sha256(self._json).digest()

    @cached_property
    def _json(self) -> bytes:
        return msgspec.json.encode(self)

    def listing(self) -> UserListing:
        """The users without what proves who they are."""
        return UserListing(
            self.revision,
            tuple(
                UserInfo(user.name, user.verifier is not None, user.grants, user.limits, user.roles)
                for user in self.users.values()
            ),
            tuple(self.roles.values()),
        )

    def to_json(self) -> str:
        """The users as JSON, with the bytes of verifiers in base64. Equal users give equal
        texts."""
        return self._json.decode()

    @classmethod
    def from_json(cls, document: str | bytes) -> Users:
        """The users that `to_json` made `document` of.

        Raises:
            UsersError: The document is not a cluster's users; the message says where, and shows
                nothing of a verifier.
        """
        return result_of(cls.from_json_in_steps(document))

    @classmethod
    def from_json_in_steps(cls, document: str | bytes) -> Generator[None, None, Users]:
        """The same, in steps between which others may have their turn: 800 kB take 20 ms.

        Raises:
            UsersError: As `from_json` does.
        """
        decoded: dict[str, User] = {}
        try:
            texts = msgspec.json.decode(document, type=_UsersOfTexts)
            if len(texts.users) > USERS_MAX:
                raise UsersError(f"a cluster has at most {USERS_MAX} users")
            size = 0
            for name, text in texts.users.items():
                user = decoded[name] = msgspec.json.decode(text, type=User)
                size += OWNER_GRANTS + len(user.grants) + len(user.roles)
                if size >= STEP_GRANTS:
                    size = 0
                    yield
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UsersError(f"not a cluster's users: {error}") from error
        users = cls(texts.revision, decoded, texts.secret, texts.roles)
        yield from users._check_in_steps()
        return users


def _is_secure(grants: Iterable[Grant]) -> bool:
    return any(grant.right is Right.SECURE for grant in grants)


def _sorted_grants(grants: Iterable[Grant]) -> tuple[Grant, ...]:
    return tuple(sorted(grants, key=lambda grant: (grant.right.value, grant.pattern, grant.prefix)))


def _without_grants(
    owner: str, grants: tuple[Grant, ...], revoked: tuple[Grant, ...]
) -> tuple[Grant, ...]:
    for grant in revoked:
        if grant not in grants:
            raise UsersError(
                f"{owner} has no grant of {grant}; a grant is taken away with the same pattern and "
                "prefix that it was made with"
            )
    return tuple(grant for grant in grants if grant not in revoked)


class UserInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A user, as operators see it.

    Attributes:
        name: The name.
        has_password: Whether the user can log in with a password, and not with a certificate alone.
        grants: What the user may do beside what the roles allow.
        limits: How much of a node the user may have.
        roles: The names of the user's roles.
    """

    name: str
    has_password: bool
    grants: tuple[Grant, ...]
    limits: Limits = NO_LIMITS
    roles: tuple[str, ...] = ()


class UserListing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The users of a cluster, as operators see them.

    Attributes:
        revision: The revision of the users.
        users: The users, by name.
        roles: The roles, by name.
    """

    revision: int
    users: tuple[UserInfo, ...]
    roles: tuple[UserRole, ...] = ()

    def to_json(self) -> str:
        """The listing as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, document: str) -> UserListing:
        """The listing that `to_json` made `document` of.

        Raises:
            UsersError: The document is not a listing.
        """
        try:
            return msgspec.json.decode(document, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UsersError(f"not a listing of users: {error}") from error


def _check_new_name(kind: str, name: str, taken_names: Container[str]) -> None:
    if name != normalised_name(name, f"a {kind}'s name"):
        raise UsersError(f"the {kind}'s name {name!r} is not in the form NFKC")
    if name in taken_names:
        raise UsersError(f"there is a {kind} {name} already")
