"""How much of this node each user has, and what exceeds the user's limits.

More connections, streams and leases are refused by name. Bytes are not refused: a connection that
reads or writes more than the limit pauses, until the user's bytes of a second are no more than
that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from upr_protocol.errors import ServerError, Status
from upr_protocol.session import ServerSession
from upr_protocol.users import NO_LIMITS, USERS_MAX, Limits
from upr_server.user_store import UserStore

BURST_S: Final = 0.25
"""A user who has been idle may exceed a limit of bytes by what it allows in so long a time."""

DEBT_MAX_S: Final = 60.0
"""Nobody waits longer for bytes that were read or written before, however many they were."""


class ByteRate:
    """The bytes of one user in one direction."""

    __slots__ = ("_free_at",)

    def __init__(self) -> None:
        self._free_at = 0.0
        """When the bytes from before are no more than the limit allows."""

    def pause_s(self, nbytes: int, limit: int, now: float) -> float:
        """Counts bytes, and says how long to wait before more of them.

        Args:
            nbytes: How many were read or written.
            limit: How many a second are allowed; 0 for any number.
            now: The time, in seconds.
        """
        if not limit:
            return 0.0
        free_at = max(self._free_at, now - BURST_S) + nbytes / limit
        self._free_at = min(free_at, now + DEBT_MAX_S)
        return max(0.0, self._free_at - now)


class UserUsage:
    """What one user has of this node.

    Args:
        name: The user.
        users: The users of the cluster.
    """

    def __init__(self, name: str, users: UserStore) -> None:
        self._name = name
        self._users = users
        self._sessions: dict[ServerSession, None] = {}
        self._read_rate, self._written_rate = ByteRate(), ByteRate()
        self._leases: dict[tuple[str, int], float] = {}
        """By bucket and lease that the user has acquired or renewed here, when it lapses."""
        self._unnamed_leases: list[tuple[str, float]] = []
        """The same for leases that the user may have acquired, and whose IDs are not known."""
        self._acquiring = 0

    @property
    def limits(self) -> Limits:
        """The user's limits as they are now."""
        user = self._users.users.get(self._name)
        return NO_LIMITS if user is None else user.limits

    @property
    def is_idle(self) -> bool:
        """Whether the user has no connection."""
        return not self._sessions

    def connect(self, session: ServerSession) -> None:
        """The user has logged in.

        Raises:
            ServerError: `TOO_MANY`: there are too many connections.
        """
        connection_count = len(self._sessions)
        # Clients wait, and try again.
        self._check("connections", connection_count, self.limits.connections, Status.TOO_MANY)
        self._sessions[session] = None

    def disconnect(self, session: ServerSession) -> None:
        """A connection is over."""
        self._sessions.pop(session, None)

    def check_streams(self) -> None:
        """Checks that the user may have a stream that its session has already. O(connections),
        where there is a limit.

        Raises:
            ServerError: `LIMIT_REACHED`: there are too many.
        """
        if limit := self.limits.streams:
            stream_count = sum([len(session.streams) for session in self._sessions])
            self._check("streams", stream_count - 1, limit)

    @contextmanager
    def acquiring_lease(self, bucket: str, lease_id: int, now: float) -> Iterator[None]:
        """Checks that the user may have a lease, which is acquired or renewed in the context. A
        repeated request for the same lease does not count twice.

        Args:
            bucket: The lease's bucket.
            lease_id: The lease.
            now: Seconds since 1970.

        Raises:
            ServerError: `LIMIT_REACHED`: there are too many.
        """
        self._leases = {lease: end for lease, end in self._leases.items() if end > now}
        self._unnamed_leases = [lease for lease in self._unnamed_leases if lease[1] > now]
        if (bucket, lease_id) not in self._leases:
            lease_count = len(self._leases) + len(self._unnamed_leases) + self._acquiring
            self._check("leases", lease_count, self.limits.leases)
        self._acquiring += 1
        try:
            yield
        finally:
            self._acquiring -= 1

    def note_lease(self, bucket: str, lease_id: int, lapses_at: float) -> None:
        """The user has acquired or renewed a lease. The ID is 0 for a lease that may be there, and
        whose ID is not known."""
        if lease_id:
            self._leases[bucket, lease_id] = lapses_at
        else:
            self._unnamed_leases.append((bucket, lapses_at))

    def forget_lease(self, bucket: str, lease_id: int) -> None:
        """A lease was released."""
        self._leases.pop((bucket, lease_id), None)

    def forget_bucket(self, bucket: str) -> None:
        """A bucket was deleted, and its leases with it. O(leases)."""
        self._leases = {lease: end for lease, end in self._leases.items() if lease[0] != bucket}
        self._unnamed_leases = [lease for lease in self._unnamed_leases if lease[0] != bucket]

    def pause_after_reading(self, nbytes: int, now: float) -> float:
        """Counts bytes that were read, and says how long to wait before more are read."""
        return self._read_rate.pause_s(nbytes, self.limits.bytes_in, now)

    def pause_after_writing(self, nbytes: int, now: float) -> float:
        """Counts bytes that were written, and says how long to wait before more are written."""
        return self._written_rate.pause_s(nbytes, self.limits.bytes_out, now)

    def _check(
        self, resource: str, count: int, limit: int, status: Status = Status.LIMIT_REACHED
    ) -> None:
        if limit and count >= limit:
            raise ServerError(
                status,
                f"user {self._name} has {count} {resource} at this node, and may have {limit}",
            )


class UserUsages:
    """What each user has of this node.

    Args:
        users: The users of the cluster.
    """

    def __init__(self, users: UserStore) -> None:
        self._users = users
        self._usages: dict[str, UserUsage] = {}

    def usage_of(self, name: str) -> UserUsage:
        """What a user has. It outlives the user's connections: a new one begins with no new limit
        of bytes."""
        usage = self._usages.get(name)
        if usage is None:
            if len(self._usages) >= USERS_MAX:
                # Some of them may have been removed.
                self._usages = {
                    key: usage for key, usage in self._usages.items() if not usage.is_idle
                }
            usage = self._usages[name] = UserUsage(name, self._users)
        return usage

    def forget_lease(self, bucket: str, lease_id: int) -> None:
        """A lease was released, perhaps by another user than the one who has it. O(users)."""
        for usage in self._usages.values():
            usage.forget_lease(bucket, lease_id)

    def forget_bucket(self, bucket: str) -> None:
        """A bucket was deleted: its leases do not count any more. O(users + leases)."""
        for usage in self._usages.values():
            usage.forget_bucket(bucket)
