"""A consumer in a process of its own that stores what it receives in a file, and can be killed.

It is forked from a process that has imported everything already. So a test can start hundreds of
them, one after the other, in a few milliseconds each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from struct import Struct
from typing import BinaryIO, Final, Literal, Self
from zlib import crc32

import msgspec
import trio

from tests.kit.mirror import Mirror
from tests.kit.process import ROOT, STOP_TIMEOUT_S, TimeoutReachedError, environment
from upr_protocol.client import (
    BarrierReached,
    ChunkReceived,
    Consumer,
    ResumeState,
    RolledBack,
    consume,
)
from upr_protocol.errors import BrokenError
from upr_protocol.ids import Operation
from upr_protocol.limits import WINDOW_BYTES_DEFAULT

_HEAD: Final = Struct("<II")
END: Final = b"the end"
"""The cookie of the barrier at which a recorder ends."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A journal entry for one event.

    Attributes:
        partition: The event's partition.
        dropped: Whether the partition's earlier items are removed.
        mutations: Sequence number, key, and value; the value is None for a deletion.
        state: The resume state after this event; empty if it is stored elsewhere.
        is_end: Whether the last barrier has returned.
    """

    partition: int = -1
    dropped: bool = False
    mutations: list[tuple[int, bytes, bytes | None]] = []
    state: bytes = b""
    is_end: bool = False


class Journal:
    """Entries in a file, each stored completely or not at all.

    Attributes:
        items: The result of all entries: by partition and key, the sequence number and value.
        state: The last resume state.
        entries: The number of entries.
        ended: Whether the last barrier has returned.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.items: dict[int, dict[bytes, tuple[int, bytes]]] = {}
        self.state = b""
        self.entries = 0
        self.ended = False
        self._file = file
        data = file.read()
        offset = 0
        while offset + _HEAD.size <= len(data):
            length, crc = _HEAD.unpack_from(data, offset)
            payload = data[offset + _HEAD.size : offset + _HEAD.size + length]
            if len(payload) < length or crc32(payload) != crc:
                break  # the writer was killed while it wrote this entry
            self._apply(msgspec.msgpack.decode(payload, type=Entry))
            offset += _HEAD.size + length
        self._whole = offset

    @classmethod
    def read(cls, path: Path) -> Self:
        """The journal in `path`, up to its last complete entry."""
        path.touch()
        with path.open("rb") as file:
            return cls(file)

    @classmethod
    def open(cls, path: Path) -> Self:
        """The journal in `path`, ready for more entries."""
        path.touch()
        journal = cls(path.open("r+b", buffering=0))
        journal._file.truncate(journal._whole)
        journal._file.seek(journal._whole)
        return journal

    def append(self, entry: Entry) -> None:
        """Adds an entry, which is then kept even if the process is killed."""
        payload = msgspec.msgpack.encode(entry)
        self._file.write(_HEAD.pack(len(payload), crc32(payload)) + payload)
        self._apply(entry)

    def _apply(self, entry: Entry) -> None:
        self.entries += 1
        self.ended = entry.is_end
        self.state = entry.state
        if entry.dropped:
            self.items.pop(entry.partition, None)
        if entry.mutations:
            items = self.items.setdefault(entry.partition, {})
            for seq, key, value in entry.mutations:
                if value is None:
                    items.pop(key, None)
                else:
                    items[key] = (seq, value)

    @property
    def contents(self) -> dict[bytes, bytes]:
        """Key → value."""
        return {key: value for items in self.items.values() for key, (_, value) in items.items()}


class Order(msgspec.Struct, frozen=True):
    """What a recorder is to do.

    Attributes:
        url: The bucket.
        folder: The folder of its journal and of its error.
        keeps_state: Where the resume state is stored: in the journal, with the data; or by the
            library in a file of its own, so that events may be received twice.
        ends: Whether it sends the last barrier at once; if not, it sends it at SIGUSR1.
        pause_s: How long it waits after each event.
        window_bytes: Its window.
    """

    url: str
    folder: str
    keeps_state: Literal["journal", "file"] = "journal"
    ends: bool = False
    pause_s: float = 0.0
    window_bytes: int = WINDOW_BYTES_DEFAULT

    @property
    def journal_path(self) -> Path:
        """The path of its journal."""
        return Path(self.folder, "journal")

    @property
    def state_path(self) -> Path:
        """The path of its resume state, if that is in a file of its own."""
        return Path(self.folder, "state")

    @property
    def complaint_path(self) -> Path:
        """The path of the error with which it ended, if it failed."""
        return Path(self.folder, "complaint")


async def _keep_recording(order: Order) -> None:
    while True:
        try:
            await _record(order)
            return
        except BrokenError:
            # The library tries the first connection once. A user would start the program again.
            await trio.sleep(0.01)


