"""Users, what proves who they are, and what each may do.

The users of a cluster are one value with a revision, as a partition map is. A change makes the next
revision, and of two values the one with the higher revision counts. Nobody may do anything that no
grant allows. Only before the first user was made, at revision 0, everybody may do everything.
"""

from __future__ import annotations

import hashlib
import unicodedata
from enum import Enum, unique
from functools import cached_property
from typing import Final

import msgspec

from upr_protocol.errors import UprError
from upr_protocol.limits import (
    BUCKET_NAME_BYTES_MAX,
    SCRAM_ITERATIONS_MAX,
    SCRAM_ITERATIONS_MIN,
)

USER_NAME_BYTES_MAX: Final = 128
"""Fits into a log's line and into a frame of the handshake."""

USERS_MAX: Final = 1000
"""Users of a cluster: nodes have them all in memory, and send them to each other as one text."""

USERS_BYTES_MAX: Final = 1024 * 1024
"""All of them as JSON, in one frame."""

GRANTS_MAX: Final = 64
"""Grants of one user: a decision may look at each of them."""

BYTES_A_SECOND_MIN: Final = 1024 * 1024
"""The lowest limit of a user's bytes: what a connection sends at a time then takes a quarter of a
second, so that several connections still have their turn before one counts as silent."""

REVISION_MAX: Final = (1 << 53) - 1
"""The highest number that every reader of JSON knows exactly."""

EVERYTHING: Final = "*"
"""The pattern of every bucket, and of the server itself."""

SERVER: Final = ""
"""In the place of a bucket's name: the server itself. Only `EVERYTHING` matches it."""


class UsersError(UprError, ValueError):
    """A document is not a cluster's users, or a change of them is not possible."""


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


class Grant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A right on the buckets whose names match a pattern.

    Attributes:
        right: The right.
        pattern: A bucket's name. Each `*` in it stands for any number of characters, and `*` alone
            for the server itself, too.
    """

    right: Right
    pattern: str

    def matches(self, bucket: str) -> bool:
        """Whether the pattern matches `bucket`, or the server itself. O(pattern × name)."""
        first, *parts = self.pattern.split("*")
        if not parts:
            return bool(bucket) and bucket == first
        if not bucket:
            return self.pattern == EVERYTHING
        *middle, last = parts
        if len(bucket) < len(first) + len(last) or not bucket.startswith(first):
            return False
        # To take each part where it comes first leaves the most room for those after it.
        position, end = len(first), len(bucket) - len(last)
        for part in middle:
            position = bucket.find(part, position, end)
            if position < 0:
                return False
            position += len(part)
        return bucket.endswith(last)

    def check(self) -> None:
        """Raises `UsersError` if there can be no such grant."""
        if _has_any(self.pattern, _UNSEEN):
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
        # Whoever reads a log must not be able to try passwords.
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
        named = msgspec.structs.asdict(self).items()
        return " ".join(f"{name}={number}" for name, number in named if number)


NO_LIMITS: Final = Limits()


class User(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user.

    Attributes:
        name: The name, normalised.
        verifier: Checks the password; None for a user who shows a certificate with this name.
        grants: What the user may do, sorted.
        limits: How much of a node the user may have.
    """

    name: str
    verifier: Verifier | None = None
    grants: tuple[Grant, ...] = ()
    limits: Limits = NO_LIMITS

    def rights_on(self, bucket: str) -> frozenset[Right]:
        """What the user may do with a bucket, or with the server. O(grants)."""
        return frozenset(grant.right for grant in self.grants if grant.matches(bucket))

    def check(self) -> None:
        """Raises `UsersError` if there can be no such user."""
        # Another version of Unicode may normalise it otherwise: that is tried for new users only.
        if not 1 <= len(self.name.encode(errors="replace")) <= USER_NAME_BYTES_MAX:
            raise UsersError(f"a user's name has 1 to {USER_NAME_BYTES_MAX} bytes in UTF-8")
        if len(self.grants) > GRANTS_MAX:
            raise UsersError(
                f"user {self.name} would have {len(self.grants)} grants, and {GRANTS_MAX} are "
                "possible; use patterns, as in orders-*"
            )
        for grant in self.grants:
            grant.check()
        if self.verifier is not None:
            self.verifier.check()
        self.limits.check()


