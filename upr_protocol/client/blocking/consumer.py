"""Consuming in programs that block."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Self

from upr_protocol.address import Address
from upr_protocol.client.blocking.cluster_connections import BlockingClusterConnections
from upr_protocol.client.blocking.connection import BLOCKING_IDLE_INTERVAL_S, SocketOptions
from upr_protocol.client.blocking.streams import BlockingStreams
from upr_protocol.client.core.delivery_tracker import DeliveryTracker, RollbackRequest, SaveLimits
from upr_protocol.client.core.events import Event, RolledBack
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, RetryState
from upr_protocol.client.core.routing import PartitionRouter
from upr_protocol.client.core.subscription import End, Subscription, checked_partitions
from upr_protocol.client.core.subscription_state import SubscriptionState
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.resume_files import FileStore
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.ids import PartitionState
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S, WINDOW_BYTES_DEFAULT
from upr_protocol.transport import SocketDial, dial_socket


class BlockingConsumer:
    """`Consumer` for programs that block: an iterator of events. Threads must not share one.

    By asking for the next event the application acknowledges the one before. Between two calls the
    connection is not read: a program that is busy for longer than twice `idle_interval_s` loses the
    connection, and goes on with a new one.

    The arguments are those of `consume`, but that `resume` is a state or a file's path, rollbacks
    start at 0, and `sleep` waits for so many seconds.

    Raises:
        AddressError: The URL is malformed, or names no bucket.
        ResumeStateError: What was loaded is not a resume state, or the state of another bucket.
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
        self._store = FileStore(resume) if isinstance(resume, str | os.PathLike) else None
        saved = self._store.load_now() if self._store else resume
        assert not isinstance(saved, str | os.PathLike)
        processed = ResumeState(address.bucket) if saved is None else saved.copy()
        processed.check_bucket(address.bucket)
        subscription = Subscription(
            checked_partitions(partitions), start == "now", state, end, lease_id
        )
        self._state = SubscriptionState(subscription, processed.copy())
        connections = BlockingClusterConnections(
            self.address,
            SocketOptions(identity, window_bytes, idle_interval_s, connect_timeout_s, dial),
            draw,
            state=state,
            by_map=by_map,
            opened=subscription.partitions,
        )
        self._streams = BlockingStreams(
            self._state,
            connections,
            RetryState(retry_timeout_s, draw),
            PartitionRouter(connections.metadata, state, retry_timeout_s, draw),
        )
        self._tracker = DeliveryTracker(
            processed, save_limits or SaveLimits(), self._streams.acknowledge, time.monotonic()
        )
        self._connecting = RetryState(retry_timeout_s, draw)
        self._sleep = sleep
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Saves what was processed and closes the connections. Closing again does nothing.

        Raises:
            OSError: The resume file cannot be written.
        """
        if self._closed:
            return
        self._closed = True
        self._tracker.discard()
        self._streams.close()
        self.save()

    def connect(self) -> None:
        """Connects, if there is no connection, and retries for `retry_timeout_s`. Without this call
        the first event asked for connects, and a server that cannot be reached then is an error
        at once.

        Raises:
            BrokenError: The server could not be reached for too long.
            ServerError: The server refused the bucket.
            ClosedError: The consumer was closed.
        """
        while not self._closed:
            try:
                self._streams.connect()
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
        """Whether every stream has ended for good, and every event was handed out."""
        return self._state.is_finished and not self._streams.deliveries

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """The next event; acknowledges the one before.

        Args:
            timeout_s: How long to wait; by default as long as it takes.

        Returns:
            None if there was none in time, or if `done`.

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
            if self._streams.deliveries:
                delivery = self._streams.deliveries.popleft()
                event = delivery.event
                assert not isinstance(event, RollbackRequest)  # there is no undo callback
                if isinstance(event, RolledBack):
                    tracker.begin_rollback(event)
                    self.save()
                if event is not None:
                    tracker.hand_out(delivery, event)
                    return event
                tracker.finish_delivery(delivery)
            elif self._state.is_finished:
                self.save()
                return None
            elif not self._receive(deadline):
                return None

    def _receive(self, deadline: float) -> bool:
        """Receives some messages.

        Returns:
            Whether there is an event, or time left to wait for one.
        """
        due_at = self._tracker.schedule.due_at if self._store else deadline
        idle_s = self._streams.receive(min(deadline, due_at))
        if idle_s:
            self._sleep(idle_s)
            self._streams.idle_time_over()
        return time.monotonic() < deadline or bool(self._streams.deliveries)

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier; `BarrierReached` with its cookie will be among the events."""
        self._streams.send_barrier(cookie)

    # The resume state.

    @property
    def resume_state(self) -> ResumeState:
        """A copy of the resume state as it is once the event in hand is processed; see
        `Consumer.resume_state`."""
        return self._tracker.state_after_current()

    def save(self) -> None:
        """Acknowledges the event in hand and saves now, if there is a file.

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
