"""Memory for frame bodies that is used again once nobody refers to it.

New memory must be zeroed, and the system finds its pages one by one; what was used just now is
still in the processor's caches. For one who deals with bodies and forgets them, as a consumer does,
that is an eighth of all that a chunk costs.
"""

from __future__ import annotations

from typing import Final

from upr_protocol.chunk import Buffer

BLOCK_BYTES: Final = 256 * 1024
"""Most chunks are shorter. Longer ones get memory of their own."""

BLOCKS: Final = 4
"""As many bodies are between the reader and the application, mostly. Who keeps bodies for long
keeps these few blocks, and of the others only what they need."""


class Blocks:
    """A few blocks, taken anew when their last view is gone. To be used by one thread; the views
    may be anywhere.

    Args:
        count: How many blocks there may be. They are made when they are needed first, and stay.
    """

    __slots__ = ("_blocks", "_count")

    def __init__(self, count: int) -> None:
        self._blocks: list[bytearray] = []
        self._count = count

    def take(self, size: int) -> Buffer:
        """`size` writable bytes, whatever is in them; in a block when there is a free one."""
        if not BLOCK_BYTES // 8 <= size <= BLOCK_BYTES:
            return bytearray(size)
        # The first that is free: the fewer are in use, the warmer they are.
        block = next(filter(_is_free, self._blocks), None)
        if block is None:
            if len(self._blocks) >= self._count:
                return bytearray(size)
            block = bytearray(BLOCK_BYTES)
            self._blocks.append(block)
        return memoryview(block)[:size]


def _is_free(block: bytearray) -> bool:
    """Whether there is no view of `block`, or of a view of it: its length may be changed only
    then."""
    try:
        block.append(block.pop())
    except BufferError:
        return False
    return True
