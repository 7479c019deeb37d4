"""A thread in which Trio runs, for callers that block.

What must go on while the program computes runs in it: a consumer's streams, and bulk publishing.
They are the ones of the Trio client. Requests are driven by the calling thread instead: crossing to
another thread and back would add four fifths to what a single request costs (ADR 20).
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Final, Generic, ParamSpec, TypeVar

import trio

from upr_protocol.address import Address
from upr_protocol.concurrency import first_failure
from upr_protocol.errors import ClosedError, UprError
from upr_protocol.transport import Dial, SocketDial, dial_socket, dial_tcp

T = TypeVar("T")
P = ParamSpec("P")

_STOP_TIMEOUT_S: Final = 5.0
"""How long the end of the thread is waited for. Its connections are closed within less."""


class _Call(Generic[T]):
    """One call from another thread. `has_outcome` says whether `result` gives or raises what came
    of it. It does not if the call was cancelled, or if the thread ended before."""

    __slots__ = (
        "_ended",
        "_error",
        "_function",
        "_has_ended",
        "_is_started",
        "_result",
        "_scope",
        "has_outcome",
    )

    _result: T

    def __init__(self, function: Callable[[], Awaitable[T]]) -> None:
        self.has_outcome = False
        self._function = function
        self._scope = trio.CancelScope()
        self._is_started = False
        self._error: Exception | None = None
        self._has_ended = False
        # The standard library's: waiting for it ends at Ctrl-C.
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    # In the thread.

    def start(self, nursery: trio.Nursery) -> None:
        self._is_started = True
        try:
            nursery.start_soon(self._run)
        except RuntimeError:  # the nursery has ended
            self._end()

    def cancel(self) -> None:
        self._scope.cancel()
        if not self._is_started:  # Ctrl-C came before `start` was queued
            self._end()

    async def _run(self) -> None:
        try:
            with self._scope:
                self._result = await self._function()
                self.has_outcome = True
        except Exception as error:  # noqa: BLE001  the calling thread raises it
            self._error = error
            self.has_outcome = True
        finally:
            self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._ended.put(None)

    # In the calling thread.

    def wait(self) -> None:
        # Ctrl-C may come once `get` has taken what was put, and before it returns: then there is
        # nothing to wait for.
        if not self._has_ended:
            self._ended.get()

    def result(self) -> T:
        error, self._error = self._error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error  # or it would refer to itself through its traceback's frame


class _Runner:
    """What the thread runs. It refers to no `TrioThread`, so that one can be garbage."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.ended = threading.Event()
        self.token: trio.lowlevel.TrioToken | None = None
        self.nursery: trio.Nursery | None = None
        self.failure: BaseException | None = None
        self.is_stopped = False

    def run(self) -> None:
        try:
            trio.run(self._run)
        except Exception as error:  # noqa: BLE001  a task met an error that nothing expected
            self.failure = first_failure(error)  # the next call raises it
        finally:
            self.ready.set()
            self.ended.set()

    def end_error(self) -> BaseException:
        """Why the thread has ended. Waits until it has."""
        self.ended.wait()
        return self.failure or ClosedError("the client was closed")

    async def _run(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self.token = trio.lowlevel.current_trio_token()
            self.ready.set()
            if not self.is_stopped:
                await trio.sleep_forever()


class TrioThread:
    """A thread in which Trio runs. It starts at once, and ends with `close`, when nobody refers to
    this any more, or when the interpreter exits.

    A child process does not inherit it: after a fork, calls in the child raise `ClosedError`.

    Raises:
        OSError: Trio cannot start: perhaps too many files are open.
    """

    def __init__(self) -> None:
        self._process_id = os.getpid()
        self._runner = _Runner()
        # A daemon, so that a program that forgets to close it can exit: the finalizer runs then.
        thread = threading.Thread(target=self._runner.run, name="upr-client", daemon=True)
        self._finalizer = weakref.finalize(self, _stop, self._runner, thread, self._process_id)
        thread.start()
        self._runner.ready.wait()
        if self._runner.token is None:
            raise self._runner.end_error()

    @property
    def nursery(self) -> trio.Nursery:
        """For tasks that go on until the thread ends. Only code in the thread may use it."""
        assert self._runner.nursery is not None
        return self._runner.nursery

    def run(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Awaits `function(...)` in the thread, and gives its result or raises its error.

        Ctrl-C in the calling thread cancels the function; `KeyboardInterrupt` is raised once the
        function has ended.

        Raises:
            ClosedError: The thread was closed, or belongs to the parent process.
        """
        call = _Call(partial(function, *args, **kwargs))
        try:
            self._enter(call.start, self.nursery)
            call.wait()
        except BaseException:  # Ctrl-C, or what another signal's handler raises
            with suppress(UprError):
                self._enter(call.cancel)
                call.wait()
            raise
        if not call.has_outcome:
            raise self._runner.end_error()
        return call.result()

    @property
    def is_of_parent(self) -> bool:
        """Whether this process was forked since: the thread, and what it uses, are the parent's."""
        return os.getpid() != self._process_id

    def check_process(self) -> None:
        """Raises `ClosedError` if the thread belongs to the parent process."""
        if self.is_of_parent:
            raise ClosedError(
                "a forked process does not inherit the connections of its parent's client: "
                "make a client in this process"
            )

    def run_soon(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Has the thread call `function(...)`, which must raise nothing, and does not wait for it.
        Calls are made in their order, before those of a later `run`.

        Raises:
            ClosedError: As for `run`.
        """
        self._enter(partial(function, *args, **kwargs))

    def close(self) -> None:
        """Cancels what runs in the thread, and waits until it has ended. Closing again does
        nothing."""
        self._finalizer()

    def _enter(self, function: Callable[..., object], *args: object) -> None:
        self.check_process()
        if not self._finalizer.alive or self._runner.token is None:
            raise self._runner.end_error()
        try:
            self._runner.token.run_sync_soon(function, *args)
        except trio.RunFinishedError:
            raise self._runner.end_error() from None


def dial_in_thread(dial: SocketDial, timeout_s: float) -> Dial:
    """Dials with a function that blocks, in a thread of its own."""
    if dial is dial_socket:
        return dial_tcp

    async def dial_stream(address: Address) -> trio.abc.Stream:
        dialled_sockets: list[socket.socket] = []
        is_abandoned = False

        def connect() -> socket.socket:
            connection = dial(address, timeout_s)
            dialled_sockets.append(connection)
            if is_abandoned:
                connection.close()
            return connection

        try:
            connection = await trio.to_thread.run_sync(connect, abandon_on_cancel=True)
        except trio.Cancelled:
            # Whichever of the two threads comes second closes the socket.
            is_abandoned = True
            for connection in dialled_sockets:
                connection.close()
            raise
        connection.setblocking(False)
        return trio.SocketStream(trio.socket.from_stdlib_socket(connection))

    return dial_stream


def _stop(runner: _Runner, thread: threading.Thread, process_id: int) -> None:
    # Ctrl-C may come while the thread starts: it ends by itself then, as soon as it runs.
    runner.is_stopped = True
    if os.getpid() != process_id or runner.nursery is None or runner.token is None:
        return
    with suppress(trio.RunFinishedError):
        runner.token.run_sync_soon(runner.nursery.cancel_scope.cancel)
    # Garbage is collected in any thread, also in this one.
    if threading.current_thread() is not thread:
        thread.join(_STOP_TIMEOUT_S)
