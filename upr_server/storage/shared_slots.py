"""Memory that the server shares with the process that reads: chunks go through it, not the pipe.

It is cut into slots. The server lends a free one with each large read; the process puts the chunks
there, one behind the other from its beginning, and answers with their lengths. The server's chunks
are views of the slot, and the last view that dies gives it back: nobody keeps account, and who
keeps a chunk for long, or forgets one, keeps its slot and nothing else. When no slot is free, and
with what does not fit, chunks go through the pipe.

A page of it takes memory from when it is first written until `trim`, which gives back what has not
been used since the last time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from contextlib import suppress
from typing import Final

import attrs

from upr_protocol.chunk import Buffer, Chunk

SLOT_BYTES: Final = 2 * 1024 * 1024
"""A read of 1 MiB ends with the chunk that comes to it: all of it fits, unless that is very large.
What is not written of a slot takes no memory."""

SLOTS: Final = 64
"""What ten connections read ahead, about. They are addresses: what is written of them is what
backfills hold, within their budget, and the rest of the slot of a chunk that was not sent yet."""

NO_SLOT: Final = -1


@attrs.frozen
class Slot:
    """A slot that was lent.

    Attributes:
        number: Which one.
        view: Its bytes, read-only. While it lives, or a slice of it, the slot is not lent again.
    """

    number: int
    view: memoryview


class SlotPool:
    """The server's end. To be used by one thread.

    Args:
        descriptor: The memory; may be closed when this has been made and others have it.
        count: How many slots it has.
        slot_bytes: The size of each, a multiple of the system's page.
    """

    def __init__(self, descriptor: int, count: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        os.ftruncate(descriptor, count * slot_bytes)
        self._map = mmap.mmap(descriptor, count * slot_bytes)
        self._slot_bytes = slot_bytes
        self._block = ctypes.c_ubyte * slot_bytes
        self._free = list(range(count))
        """A stack: what was in use last is lent next, and the rest is not touched."""
        self._unused = count
        """So many at its bottom were not lent since `trim`."""
        self._resident: set[int] = set()
        """Those that may take memory."""

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free)

    def lend(self) -> Slot | None:
        """A slot, for as long as its view lives; None when none is free. O(1)."""
        if not self._free:
            return None
        number = self._free.pop()
        self._unused = min(self._unused, len(self._free))
        self._resident.add(number)
        # All views have this array in common. Unlike the map and unlike a view, it dies with the
        # last of them, and says so.
        block = self._block.from_buffer(self._map, number * self._slot_bytes)
        weakref.finalize(block, self._free.append, number).atexit = False
        return Slot(number, memoryview(block).cast("B").toreadonly())

    def trim(self) -> None:
        """Gives the memory of slots back to the system that were free ever since the last call."""
        for number in self._free[: self._unused]:
            if number in self._resident:
                self._resident.discard(number)
                # A sandbox may have no such call: then it keeps what it once took.
                with suppress(OSError):
                    self._map.madvise(mmap.MADV_REMOVE, number * self._slot_bytes, self._slot_bytes)
        self._unused = len(self._free)


class SlotBuffer:
    """The other process's end.

    Args:
        descriptor: The memory; closed by this.
        slot_bytes: The size of each slot.
    """

    def __init__(self, descriptor: int, slot_bytes: int = SLOT_BYTES) -> None:
        self._map = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        self._slot_bytes = slot_bytes
        self._rest = memoryview(b"")
        self._put_bytes = 0

    def begin(self, number: int) -> None:
        """From here on `put` has this slot, or none when it is `NO_SLOT`."""
        self._rest = memoryview(b"")
        if number != NO_SLOT:
            at = number * self._slot_bytes
            self._rest = memoryview(self._map)[at : at + self._slot_bytes]
        self._put_bytes = 0

    def put(self, chunk: Chunk) -> Chunk:
        """A copy of `chunk`: in the slot if it fits, else in memory of its own."""
        if chunk.nbytes > len(self._rest):
            return chunk.copied()
        crc = chunk.crc
        copy = self._rest[: chunk.nbytes]
        copy[:] = chunk.encode()
        self._rest = self._rest[chunk.nbytes :]
        self._put_bytes += chunk.nbytes
        return Chunk(copy, crc)

    def places(self, buffers: list[Buffer]) -> list[bool]:
        """Which of the buffers of an answer lie in the slot. In it there is nothing else, and all
        in the order of the answer."""
        found = [isinstance(one, memoryview) and one.obj is self._map for one in buffers]
        in_slot = sum(len(one) for one, is_there in zip(buffers, found, strict=True) if is_there)
        assert in_slot in (0, self._put_bytes), "something was put and is not in the answer"
        return found


def make_shared_memory() -> int | None:
    """A descriptor of memory that has no name; None where the system has no such thing."""
    if not (hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")):
        return None
    try:
        return os.memfd_create("upr-slots")
    except OSError:
        return None
