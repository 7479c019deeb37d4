"""A process that carries out calls:
`python -m upr_server.storage.worker FD DIRECTORY ROLE BYTES_MAX SLOTS_FD`.

LMDB runs in processes of its own because of Python's global lock. A thread beside a busy loop waits
for the lock after every single call of LMDB, and a batch of 8,000 keys then takes minutes instead
of milliseconds (docs/adr/0007-storage-processes.md). And a truncated file kills its reader with
SIGBUS, which then is not the server.

The process ends when its pipe does. So however the server ends, it leaves no process behind.
"""

from __future__ import annotations

import faulthandler
import gc
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from upr_protocol.chunk import Buffer
from upr_server.storage.directory import DataDirectory
from upr_server.storage.messages import (
    HEAD,
    RECORD_BYTES,
    CallFailure,
    Unpacker,
    message_head,
    pack_message,
    parse_records,
    request_type,
)
from upr_server.storage.shared_slots import SlotBuffer
from upr_server.storage.storage_server import StorageServer

NO_DESCRIPTOR: Final = -1
"""Stands for SLOTS_FD when no memory is shared with the process."""

OBJECTS_BETWEEN_COLLECTIONS: Final = 100_000
"""How many objects more must be made than freed before Python looks for cycles: more than one call
makes. By default it is 700."""

REQUEST: Final = request_type()
"""What requests are unpacked as."""


def main(arguments: Sequence[str]) -> None:
    """Carries out calls until the pipe ends."""
    descriptor, path, role, bytes_max, slots_descriptor = arguments
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A terminal and a service manager send these to all processes. They are for the server: it
        # stops, or reads its certificate again. It closes the pipe when it has stopped.
        signal.signal(signal_number, signal.SIG_IGN)
    # A crash in C tells its place on standard error.
    faulthandler.enable(2)
    # A step of indexing makes tens of thousands of objects, none of which is in a cycle.
    gc.freeze()
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    directory = DataDirectory(Path(path), readonly=role == "reader", bytes_max=int(bytes_max))
    slots = None
    if int(slots_descriptor) != NO_DESCRIPTOR:
        slots = SlotBuffer(int(slots_descriptor))
    server = (
        StorageServer(directory) if slots is None else StorageServer(directory, slots.put_chunk)
    )
    unpacker = Unpacker()

    with socket.socket(fileno=int(descriptor)) as pipe:
        try:
            while True:
                _serve(pipe, unpacker, server, slots)
        except (EOFError, ConnectionError):
            pass
        finally:
            server.close()


def _serve(
    pipe: socket.socket,
    unpacker: Unpacker,
    server: StorageServer,
    slots: SlotBuffer | None,
) -> None:
    length, count, _ = HEAD.unpack(_receive(pipe, HEAD.size))
    records = parse_records(_receive(pipe, RECORD_BYTES * count))
    message = _receive(pipe, length)
    buffers = [_receive(pipe, length) for length, _ in records]
    answer: Any
    is_failure = False
    try:
        request = unpacker.unpack(message, REQUEST, buffers)
        if slots is not None:
            slots.begin_answer(request.slot)
        answer = request.call.run_on(server)
    except Exception as error:  # noqa: BLE001  # the server gets every error
        answer, is_failure = CallFailure.of(error), True
    packed_answer, chunks = pack_message(answer)
    in_slot = [False] * len(chunks) if slots is None else slots.are_in_slot(chunks)
    head = message_head(packed_answer, chunks, in_slot, is_failure=is_failure)
    unshared_chunks = [
        chunk for chunk, is_in_slot in zip(chunks, in_slot, strict=True) if not is_in_slot
    ]
    _send(pipe, [head + packed_answer, *unshared_chunks])


def _receive(pipe: socket.socket, length: int) -> bytes:
    # All at once, into memory that nobody fills with zeros before.
    data = pipe.recv(length, socket.MSG_WAITALL)
    while len(data) < length:
        piece = pipe.recv(length - len(data), socket.MSG_WAITALL)
        if not piece:
            raise EOFError
        data += piece
    return data


def _send(pipe: socket.socket, buffers: list[Buffer]) -> None:
    for buffer in buffers:
        pipe.sendall(buffer)


if __name__ == "__main__":
    main(sys.argv[1:])
