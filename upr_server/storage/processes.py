"""The store of a data directory: two processes do its work. The writer carries out the calls that
change something, and the reader those that only read."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import attrs
import structlog
import trio

from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.concurrency import Notifier
from upr_protocol.transport import first_bytes, new_memory, unsent, write_all
from upr_server.runtime import essential
from upr_server.storage.api import Store
from upr_server.storage.calls import BucketCall, ReadChunks, StoreCall
from upr_server.storage.directory import lock, prepare
from upr_server.storage.errors import DataDirectoryError, StoreFailedError
from upr_server.storage.messages import (
    HEAD,
    RECORD_BYTES,
    STEP_CHUNKS,
    CallFailure,
    RequestPacking,
    Unpacker,
    parse_records,
    unpack_chunks,
)
from upr_server.storage.shared_slots import NO_SLOT, Slot, SlotPool, make_shared_memory
from upr_server.storage.worker import NO_DESCRIPTOR

Answer = TypeVar("Answer")

LOCK_TIMEOUT_S: Final = 5.0
"""How long to wait for the directory's lock. The processes of a killed server end a moment after
it, and hold the lock until then."""

_LOCK_POLL_S: Final = 0.05

STOP_TIMEOUT_S: Final = 30.0
"""How long a process may take to finish its call before it is killed."""

SLOT_READ_BYTES_MIN: Final = 64 * 1024
"""A smaller read goes through the pipe, and leaves the slots to larger ones."""

TRIM_S: Final = 1.0
"""Slots that were not in use for so long give their memory back."""

MMAP_THRESHOLD_BYTES: Final = 1024 * 1024
"""Blocks of this size have pages of their own in the processes. LMDB allocates 3 MiB for each map,
and hardly touches them. glibc raises its threshold, up to 32 MiB, when a large value is freed. Then
it takes such blocks from its heap and clears them: 250 buckets took 1,065 MiB instead of 42."""

TRIM_THRESHOLD_BYTES: Final = 16 * 1024 * 1024
"""Free memory at the end of a process's heap that it keeps: that of two commits. glibc's own limit
is 128 KiB, so each commit would take its memory from the system again, and return it."""

SEND_BUFFER_BYTES: Final = 4 * 1024 * 1024
"""What the system may hold of a request on its way to a process, where it allows so much. Of a
commit of 8 MiB it takes a fortieth by default, and each of these needs a turn of the loop."""

_RECEIVE_BYTES: Final = 64 * 1024
"""Bytes received at once: mostly all of an answer without chunks."""

_RECEIVE_BYTES_MAX: Final = 1024 * 1024
"""Bytes of a large answer that one step receives."""

SEND_BYTES: Final = 512 * 1024
"""Bytes of a call that one step sends, in a millisecond or two: the system makes a buffer for every
page. While the process reads, the pipe takes any amount: 19 MiB in one step took 53 ms."""

SEND_PARTS: Final = 1024
"""Parts of a call that one step sends, of which the system takes as many at once."""

READS_SENT_MAX: Final = 16
"""Reads of chunks that a process has at a time: some 10 ms of work. The pipe would take hundreds.
Thousands of streams may begin at once, and whoever needs an item would wait behind all of them."""

log = structlog.get_logger(__name__)


@attrs.define(eq=False)
class _PendingCall:
    call: StoreCall[Any]
    slot: Slot | None
    event: trio.Event = attrs.field(factory=trio.Event)
    answer: Any = None
    failure: CallFailure | None = None


class _Worker:
    """One process, and the calls that it has not answered yet, in order."""

    def __init__(
        self, process: trio.Process, pipe: trio.SocketStream, role: str, slots: SlotPool | None
    ) -> None:
        self.process = process
        self.role = role
        self.slots = slots
        self._pipe = pipe
        self._unpacker = Unpacker()
        self._received_bytes = bytearray()
        """Received, and not parsed yet."""
        # In their order. A read whose caller is gone is taken out, wherever it stands.
        self._unsent_calls: OrderedDict[_PendingCall, None] = OrderedDict()
        # Reads of chunks wait apart, and take turns with the others.
        self._unsent_reads: OrderedDict[_PendingCall, None] = OrderedDict()
        self._is_reads_turn = False
        self._reads_sent = 0
        self._sent_calls: deque[_PendingCall] = deque()
        self._has_calls = Notifier()
        self.is_gone = False

    async def call(self, call: StoreCall[Any]) -> Any:
        """Has a call carried out. Once sent, it is carried out even if the caller is cancelled; and
        so is one that is not sent yet, unless it only reads of a bucket.

        Raises:
            StorageError: It could not be done.
        """
        if self.is_gone:
            raise StoreFailedError("the store is closed")
        slot = None
        if (
            self.slots is not None
            and isinstance(call, ReadChunks)
            and call.bytes_max >= SLOT_READ_BYTES_MIN
        ):
            slot = self.slots.acquire()
        pending_call = _PendingCall(call, slot)
        unsent_calls = self._unsent_reads if isinstance(call, ReadChunks) else self._unsent_calls
        unsent_calls[pending_call] = None
        self._has_calls.notify()
        try:
            await pending_call.event.wait()
        finally:
            if call.is_read and isinstance(call, BucketCall):
                unsent_calls.pop(pending_call, None)
        if pending_call.failure is not None:
            raise pending_call.failure.error()
        return pending_call.answer

    async def send(self) -> None:
        """Sends calls, until it is cancelled."""
        while True:
            await self._has_calls.wait_until(
                lambda: bool(self._unsent_calls) or self._may_send_read()
            )
            await self._send_next()

    def _may_send_read(self) -> bool:
        return bool(self._unsent_reads) and self._reads_sent < READS_SENT_MAX

    def _take_unsent(self) -> _PendingCall:
        if self._may_send_read() and (self._is_reads_turn or not self._unsent_calls):
            self._is_reads_turn = False
            self._reads_sent += 1
            return self._unsent_reads.popitem(last=False)[0]
        self._is_reads_turn = True
        return self._unsent_calls.popitem(last=False)[0]

    async def _send_next(self) -> None:
        # A local name in `send` would keep the call's bytes, and its answer with the slot, until
        # the next call.
        pending_call = self._take_unsent()
        self._sent_calls.append(pending_call)
        slot_number = NO_SLOT if pending_call.slot is None else pending_call.slot.number
        request_packing = RequestPacking(pending_call.call, slot_number)
        for _ in request_packing.steps():
            await trio.lowlevel.checkpoint()
        await send_in_steps(self._pipe, request_packing.parts)

    async def receive(self) -> None:
        """Receives answers, until the process ends and an exception says so."""
        while True:
            await self._receive()

    async def _receive(self) -> None:
        length, count, is_failure = HEAD.unpack(await self._exactly(HEAD.size))
        records = parse_records(await self._exactly(RECORD_BYTES * count))
        message = await self._exactly(length)
        buffers = await self._buffers(records)
        pending_call, answer, failure = self._sent_calls[0], None, None
        if is_failure:
            failure = self._unpacker.unpack(message, CallFailure, ())
        elif pending_call.call.answer_type == list[Chunk]:
            answer = await self._chunks(message, buffers)
        else:
            answer = self._unpacker.unpack(message, pending_call.call.answer_type, buffers)
        # The call leaves the queue only after the last checkpoint: if this is cancelled, `fail`
        # fails the call.
        self._sent_calls.popleft()
        if isinstance(pending_call.call, ReadChunks):
            self._reads_sent -= 1
            self._has_calls.notify()
        # From here on the answer's chunks alone keep the slot.
        pending_call.slot = None
        pending_call.answer, pending_call.failure = answer, failure
        pending_call.event.set()

    async def _buffers(self, records: Sequence[tuple[int, bool]]) -> list[Buffer]:
        """What an answer has beside its message."""
        slot, offset = self._sent_calls[0].slot, 0
        buffers: list[Buffer] = []
        for length, is_in_slot in records:
            if is_in_slot:
                assert slot is not None, "the process was lent no slot"
                buffers.append(slot.view[offset : offset + length])
                offset += length
            else:
                buffers.append(await self._exactly(length))
            if len(buffers) % STEP_CHUNKS == 0:
                await trio.lowlevel.checkpoint()
        return buffers

    async def _chunks(self, message: Buffer, buffers: Sequence[Buffer]) -> list[Chunk]:
        chunks: list[Chunk] = []
        for chunk in unpack_chunks(message, buffers):
            chunks.append(chunk)
            if len(chunks) % STEP_CHUNKS == 0:
                await trio.lowlevel.checkpoint()
        return chunks

    async def _exactly(self, length: int) -> Buffer:
        while len(self._received_bytes) < length <= _RECEIVE_BYTES:
            piece = await self._pipe.socket.recv(_RECEIVE_BYTES)
            if not piece:
                raise EOFError
            self._received_bytes += piece
        if len(self._received_bytes) >= length:
            data = self._received_bytes[:length]
            del self._received_bytes[:length]
            return data
        # To fill a bytearray with zeros first would hold the loop for a large answer.
        memory = memoryview(new_memory(length))
        filled_bytes = len(self._received_bytes)
        memory[:filled_bytes] = self._received_bytes
        self._received_bytes.clear()
        while filled_bytes < length:
            count = await self._pipe.socket.recv_into(
                memory[filled_bytes : filled_bytes + _RECEIVE_BYTES_MAX]
            )
            if not count:
                raise EOFError
            filled_bytes += count
        return memory

    def fail(self, sentence: str) -> None:
        """Fails all calls, those to come as well. The first reason is kept."""
        if self.is_gone:
            return
        self.is_gone = True
        for pending_call in (*self._sent_calls, *self._unsent_calls, *self._unsent_reads):
            pending_call.failure = CallFailure(StoreFailedError.__name__, sentence)
            pending_call.event.set()

    async def stop(self) -> None:
        """Ends the process once it has carried out what it was sent."""
        await self._pipe.aclose()
        with trio.move_on_after(STOP_TIMEOUT_S):
            await self.process.wait()
        self.process.kill()
        await self.process.wait()


async def send_in_steps(pipe: trio.abc.SendStream, parts: list[Buffer]) -> None:
    """Sends a message, `SEND_BYTES` or `SEND_PARTS` in each step, however long that takes."""
    for begin in range(0, len(parts), SEND_PARTS):
        unsent_parts = parts[begin : begin + SEND_PARTS]
        while unsent_parts:
            await write_all(pipe, first_bytes(unsent_parts, SEND_BYTES), float("inf"))
            unsent_parts = unsent(unsent_parts, SEND_BYTES)


class ProcessStore(Store):
    """The store of a data directory. `open_store` makes it."""

    def __init__(self, writer: _Worker, reader: _Worker) -> None:
        super().__init__()
        self._writer = writer
        self._reader = reader

    async def execute(self, call: StoreCall[Answer]) -> Answer:
        worker = self._reader if call.is_read else self._writer
        answer: Answer = await worker.call(call)
        return answer

    async def watch(self, worker: _Worker) -> None:
        """Serves one process's pipe. If the process ends, the store fails."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(worker.send)
                nursery.start_soon(worker.receive)
        except* (EOFError, OSError, trio.BrokenResourceError, trio.ClosedResourceError):
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await worker.process.wait()
            sentence = (
                f"the store's {worker.role} process {_how_it_ended(worker.process.returncode)}"
            )
            self.fail(sentence)
            worker.fail(sentence)
        finally:
            # When the store is closed, callers that wait in a shielded scope need an answer, too.
            worker.fail("the store is closed")


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "does not answer"
    if code == -signal.SIGBUS:
        return "was killed by SIGBUS: a data file was truncated; run `upr-server check`"
    if code < 0:
        # Real-time signals have no names, but for two of them.
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-code, f"signal {-code}")
        return f"was killed by {name}; the system's log may say why; start the server again"
    return f"ended with code {code}; its last lines on standard error say why"


