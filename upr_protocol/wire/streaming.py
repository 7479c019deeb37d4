"""Messages of the partition cycle: snapshots, barriers, acknowledgements."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from struct import Struct
from typing import Any, Final

import construct as cs
from crc32c import crc32c

from upr_kernel import pack_header
from upr_protocol.chunk import Buffer, Chunk
from upr_protocol.ids import NO_PARTITION, HistoryId, PartitionId, SeqNo, SnapshotKind
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_protocol.wire.columns import CHUNK, member, member_of, octets, row, tuple_of
from upr_protocol.wire.message import (
    AFTER_HANDSHAKE,
    DATA,
    SMALL_BYTES,
    STREAMING,
    Message,
    Role,
    SessionState,
    U64Message,
    allowed_in,
    check_end,
    unpack_whole,
)

_START: Final = Struct("<QQQQB?6x")
_U16: Final = Struct("<H")
_U64: Final = Struct("<Q")


class PartitionStart(Message, frozen=True):
    """A snapshot of one partition begins. A second `PartitionStart` before a `PartitionEnd`
    replaces the first.

    Attributes:
        start: The sequence number after which the snapshot begins.
        end: The last sequence number of the snapshot. The client is consistent when it has received
            everything up to it.
        may_repeat: Older versions of a key may appear before its newest.
    """

    opcode = 0x88
    sender = Role.SERVER
    states = STREAMING
    about_partition = True
    layout = cs.Struct(
        "history_id" / cs.Int64ul * "the history it belongs to",
        "start" / cs.Int64ul * "the sequence number after which it begins",
        "end" / cs.Int64ul * "the last sequence number it covers",
        "purge_seq" / cs.Int64ul * "deletions at or below it may be gone",
        "kind" / member(SnapshotKind) * "1 memory, 2 disk",
        "may_repeat" / cs.Flag * "whether older versions of a key may appear",
        "padding" / cs.Padding(6),
    )

    history_id: HistoryId
    start: SeqNo
    end: SeqNo
    purge_seq: SeqNo
    kind: SnapshotKind
    may_repeat: bool

    def body_buffers(self) -> tuple[Buffer, ...]:
        return (
            _START.pack(
                self.history_id, self.start, self.end, self.purge_seq, self.kind, self.may_repeat
            ),
        )

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        history_id, start, end, purge_seq, kind, may_repeat = unpack_whole(_START, body)
        kind = member_of(SnapshotKind, kind)
        return history_id, start, end, purge_seq, kind, may_repeat


class PartitionChunk(Message, frozen=True):
    """Some of the snapshot's mutations, in order. The body is the chunk alone, so all consumers get
    the same bytes."""

    opcode = 0x89
    sender = Role.SERVER
    states = STREAMING
    about_partition = True
    body_bytes_max = FRAME_BODY_BYTES_MAX
    layout = cs.Struct("chunk" / CHUNK * "a stored chunk")

    chunk: Chunk

    def body_buffers(self) -> tuple[Buffer, ...]:
        return (self.chunk.encode(),)

    def frame_buffers(self) -> list[Buffer]:
        # The chunk remembers its CRC: it is computed once, however many consumers there are.
        chunk = self.chunk
        header = pack_header(
            self.opcode, self.status, self.partition, self.opaque, chunk.nbytes, chunk.crc
        )
        return [header, chunk.encode()]

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        return (Chunk(body),)


class PartitionSnapshot(PartitionChunk, frozen=True):
    """A whole snapshot from memory in one frame, without repeated keys. Its history and purge
    sequence number are those of the stream's last `PartitionStart`; at least one comes before."""

    opcode = 0x8D


def chunk_frame(
    kind: type[PartitionChunk], chunk: Chunk, partition: PartitionId, opaque: int
) -> tuple[bytes, memoryview]:
    """The frame of a `PartitionChunk` or a `PartitionSnapshot`, as pieces, without the message."""
    header = pack_header(kind.opcode, 0, partition, opaque, chunk.nbytes, chunk.crc)
    return header, chunk.encode()


class PartitionEnd(U64Message, frozen=True):
    """The snapshot is complete. Only now is the client consistent, at `end`."""

    opcode = 0x8A
    sender = Role.SERVER
    states = STREAMING
    about_partition = True
    layout = cs.Struct("end" / cs.Int64ul * "the snapshot's last sequence number")

    end: SeqNo


