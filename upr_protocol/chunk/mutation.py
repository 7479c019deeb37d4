"""One mutation as a row, and what an increment or decrement asks for."""

from __future__ import annotations

from struct import Struct
from typing import Final

import msgspec

from upr_protocol.chunk.layout import Buffer
from upr_protocol.errors import ChunkError
from upr_protocol.ids import Cas, Operation, SeqNo

_DELTA: Final = Struct("<QQ?7x")

COUNTER_DELTA_BYTES: Final = _DELTA.size


class Mutation(msgspec.Struct, frozen=True, order=False):
    """One mutation, as a row. The package's docstring describes the columns.

    In a published chunk `seq` is 0 and `cas` is the expected CAS; in a stored one they are the
    mutation's own.
    """

    op: Operation
    key: bytes
    value: bytes = b""
    seq: SeqNo = SeqNo(0)
    cas: Cas = Cas(0)
    flags: int = 0
    expiry: int = 0


class CounterDelta(msgspec.Struct, frozen=True):
    """The value of an increment or decrement in a published chunk.

    Attributes:
        delta: How much to add or subtract, below 2**64.
        initial: The value that a missing counter starts at; the delta is not applied to it.
        create: Whether to create a missing counter; otherwise a missing counter is an error.
    """

    delta: int
    initial: int = 0
    create: bool = True

    def encode(self) -> bytes:
        """The 24 bytes of the value column."""
        return _DELTA.pack(self.delta, self.initial, self.create)

    @classmethod
    def decode(cls, data: Buffer) -> CounterDelta:
        """The reverse of `encode`; raises `ChunkError` when the length is wrong."""
        if len(data) != _DELTA.size:
            raise ChunkError(f"a counter's delta is {_DELTA.size} bytes, not {len(data)}")
        return cls(*_DELTA.unpack(data))
