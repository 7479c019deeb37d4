"""How calls and their answers go through the pipe between the server and a worker process.

A message is a head, the record of each buffer, the msgpack message, and the buffers. Chunks go
beside the msgpack message, as they are: encoding them into it would copy them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, Final, Generic, TypeVar, Union

import msgspec

from upr_protocol.chunk import Buffer, Chunk
from upr_server.storage.calls import all_calls
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StoreFailedError,
)
from upr_server.storage.shared_slots import NO_SLOT

AnyCall = TypeVar("AnyCall")

HEAD: Final = Struct("<II?")
"""Length of the message, count of buffers, whether it is a failure. After it come a record of each
buffer, the message, and the buffers that are not in the slot."""

_RECORD: Final = Struct("<I?")
RECORD_BYTES: Final = _RECORD.size


class StoreRequest(msgspec.Struct, Generic[AnyCall], frozen=True, array_like=True):
    """What the server sends to a process.

    Attributes:
        call: The call to carry out.
        slot: The slot that is lent for the answer's chunks.
    """

    call: AnyCall
    slot: int = NO_SLOT


def request_type() -> Any:
    """The type to unpack a request as: it can hold any call that was imported by now."""
    return StoreRequest[Union[tuple(all_calls())]]  # type: ignore[misc]  # noqa: UP007  # made at run time


_ERRORS: Final[dict[str, type[StorageError]]] = {
    kind.__name__: kind
    for kind in (CorruptionError, DataDirectoryError, DiskFullError, StoreFailedError)
}


class CallFailure(msgspec.Struct, frozen=True):
    """A call did not succeed.

    Attributes:
        kind: The name of the `StorageError`.
        sentence: What went wrong.
    """

    kind: str
    sentence: str

    @classmethod
    def of(cls, error: Exception) -> CallFailure:
        """The failure for `error`. An error that is not a `StorageError` is a bug, and after it
        the state of the disk is unknown."""
        kind = type(error).__name__
        if kind not in _ERRORS:
            return cls(StoreFailedError.__name__, f"bug in the store: {kind}: {error}")
        return cls(kind, str(error))

    def error(self) -> StorageError:
        """The exception."""
        return _ERRORS[self.kind](self.sentence)


def message_head(
    message: bytes, buffers: Sequence[Buffer], in_slot: Sequence[bool], *, failed: bool = False
) -> bytes:
    """The bytes before a message. `in_slot` says of each buffer whether it is in the slot."""
    records = b"".join(
        _RECORD.pack(len(buffer), is_in_slot)
        for buffer, is_in_slot in zip(buffers, in_slot, strict=True)
    )
    return HEAD.pack(len(message), len(buffers), failed) + records


def parse_records(data: Buffer) -> list[tuple[int, bool]]:
    """The buffers' lengths, and whether each is in the slot, where they lie one after the other."""
    return list(_RECORD.iter_unpack(data))


def pack_message(value: object) -> tuple[bytes, list[Buffer]]:
    """A message, and the buffers of the chunks in it. In the message stands only a chunk's length
    and checksum."""
    buffers: list[Buffer] = []

    def put_aside(chunk: object) -> tuple[int, int]:
        if not isinstance(chunk, Chunk):
            raise TypeError(f"{type(chunk).__name__} cannot be sent")
        buffers.append(chunk.encode())
        return chunk.nbytes, chunk.crc

    return msgspec.msgpack.encode(value, enc_hook=put_aside), buffers


class Unpacker:
    """The reverse of `pack_message`, for one thread. It keeps the decoder of each type: making one
    costs more than a hundred small messages."""

    def __init__(self) -> None:
        self._decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
        self._buffers: Iterator[Buffer] = iter(())

    def unpack(self, data: Buffer, kind: Any, buffers: Iterable[Buffer]) -> Any:
        """The value; its chunks refer to `buffers`."""
        decoder = self._decoders.get(kind)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._chunk)
            self._decoders[kind] = decoder
        self._buffers = iter(buffers)
        try:
            return decoder.decode(data)
        finally:
            self._buffers = iter(())

    def _chunk(self, _kind: type, length_and_crc: tuple[int, int]) -> Chunk:
        return Chunk(next(self._buffers), length_and_crc[1])
