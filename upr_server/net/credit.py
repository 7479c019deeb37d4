"""Credit: how many bytes a publisher may have on their way to a bucket, unanswered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Final

from upr_protocol.session import ServerSession, SessionState
from upr_protocol.wire import Credit
from upr_server.buckets import Upkeep
from upr_server.engine import Bucket, MemoryAction

CREDIT_BYTES_MAX: Final = 8 * 1024 * 1024
"""For one publisher: at 1 GB/s it covers 8 ms without an answer."""

CREDIT_BYTES_MIN: Final = 64 * 1024
"""Less would turn every batch into a round trip. A connection has this much before its first batch:
most clients that open a bucket only read it, and the first batch brings the rest."""

MEMORY_PER_BYTE: Final = 2
"""What a published byte comes to in memory, about: small mutations take as much again in the hash
table."""

STEP_PUBLISHERS: Final = 256
"""Publishers that one step gives credit that they were refused before: at some 8 µs each, 2 ms."""

_TOP_UP_FRACTION: Final = 4
"""Credit is topped up once a quarter of it was spent: one message then serves for many batches."""

_ENOUGH_BYTES: Final = CREDIT_BYTES_MAX - CREDIT_BYTES_MAX // _TOP_UP_FRACTION
"""A publisher with more credit left gets nothing now, whatever its share is."""


class CreditShares:
    """Divides what lies between the mark at which a bucket is full and its quota among its
    publishers, so that it stays within its quota however many they are. What one was granted while
    there were fewer is not taken back, and the last of a credit may be overshot by a frame.

    Users have equal shares, and the publishers of a user have equal shares of that: nobody gets
    more by more connections. Where there are no users, all publishers are those of one.

    Args:
        upkeep: Frees the memory of buckets that are short of it. Publishers that were refused
            credit get it after one of its steps.
    """

    def __init__(self, upkeep: Upkeep) -> None:
        self.upkeep = upkeep
        self._publishers: defaultdict[Bucket, dict[str | None, set[PublisherCredit]]] = defaultdict(
            dict
        )
        """The publishers of each bucket, by user."""
        self._refused_publishers: dict[PublisherCredit, None] = {}
        upkeep.call_after_step(self._top_up_refused)

    def share(self, bucket: Bucket, publisher: PublisherCredit) -> int:
        """How many bytes `publisher` may have on their way to `bucket`. O(1)."""
        users = self._publishers[bucket]
        publishers = users.get(publisher.user, ())
        if publisher not in publishers:
            return CREDIT_BYTES_MIN
        room = (
            bucket.memory_policy.limit_bytes - bucket.memory_policy.full_bytes
        ) // MEMORY_PER_BYTE
        return max(CREDIT_BYTES_MIN, min(CREDIT_BYTES_MAX, room // len(users) // len(publishers)))

    def add(self, bucket: Bucket, publisher: PublisherCredit) -> None:
        """`publisher` publishes to `bucket`, and has a share from now on."""
        self._publishers[bucket].setdefault(publisher.user, set()).add(publisher)

    def remove(self, bucket: Bucket, publisher: PublisherCredit) -> None:
        """`publisher` is gone."""
        users = self._publishers[bucket]
        if publisher in users.get(publisher.user, ()):
            users[publisher.user].remove(publisher)
            if not users[publisher.user]:
                del users[publisher.user]
        self._refused_publishers.pop(publisher, None)

    def remove_bucket(self, bucket: Bucket) -> None:
        """`bucket` was deleted."""
        self._publishers.pop(bucket, None)

    def withhold_credit(self, publisher: PublisherCredit) -> None:
        """`publisher` gets no credit before there is room again."""
        self._refused_publishers[publisher] = None

    def _top_up_refused(self) -> Iterator[None]:
        for count, publisher in enumerate(list(self._refused_publishers), 1):
            # Between two steps it may have gone. One that is refused again is added at the end.
            if publisher in self._refused_publishers:
                del self._refused_publishers[publisher]
                publisher.top_up()
            if count % STEP_PUBLISHERS == 0:
                yield


class PublisherCredit:
    """The credit of one connection: decides when how much is granted.

    Args:
        shares: Divides what a bucket has room for.
        session: The connection's session.
        wake: Has what is in the session sent.

    Attributes:
        user: The user who publishes; None where nobody logged in.
    """

    __slots__ = ("_bucket", "_session", "_shares", "_wake", "user")

    def __init__(
        self, shares: CreditShares, session: ServerSession, wake: Callable[[], None]
    ) -> None:
        self._shares = shares
        self._session = session
        self._wake = wake
        self._bucket: Bucket | None = None
        self.user: str | None = None

    def open_bucket(self, bucket: Bucket, user: str | None) -> None:
        """The client, who logged in as `user`, opened `bucket`: grants its first credit."""
        self._bucket, self.user = bucket, user
        self.top_up()

    def note_spent(self) -> None:
        """A batch came, and has spent some of its credit."""
        if self._bucket is not None and self._session.credit.remaining_bytes <= _ENOUGH_BYTES:
            self._shares.add(self._bucket, self)
            self.top_up()

    def top_up(self) -> None:
        """Grants more when enough was spent. While the bucket is over its quota nothing is granted:
        the memory is freed first, and then this is called again. A publisher to a deleted bucket
        gets the smallest credit, and each of its batches is refused."""
        bucket, session = self._bucket, self._session
        if session.state is SessionState.CLOSED:
            return
        share = CREDIT_BYTES_MIN if bucket is None else self._shares.share(bucket, self)
        missing_bytes = share - session.credit.remaining_bytes
        if missing_bytes * _TOP_UP_FRACTION < share:
            return
        relief = MemoryAction.NOTHING if bucket is None else bucket.memory_action()
        if bucket is not None and relief is not MemoryAction.NOTHING:
            self._shares.upkeep.request_relief(bucket)
        if relief is MemoryAction.REFUSE_CREDIT:
            self._shares.withhold_credit(self)
            return
        session.send(Credit(missing_bytes))
        self._wake()

    def leave_bucket(self) -> None:
        """The bucket was deleted."""
        self._bucket = None

    def close(self) -> None:
        """The connection is over: others share what it had."""
        if self._bucket is not None:
            self._shares.remove(self._bucket, self)
