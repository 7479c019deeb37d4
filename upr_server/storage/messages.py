"""How calls and their answers go through the pipe between the server and a worker process.

A message is a head, the record of each buffer, the msgpack message, and the buffers. Chunks go
beside the msgpack message, as they are: encoding them into it would copy them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, Final, Generic, TypeVar, Union

import msgspec
from msgspec.structs import replace

from upr_protocol.chunk import Buffer, Chunk
from upr_server.storage.calls import Commit, StoreCall, all_calls
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StoreFailedError,
    encodable,
)
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.shared_slots import NO_SLOT

AnyCall = TypeVar("AnyCall")
Item = TypeVar("Item")

HEAD: Final = Struct("<II?")
"""Length of the message, count of buffers, whether it is a failure. After it come a record of each
buffer, the message, and the buffers that are not in the slot."""

_RECORD: Final = Struct("<I?")
RECORD_BYTES: Final = _RECORD.size

STEP_ITEMS: Final = 2048
"""Snapshots and partitions that are packed before other tasks run: half a millisecond or so."""

ITEM_BYTES: Final = 512
"""Bytes of answers to publishers that cost as much as one of these."""

STEP_CHUNKS: Final = 512
"""Chunks of an answer that are made before other tasks run: a millisecond or two. A read of 1 MiB
may have 13,000, of one small mutation each."""

_CHUNK_LIST: Final = msgspec.msgpack.Decoder(list[tuple[int, int]])
"""Reads the length and checksum of each chunk."""


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
        kind, sentence = type(error).__name__, encodable(str(error))
        if kind not in _ERRORS:
            return cls(StoreFailedError.__name__, f"bug in the store: {kind}: {sentence}")
        return cls(kind, sentence)

    def error(self) -> StorageError:
        """The exception."""
        return _ERRORS[self.kind](self.sentence)


def message_head(
    message: bytes, buffers: Sequence[Buffer], in_slot: Sequence[bool], *, is_failure: bool = False
) -> bytes:
    """The bytes before a message. `in_slot` says of each buffer whether it is in the slot."""
    return HEAD.pack(len(message), len(buffers), is_failure) + _pack_records(buffers, in_slot)


def _pack_records(buffers: Sequence[Buffer], in_slot: Sequence[bool]) -> bytes:
    return b"".join(
        _RECORD.pack(len(buffer), is_in_slot)
        for buffer, is_in_slot in zip(buffers, in_slot, strict=True)
    )


def parse_records(data: Buffer) -> list[tuple[int, bool]]:
    """The buffers' lengths, and whether each is in the slot, where they lie one after the other."""
    return list(_RECORD.iter_unpack(data))


class _Packer:
    """Packs values of one message.

    Attributes:
        buffers: Those of the chunks so far, in their order in the message.
    """

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []

    def pack(self, value: object) -> bytes:
        """The value. In place of a chunk stands only its length and checksum."""
        return msgspec.msgpack.encode(value, enc_hook=self._put_aside)

    def _put_aside(self, chunk: object) -> tuple[int, int]:
        if not isinstance(chunk, Chunk):
            raise TypeError(f"{type(chunk).__name__} cannot be sent")
        self.buffers.append(chunk.encode())
        return chunk.nbytes, chunk.crc


def pack_message(value: object) -> tuple[bytes, list[Buffer]]:
    """A message, and the buffers of the chunks in it."""
    packer = _Packer()
    return packer.pack(value), packer.buffers


class RequestPacking:
    """Packs a request in steps: a commit may hold changes of all partitions, thousands of snapshots
    and answers to publishers. The bytes are those of `pack_message`.

    Args:
        call: The call.
        slot: The slot that is lent for the answer's chunks.

    Attributes:
        parts: What to send, one after the other; complete after the last step.
    """

    def __init__(self, call: StoreCall[Any], slot: int = NO_SLOT) -> None:
        self.parts: list[Buffer] = []
        self._request = StoreRequest(call, slot)
        self._packer = _Packer()

    def steps(self) -> Iterator[None]:
        """Packs it. Between steps others may run."""
        call, buffers = self._request.call, self._packer.buffers
        message: list[bytes] = []
        if isinstance(call, Commit):
            head, tail = self._around_writes(call)
            message.append(head)
            for packed_part in self._writes(call.writes):
                message.append(packed_part)
                yield
            message.append(tail)
        else:
            message.append(self._packer.pack(self._request))
        self.parts.append(HEAD.pack(sum(map(len, message)), len(buffers), False))
        for step in _in_steps(buffers):
            self.parts.append(_pack_records(step, [False] * len(step)))
            yield
        self.parts += [*message, *buffers]

    def _around_writes(self, commit: Commit) -> tuple[bytes, bytes]:
        """What stands before and behind the writes, which are the last field of a commit."""
        packed_request = self._packer.pack(
            StoreRequest(replace(commit, writes=()), self._request.slot)
        )
        tail = self._packer.pack(self._request.slot)
        head = packed_request.removesuffix(_array_head(0) + tail)
        assert head != packed_request, "something stands between the writes and the slot"
        return head, tail

    def _writes(self, writes: Sequence[PartitionWrite]) -> Iterator[bytes]:
        """They are joined in each step, but not as a whole: to copy 10 MB takes 3 ms."""
        packed_parts, item_count = [_array_head(len(writes))], 0
        for write in writes:
            write_count = 1 + len(write.chunks) + len(write.ends)
            write_count += write.answer_bytes // ITEM_BYTES
            if item_count + write_count > STEP_ITEMS:
                yield b"".join(packed_parts)
                packed_parts, item_count = [], 0
            if write_count > STEP_ITEMS:
                yield from self._fields(write)
            else:
                packed_parts.append(self._packer.pack(write))
                item_count += write_count
        yield b"".join(packed_parts)

    def _fields(self, write: PartitionWrite) -> Iterator[bytes]:
        fields = write.__struct_fields__
        yield _map_head(len(fields))
        for name in fields:
            yield self._packer.pack(name)
            value = getattr(write, name)
            if name in ("chunks", "ends"):
                yield _array_head(len(value))
                for step in _in_steps(value):
                    yield self._packer.pack(step).removeprefix(_array_head(len(step)))
            elif name == "answers":
                # Each is a step: they are not joined, nor packed together, as they may be many MB.
                yield _array_head(len(value))
                yield from map(self._packer.pack, value)
            else:
                yield self._packer.pack(value)


def _in_steps(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    for begin in range(0, len(items), STEP_ITEMS):
        yield items[begin : begin + STEP_ITEMS]


def _map_head(count: int) -> bytes:
    """What msgpack has before the names and values of a small map."""
    assert count < 1 << 4, "the head of a larger map has another form"
    return bytes([0x80 | count])


def _array_head(count: int) -> bytes:
    """What msgpack has before the items of an array."""
    if count < 1 << 4:
        return bytes([0x90 | count])
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def unpack_chunks(data: Buffer, buffers: Sequence[Buffer]) -> Iterator[Chunk]:
    """A message that is a list of chunks. Each is made when it is asked for, and refers to its
    buffer."""
    for buffer, (_, crc) in zip(buffers, _CHUNK_LIST.decode(data), strict=True):
        yield Chunk(buffer, crc)


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