async def _record(order: Order) -> None:
    journal = Journal.open(order.journal_path)
    mirror = Mirror(journal.items)
    in_file = order.keeps_state == "file"
    resume: ResumeState | Path | None = order.state_path
    if not in_file:
        resume = ResumeState.decode(journal.state) if journal.state else None
    with trio.open_signal_receiver(signal.SIGUSR1) as signals:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR1,))
        async with (
            consume(
                order.url, resume=resume, window_bytes=order.window_bytes, identity="test:recorder"
            ) as consumer,
            trio.open_nursery() as nursery,
        ):

            async def end_when_told() -> None:
                async for _ in signals:
                    with suppress(Exception):
                        consumer.send_barrier(END)

            if order.ends:
                consumer.send_barrier(END)
            nursery.start_soon(end_when_told)
            async for event in consumer:
                mirror.apply(event)
                state = b"" if in_file else consumer.resume_state.encode()
                if isinstance(event, BarrierReached):
                    journal.append(Entry(state=state, is_end=True))
                    break
                if isinstance(event, RolledBack):
                    journal.append(Entry(event.partition, dropped=True, state=state))
                elif isinstance(event, ChunkReceived):
                    journal.append(Entry(event.partition, mutations=_rows(event), state=state))
                elif not in_file:
                    journal.append(Entry(state=state))
                if order.pause_s:
                    await trio.sleep(order.pause_s)
            nursery.cancel_scope.cancel()


def _rows(event: ChunkReceived) -> list[tuple[int, bytes, bytes | None]]:
    return [
        (row.seq, row.key, row.value if row.op is Operation.SET else None) for row in event.chunk
    ]


# The process from which all recorders are forked.


def _fork_on_request() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # their exit codes are not needed
    # A signal that arrives before its receiver is ready stays pending.
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGUSR1,))
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Order)
        pid = os.fork()
        if pid == 0:
            try:
                trio.run(_keep_recording, order)
            except (Exception, KeyboardInterrupt, SystemExit):  # noqa: BLE001  written down
                order.complaint_path.write_text(traceback.format_exc())
            finally:
                os._exit(0)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()


class Recorder:
    """A running recorder.

    Attributes:
        order: What it is to do.
    """

    def __init__(self, order: Order, pid: int) -> None:
        self.order = order
        self._pid_fd: int | None = None
        with suppress(ProcessLookupError):
            self._pid_fd = os.pidfd_open(pid)

    def _signal(self, signal_number: signal.Signals) -> None:
        if self._pid_fd is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pid_fd, signal_number)

    async def kill(self) -> None:
        """Kills it, as a crash would."""
        self._signal(signal.SIGKILL)
        await self._wait()

    async def finish(self) -> None:
        """Makes it send its last barrier now, and waits for its end."""
        self._signal(signal.SIGUSR1)
        await self.ended()

    async def ended(self) -> None:
        """Waits until it has ended by itself, at its last barrier."""
        await self._wait()
        assert Journal.read(self.order.journal_path).ended, self.complaint

    async def _wait(self) -> None:
        if self._pid_fd is not None:
            with trio.move_on_after(STOP_TIMEOUT_S) as patience:
                await trio.lowlevel.wait_readable(self._pid_fd)
            if patience.cancelled_caught:
                self.close()
                raise TimeoutReachedError(f"a recorder did not end in {STOP_TIMEOUT_S:.0f} s")
        assert not self.complaint, self.complaint

    @property
    def complaint(self) -> str:
        """The error with which it ended; empty if there was none."""
        path = self.order.complaint_path
        return path.read_text() if path.exists() else ""

    def close(self) -> None:
        """Kills it, if it still runs, and releases its descriptor."""
        if self._pid_fd is not None:
            self._signal(signal.SIGKILL)
            os.close(self._pid_fd)
            self._pid_fd = None


class Recorders:
    """Starts recorders."""

    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._lock = trio.Lock()

    @asynccontextmanager
    async def start(self, order: Order) -> AsyncIterator[Recorder]:
        """A recorder that runs while the context lasts, unless it ends before."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        async with self._lock:
            await stdin.send_all(msgspec.json.encode(order) + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                answer += await stdout.receive_some()
        recorder = Recorder(order, int(answer))
        try:
            yield recorder
        finally:
            recorder.close()


@asynccontextmanager
async def recorders() -> AsyncIterator[Recorders]:
    """A process from which recorders are forked, while the context lasts."""
    process = await trio.lowlevel.open_process(
        (sys.executable, "-m", "tests.kit.recorder"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env=environment(),
    )
    try:
        yield Recorders(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


__all__ = ["Consumer", "Entry", "Journal", "Order", "Recorder", "Recorders", "recorders"]

if __name__ == "__main__":
    _fork_on_request()
