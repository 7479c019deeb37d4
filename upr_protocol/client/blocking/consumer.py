"""Consuming in programs that block."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Self

from upr_protocol.address import Address
from upr_protocol.client.blocking.streams import WINDOW_SHARE, StreamsInThread
from upr_protocol.client.blocking.trio_thread import TrioThread, dial_in_thread
from upr_protocol.client.core.delivery_tracker import (
    DeliveryTracker,
    RollbackRequest,
    SaveLimits,
)
from upr_protocol.client.core.events import Event, RolledBack
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, RetryState
from upr_protocol.client.core.subscription import (
    End,
    Subscription,
    SubscriptionState,
)
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.client.resume_stores import FileStore
from upr_protocol.client.trio.connection import TrioOptions
from upr_protocol.client.trio.streams import ConsumerStreams
from upr_protocol.errors import ClosedError
from upr_protocol.ids import PartitionId, PartitionState, SeqNo
from upr_protocol.limits import (
    HANDSHAKE_TIMEOUT_S,
    IDLE_INTERVAL_S_DEFAULT,
    WINDOW_BYTES_DEFAULT,
)
from upr_protocol.transport import SocketDial, dial_socket

BlockingUndoCallback = Callable[[PartitionId, SeqNo, str], SeqNo]
"""An `UndoCallback` that blocks. It is called in the thread that asks for the next event."""


class BlockingConsumer:
    """`Consumer` for programs that block: an iterator of events. Threads must not share one.

    By asking for the next event the application acknowledges the one before. Its connections are
    those of the Trio client, in a thread of their own: they are read, up to the window, and kept
    alive while the program is busy with something else.

    Leave the context, or call `close`, to end the thread. After an error other than `OSError` the
    consumer cannot go on, unless it was never connected: make a new one.

    The arguments and errors are those of `consume`, but that `resume` is a state or a file's path,
    that `undo` blocks, and that it does not connect yet.
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
        key_prefix: bytes = b"",
        undo: BlockingUndoCallback | None = None,
        with_logs: bool = False,
        follow_map: bool = True,
        window_bytes: int = WINDOW_BYTES_DEFAULT,
        identity: str = IDENTITY_DEFAULT,
        retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
        save_limits: SaveLimits | None = None,
        idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT,
        connect_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        dial: SocketDial = dial_socket,
        draw: Callable[[], float] = random.random,
    ) -> None:
        address = (Address.parse(target) if isinstance(target, str) else target).with_bucket()
        self.address = address
        self._store, processed_state = _load(resume, address.bucket, key_prefix)
        subscription = Subscription(
            partitions,
            start == "now",
            state,
            end,
            lease_id,
            with_logs=with_logs,
            has_undo=undo is not None,
            key_prefix=key_prefix,
        )
        options = TrioOptions(
            identity,
            window_bytes,
            idle_interval_s,
            connect_timeout_s,
            dial_in_thread(dial, connect_timeout_s),
            draw,
            retry_timeout_s,
            follow_map,
        )
        subscription_state = SubscriptionState(subscription, processed_state.copy())
        self._streams = StreamsInThread(
            lambda: ConsumerStreams(address, options, subscription_state),
            window_bytes // WINDOW_SHARE,
        )
        self._thread: TrioThread | None = None
        self._tracker = DeliveryTracker(
            processed_state,
            save_limits or SaveLimits(),
            self._streams.acknowledge,
            time.monotonic(),
        )
        self._new_retry_state = options.new_retry_state
        self._undo = undo
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Saves what was processed and closes the connections. Closing again does nothing. A forked
        process leaves both to its parent.

        Raises:
            OSError: The resume file cannot be written.
        """
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread is not None and self._thread.is_of_parent:
            return
        self._tracker.discard_current()
        try:
            self.save()
        finally:
            if self._thread is not None:
                self._thread.close()

    def connect(self) -> None:
        """Connects, if it was not connected yet, and retries for `retry_timeout_s`. Without this
        call the first event asked for connects, and a server that cannot be reached then is an
        error at once.

        Raises:
            BrokenError: The server could not be reached for too long.
            ServerError: The server refused the bucket.
            ClosedError: The consumer was closed.
        """
        self._connect(self._new_retry_state())

    def _connect(self, retry: RetryState | None = None) -> TrioThread:
        """The thread of the streams, once they are connected. The first call starts it."""
        self._check_open()
        if self._thread is None:
            self._thread = TrioThread()
        if not self._streams.is_connected:
            self._thread.run(self._streams.connect, self._thread.nursery, retry)
        return self._thread

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the consumer was closed")
        if self._thread is not None:
            self._thread.check_process()

    # Events.

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = self.next_event()
        if event is None:
            raise StopIteration
        return event

    @property
    def is_finished(self) -> bool:
        """Whether every stream has ended for good, and every event was handed out."""
        return self._streams.is_finished and not self._streams.deliveries

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """The next event; acknowledges the one before.

        Args:
            timeout_s: How long to wait; by default as long as it takes. Ctrl-C meanwhile loses no
                event.

        Returns:
            None if there was none in time, or if `is_finished`.

        Raises:
            ServerError: The server refused, and went on refusing.
            BrokenError: The server could not be reached for too long.
            ClosedError: The consumer was closed.
        """
        self._check_open()
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        tracker, deliveries = self._tracker, self._streams.deliveries
        tracker.finish_current()
        while True:
            self._save_when_due()
            event = self._prepare_event()
            if event is not None:
                # Python looks for Ctrl-C at calls, and there is no call here: either the event is
                # still in the queue, or the program is given it.
                tracker.current_delivery = deliveries[0]
                del deliveries[0]
                return event
            if deliveries:
                continue
            if self._streams.is_finished:
                self.save()
                return None
            if not self._receive(deadline):
                return None

    def _prepare_event(self) -> Event | None:
        """The event of the first delivery, which stays in the queue: after an exception the next
        call does this again. A delivery without an event is processed at once."""
        deliveries = self._streams.deliveries
        if not deliveries:
            return None
        event = deliveries[0].event
        if isinstance(event, RollbackRequest | RolledBack):
            return self._roll_back(event)
        if event is None:
            self._tracker.finish_delivery(deliveries[0])
            del deliveries[0]
        return event

    def _roll_back(self, event: RollbackRequest | RolledBack) -> RolledBack:
        """Has a rollback undone, before anything that arrived meanwhile."""
        self._tracker.begin_rollback(event)
        self.save()
        if isinstance(event, RolledBack):
            return event
        assert self._undo is not None
        to = self._undo(event.partition, event.ceiling, event.reason)
        self._connect().run(self._streams.note_rolled_back, event.partition, to)
        outcome = self._streams.deliveries[0].event
        assert isinstance(outcome, RolledBack)
        return outcome

    def _receive(self, deadline: float) -> bool:
        """Waits for deliveries, or until the state is to be saved; whether to go on."""
        due_at = self._tracker.schedule.due_at if self._store else deadline
        thread = self._connect()
        thread.run(self._streams.receive, max(0.0, min(deadline, due_at) - time.monotonic()))
        return bool(self._streams.deliveries) or time.monotonic() < deadline

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier, as `Consumer.send_barrier`. Connects, if it was not connected yet."""
        self._connect().run(self._streams.send_barrier, cookie)

    # The resume state.

    @property
    def resume_state(self) -> ResumeState:
        """A copy of the resume state as it is once the current event is processed; see
        `Consumer.resume_state`."""
        return self._tracker.state_after_current()

    @property
    def processed_state(self) -> ResumeState:
        """A copy of the resume state without the current event. O(partitions)."""
        return self._tracker.state.copy()

    def save(self) -> None:
        """Acknowledges the current event and saves now, if there is a file.

        Raises:
            OSError: The resume file cannot be written.
            ClosedError: The consumer is that of the parent process, as its file is.
        """
        if self._thread is not None:
            self._thread.check_process()
        tracker = self._tracker
        tracker.finish_current()
        if self._store is not None and tracker.schedule.has_unsaved:
            self._store.save_now(tracker.state)
            tracker.schedule.note_saved(time.monotonic(), tracker.schedule.moves)

    def _save_when_due(self) -> None:
        if self._store is not None and self._tracker.schedule.due_at <= time.monotonic():
            self.save()


def _load(
    resume: ResumeState | str | os.PathLike[str] | None, bucket: str, key_prefix: bytes
) -> tuple[FileStore | None, ResumeState]:
    """The file to save to, if `resume` names one, and a copy of the state to resume from."""
    store = FileStore(resume) if isinstance(resume, str | os.PathLike) else None
    saved_state = store.load_now() if store else resume
    assert not isinstance(saved_state, str | os.PathLike)
    return store, (saved_state or ResumeState(bucket)).of_stream(bucket, key_prefix)