class Users(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The users of a cluster.

    Attributes:
        revision: Rises with each change; 0 before the first user was made.
        users: Each user, by name.
        secret: Random bytes that no stranger knows, the same on all nodes. What a node tells a
            stranger of a user who does not exist is made of them. Drawn with the first change.
    """

    revision: int = 0
    users: dict[str, User] = {}
    secret: bytes = b""

    def __repr__(self) -> str:
        return f"Users(revision={self.revision}, users={self.users})"

    @property
    def is_open(self) -> bool:
        """Whether everybody may do everything, because no user was ever made."""
        return self.revision == 0

    def get(self, name: str) -> User | None:
        """The user of this name, or None."""
        return self.users.get(name)

    def rights_of(self, name: str | None, bucket: str) -> frozenset[Right]:
        """What a user may do with a bucket. O(grants).

        Args:
            name: The user; None for somebody who did not log in.
            bucket: The bucket, or `SERVER` for the server itself.
        """
        if self.is_open:
            return EVERY_RIGHT
        user = None if name is None else self.users.get(name)
        return frozenset() if user is None else user.rights_on(bucket)

    def allows(self, name: str | None, right: Right, bucket: str) -> bool:
        """Whether a user has a right on a bucket, or on the server. O(grants)."""
        return right in self.rights_of(name, bucket)

    # Changes. Each makes the next revision.

    def with_user(self, user: User) -> Users:
        """With one more user.

        Raises:
            UsersError: The name is taken, or there can be no such user.
        """
        if user.name != normalised_name(user.name, "a user's name"):
            raise UsersError(f"the user's name {user.name!r} is not in the form NFKC")
        if user.name in self.users:
            raise UsersError(f"there is a user {user.name} already")
        return self._next({**self.users, user.name: user}, user)

    def with_verifier(self, name: str, verifier: Verifier | None) -> Users:
        """With another password of a user, or with none.

        Raises:
            UsersError: There is no such user.
        """
        user = msgspec.structs.replace(self._user(name), verifier=verifier)
        return self._next({**self.users, name: user}, user)

    def with_limits(self, name: str, limits: Limits) -> Users:
        """With other limits of a user.

        Raises:
            UsersError: There is no such user, or there can be no such limits.
        """
        user = msgspec.structs.replace(self._user(name), limits=limits)
        return self._next({**self.users, name: user}, user)

    def granting(self, name: str, grants: tuple[Grant, ...]) -> Users:
        """With more grants of a user; those that the user has already change nothing.

        Raises:
            UsersError: There is no such user, or there can be no such grant.
        """
        user = self._user(name)
        return self._with_grants(user, {*user.grants, *grants})

    def revoking(self, name: str, grants: tuple[Grant, ...]) -> Users:
        """Without some grants of a user.

        Raises:
            UsersError: There is no such user, the user has no such grant, or nobody would be left
                who may change users.
        """
        user = self._user(name)
        for grant in grants:
            if grant not in user.grants:
                raise UsersError(
                    f"user {name} has no grant of {grant.right.value} on {grant.pattern}; a grant "
                    "is taken away with the same pattern that it was made with"
                )
        return self._with_grants(user, {*user.grants} - {*grants})

    def without(self, name: str) -> Users:
        """Without a user.

        Raises:
            UsersError: There is no such user, or nobody would be left who may change users.
        """
        self._user(name)
        return self._next({key: user for key, user in self.users.items() if key != name})

    def _user(self, name: str) -> User:
        user = self.users.get(name)
        if user is None:
            raise UsersError(f"there is no user {name}")
        return user

    def _with_grants(self, user: User, grants: set[Grant]) -> Users:
        ordered = tuple(sorted(grants, key=lambda grant: (grant.right.value, grant.pattern)))
        user = msgspec.structs.replace(user, grants=ordered)
        return self._next({**self.users, user.name: user}, user)

    def _next(self, users: dict[str, User], user: User | None = None) -> Users:
        """The next revision, in which only `user` is new. The others were checked when they were
        new, and to check 1,000 of them again would hold a server's loop."""
        changed = Users(self.revision + 1, dict(sorted(users.items())), self.secret)
        if user is not None:
            user.check()
        changed._check_limits()
        return changed

    def check(self) -> None:
        """Raises `UsersError` if the users contradict themselves, exceed a limit, or lock everybody
        out of changing them."""
        for name, user in self.users.items():
            if name != user.name:
                raise UsersError(f"the user {user.name!r} stands under the name {name!r}")
            user.check()
        self._check_limits()

    def _check_limits(self) -> None:
        if not 0 <= self.revision <= REVISION_MAX:
            raise UsersError(f"a revision is 0 to {REVISION_MAX}, not {self.revision}")
        if len(self.users) > USERS_MAX:
            raise UsersError(f"a cluster has at most {USERS_MAX} users")
        nbytes = len(self._json)
        if nbytes > USERS_BYTES_MAX:
            raise UsersError(
                f"the users would take {nbytes:,} bytes, and {USERS_BYTES_MAX:,} are possible; use "
                "patterns in place of many grants"
            )
        if self.is_open:
            if self.users:
                raise UsersError("users have a revision of 1 or more")
        elif not any(
            grant.right is Right.SECURE for user in self.users.values() for grant in user.grants
        ):
            raise UsersError(
                f"nobody would have {Right.SECURE.value} any more, and nobody could change users; "
                "grant it to somebody first"
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
                UserInfo(user.name, user.verifier is not None, user.grants, user.limits)
                for user in self.users.values()
            ),
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
        try:
            users = msgspec.json.decode(document, type=cls)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise UsersError(f"not a cluster's users: {error}") from error
        users.check()
        return users


class UserInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A user, as operators see it.

    Attributes:
        name: The name.
        has_password: Whether the user can log in with a password, and not with a certificate alone.
        grants: What the user may do.
        limits: How much of a node the user may have.
    """

    name: str
    has_password: bool
    grants: tuple[Grant, ...]
    limits: Limits = NO_LIMITS


class UserListing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The users of a cluster, as operators see them.

    Attributes:
        revision: The revision of the users.
        users: The users, by name.
    """

    revision: int
    users: tuple[UserInfo, ...]

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


# A change of the users, as a value that an operator sends to a node.


class UserChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A change of one user.

    Attributes:
        name: The user.
    """

    name: str

    def apply(self, users: Users) -> Users:
        """The next revision of the users.

        Raises:
            UsersError: The change is not possible.
        """
        raise NotImplementedError

    def to_json(self) -> str:
        """The change as JSON."""
        return msgspec.json.encode(self).decode()


class AddUser(UserChange, frozen=True):
    """Makes a user.

    Attributes:
        verifier: Checks the password; None for a user who shows a certificate.
        grants: What the user may do.
    """

    verifier: Verifier | None = None
    grants: tuple[Grant, ...] = ()

    def apply(self, users: Users) -> Users:
        """With one more user."""
        return users.with_user(User(self.name, self.verifier, self.grants))


class SetPassword(UserChange, frozen=True):
    """Replaces a user's password.

    Attributes:
        verifier: Checks the new password; None to have none.
    """

    verifier: Verifier | None = None

    def apply(self, users: Users) -> Users:
        """With another password."""
        return users.with_verifier(self.name, self.verifier)


class GrantRights(UserChange, frozen=True):
    """Grants rights to a user.

    Attributes:
        grants: What the user may do from now on, too.
    """

    grants: tuple[Grant, ...]

    def apply(self, users: Users) -> Users:
        """With more grants."""
        return users.granting(self.name, self.grants)


class RevokeRights(UserChange, frozen=True):
    """Takes rights from a user.

    Attributes:
        grants: What the user may not do any more.
    """

    grants: tuple[Grant, ...]

    def apply(self, users: Users) -> Users:
        """Without these grants."""
        return users.revoking(self.name, self.grants)


class SetLimits(UserChange, frozen=True):
    """Replaces a user's limits.

    Attributes:
        limits: All of them.
    """

    limits: Limits = NO_LIMITS

    def apply(self, users: Users) -> Users:
        """With other limits."""
        return users.with_limits(self.name, self.limits)


class RemoveUser(UserChange, frozen=True):
    """Removes a user."""

    def apply(self, users: Users) -> Users:
        """Without the user."""
        return users.without(self.name)


AnyUserChange = AddUser | SetPassword | GrantRights | RevokeRights | SetLimits | RemoveUser


def user_change_from_json(document: str) -> AnyUserChange:
    """The change that `to_json` made `document` of.

    Raises:
        UsersError: The document is not a change of users. The message shows nothing of a verifier.
    """
    try:
        change: AnyUserChange = msgspec.json.decode(document, type=AnyUserChange)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsersError(f"not a change of users: {error}") from error
    return change


def normalised(text: str, what: str) -> str:
    """A name or a password in the one form in which it is compared: NFKC, as SASLprep has it.

    Args:
        text: The text.
        what: What it is, for the error. The error does not show the text.

    Raises:
        UsersError: It is empty, or has a character that no keyboard should make: of control, not
            assigned, a surrogate, or for private use.
    """
    form = unicodedata.normalize("NFKC", text)
    if not form:
        raise UsersError(f"{what} is empty")
    if _has_any(form, _REFUSED):
        raise UsersError(f"{what} has a control character, or one that Unicode does not assign")
    return form


def normalised_name(text: str, what: str) -> str:
    """A user's name in the one form in which it is compared; see `normalised`.

    Raises:
        UsersError: Also if it has a character that nobody sees, or that changes how others are
            shown: two users must not look the same.
    """
    form = normalised(text, what)
    if _has_any(form, _UNSEEN):
        raise UsersError(f"{what} has a format character, or an end of a line")
    return form


def _has_any(text: str, categories: frozenset[str]) -> bool:
    return any(unicodedata.category(character) in categories for character in text)


_REFUSED: Final = frozenset(("Cc", "Cn", "Cs", "Co"))
_UNSEEN: Final = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))
"""What may be in no pattern. Not what Unicode does not assign: that may be assigned at another
node."""
