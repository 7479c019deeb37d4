"""A process that answers calls: `python -m upr_server.storage.worker FD DIRECTORY ROLE BYTES_MAX`.

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

from upr_protocol.chunk import Buffer
from upr_server.storage.calls import AnyCall, Failure, pack, unpack
from upr_server.storage.data_directory import DataRoom
from upr_server.storage.ledger import LEDGER_CALLS, Ledger, LedgerCall
from upr_server.storage.library import Library

WorkerCall = AnyCall | LedgerCall
"""What a process is asked."""

HEAD: Final = Struct("<II?")
"""Length of the message, count of buffers, whether it is a failure; then the buffers' lengths, the
message, the buffers."""

_LENGTH: Final = Struct("<I")


def head_of(message: bytes, buffers: Sequence[Buffer], *, failed: bool = False) -> bytes:
    """What stands before a message."""
    lengths = b"".join(_LENGTH.pack(len(buffer)) for buffer in buffers)
    return HEAD.pack(len(message), len(buffers), failed) + lengths


def parse_lengths(data: Buffer) -> list[int]:
    """The buffers' lengths."""
    return [length for (length,) in _LENGTH.iter_unpack(data)]


LENGTH_BYTES: Final = _LENGTH.size


def main(arguments: Sequence[str]) -> None:
    """Answers calls until the pipe ends."""
    descriptor, path, role, bytes_max = arguments
    for ignored in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C reaches the whole group; when it is time to go, the server closes the pipe.
        signal.signal(ignored, signal.SIG_IGN)
    room = DataRoom(Path(path), readonly=role == "reader", bytes_max=int(bytes_max))
    library, ledger = Library(room), Ledger(Path(path) / "events")

    def answer(call: WorkerCall) -> Any:
        return ledger.answer(call) if isinstance(call, LEDGER_CALLS) else library.answer(call)

    with socket.socket(fileno=int(descriptor)) as pipe:
        try:
            while True:
                _serve(pipe, answer)
        except (EOFError, ConnectionError):
            pass
        finally:
            ledger.close()
            library.close()


def _serve(pipe: socket.socket, answer_to: Callable[[WorkerCall], Any]) -> None:
    length, count, _ = HEAD.unpack(_receive(pipe, HEAD.size))
    lengths = parse_lengths(_receive(pipe, LENGTH_BYTES * count))
    message = _receive(pipe, length)
    buffers = [_receive(pipe, length) for length in lengths]
    answer: Any
    failed = False
    try:
        answer = answer_to(unpack(message, WorkerCall, buffers))
    except Exception as error:  # noqa: BLE001  # whatever it is, the server hears of it
        answer, failed = Failure.of(error), True
    packed, out = pack(answer)
    _send(pipe, [head_of(packed, out, failed=failed) + packed, *out])


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
