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
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import structlog
import trio

from upr_protocol.chunk import Buffer
from upr_protocol.transport import write_all
from upr_server.storage.api import Store
from upr_server.storage.calls import Call, ReadChunks
from upr_server.storage.directory import lock, prepare
from upr_server.storage.errors import DataDirectoryError, StoreFailedError
from upr_server.storage.messages import (
    HEAD,
    RECORD_BYTES,
    Failure,
    Request,
    Unpacker,
    head_of,
    pack,
    parse_records,
)
from upr_server.storage.shared_slots import NO_SLOT, Slot, SlotPool, make_shared_memory
from upr_server.storage.worker import NO_DESCRIPTOR

Answer = TypeVar("Answer")

LOCK_TIMEOUT_S: Final = 5.0
"""How long to wait for the directory: the processes of a server that was killed end in a moment."""

_LOCK_POLL_S: Final = 0.05

STOP_TIMEOUT_S: Final = 30.0
"""How long a process may take to finish what it is at, before it is killed."""

SLOT_READ_BYTES_MIN: Final = 64 * 1024
"""A read of less goes through the pipe: it would keep a slot from those who need it more."""

TRIM_S: Final = 1.0
"""Memory that is shared with the reader and was not in use for so long is given back."""

_RECEIVE_BYTES: Final = 64 * 1024
"""What is taken from a pipe at once: mostly, all of an answer that has no chunks beside it."""

log = structlog.get_logger(__name__)


@attrs.define
class _Waiting:
    call: Call[Any]
    slot: Slot | None
    done: trio.Event = attrs.field(factory=trio.Event)
    answer: Any = None
    failure: Failure | None = None


class _Worker:
    """One process, and the calls that it has not answered yet, in their order."""

    def __init__(
        self, process: trio.Process, pipe: trio.SocketStream, role: str, slots: SlotPool | None
    ) -> None:
        self.process = process
        self.role = role
        self.slots = slots
        self._pipe = pipe
        self._unpacker = Unpacker()
        self._received = bytearray()
        """Came with what was wanted before."""
        self._to_send: deque[_Waiting] = deque()
        self._sent: deque[_Waiting] = deque()
        self._wakeup = trio.Event()
        self.is_gone = False

    async def call(self, call: Call[Any]) -> Any:
        """Has `call` answered. On cancellation it is carried out nevertheless."""
        if self.is_gone:
            raise StoreFailedError("the store is closed")
        slot = None
        if (
            self.slots is not None
            and isinstance(call, ReadChunks)
            and call.bytes_max >= SLOT_READ_BYTES_MIN
        ):
            slot = self.slots.lend()
        waiting = _Waiting(call, slot)
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
            number = NO_SLOT if waiting.slot is None else waiting.slot.number
            message, buffers = pack(Request(waiting.call, number))
            # Else this would hold the answer until the next call.
            del waiting
            head = head_of(message, buffers, [False] * len(buffers))
            parts: list[Buffer] = [head + message, *buffers]
            await write_all(self._pipe, parts, float("inf"))

    async def receive(self) -> None:
        """Takes answers, until the process ends."""
        while True:
            await self._receive()

    async def _receive(self) -> None:
        length, count, failed = HEAD.unpack(await self._exactly(HEAD.size))
        records = parse_records(await self._exactly(RECORD_BYTES * count))
        message = await self._exactly(length)
        slot, at = self._sent[0].slot, 0
        buffers: list[Buffer] = []
        for length, is_in_slot in records:
            if is_in_slot:
                assert slot is not None, "the process was lent none"
                buffers.append(slot.view[at : at + length])
                at += length
            else:
                buffers.append(await self._exactly(length))
        waiting = self._sent.popleft()
        waiting.slot = None
        if failed:
            waiting.failure = self._unpacker.unpack(message, Failure, ())
        else:
            waiting.answer = self._unpacker.unpack(message, waiting.call.answer_type, buffers)
        waiting.done.set()

    async def _exactly(self, length: int) -> bytearray:
        while len(self._received) < length <= _RECEIVE_BYTES:
            got = await self._pipe.socket.recv(_RECEIVE_BYTES)
            if not got:
                raise EOFError
            self._received += got
        data = self._received[:length]
        del self._received[:length]
        at = len(data)
        if at < length:
            data += bytes(length - at)
            with memoryview(data) as view:
                while at < length:
                    count = await self._pipe.socket.recv_into(view[at:])
                    if not count:
                        raise EOFError
                    at += count
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


class ProcessStore(Store):
    """See the module. Made by `open_store`."""

    def __init__(self, writer: _Worker, reader: _Worker) -> None:
        super().__init__()
        self._writer = writer
        self._reader = reader

    async def execute(self, call: Call[Answer]) -> Answer:
        worker = self._reader if call.is_read else self._writer
        answer: Answer = await worker.call(call)
        return answer

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
            self.fail(sentence)
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
            workers: list[_Worker] = []
            try:
                # Cancelled in its midst, a process would be left that nobody ends.
                with trio.CancelScope(shield=True):
                    workers.append(writer := await _start(path, "writer", bytes_max, descriptor))
                    workers.append(reader := await _start_reader(path, bytes_max, descriptor))
                store = ProcessStore(writer, reader)
                if reader.slots is not None:
                    nursery.start_soon(_trim, reader.slots)
                nursery.start_soon(store.watch, writer)
                nursery.start_soon(store.watch, reader)
                yield store
            finally:
                nursery.cancel_scope.cancel()
                with trio.CancelScope(shield=True):
                    for worker in reversed(workers):
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


async def _trim(slots: SlotPool) -> None:
    """Gives memory back that is not in use, for ever."""
    while True:
        await trio.sleep(TRIM_S)
        slots.trim()


async def _start_reader(path: Path, bytes_max: int, descriptor: int) -> _Worker:
    shared = make_shared_memory()
    if shared is None:
        return await _start(path, "reader", bytes_max, descriptor)
    try:
        return await _start(path, "reader", bytes_max, descriptor, shared)
    finally:
        os.close(shared)


async def _start(
    path: Path, role: str, bytes_max: int, descriptor: int, shared: int = NO_DESCRIPTOR
) -> _Worker:
    slots = None if shared == NO_DESCRIPTOR else SlotPool(shared)
    ours, theirs = socket.socketpair()
    with theirs, ExitStack() as undo:
        undo.callback(ours.close)
        command = ("-c", _MAIN, str(theirs.fileno()), str(path), role, str(bytes_max), str(shared))
        process = await trio.lowlevel.open_process(
            (sys.executable, *command),
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), descriptor, *([] if slots is None else [shared])),
        )
        undo.pop_all()
    ours.setblocking(False)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(ours))
    return _Worker(process, stream, role, slots)


_MAIN: Final = "import sys; from upr_server.storage.worker import main; main(sys.argv[1:])"