@asynccontextmanager
async def open_store(path: Path, *, bytes_max: int = 0) -> AsyncIterator[ProcessStore]:
    """Opens the store of a data directory, for as long as the context.

    Args:
        path: The data directory; created if it does not exist.
        bytes_max: How large each file may become; 0 for as large as the disk is.

    Raises:
        DataDirectoryError: The directory cannot be used, or another server uses it.
    """
    prepare(path)
    descriptor = await _locked(path)
    try:
        async with trio.open_nursery() as nursery:
            workers: list[_Worker] = []
            try:
                # Cancelled half-way, it would leave a process that nobody ends.
                with trio.CancelScope(shield=True):
                    workers.append(writer := await _start(path, "writer", bytes_max, descriptor))
                    workers.append(reader := await _start_reader(path, bytes_max, descriptor))
                store = ProcessStore(writer, reader)
                if reader.slots is not None:
                    nursery.start_soon(essential(_trim), reader.slots)
                nursery.start_soon(essential(store.watch), writer)
                nursery.start_soon(essential(store.watch), reader)
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
                    f"{path} cannot be locked: {error.strerror}; give the server's user write "
                    "permission for the file lock there"
                ) from error
            if descriptor is not None:
                return descriptor
            await trio.sleep(_LOCK_POLL_S)
    raise DataDirectoryError(
        f"{path} is in use by another server; stop it, or choose another directory with --data-dir"
    )


