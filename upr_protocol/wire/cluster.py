"""The partition map, and what replicas are sent and report beside the changes."""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import construct as cs

from upr_protocol.chunk import Buffer
from upr_protocol.errors import Status
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.limits import FRAME_BODY_BYTES_MAX
from upr_protocol.wire.columns import (
    LayoutError,
    octets,
    pack_text,
    row,
    text,
    tuple_of,
    unpack_text,
)
from upr_protocol.wire.message import (
    CONTROL,
    DATA,
    STREAMING,
    Message,
    Role,
    check_end,
)

_ENDS: Final = Struct("<HQQQ")
_MAP: Final = Struct("<QI")
_U16: Final = Struct("<H")
_U32: Final = Struct("<I")
_ANSWER: Final = Struct("<16sQQI")


class MapReply(Message, frozen=True):
    """The partition map that the node has now."""

    opcode = 0xA0
    sender = Role.SERVER
    states = CONTROL
    # More than `SetMap`: the node adds its name, and may write the same map with more characters.
    body_bytes_max = 2 * 1024 * 1024
    layout = cs.Struct(
        "revision" / cs.Int64ul * "the map's revision; 0: the node has no map of the bucket",
        "document" / text(cs.Int32ul) * "the map, as JSON; empty for revision 0",
        "node" / text() * "the answering node's name in maps",
    )

    revision: int
    document: str
    node: str = ""

    # Nodes and clients ask for maps again and again, and more so while something is wrong.

    def body_buffers(self) -> tuple[Buffer, ...]:
        document = self.document.encode()
        head = _MAP.pack(self.revision, len(document))
        return (head + document + pack_text(self.node),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        revision, length = _MAP.unpack_from(data)
        offset = _MAP.size + length
        document = data[_MAP.size : offset].decode()
        node, end = unpack_text(data, offset)
        check_end(data, end)
        return revision, document, node


class GetMap(Message, frozen=True):
    """Asks for a bucket's partition map, and for the node's name."""

    opcode = 0x20
    sender = Role.CLIENT
    states = CONTROL
    answers = (MapReply,)
    refusals = (Status.NO_BUCKET, Status.DAMAGED)
    layout = cs.Struct(
        "bucket" / text() * "the bucket's name; empty to ask for the node's name only"
    )

    bucket: str

    def body_buffers(self) -> tuple[Buffer, ...]:
        return (pack_text(self.bucket),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        data = bytes(body)
        bucket, end = unpack_text(data, 0)
        check_end(data, end)
        return (bucket,)


_REFUSED_MAPS: Final = (
    Status.WRONG_STATE,
    Status.BAD_ARGUMENT,
    Status.TEMPORARY_FAILURE,
    Status.LIMIT_REACHED,
    Status.DAMAGED,
    Status.REVISION_CONFLICT,
)
"""Why a node does not apply a partition map."""


class SetMap(Message, frozen=True):
    """Replaces a node's partition map. When the node answers, it has applied the map. If its old
    map does not have the expected revision, it refuses with `REVISION_CONFLICT`. If the map needs
    everything of a partition from this node, and its copy may have less, it refuses with
    `WRONG_STATE`."""

    opcode = 0x21
    sender = Role.CLIENT
    states = DATA
    body_bytes_max = 1024 * 1024
    answers = (MapReply,)
    refusals = _REFUSED_MAPS
    layout = cs.Struct(
        "expected_revision" / cs.Int64ul * "the revision that it replaces; 0 for none",
        "document" / text(cs.Int32ul) * "the map, as JSON",
    )

    expected_revision: int
    document: str


class Join(Message, frozen=True):
    """For a node that does not have the bucket: it asks the node at `address` for the partition
    map, and applies it. A node that has the bucket gets maps with `SetMap`."""

    opcode = 0x22
    sender = Role.CLIENT
    states = CONTROL
    answers = (MapReply,)
    refusals = _REFUSED_MAPS
    layout = cs.Struct(
        "bucket" / text() * "the bucket's name",
        "address" / text() * "`HOST:PORT` of a node that has the map",
    )

    bucket: str
    address: str


class PartitionAnswers(Message, frozen=True):
    """Answers to publishers, for the runs in one snapshot: the snapshot that has begun, or the
    `PartitionSnapshot` that follows. Only streams `with_answers` have it."""

    opcode = 0xA2
    sender = Role.SERVER
    states = STREAMING
    about_partition = True
    body_bytes_max = FRAME_BODY_BYTES_MAX
    layout = cs.Struct(
        "rows"
        / tuple_of(
            row(writer=cs.Bytes(16), counter=cs.Int64ul, seq=cs.Int64ul, answer=octets(cs.Int32ul)),
            cs.Int32ul,
        )
        * "of each run its writer, its counter, the partition's highest sequence number then, and "
        "the answer as the server keeps it, oldest first",
    )

    rows: tuple[tuple[bytes, int, int, bytes], ...]

    # There may be as many as there are batches in a snapshot.

    def body_buffers(self) -> tuple[Buffer, ...]:
        pieces = [_U32.pack(len(self.rows))]
        for writer, counter, seq, answer in self.rows:
            if len(writer) != 16:
                raise ValueError("a writer has 16 bytes")
            pieces += (_ANSWER.pack(writer, counter, seq, len(answer)), answer)
        return (b"".join(pieces),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        rows = []
        (count,) = _U32.unpack_from(body)
        if count * _ANSWER.size > len(body):
            raise LayoutError(f"a body of {len(body)} bytes cannot hold {count} rows")
        offset = _U32.size
        for _ in range(count):
            writer, counter, seq, length = _ANSWER.unpack_from(body, offset)
            offset += _ANSWER.size
            answer = bytes(body[offset : offset + length])
            offset += length
            rows.append((writer, counter, seq, answer))
        # A truncated answer is the last one, and would end after the body.
        check_end(body, offset)
        return (tuple(rows),)


class ReplicaAck(Message, frozen=True):
    """A replica reports the complete snapshot ends that it has received and persisted, for any
    number of partitions. The server does not answer."""

    opcode = 0x16
    sender = Role.CLIENT
    states = DATA
    body_bytes_max = 32 * 1024
    layout = cs.Struct(
        "rows"
        / tuple_of(
            row(
                partition=cs.Int16ul,
                history_id=cs.Int64ul,
                received=cs.Int64ul,
                persisted=cs.Int64ul,
            )
        )
        * "for each partition the history the ends belong to, and the last complete snapshot ends "
        "received and persisted",
    )

    rows: tuple[tuple[PartitionId, HistoryId, SeqNo, SeqNo], ...]

    # They come for nearly every change.

    def body_buffers(self) -> tuple[Buffer, ...]:
        return (_U16.pack(len(self.rows)) + b"".join([_ENDS.pack(*row) for row in self.rows]),)

    @classmethod
    def unpack_body(cls, body: Buffer) -> tuple[Any, ...]:
        (count,) = _U16.unpack_from(body)
        end = _U16.size + _ENDS.size * count
        check_end(body, end)
        return (tuple(_ENDS.iter_unpack(memoryview(body)[_U16.size : end])),)