class CycleEnd(U64Message, frozen=True):
    """The end of a cycle: the server has streamed or skipped every stream once more. It follows the
    first cycle, and each later cycle in which the server sent a snapshot."""

    opcode = 0x8B
    sender = Role.SERVER
    states = STREAMING
    layout = cs.Struct("cycle" / cs.Int64ul * "cycles completed, from 1")

    cycle: int


def cycle_end_frame(cycle: int) -> bytes:
    """The frame of a `CycleEnd`, without the message: a consumer that keeps up gets one for nearly
    every change."""
    body = _U64.pack(cycle)
    return pack_header(CycleEnd.opcode, 0, NO_PARTITION, 0, len(body), crc32c(body)) + body


class StreamEnds(tuple[tuple[PartitionId, SeqNo], ...]):  # noqa: SLOT001  # tuples have no slots
    """The ends that several `BarrierReply`s have in common. They are encoded once: 1,024 of them
    take 90 µs, and 64 barriers may return at a time."""

    @cached_property
    def encoded(self) -> bytes:
        """The ends, as `BarrierReply` has them."""
        return _packed_ends(self)


def _packed_ends(ends: Sequence[tuple[PartitionId, SeqNo]]) -> bytes:
    flat = [value for pair in ends for value in pair]
    return Struct("<H" + "HQ" * len(ends)).pack(len(ends), *flat)


class BarrierReply(Message, frozen=True):
    """Returns a barrier: since it arrived, the server has streamed or skipped every stream."""

    opcode = 0x8C
    sender = Role.SERVER
    states = STREAMING
    body_bytes_max = 64 * 1024
    layout = cs.Struct(
        "cookie" / octets() * "the cookie that was sent",
        "ends"
        / tuple_of(row(partition=cs.Int16ul, end=cs.Int64ul))
        * "for each accepted stream its partition and its last snapshot end; before the first one, "
        "the `last_complete` with which the stream began",
    )

    cookie: bytes
    ends: tuple[tuple[PartitionId, SeqNo], ...]

    def body_buffers(self) -> tuple[Buffer, ...]:
        ends = self.ends.encoded if isinstance(self.ends, StreamEnds) else _packed_ends(self.ends)
        cookie = _U16.pack(len(self.cookie)) + self.cookie
        return (cookie + ends,) if len(ends) <= SMALL_BYTES else (cookie, ends)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        (length,) = _U16.unpack_from(data)
        (count,) = _U16.unpack_from(data, 2 + length)
        check_end(data, 4 + length + 10 * count)
        flat = Struct("<" + "HQ" * count).unpack_from(data, 4 + length)
        return data[2 : 2 + length], tuple(zip(flat[::2], flat[1::2], strict=True))


class Barrier(Message, frozen=True):
    """The server returns a barrier when it has streamed everything that it had when the barrier
    arrived."""

    opcode = 0x0C
    sender = Role.CLIENT
    states = STREAMING
    layout = cs.Struct("cookie" / octets() * "1 to 64 bytes of the client's choice")

    cookie: bytes


class Ack(U64Message, frozen=True):
    """Adds to the window the bytes of frames that the client has handled since its last `Ack`."""

    opcode = 0x0D
    sender = Role.CLIENT
    states = STREAMING
    layout = cs.Struct("bytes" / cs.Int64ul * "bytes, in addition to earlier ones")

    bytes: int


class Noop(Message, frozen=True):
    """Shows only that its sender is alive."""

    opcode = 0x0E
    sender = Role.EITHER
    states = AFTER_HANDSHAKE
    layout = cs.Struct()


class StreamEnd(Message, frozen=True):
    """One partition's stream is over; the status says why."""

    opcode = 0x8F
    sender = Role.SERVER
    states = DATA
    about_partition = True
    status_meaning = "why the stream ended"
    layout = cs.Struct()


class CloseStream(Message, frozen=True):
    """Ends one partition's stream. `StreamEnd` follows."""

    opcode = 0x0F
    sender = Role.CLIENT
    states = DATA
    about_partition = True
    layout = cs.Struct()


class Close(Message, frozen=True):
    """The client ends the session."""

    opcode = 0x10
    sender = Role.CLIENT
    states = allowed_in(*AFTER_HANDSHAKE, leads_to=SessionState.CLOSED)
    layout = cs.Struct()