async def _trim(slots: SlotPool) -> None:
    """Gives unused memory back every `TRIM_S`, until it is cancelled."""
    while True:
        await trio.sleep(TRIM_S)
        for _ in slots.trim():
            await trio.lowlevel.checkpoint()


async def _start_reader(path: Path, bytes_max: int, descriptor: int) -> _Worker:
    shared_memory = make_shared_memory()
    if shared_memory is None:
        return await _start(path, "reader", bytes_max, descriptor)
    try:
        return await _start(path, "reader", bytes_max, descriptor, shared_memory)
    finally:
        os.close(shared_memory)


async def _start(
    path: Path, role: str, bytes_max: int, descriptor: int, shared_memory: int = NO_DESCRIPTOR
) -> _Worker:
    slots = None if shared_memory == NO_DESCRIPTOR else SlotPool(shared_memory)
    own_socket, worker_socket = socket.socketpair()
    with suppress(OSError):  # it need not allow so much
        own_socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    with worker_socket, ExitStack() as undo:
        undo.callback(own_socket.close)
        command = (
            # Without -P, modules in the working directory would be imported.
            "-P",
            "-c",
            _MAIN,
            str(worker_socket.fileno()),
            str(path),
            role,
            str(bytes_max),
            str(shared_memory),
        )
        process = await trio.lowlevel.open_process(
            (sys.executable, *command),
            stdin=subprocess.DEVNULL,
            # The C library reads it at its start. To call `mallopt` in the process would be later.
            env={
                "MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD_BYTES),
                "MALLOC_TRIM_THRESHOLD_": str(TRIM_THRESHOLD_BYTES),
                **os.environ,
            },
            pass_fds=(
                worker_socket.fileno(),
                descriptor,
                *([] if slots is None else [shared_memory]),
            ),
        )
        undo.pop_all()
    own_socket.setblocking(False)
    stream = trio.SocketStream(trio.socket.from_stdlib_socket(own_socket))
    return _Worker(process, stream, role, slots)


_MAIN: Final = "import sys; from upr_server.storage.worker import main; main(sys.argv[1:])"
