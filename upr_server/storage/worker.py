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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from upr_protocol.chunk import Buffer
from upr_server.storage.directory import DataDirectory
from upr_server.storage.messages import (
    HEAD,
    RECORD_BYTES,
    Failure,
    Unpacker,
    head_of,
    pack,
    parse_records,
    request_type,
)
from upr_server.storage.shared_slots import SlotBuffer
from upr_server.storage.storage_server import StorageServer

NO_DESCRIPTOR: Final = -1
"""In the place of SLOTS_FD: no memory is shared with this process."""

REQUEST: Final = request_type()


def main(arguments: Sequence[str]) -> None:
    """Answers calls until the pipe ends."""
    descriptor, path, role, bytes_max, slots_descriptor = arguments
    for ignored in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C reaches the whole group; when it is time to go, the server closes the pipe.
        signal.signal(ignored, signal.SIG_IGN)
    directory = DataDirectory(Path(path), readonly=role == "reader", bytes_max=int(bytes_max))
    slots = None
    if int(slots_descriptor) != NO_DESCRIPTOR:
        slots = SlotBuffer(int(slots_descriptor))
    server = StorageServer(directory) if slots is None else StorageServer(directory, slots.put)
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
    failed = False
    try:
        request = unpacker.unpack(message, REQUEST, buffers)
        if slots is not None:
            slots.begin(request.slot)
        answer = request.call.run_on(server)
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
