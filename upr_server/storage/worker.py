"""A process that answers calls:
`python -m upr_server.storage.worker FD DIRECTORY ROLE BYTES_MAX SLOTS_FD`.

LMDB is used in processes of its own because of Python's global lock: a thread beside a busy loop
waits for the lock after every single call of LMDB, and writing a batch of 8,000 keys then takes
minutes instead of milliseconds (docs/adr/0007-storage-processes.md). A file that was truncated
kills its reader with SIGBUS, and that is not the server either.

The process ends when its pipe does: however the server ends, none is left behind.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final

import msgspec

from upr_protocol.chunk import Buffer
from upr_server.storage.calls import AnyCall, Failure, Unpacker, pack
from upr_server.storage.data_directory import DataRoom
from upr_server.storage.ledger import LEDGER_CALLS, Ledger, LedgerCall
from upr_server.storage.library import Library
from upr_server.storage.slots import NO_SLOT, SlotWriter

WorkerCall = AnyCall | LedgerCall
"""What a process is asked."""

NO_DESCRIPTOR: Final = -1
"""In the place of SLOTS_FD: no memory is shared with this process."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """What goes to a process.

    Attributes:
        call: What is asked.
        slot: The slot that was lent for the answer's chunks.
    """

    call: WorkerCall
    slot: int = NO_SLOT


HEAD: Final = Struct("<II?")
"""Length of the message, count of buffers, whether it is a failure; then a record of each buffer,
the message, and the buffers that do not lie in the slot."""

_RECORD: Final = Struct("<I?")


def head_of(
    message: bytes, buffers: Sequence[Buffer], in_slot: Sequence[bool], *, failed: bool = False
) -> bytes:
    """What stands before a message: `in_slot` says of each buffer where it is."""
    records = b"".join(
        _RECORD.pack(len(buffer), is_there)
        for buffer, is_there in zip(buffers, in_slot, strict=True)
    )
    return HEAD.pack(len(message), len(buffers), failed) + records


def parse_records(data: Buffer) -> list[tuple[int, bool]]:
    """The buffers' lengths, and whether each lies in the slot, behind those before it."""
    return list(_RECORD.iter_unpack(data))


RECORD_BYTES: Final = _RECORD.size


def main(arguments: Sequence[str]) -> None:
    """Answers calls until the pipe ends."""
    descriptor, path, role, bytes_max, slots_descriptor = arguments
    for ignored in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C reaches the whole group; when it is time to go, the server closes the pipe.
        signal.signal(ignored, signal.SIG_IGN)
    room = DataRoom(Path(path), readonly=role == "reader", bytes_max=int(bytes_max))
    slots = None
    if int(slots_descriptor) != NO_DESCRIPTOR:
        slots = SlotWriter(int(slots_descriptor))
    library = Library(room) if slots is None else Library(room, slots.put)
    ledger = Ledger(Path(path) / "events")
    unpacker = Unpacker()

    def answer(call: WorkerCall) -> Any:
        return ledger.answer(call) if isinstance(call, LEDGER_CALLS) else library.answer(call)

    with socket.socket(fileno=int(descriptor)) as pipe:
        try:
            while True:
                _serve(pipe, unpacker, answer, slots)
        except (EOFError, ConnectionError):
            pass
        finally:
            ledger.close()
            library.close()


def _serve(
    pipe: socket.socket,
    unpacker: Unpacker,
    answer_to: Callable[[WorkerCall], Any],
    slots: SlotWriter | None,
) -> None:
    length, count, _ = HEAD.unpack(_receive(pipe, HEAD.size))
    records = parse_records(_receive(pipe, RECORD_BYTES * count))
    message = _receive(pipe, length)
    buffers = [_receive(pipe, length) for length, _ in records]
    answer: Any
    failed = False
    try:
        request = unpacker.unpack(message, Request, buffers)
        if slots is not None:
            slots.begin(request.slot)
        answer = answer_to(request.call)
    except Exception as error:  # noqa: BLE001  # whatever it is, the server hears of it
        answer, failed = Failure.of(error), True
    packed, out = pack(answer)
    in_slot = [False] * len(out) if slots is None else slots.places(out)
    head = head_of(packed, out, in_slot, failed=failed)
    beside = [buffer for buffer, is_there in zip(out, in_slot, strict=True) if not is_there]
    _send(pipe, [head + packed, *beside])


def _receive(pipe: socket.socket, length: int) -> bytearray:
    data = bytearray(length)
    view = memoryview(data)
    at = 0
    while at < length:
        got = pipe.recv_into(view[at:])
        if not got:
            raise EOFError
        at += got
    return data


def _send(pipe: socket.socket, buffers: list[Buffer]) -> None:
    for buffer in buffers:
        pipe.sendall(buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
