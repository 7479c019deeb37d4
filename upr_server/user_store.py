"""The users of the cluster, as this node has them: in memory and on disk."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from typing import Final

import msgspec
import structlog
import trio

from upr_protocol.users import ALL_RIGHTS, NO_RIGHTS, BucketRights, Users, UsersError
from upr_server.storage.api import Store
from upr_server.storage.calls import LoadUsers, SaveUsers
from upr_server.storage.errors import CorruptionError

SECRET_BYTES: Final = 32

RIGHTS_MAX: Final = 10_000
"""Users or roles, and buckets, whose rights are kept in memory, some MiB; more are looked up
again each time."""

log = structlog.get_logger(__name__)


class UserStore:
    """The users of the cluster.

    Args:
        store: The disk.

    Attributes:
        digest: That of the users.
        generation: How often the users have changed in memory.
    """

    def __init__(self, store: Store) -> None:
        self._users = Users()
        self.generation = 0
        self.digest = self._users.digest
        self._rights: dict[tuple[str, str], BucketRights] = {}
        """By user and bucket. Many connections have the same, and all ask when the users change."""
        self._rights_of_roles: dict[tuple[str, str], BucketRights] = {}
        """By role and bucket. Many users have the same."""
        self._equal_rights: dict[BucketRights, BucketRights] = {}
        """Each of these once: prefixes may be many, and the same on many buckets."""
        self._store = store
        self._on_change: list[Callable[[], Iterator[None]]] = []
        # Changes are made one after the other.
        self._lock = trio.Lock()

    @property
    def users(self) -> Users:
        """The users. They are on disk."""
        return self._users

    @users.setter
    def users(self, users: Users) -> None:
        self._users, self.digest = users, users.digest
        self.generation += 1
        self._rights.clear()
        self._rights_of_roles.clear()
        self._equal_rights.clear()

    def rights_of(self, name: str | None, bucket: str) -> BucketRights:
        """What a user may do with a bucket; see `Users.rights_of`. O(1) if the user's rights were
        asked for since the last change; O(grants of the user + roles) if only those of the user's
        roles were."""
        if self._users.is_open:
            return ALL_RIGHTS
        user = None if name is None else self._users.get(name)
        if user is None:
            return NO_RIGHTS
        rights = self._rights.get((user.name, bucket))
        if rights is None:
            own_rights = BucketRights.of(user.grants, bucket)
            of_roles = [self._rights_of_role(role, bucket) for role in user.roles]
            union = BucketRights.union([own_rights, *of_roles])
            rights = self._keep(self._rights, (user.name, bucket), union)
        return rights

    def _rights_of_role(self, name: str, bucket: str) -> BucketRights:
        rights = self._rights_of_roles.get((name, bucket))
        if rights is None:
            of_role = BucketRights.of(self._users.roles[name].grants, bucket)
            rights = self._keep(self._rights_of_roles, (name, bucket), of_role)
        return rights

    def _keep(
        self,
        kept_rights: dict[tuple[str, str], BucketRights],
        key: tuple[str, str],
        rights: BucketRights,
    ) -> BucketRights:
        if len(kept_rights) >= RIGHTS_MAX:
            # Clients may ask for any name.
            kept_rights.clear()
            self._equal_rights.clear()
        kept_rights[key] = equal = self._equal_rights.setdefault(rights, rights)
        return equal

    async def load(self) -> None:
        """Reads the users from disk, before anything is served.

        Raises:
            StorageError: They cannot be read. A server that began without them would serve
                everybody.
        """
        document = await self._store.ask(LoadUsers())
        if document:
            try:
                self.users = Users.from_json(document)
            except UsersError as error:
                raise CorruptionError(f"the file of users is not readable: {error}") from error

    def call_on_change(self, callback: Callable[[], Iterator[None]]) -> None:
        """Has `callback`, which must not raise, called after each change, and its steps made before
        the change returns. Nothing else runs before its first step; others have their turn between
        the steps."""
        self._on_change.append(callback)

    async def apply_change(self, change: Callable[[Users], Users]) -> Users:
        """Makes the next revision; it is on disk when this returns. Cancelled, it is made or not,
        in memory and on disk alike.

        Args:
            change: Makes the next revision of the present one.

        Returns:
            The next revision.

        Raises:
            UsersError: The change is not possible.
            StorageError: It could not be put on disk; nothing changed.
        """
        async with self._lock:
            users = change(self.users)
            if not users.secret:
                users = msgspec.structs.replace(users, secret=secrets.token_bytes(SECRET_BYTES))
            await self._put(users)
            return users

    async def adopt_users(self, users: Users) -> bool:
        """Takes the users of another node, if they count for more than this node's.

        Of two different values with one revision, made by changes on two nodes at the same moment,
        all nodes choose the same one. The other change is lost.

        Returns:
            Whether they were taken.

        Raises:
            StorageError: They could not be put on disk; nothing changed.
        """
        async with self._lock:
            if _rank(users) <= _rank(self.users):
                return False
            if users.revision == self.users.revision:
                log.warning(
                    "two nodes changed the users at the same time; the change made here is lost",
                    revision=users.revision,
                )
            await self._put(users)
            return True

    async def _put(self, users: Users) -> None:
        # The client that asked for it may leave meanwhile. What is on disk must be in memory, too.
        with trio.CancelScope(shield=True):
            await self._store.ask(SaveUsers(users.to_json().encode()))
            self.users = users
            for callback in self._on_change:
                for _ in callback():
                    await trio.lowlevel.checkpoint()


def _rank(users: Users) -> tuple[int, str]:
    return users.revision, users.to_json()
