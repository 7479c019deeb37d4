"""Consuming in programs that block."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Self

from upr_protocol.address import Address
from upr_protocol.client.blocking.connection import BLOCKING_IDLE_INTERVAL_S, SocketOptions
from upr_protocol.client.blocking.connection_pool import BlockingConnectionPool
from upr_protocol.client.blocking_feeds import BlockingFeeds
from upr_protocol.client.core.delivery_tracker import DeliveryTracker, RollbackRequest, SaveLimits
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, RetryPolicy
from upr_protocol.client.course import Course
from upr_protocol.client.events import Event, RolledBack
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.resume_files import FileStore
from upr_protocol.client.wishes import End, Wishes, partitions_wanted
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.ids import PartitionState
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S, WINDOW_BYTES_DEFAULT
from upr_protocol.transport import SocketDial, dial_socket


class BlockingConsumer:
    """`Consumer` for programs that block: an iterator of events; not to be shared between threads.

    To ask for the next event is to say that the one before is dealt with. Between two calls nobody
    listens: a program that is busy for longer than twice the idle interval loses its connection,
    and goes on with a new one.

    Args:
        target: `upr://host:port/bucket`.
        partitions: Those to stream; by default all. An empty list is a ValueError.
        start: Where partitions without a position start.
        resume: A state to begin with, or the path of a file in which it is kept.
        state: The state that partitions must be in on that server.
        end: Where the streams end; see `consume`.
        lease_id: A lease under which a range is read; see `consume`.
        by_map: Whether to go by the partition map; see `consume`.
        window_bytes: How many bytes may be on their way.
        identity: `what:who`, for the server's logs and statistics.
        retry_timeout_s: How long it goes on without a connection that streams before it gives up.
        save_limits: How much may be read again after a crash.
        idle_interval_s: See above.
        connect_timeout_s: How long a connection and its first answers may take.
        dial: How to reach an address, where that is not plain TCP.
        draw: Gives numbers in [0, 1), for the waits between attempts.
        sleep: Waits for so many seconds.

    Raises:
        AddressError: The URL is none, or names no bucket.
        ResumeStateError: What was loaded is no resume state, or that of another bucket.
        OSError: The resume file cannot be read.
    """

    def __init__(
        self,
        target: str | Address,
        *,
        partitions: Sequence[int] | None = None,
        start: Literal["beginning", "now"] = "beginning",
        resume: ResumeState | str | os.PathLike[str] | None = None,
        state: PartitionState = PartitionState.ACTIVE,
        end: End = None,
        lease_id: int = 0,
        by_map: bool = True,
        window_bytes: int = WINDOW_BYTES_DEFAULT,
        identity: str = IDENTITY_DEFAULT,
        retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
        save_limits: SaveLimits | None = None,
        idle_interval_s: int = BLOCKING_IDLE_INTERVAL_S,
        connect_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        dial: SocketDial = dial_socket,
        draw: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,  # noqa: TID251  there is no event to wait for
    ) -> None:
        address = Address.parse(target) if isinstance(target, str) else target
        self.address = address.with_bucket()
        self._options = SocketOptions(
            identity, window_bytes, idle_interval_s, connect_timeout_s, dial
        )
        self._store = FileStore(resume) if isinstance(resume, str | os.PathLike) else None
        found = self._store.load_now() if self._store else resume
        assert not isinstance(found, str | os.PathLike)
        if found is None:
            found = ResumeState(address.bucket)
        found.check_bucket(address.bucket)
        self._wishes = Wishes(partitions_wanted(partitions), start == "now", state, end, lease_id)
        self._course = Course(self._wishes, found.copy())
        self._feeds = BlockingFeeds(
            self._course,
            BlockingConnectionPool(
                self.address,
                self._options,
                draw,
                state=state,
                by_map=by_map,
                opened=self._wishes.partitions,
            ),
            RetryPolicy(retry_timeout_s, draw),
            retry_timeout_s,
        )
        self._tracker = DeliveryTracker(
            found.copy(),
            save_limits or SaveLimits(),
            self._feeds.acknowledge,
            time.monotonic(),
        )
        self._connecting = RetryPolicy(retry_timeout_s, draw)
        self._sleep = sleep
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Saves what was dealt with and closes the connection. Closing again does nothing.

        Raises:
            OSError: The resume file cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        self._tracker.discard()
        self._feeds.close()
        self.save()

    def connect(self) -> None:
        """Connects if it is not connected, and tries again for as long as `retry_timeout_s`: for a
        server that is known to be one. Otherwise the first event asked for connects, and what
        cannot be reached then is an error at once.

        Raises:
            BrokenError: The server could not be reached for too long.
            ServerError: It refused the bucket.
            ClosedError: The consumer was closed.
        """
        while not self._closed:
            try:
                self._feeds.connect()
            except UprError as error:
                self._sleep(self._connecting.wait_s(error, time.monotonic()))
            else:
                self._connecting.progress()
                return
        raise ClosedError("the consumer was closed")

    # Events.

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self.next_event()
        if event is None:
            raise StopIteration
        return event

    @property
    def done(self) -> bool:
        """Whether every stream has ended for good, and every event was handed on."""
        return self._course.done and not self._feeds.inbox

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """The next event; the one before is dealt with.

        Args:
            timeout_s: How long to wait; by default as long as it takes.

        Returns:
            None when none came in time, or `done`.

        Raises:
            ServerError: The server refused, and went on refusing.
            BrokenError: The server could not be reached for too long.
            ClosedError: The consumer was closed.
        """
        if self._closed:
            raise ClosedError("the consumer was closed")
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        tracker = self._tracker
        tracker.finish()
        while True:
            self._save_when_due()
            if self._feeds.inbox:
                delivery = self._feeds.inbox.popleft()
                event = delivery.event
                assert not isinstance(event, RollbackRequest)  # nobody undoes here
                if isinstance(event, RolledBack):
                    tracker.begin_rollback(event)
                    self.save()
                if event is not None:
                    tracker.hand_out(delivery, event)
                    return event
                tracker.finish_delivery(delivery)
            elif self._course.done:
                self.save()
                return None
            elif not self._receive(deadline):
                return None

    def _receive(self, deadline: float) -> bool:
        """Takes in some messages; whether there is time left for more."""
        due_at = self._tracker.schedule.due_at if self._store else deadline
        rest_s = self._feeds.receive(min(deadline, due_at))
        if rest_s:
            self._sleep(rest_s)
            self._feeds.rested()
        return time.monotonic() < deadline or bool(self._feeds.inbox)

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier; `BarrierReached` with its cookie will be among the events."""
        self._feeds.barrier(cookie)

    # The resume state.

    @property
    def resume_state(self) -> ResumeState:
        """A copy of the resume state as it is once the event in hand is dealt with; see
        `Consumer.resume_state`."""
        return self._tracker.state_after_current()

    def save(self) -> None:
        """Says that the event in hand is dealt with, and saves now, if there is a file.

        Raises:
            OSError: The resume file cannot be written.
        """
        tracker = self._tracker
        tracker.finish()
        if self._store is not None and tracker.schedule.has_unsaved:
            self._store.save_now(tracker.state)
            tracker.schedule.saved(time.monotonic())

    def _save_when_due(self) -> None:
        if self._store is not None and self._tracker.schedule.due_at <= time.monotonic():
            self.save()
