"""Memory for frame bodies that is used again once nobody refers to it.

New memory must be zeroed, and the system finds its pages one by one; memory used just now is still
in the processor's caches. For a consumer, which handles bodies and forgets them, that is an eighth
of all that a chunk costs. A session gets `FrameMemory(...).allocate`; a server's sessions, whose
bodies stay, get new memory for each from `new_memory`.
"""

from __future__ import annotations

import mmap
from typing import Final

from upr_protocol.chunk import Buffer
from upr_protocol.wire.frame import TRUSTED_BYTES_MAX

BLOCK_BYTES: Final = 576 * 1024
"""Most chunks are shorter: a server makes them of 512 KiB, and counts some of these by their mean
length. Longer ones get memory of their own."""

SHORT_BYTES: Final = 32 * 1024
"""Bodies that are shorter are not worth a block."""

BLOCKS: Final = 6
"""Mostly no more bodies than this are between the reader and the application: one that arrives,
four of 150 kB that were read at once, and the one that the application has. With four blocks a
tenth of a consumer's time went into new memory. An application that keeps bodies for long holds
these few blocks, and of other bodies only what they need."""


def new_memory(size: int) -> Buffer:
    """`size` writable bytes. The memory of a large body is mapped: its pages are made when bytes
    are put into them.

    Raises:
        OSError: The system has no memory.
    """
    if size <= TRUSTED_BYTES_MAX:
        return bytearray(size)
    # A bytearray is zeroed when it is made, so it has all its pages at once.
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class FrameMemory:
    """A few blocks, handed out again when their last view is gone. For one thread; the views may be
    anywhere.

    Args:
        count: How many blocks to keep at most. Each is made when it is needed first, and stays.
    """

    __slots__ = ("_blocks", "_count")

    def __init__(self, count: int = BLOCKS) -> None:
        self._blocks: list[bytearray] = []
        self._count = count

    def allocate(self, size: int) -> Buffer:
        """`size` writable bytes of any content: a free block, or new memory if there is none."""
        if not SHORT_BYTES <= size <= BLOCK_BYTES:
            return new_memory(size)
        # The first free block is taken: the fewer blocks are in use, the more of them the
        # processor's caches hold.
        block = next(filter(_is_free, self._blocks), None)
        if block is None:
            if len(self._blocks) >= self._count:
                return bytearray(size)
            block = bytearray(BLOCK_BYTES)
            self._blocks.append(block)
        return memoryview(block)[:size]


def _is_free(block: bytearray) -> bool:
    """Whether nobody holds a view of `block`, or a view of such a view."""
    try:
        # Python lets a bytearray change its length only then.
        block.append(block.pop())
    except BufferError:
        return False
    return True
