"""The store of a data directory: a `Store` whose work is done by two processes, one for what
changes something and one for what only reads."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import attrs
import structlog
import trio

from upr_protocol.chunk import Buffer
from upr_protocol.client.write import write_all
from upr_server.storage.calls import READS, AnyCall, Failure, Forget, pack, unpack
from upr_server.storage.data_directory import lock, prepare
from upr_server.storage.errors import DataDirectoryError, StoreFailedError
from upr_server.storage.ledger import LedgerCall
from upr_server.storage.store import CallingStore
from upr_server.storage.worker import HEAD, LENGTH_BYTES, WorkerCall, head_of, parse_lengths

LOCK_TIMEOUT_S: Final = 5.0
"""How long to wait for the directory: the processes of a server that was killed end in a moment."""

_LOCK_POLL_S: Final = 0.05

STOP_TIMEOUT_S: Final = 30.0
"""How long a process may take to finish what it is at, before it is killed."""

log = structlog.get_logger(__name__)


@attrs.define
class _Waiting:
    call: WorkerCall
    done: trio.Event = attrs.field(factory=trio.Event)
    answer: Any = None
    failure: Failure | None = None


class _Worker:
    """One process, and the calls that it has not answered yet, in their order."""

    def __init__(self, process: trio.Process, pipe: trio.SocketStream, role: str) -> None:
        self.process = process
        self.role = role
        self._pipe = pipe
        self._to_send: deque[_Waiting] = deque()
        self._sent: deque[_Waiting] = deque()
        self._wakeup = trio.Event()
        self.is_gone = False

    async def call(self, call: WorkerCall) -> Any:
        """Has `call` answered. On cancellation it is carried out nevertheless."""
        if self.is_gone:
            raise StoreFailedError("the store is closed")
        waiting = _Waiting(call)
        self._to_send.append(waiting)
        self._wakeup.set()
        await waiting.done.wait()
        if waiting.failure is not None:
            raise waiting.failure.error()
        return waiting.answer

    async def send(self) -> None:
        """Sends calls, for ever."""
        while True:
            while not self._to_send:
                self._wakeup = trio.Event()
                await self._wakeup.wait()
            waiting = self._to_send.popleft()
            self._sent.append(waiting)
            message, buffers = pack(waiting.call)
            parts: list[Buffer] = [head_of(message, buffers) + message, *buffers]
            await write_all(self._pipe, parts, float("inf"))

    async def receive(self) -> None:
        """Takes answers, until the process ends."""
        while True:
            length, count, failed = HEAD.unpack(await self._exactly(HEAD.size))
            lengths = parse_lengths(await self._exactly(LENGTH_BYTES * count))
            message = await self._exactly(length)
            buffers = [await self._exactly(length) for length in lengths]
            waiting = self._sent.popleft()
            if failed:
                waiting.failure = unpack(message, Failure, ())
            else:
                waiting.answer = unpack(message, waiting.call.answer_type, buffers)
            waiting.done.set()

    async def _exactly(self, length: int) -> bytearray:
        data = bytearray(length)
        view = memoryview(data)
        at = 0
        while at < length:
            got = await self._pipe.socket.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return data

    def fail(self, sentence: str) -> None:
        """Nothing is answered any more. The first reason is the one that is told."""
        if self.is_gone:
            return
        self.is_gone = True
        for waiting in (*self._sent, *self._to_send):
            waiting.failure = Failure(StoreFailedError.__name__, sentence)
            waiting.done.set()

    async def stop(self) -> None:
        """Ends the process when it has done what it was told."""
        await self._pipe.aclose()
        with trio.move_on_after(STOP_TIMEOUT_S):
            await self.process.wait()
        self.process.kill()
        await self.process.wait()


class ProcessStore(CallingStore):
    """See the module. Made by `open_store`."""

    def __init__(self, writer: _Worker, reader: _Worker) -> None:
        super().__init__()
        self._writer = writer
        self._reader = reader

    async def _answer(self, call: AnyCall) -> Any:
        if isinstance(call, Forget):
            await self._reader.call(call)
            return None
        worker = self._reader if isinstance(call, READS) else self._writer
        return await worker.call(call)

    async def ledger(self, call: LedgerCall) -> Any:
        """Has the node's ledger answer: in the process that reads, which has the most time.

        Raises:
            StorageError: It could not be done.
        """
        return await self._reader.call(call)

    async def watch(self, worker: _Worker) -> None:
        """Serves one process's pipe until it ends, and says so."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.send)
                nursery.start_soon(worker.receive)
        except* (EOFError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await worker.process.wait()
            sentence = f"the {worker.role} of the store {_how_it_ended(worker.process.returncode)}"
            self.has_failed(sentence)
            worker.fail(sentence)
        finally:
            # Cancelled: those who wait although they are cancelled too must hear of it.
            worker.fail("the store is closed")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "does not answer"
    if code == -signal.SIGBUS:
        return "was killed by SIGBUS: a data file is shorter than it was; run `upr-server check`"
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


@asynccontextmanager
async def open_store(path: Path, *, bytes_max: int = 0) -> AsyncIterator[ProcessStore]:
    """The store of a data directory, for as long as the context.

    Args:
        path: The data directory; made when it is not there.
        bytes_max: How large each file may become; 0 for as large as the disk is.

    Raises:
        DataDirectoryError: It cannot be used, or another server uses it.
    """
    prepare(path)
    descriptor = await _locked(path)
    try:
        async with trio.open_nursery() as nursery:
            writer = await _start(path, "writer", bytes_max, descriptor)
            reader = await _start(path, "reader", bytes_max, descriptor)
            store = ProcessStore(writer, reader)
            nursery.start_soon(store.watch, writer)
            nursery.start_soon(store.watch, reader)
            try:
                yield store
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    for worker in (reader, writer):
                        worker.fail("the store is closed")
                        await worker.stop()
    finally:
        os.close(descriptor)


async def _locked(path: Path) -> int:
    with trio.move_on_after(LOCK_TIMEOUT_S):
        while True:
            try:
                descriptor = lock(path)
            except OSError as error:
                raise DataDirectoryError(
                    f"{path} cannot be locked: {error.strerror}; give the server's user the right "
                    "to write the file lock there"
                ) from error
            if descriptor is not None:
                return descriptor
            await trio.sleep(_LOCK_POLL_S)
    raise DataDirectoryError(
        f"{path} is used by another server: stop that one, or choose another directory with "
        "--data-dir"
    )


async def _start(path: Path, role: str, bytes_max: int, descriptor: int) -> _Worker:
    ours, theirs = socket.socketpair()
    with theirs:
        command = ("-c", _MAIN, str(theirs.fileno()), str(path), role, str(bytes_max))
        process = await trio.lowlevel.open_process(
            (sys.executable, *command),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), descriptor),
        )
    ours.setblocking(False)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    return _Worker(process, stream, role)


_MAIN: Final = "import sys; from upr_server.storage.worker import main; main(sys.argv[1:])"
