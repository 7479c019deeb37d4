"""Undoing rollbacks in programs that block."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Final, Literal, Self, TypeVar, Unpack

import trio

from upr_protocol.address import Address
from upr_protocol.client.blocking.trio_thread import TrioThread
from upr_protocol.client.core.delivery_tracker import SaveLimits
from upr_protocol.client.core.events import Event, Undone
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT
from upr_protocol.client.core.subscription import End
from upr_protocol.client.rollback.consumer import RollbackConsumer, consume_with_rollback
from upr_protocol.client.rollback.received_keys import ReceivedKeysLimits
from upr_protocol.client.trio.connection import ConnectOptions
from upr_protocol.concurrency import first_failure
from upr_protocol.errors import ClosedError

T = TypeVar("T")

_LEAST_TIMEOUT_S: Final = 0.02
"""How long a call that does not want to wait may take to give the program what has arrived. Taking
an event and recording its keys pass checkpoints: with less time, each call would be cancelled
before it is done."""


class BlockingRollbackConsumer:
    """`RollbackConsumer` for programs that block: an iterator of events in which `Undone` takes the
    place of `RolledBack`. Threads must not share one.

    By asking for the next event the application acknowledges the one before. The consumer runs in a
    thread of its own, with Trio: its connections are read, up to the window, and kept alive while
    the program is busy with something else. Enter the context to connect, and leave it to save what
    was processed and to end the thread.

    The arguments are those of `consume_with_rollback`, but that `resume` is a state or a file's
    path. `dial` is called in the thread.
    """

    def __init__(
        self,
        target: str | Address,
        received_keys: str | os.PathLike[str],
        *,
        resume: ResumeState | str | os.PathLike[str],
        received_keys_limits: ReceivedKeysLimits | None = None,
        buffer_received_keys: bool = False,
        partitions: Sequence[int] | None = None,
        start: Literal["beginning", "now"] = "beginning",
        end: End = None,
        retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT,
        save_limits: SaveLimits | None = None,
        **options: Unpack[ConnectOptions],
    ) -> None:
        self._open_consumer: Callable[[], AbstractAsyncContextManager[RollbackConsumer]] = partial(
            consume_with_rollback,
            target,
            received_keys,
            resume=resume,
            received_keys_limits=received_keys_limits,
            buffer_received_keys=buffer_received_keys,
            partitions=partitions,
            start=start,
            end=end,
            retry_timeout_s=retry_timeout_s,
            save_limits=save_limits,
            **options,
        )
        self._thread: TrioThread | None = None
        self._consumer: RollbackConsumer | None = None
        self._close_requested, self._closed = trio.Event(), trio.Event()
        self._failure: BaseException | None = None
        # An event that has arrived, and that the program was not given because Ctrl-C came first.
        self._undelivered_event: Event | Undone | None = None

    def __enter__(self) -> Self:
        """Connects. The errors are those of `consume_with_rollback`."""
        if self._thread is not None:
            raise ClosedError("the consumer was opened before: make a new one")
        self._thread = TrioThread()
        try:
            self._thread.run(self._start, self._thread.nursery)
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(self, *_exception_info: object) -> None:
        self.close()

    def close(self) -> None:
        """Saves what was processed and closes the connections. Closing again does nothing. A forked
        process leaves both to its parent.

        Raises:
            OSError: The resume file cannot be written.
        """
        if self._thread is None or self._consumer is None:
            return
        self._consumer = None
        if self._thread.is_of_parent:
            return
        try:
            self._thread.run(self._end)
        finally:
            self._thread.close()
        if self._failure is not None:
            raise self._failure

    # Events.

    def __iter__(self) -> Iterator[Event | Undone]:
        return self

    def __next__(self) -> Event | Undone:
        event = self.next_event()
        if event is None:
            raise StopIteration
        return event

    def next_event(self, timeout_s: float | None = None) -> Event | Undone | None:
        """The next event, as `BlockingConsumer.next_event`. Raises `OSError` if the received keys
        cannot be written."""
        thread, consumer = self._require_open()
        if self._undelivered_event is None:
            thread.run(self._receive, consumer, timeout_s)
        event, self._undelivered_event = self._undelivered_event, None
        return event

    def barrier(self, cookie: bytes) -> None:
        """Sends a barrier, as `Consumer.send_barrier`."""
        thread, consumer = self._require_open()
        thread.run(_call, partial(consumer.send_barrier, cookie))

    # What is saved.

    def flush_received_keys(self) -> None:
        """Records the received keys on disk; see `RollbackConsumer.flush_received_keys`."""
        _, consumer = self._require_open()
        consumer.flush_received_keys()

    @property
    def resume_state(self) -> ResumeState:
        """A copy of the resume state as it is once the current event is processed; see
        `Consumer.resume_state`."""
        thread, consumer = self._require_open()
        if self._undelivered_event is not None:
            return thread.run(_call, lambda: consumer.processed_state)
        return thread.run(_call, lambda: consumer.resume_state)

    def save(self) -> None:
        """Acknowledges the current event and saves now; see `RollbackConsumer.save`.

        Raises:
            OSError: The resume file or the received keys cannot be written.
        """
        thread, consumer = self._require_open()
        if self._undelivered_event is None:
            thread.run(consumer.save)

    def _require_open(self) -> tuple[TrioThread, RollbackConsumer]:
        if self._thread is None or self._consumer is None:
            raise ClosedError("the consumer is not open: use it in its context")
        self._thread.check_process()
        return self._thread, self._consumer

    # In the thread.

    async def _start(self, nursery: trio.Nursery) -> None:
        self._consumer = await nursery.start(self._hold)

    async def _hold(self, task_status: trio.TaskStatus[RollbackConsumer]) -> None:
        """Has the consumer open until `close`: it must be opened and closed by one task."""
        is_open = False
        try:
            async with self._open_consumer() as consumer:
                is_open = True
                task_status.started(consumer)
                await self._close_requested.wait()
        except Exception as error:
            if not is_open:
                raise
            self._failure = first_failure(error)
        finally:
            self._closed.set()

    async def _receive(self, consumer: RollbackConsumer, timeout_s: float | None) -> None:
        with trio.move_on_after(
            math.inf if timeout_s is None else max(timeout_s, _LEAST_TIMEOUT_S)
        ):
            self._undelivered_event = await anext(consumer, None)

    async def _end(self) -> None:
        self._close_requested.set()
        await self._closed.wait()


async def _call(function: Callable[[], T]) -> T:
    """Calls a function that blocks nothing."""
    await trio.lowlevel.checkpoint()
    return function()
