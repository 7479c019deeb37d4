"""Collecting operations until there are enough of them to send."""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as StructError
from typing import Final

import attrs

from upr_protocol.chunk import Buffer, Chunk, ChunkBuilder
from upr_protocol.errors import ServerError, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import Operation, PartitionId
from upr_protocol.limits import BUNDLE_MUTATIONS_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX

BUNDLE_MUTATIONS: Final = 1_024
"""Operations that fill a bundle. With more, what a bundle costs beside them hardly matters."""

BUNDLE_BYTES: Final = 256 * 1024
"""Bytes that fill a bundle: long enough for large sends, short enough that other messages do not
wait long for one bundle to pass."""

BUNDLE_BYTES_LIMIT: Final = 8 * 1024 * 1024
"""With one more value of the largest size, the batch still fits a frame."""

_OPERATION_BYTES: Final = 33
"""What an operation takes in a chunk beside its key and value."""

_NUMBERS: Final = Struct("<QII")
"""CAS, flags and expiry, as wide as in a chunk."""


@attrs.frozen
class BatchLimits:
    """When the collected operations are sent.

    Attributes:
        mutations: At this many operations, of all partitions together.
        nbytes: At about this many encoded bytes; a single operation may be longer.
        linger_s: After this time, however many there are.
    """

    mutations: int = attrs.field(
        default=BUNDLE_MUTATIONS,
        validator=[attrs.validators.ge(1), attrs.validators.le(BUNDLE_MUTATIONS_MAX)],
    )
    nbytes: int = attrs.field(
        default=BUNDLE_BYTES, validator=attrs.validators.le(BUNDLE_BYTES_LIMIT)
    )
    linger_s: float = 0.005


class Batcher:
    """The batch of each partition that is being filled. All are taken out together, so that they
    can ride in one bundle."""

    __slots__ = ("_begun_at", "_builders", "_count", "_limits", "_nbytes", "_partition_count")

    def __init__(self, partition_count: int, limits: BatchLimits) -> None:
        self._partition_count = partition_count
        self._limits = limits
        self._builders: dict[PartitionId, ChunkBuilder] = {}
        self._count = 0
        self._nbytes = 0
        self._begun_at = 0.0

    def __len__(self) -> int:
        """How many operations are collected."""
        return self._count

    def add(
        self,
        now: float,
        operation: Operation,
        key: bytes,
        value: Buffer = b"",
        *,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
    ) -> PartitionId:
        """Adds an operation, and gives its partition. O(1).

        Raises:
            ServerError: The key or the value is longer than any server takes, or a number does not
                fit a chunk; nothing was added.
        """
        check_sizes(key, value)
        if not self._count:
            self._begun_at = now
        partition = partition_of(key, self._partition_count)
        builder = self._builders.get(partition)
        if builder is None:
            builder = self._builders[partition] = ChunkBuilder()
        try:
            builder.append(operation, key, value, 0, cas, flags, expiry)
        except (OverflowError, TypeError):
            check_numbers(cas, flags, expiry)
            raise
        self._count += 1
        self._nbytes += _OPERATION_BYTES + len(key) + len(value)
        return partition

    @property
    def is_full(self) -> bool:
        """Whether there are enough operations."""
        return self._count >= self._limits.mutations or self._nbytes >= self._limits.nbytes

    @property
    def due_at(self) -> float | None:
        """When the oldest operation is due; None without operations."""
        return self._begun_at + self._limits.linger_s if self._count else None

    def take(self) -> list[tuple[PartitionId, Chunk]]:
        """Takes out the batch of every partition that has one."""
        # What was refused leaves an empty builder.
        batches = [
            (partition, builder.build())
            for partition, builder in self._builders.items()
            if len(builder)
        ]
        self._builders.clear()
        self._count = self._nbytes = 0
        return batches


def check_sizes(key: bytes, value: Buffer = b"") -> None:
    """Refuses what every server would refuse.

    Raises:
        ServerError: `BAD_KEY` or `TOO_LARGE`, as a server would.
    """
    if not 1 <= len(key) <= KEY_BYTES_MAX:
        raise ServerError(Status.BAD_KEY, f"a key of {len(key)} bytes")
    if len(value) > VALUE_BYTES_MAX:
        raise ServerError(Status.TOO_LARGE, f"a value of {len(value)} bytes")


def check_numbers(cas: int, flags: int, expiry: int) -> None:
    """Refuses what no chunk can hold.

    Raises:
        ServerError: `BAD_ARGUMENT`.
    """
    try:
        _NUMBERS.pack(cas, flags, expiry)
    except StructError as error:
        raise ServerError(
            Status.BAD_ARGUMENT,
            "a CAS is a whole number below 2**64, flags and an expiry in seconds are below 2**32, "
            f"and none is negative: {cas!r}, {flags!r}, {expiry!r}",
        ) from error


def next_bundle(source: Iterator[tuple[PartitionId, Chunk]]) -> list[tuple[PartitionId, Chunk]]:
    """As many batches as fill a bundle; fewer, or none, at the end of the source."""
    bundle: list[tuple[PartitionId, Chunk]] = []
    rows = nbytes = 0
    while rows < BUNDLE_MUTATIONS and nbytes < BUNDLE_BYTES:
        batch = next(source, None)
        if batch is None:
            break
        bundle.append(batch)
        rows += batch[1].count
        nbytes += batch[1].nbytes
    return bundle
