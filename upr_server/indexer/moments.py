"""Moments of indexes that are held, so that the pages of a scan are all of one moment.

A held moment is a transaction that reads. LMDB writes to no page that such a transaction sees, so
each commit takes new pages of the file instead of free ones. Moments are therefore bounded in
number, in time, and by how much the file grows while they are held.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Final

import trio

from upr_protocol.concurrency import Notifier
from upr_protocol.errors import UprError
from upr_server.indexer.index_file import IndexFile, IndexView
from upr_server.indexer.pool import MemoryPool, OverloadedError

HOLD_S_MAX: Final = 60.0
"""The longest time between two pages."""

AGE_S_MAX: Final = 600.0
"""The longest time that a moment is held, however often it is asked for."""

MOMENTS_MAX: Final = 64
"""How many moments are held at most. LMDB looks at each reader at each commit."""

GROWTH_BYTES_MAX: Final = 1024 * 1024 * 1024
"""A moment is given up when its index has taken so much more of its file since."""

MOMENT_BYTES: Final = 16 * 1024
"""What a moment counts for in the pool."""

CHECK_INTERVAL_S: Final = 1.0
"""The time between two looks at which moments have expired."""

_TOKEN_BYTES: Final = 16


class MomentGoneError(UprError):
    """A moment is not held, or no longer."""


class Moment:
    """A moment of an index that is held; see `Moments.hold`.

    Attributes:
        token: Its name.
        file: The index.
        is_gone: Whether it was given up.
    """

    def __init__(self, token: str, file: IndexFile, view: IndexView) -> None:
        self.token = token
        self.file = file
        self.is_gone = False
        self._view = view
        self._lock = trio.Lock()
        self._users = 0
        self._ends_at = trio.current_time() + AGE_S_MAX
        self._expires_at = self._ends_at

    @contextmanager
    def in_use(self, hold_s: float) -> Iterator[None]:
        """Keeps it from expiring for as long as the context, and `hold_s` after that. It may be
        given up meanwhile."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            self.expire_in(hold_s)

    def expire_in(self, hold_s: float) -> None:
        """Lets it expire so many seconds from now, if nobody uses it until then."""
        self._expires_at = trio.current_time() + hold_s

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[IndexView]:
        """Gives its view to one reader at a time, for as long as the context.

        Raises:
            MomentGoneError: It was given up.
        """
        try:
            # Without a checkpoint, if nobody has it: a scan may have no time to wait.
            self._lock.acquire_nowait()
        except trio.WouldBlock:
            await self._lock.acquire()
        try:
            self.check()
            yield self._view
        finally:
            # It may have been given up also before this reader, whose turn it was, went on.
            if self.is_gone:
                self._view.close()
            self._lock.release()

    def check(self) -> None:
        """Makes sure that it is held.

        Raises:
            MomentGoneError: It was given up.
        """
        if self.is_gone:
            raise moment_gone_error(self.token)

    def is_over(self) -> bool:
        """Whether it has been held for too long, or costs too much of the disk. O(1)."""
        now = trio.current_time()
        is_expired = not self._users and now >= self._expires_at
        return is_expired or now >= self._ends_at or self._view.grown_bytes() > GROWTH_BYTES_MAX

    def give_up(self) -> None:
        """Gives it up: at once, or when the reader that has it is done."""
        if not self.is_gone:
            self.is_gone = True
            if not self._lock.locked():
                self._view.close()


def moment_gone_error(token: str) -> MomentGoneError:
    """The error for a moment that is not held."""
    return MomentGoneError(
        f"the moment {token!r} is not held: it was released, or not asked for in time, the index "
        "has changed too much since, or the indexer was restarted; scan again from the beginning"
    )


class Moments:
    """The moments that are held.

    Args:
        pool: The memory pool, in which they count.

    Attributes:
        given_up: How many were given up because of a limit.
    """

    def __init__(self, pool: MemoryPool) -> None:
        self._pool = pool
        self._moments: dict[str, Moment] = {}
        self._new_moment = Notifier()
        self.given_up = 0

    def __len__(self) -> int:
        return len(self._moments)

    def hold(self, file: IndexFile, view: IndexView) -> Moment:
        """Holds a view, until the moment is released or over. The view is closed then, and also if
        it cannot be held.

        Raises:
            OverloadedError: Too many moments are held, or the pool is full.
        """
        try:
            if len(self._moments) >= MOMENTS_MAX:
                raise OverloadedError(f"the indexer holds {MOMENTS_MAX} moments, the most it may")
            self._pool.reserve_scan(MOMENT_BYTES)
        except OverloadedError:
            view.close()
            raise
        moment = Moment(secrets.token_hex(_TOKEN_BYTES), file, view)
        self._moments[moment.token] = moment
        self._new_moment.notify()
        return moment

    def find(self, token: str, file: IndexFile | None = None) -> Moment:
        """The moment of this name.

        Args:
            token: Its name.
            file: The index that it must be of; None for any.

        Raises:
            MomentGoneError: It is not held, or of another index.
        """
        moment = self._moments.get(token)
        if moment is None or (file is not None and moment.file is not file):
            raise moment_gone_error(token)
        return moment

    def release(self, moment: Moment) -> None:
        """Gives a moment up. May be called again."""
        if self._moments.pop(moment.token, None) is not None:
            self._pool.release_scan(MOMENT_BYTES)
            moment.give_up()

    def release_all(self, file: IndexFile | None = None) -> None:
        """Gives up the moments of an index that is to be closed; of all of them without one."""
        for moment in list(self._moments.values()):
            if file is None or moment.file is file:
                self.release(moment)

    async def run(self) -> None:
        """Gives up moments when they are over, for ever."""
        while True:
            await self._new_moment.wait_until(lambda: bool(self._moments))
            await trio.sleep(CHECK_INTERVAL_S)
            for moment in list(self._moments.values()):
                if moment.is_over():
                    self.given_up += 1
                    self.release(moment)
