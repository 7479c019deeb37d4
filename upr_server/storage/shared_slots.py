"""Memory that the server shares with the process that reads: large chunks go through it.

The memory is divided into slots. With each large read the server lends a free slot. The process
puts the chunks there, one after the other from the slot's beginning, and answers with their
lengths. The server's chunks are views of the slot, and the last view that dies gives the slot back.
So nobody counts references: code that keeps a chunk for long keeps one slot, and nothing else.
Without a free slot, and for what does not fit, chunks go through the pipe.

A page of the memory is resident from its first write until `trim`, which gives back what has not
been used since the call before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import attrs

from upr_protocol.chunk import Buffer, Chunk
from upr_server.storage.errors import StoreFailedError

SLOT_BYTES: Final = 2 * 1024 * 1024
"""A read of 1 MiB ends with the chunk that reaches it. All of that fits, unless the chunk is very
large. What is not written of a slot takes no memory."""

SLOTS: Final = 256
"""Two for each of 128 partitions that are read from disk at once: one that is sent, and one ahead.
With 64, a third of the reads of 64 partitions found none and went through the pipe, which took half
of the server's time. Slots are addresses first. What is written of them is what backfills hold
within their budget, plus the rest of a slot while a chunk of it is not sent."""

NO_SLOT: Final = -1
"""Stands for a slot's number when none is lent."""


@attrs.frozen
class Slot:
    """A slot that is lent.

    Attributes:
        number: The slot's number.
        view: Its bytes, read-only. While the view or a slice of it lives, the slot is not lent
            again.
    """

    number: int
    view: memoryview


class SlotPool:
    """The server's end, for one thread.

    Args:
        descriptor: The memory. It may be closed once this is made.
        count: How many slots there are.
        slot_bytes: The size of each, a multiple of the system's page size.

    Raises:
        StoreFailedError: The system allows no file of this size, and the memory counts as one.
    """

    def __init__(self, descriptor: int, count: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        try:
            os.ftruncate(descriptor, count * slot_bytes)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise StoreFailedError(
                f"the memory that the server shares with the process that reads counts as a file "
                f"of {count * slot_bytes >> 20} MiB, and the system allows no file of this size; "
                "raise the limit of a file's size (`ulimit -f unlimited`)"
            ) from error
        self._map = mmap.mmap(descriptor, count * slot_bytes)
        self._slot_bytes = slot_bytes
        self._block = ctypes.c_ubyte * slot_bytes
        self._free_slots = list(range(count))
        """A stack: the slot used last is lent next, and the others stay untouched."""
        self._unused_count = count
        """How many at the stack's bottom were not lent since `trim`."""
        self._resident_slots: set[int] = set()
        """The slots that may take memory."""

    def __len__(self) -> int:
        """How many are free."""
        return len(self._free_slots)

    def acquire(self) -> Slot | None:
        """A slot, for as long as its view lives; None when none is free. O(1)."""
        if not self._free_slots:
            return None
        slot = self._free_slots.pop()
        self._unused_count = min(self._unused_count, len(self._free_slots))
        self._resident_slots.add(slot)
        # All views of the slot share this array. It dies with the last of them, and can be watched:
        # the map lives on, and a memoryview cannot be watched through its slices.
        block = self._block.from_buffer(self._map, slot * self._slot_bytes)
        weakref.finalize(block, self._free_slots.append, slot).atexit = False
        return Slot(slot, memoryview(block).cast("B").toreadonly())

    def trim(self) -> Iterator[None]:
        """Gives the system back the memory of slots that were free ever since the last call. One in
        each step, which takes up to half a millisecond; slots may be lent between two."""
        place = 0
        while place < self._unused_count:
            slot = self._free_slots[place]
            place += 1
            if slot in self._resident_slots:
                self._resident_slots.discard(slot)
                # A sandbox may lack this call. Then the memory stays resident.
                with suppress(OSError):
                    self._map.madvise(mmap.MADV_REMOVE, slot * self._slot_bytes, self._slot_bytes)
                yield
        self._unused_count = len(self._free_slots)


class SlotBuffer:
    """The process's end: what is left of the slot that it was lent.

    Args:
        descriptor: The memory; this closes it.
        slot_bytes: The size of each slot.
    """

    def __init__(self, descriptor: int, slot_bytes: int = SLOT_BYTES) -> None:
        self._map = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        self._slot_bytes = slot_bytes
        self._remaining_memory = memoryview(b"")
        self._put_bytes = 0

    def begin_answer(self, slot: int) -> None:
        """Begins an answer: `put_chunk` writes to this slot, or to none if it is `NO_SLOT`."""
        self._remaining_memory = memoryview(b"")
        if slot != NO_SLOT:
            offset = slot * self._slot_bytes
            self._remaining_memory = memoryview(self._map)[offset : offset + self._slot_bytes]
        self._put_bytes = 0

    def put_chunk(self, chunk: Chunk) -> Chunk:
        """Copies a chunk: into the slot if it fits, otherwise into memory of its own."""
        if chunk.nbytes > len(self._remaining_memory):
            return chunk.copied()
        crc = chunk.crc
        copy = self._remaining_memory[: chunk.nbytes]
        copy[:] = chunk.encode()
        self._remaining_memory = self._remaining_memory[chunk.nbytes :]
        self._put_bytes += chunk.nbytes
        return Chunk(copy, crc)

    def are_in_slot(self, buffers: list[Buffer]) -> list[bool]:
        """Which buffers of an answer are in the slot. They are all that the slot holds, in the
        order of the answer: the server finds them by their lengths alone."""
        in_slot = [isinstance(buffer, memoryview) and buffer.obj is self._map for buffer in buffers]
        nbytes = sum(
            len(buffer) for buffer, is_in_slot in zip(buffers, in_slot, strict=True) if is_in_slot
        )
        assert nbytes in (0, self._put_bytes), "a chunk in the slot is not in the answer"
        return in_slot


def make_shared_memory() -> int | None:
    """A descriptor of anonymous memory; None where the system does not offer it."""
    if not (hasattr(os, "memfd_create") and hasattr(mmap, "MADV_REMOVE")):
        return None
    try:
        return os.memfd_create("upr-slots")
    except OSError:
        return None
