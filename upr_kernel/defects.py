"""What can be wrong with an encoded chunk, as codes: the kernel's users have the sentences."""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class Defect(IntEnum):
    """A rule of the chunk's layout, broken. Of several, the first of this list is reported."""

    LAYOUT = 1
    """The lengths in the head do not add up to the buffer's."""
    KEY_SPAN = 2
    """The key offsets do not begin at 0, or do not end with the key bytes."""
    KEY_ORDER = 3
    """A key offset is below the one before it."""
    KEY_LENGTH = 4
    """A key is empty, or too long."""
    VALUE_SPAN = 5
    """The value offsets do not begin at 0, or do not end with the value bytes."""
    VALUE_ORDER = 6
    """A value offset is below the one before it."""
    VALUE_LENGTH = 7
    """A value is too long."""
    OPERATION = 8
    """An operation is not among those allowed."""
    OFFSETS = 9
    """The offsets of the rows asked for decrease, or leave the keys or values."""


class ChunkDefectError(ValueError):
    """A chunk is damaged. The only argument is the `Defect`'s code."""

    def __init__(self, code: int) -> None:
        super().__init__(Defect(code))

    @property
    def defect(self) -> Defect:
        """The rule that the chunk breaks."""
        defect: Defect = self.args[0]
        return defect

    def __str__(self) -> str:
        return f"the chunk is damaged: {self.defect.name}"
