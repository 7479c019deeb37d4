"""What is asked of a library, as values, and how they go through a pipe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec

from upr_protocol.chunk import Buffer, Chunk, Mutation
from upr_protocol.ids import SeqNo
from upr_server.engine import Want
from upr_server.storage.chunk_log import PartitionWrite, StoredBucket, Token
from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StorageError,
    StoreFailedError,
)
from upr_server.storage.key_index import Due
from upr_server.storage.port import Upkeep
from upr_server.storage.records import BucketRecord, LeaseRecord, PartitionRecord


class Call(msgspec.Struct, frozen=True, tag=True):
    """A request.

    Attributes:
        answer_type: What is answered.
    """

    answer_type: ClassVar[Any] = None


class Load(Call, frozen=True, tag=True):
    """`Store.load`."""

    answer_type: ClassVar[Any] = list[StoredBucket]


class Create(Call, frozen=True, tag=True):
    """`Store.create`."""

    record: BucketRecord
    partitions: Sequence[PartitionRecord]


class Delete(Call, frozen=True, tag=True):
    """`Store.delete`."""

    bucket: str


class Forget(Call, frozen=True, tag=True):
    """A bucket is about to be deleted by another process: lets go of it."""

    bucket: str


class Begin(Call, frozen=True, tag=True):
    """`Store.begin`."""

    bucket: str
    records: Sequence[tuple[int, PartitionRecord]]


class Finish(Call, frozen=True, tag=True):
    """`Store.finish`."""

    bucket: str


class Commit(Call, frozen=True, tag=True):
    """`Store.commit`."""

    bucket: str
    writes: Sequence[PartitionWrite]


class PutLease(Call, frozen=True, tag=True):
    """`Store.put_lease`."""

    bucket: str
    lease: LeaseRecord


class DeleteLeases(Call, frozen=True, tag=True):
    """`Store.delete_leases`."""

    bucket: str
    lease_ids: Sequence[int]


class PutMap(Call, frozen=True, tag=True):
    """`Store.put_map`."""

    bucket: str
    document: str
    records: Sequence[tuple[int, PartitionRecord]]


class Cut(Call, frozen=True, tag=True):
    """`Store.cut`."""

    bucket: str
    partition: int
    record: PartitionRecord
    tokens: Sequence[Token]

    answer_type: ClassVar[Any] = list[int]


class ForgetIndex(Call, frozen=True, tag=True):
    """A step of `Store.cut` to 0."""

    bucket: str
    partition: int

    answer_type: ClassVar[Any] = bool


class NewestEnd(Call, frozen=True, tag=True):
    """`Store.newest_end`."""

    bucket: str
    partition: int
    ceiling: SeqNo
    floor: SeqNo

    answer_type: ClassVar[Any] = SeqNo | None


class UpkeepStep(Call, frozen=True, tag=True):
    """`Store.upkeep`; the answer has the bucket's figures, too."""

    bucket: str
    urgent: bool
    leases: Sequence[tuple[int, int, int]]
    lapsed: Sequence[LeaseRecord]
    purge_before_cas: int
    keep: int = 0

    answer_type: ClassVar[Any] = tuple[Upkeep, dict[str, Any]]


class Read(Call, frozen=True, tag=True):
    """`Store.read`."""

    bucket: str
    partition: int
    after: SeqNo
    through: SeqNo
    bytes_max: int

    answer_type: ClassVar[Any] = list[Chunk]


class Measure(Call, frozen=True, tag=True):
    """`Store.measure`."""

    bucket: str
    ranges: Sequence[tuple[int, int, int]]

    answer_type: ClassVar[Any] = list[int]


class Find(Call, frozen=True, tag=True):
    """`Store.find`."""

    bucket: str
    partition: int
    wants: Sequence[Want]
    indexed: int

    answer_type: ClassVar[Any] = list[Mutation | None]


class FindDue(Call, frozen=True, tag=True):
    """`Store.due`."""

    bucket: str
    now: int
    after: bytes
    limit: int

    answer_type: ClassVar[Any] = tuple[list[Due], bytes]


AnyCall = (
    Load
    | Create
    | Delete
    | Forget
    | Begin
    | Finish
    | Commit
    | PutLease
    | DeleteLeases
    | PutMap
    | Cut
    | ForgetIndex
    | NewestEnd
    | UpkeepStep
    | Read
    | Measure
    | Find
    | FindDue
)

READS: Final = (Read, Measure, Find, FindDue, NewestEnd)
"""Calls that change nothing: they are answered beside those that do."""

_ERRORS: Final[dict[str, type[StorageError]]] = {
    kind.__name__: kind
    for kind in (CorruptionError, DataDirectoryError, DiskFullError, StoreFailedError)
}


class Failure(msgspec.Struct, frozen=True):
    """A call did not succeed.

    Attributes:
        kind: The name of the `StorageError`.
        sentence: What went wrong.
    """

    kind: str
    sentence: str

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """What is said of `error`. One that is no `StorageError` is a fault of ours: nothing can be
        said of the disk after it."""
        kind = type(error).__name__
        if kind not in _ERRORS:
            return cls(StoreFailedError.__name__, f"a fault in the store: {kind}: {error}")
        return cls(kind, str(error))

    def error(self) -> StorageError:
        """The exception."""
        return _ERRORS[self.kind](self.sentence)


# Packing: chunks go beside the message, as they are.


def pack(value: object) -> tuple[bytes, list[Buffer]]:
    """A message, and the buffers of the chunks in it."""
    buffers: list[Buffer] = []

    def chunk(found: object) -> tuple[int, int]:
        if not isinstance(found, Chunk):
            raise TypeError(f"{type(found).__name__} cannot be sent")
        buffers.append(found.encode())
        return found.nbytes, found.crc

    return msgspec.msgpack.encode(value, enc_hook=chunk), buffers


class Unpacker:
    """The reverse of `pack`. To be used by one thread. It keeps the decoder of each type, as making
    one costs more than a hundred small messages."""

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

    def _chunk(self, _kind: type, given: tuple[int, int]) -> Chunk:
        return Chunk(next(self._buffers), given[1])
