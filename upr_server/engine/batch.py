"""The batch: what a publisher sends to one partition at once, a run of its bundle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, cast

from upr_kernel import HAS_PREFIX, MAY_EXPIRE, UNCONDITIONAL
from upr_protocol.chunk import COUNTER_DELTA_BYTES, Buffer, Bundle, BundleRun, Chunk, CounterDelta
from upr_protocol.errors import ChunkError, Status
from upr_protocol.ids import DESIGN_PREFIX, NO_WRITER, SeqNo
from upr_server.engine.operations import COUNTS
from upr_server.engine.publisher_answers import WriterToken

_NO_MISFITS: Final[Mapping[int, Status]] = MappingProxyType({})


class CheckedChunk:
    """A published chunk, with what one look at whole columns tells. It keeps the rules, but for
    keys and values of a wrong length: each such row fails alone.

    Attributes:
        encoded: The chunk's bytes.
        misfits: The rows that fail for the length of their key or value, each with the reason.
        is_unconditional: Whether each mutation is a `SET` that expects no CAS, and none fails.
        may_expire: Whether any mutation has an expiry time.
        may_hold_designs: Whether any key may be a design document's.

    Raises:
        ChunkError: The chunk breaks a rule of published chunks.
    """

    __slots__ = (
        "_chunk",
        "_keys",
        "encoded",
        "is_unconditional",
        "may_expire",
        "may_hold_designs",
        "misfits",
    )

    def __init__(self, chunk: Chunk) -> None:
        misfits: Mapping[int, Status] = _NO_MISFITS
        try:
            flags = chunk.published_flags()
        except ChunkError:
            misfits = chunk.published_misfits()
            # Such a chunk's rows are not searched for these two. So both count as possible.
            flags = MAY_EXPIRE | HAS_PREFIX
        self._chunk: Chunk | None = chunk
        self._keys: list[bytes] | None = None
        self.encoded: Buffer = chunk.encode()
        self.misfits = misfits
        self.is_unconditional = flags & UNCONDITIONAL != 0
        self.may_expire = flags & MAY_EXPIRE != 0
        self.may_hold_designs = flags & HAS_PREFIX != 0
        if not self.is_unconditional:
            _check_counters(chunk)

    @property
    def chunk(self) -> Chunk:
        """The chunk."""
        if self._chunk is None:
            self._chunk = Chunk(self.encoded)
        return self._chunk

    @property
    def keys(self) -> list[bytes]:
        """The chunk's keys. O(rows) for the first call: most batches are applied without."""
        if self._keys is None:
            self._keys = self.chunk.keys()
        return self._keys


class CheckedSets(CheckedChunk):
    """A chunk that the kernel has made of `SET`s that expect no CAS, and checked. Mostly it is
    stored without a look at its columns.

    Args:
        encoded: The chunk's bytes.
        flags: What the kernel says of it.
    """

    __slots__ = ()

    def __init__(self, encoded: Buffer, flags: int) -> None:
        self._chunk = self._keys = None
        self.encoded = encoded
        self.misfits = _NO_MISFITS
        self.is_unconditional = True
        self.may_expire = flags & MAY_EXPIRE != 0
        self.may_hold_designs = flags & HAS_PREFIX != 0


class MutationBatch:
    """A publisher's batch, checked: some neighbouring rows of a chunk.

    Args:
        columns: The chunk; the engine keeps rows of it, or copies.
        low: The batch's first row.
        high: One more than its last.
        token: The batch's name; None for one that nobody will send again.
        attempt: Which run of the publisher's task sends it; 0 where it has none.
        chain: What the publisher gives to vouch for the batch and all before it; 0 for nothing.
    """

    __slots__ = ("attempt", "chain", "columns", "high", "low", "token")

    def __init__(
        self,
        columns: CheckedChunk,
        low: int,
        high: int,
        token: WriterToken | None = None,
        attempt: int = 0,
        chain: int = 0,
    ) -> None:
        self.columns = columns
        self.low = low
        self.high = high
        self.token = token
        self.attempt = attempt
        self.chain = chain

    def __len__(self) -> int:
        return self.high - self.low

    @property
    def keys(self) -> list[bytes]:
        """Its keys. O(rows)."""
        return self.columns.keys[self.low : self.high]

    @property
    def chunk(self) -> Chunk:
        """Its rows as a chunk of their own. A copy each time, unless they are the whole chunk."""
        chunk = self.columns.chunk
        if len(self) == chunk.count:
            return chunk
        return chunk.rows(self.low, self.high, SeqNo(0), SeqNo(0))

    @property
    def misfits(self) -> Mapping[int, Status]:
        """Which of its rows fail for the length of their key or value, by place in the batch.
        O(rows), O(1) where no row of the chunk does."""
        misfits, low = self.columns.misfits, self.low
        if not misfits:
            return misfits
        return {row - low: misfits[row] for row in range(low, self.high) if row in misfits}

    @property
    def is_plain(self) -> bool:
        """Whether each mutation is a `SET` that expects no CAS and has a key and value of right
        lengths. Such a batch cannot fail, whatever the keys hold. O(rows), O(1) if the whole chunk
        is so."""
        return self.columns.is_unconditional or (
            self.columns.chunk.are_unconditional(self.low, self.high) and not self.misfits
        )

    def piece(self, begin: int, rows_max: int, bytes_max: int) -> Chunk:
        """Some of its rows as a chunk of their own: a copy, unless they are the whole chunk.

        Args:
            begin: Which of its rows is the first.
            rows_max: How many at most.
            bytes_max: How many bytes of values at most, if it is more than one row.
        """
        chunk, low = self.columns.chunk, self.low + begin
        high = min(low + rows_max, self.high)
        if high - low == chunk.count and chunk.nbytes <= bytes_max:
            return chunk
        offsets = cast("Sequence[int]", chunk.value_offsets)
        if offsets[high] - offsets[low] > bytes_max:
            # The last row that ends within the bytes; the first one in any case.
            high = bisect_right(offsets, offsets[low] + bytes_max, low + 2, high + 1) - 1
        return chunk.rows(low, high, SeqNo(0), SeqNo(0))


def batch_of(
    chunk: Chunk, token: WriterToken | None = None, *, attempt: int = 0, chain: int = 0
) -> MutationBatch:
    """A batch of all rows of a published chunk.

    Raises:
        ChunkError: The chunk breaks a rule of published chunks.
    """
    return MutationBatch(CheckedChunk(chunk), 0, chunk.count, token, attempt, chain)


class BundleBatches:
    """The batches of a bundle, one a run, each made when it is asked for. The bundle's columns are
    checked once.

    Args:
        bundle: The bundle.
        writer: Who publishes it; zeros for one that nobody will send again.
        attempt: Which run of the publisher's task sends it; 0 where it has none.

    Attributes:
        columns: The bundle's chunk.

    Raises:
        ChunkError: The chunk breaks a rule of published chunks.
    """

    __slots__ = ("_bundle", "attempt", "columns", "writer")

    def __init__(self, bundle: Bundle, writer: bytes = NO_WRITER, attempt: int = 0) -> None:
        self._bundle = bundle
        self.writer = writer
        self.columns = CheckedChunk(bundle.chunk)
        self.attempt = attempt

    def __len__(self) -> int:
        return self._bundle.run_count

    def __getitem__(self, index: int) -> MutationBatch:
        run, bounds = self._bundle.runs[index], self._bundle.bounds
        return MutationBatch(
            self.columns,
            bounds[index],
            bounds[index + 1],
            self.token(run),
            self.attempt,
            run.chain,
        )

    def __iter__(self) -> Iterator[MutationBatch]:
        return (self[index] for index in range(len(self)))

    def token(self, run: BundleRun) -> WriterToken | None:
        """The name of the batch that is a run of the bundle."""
        return None if self.writer == NO_WRITER else WriterToken(self.writer, run.counter)


def is_design_key(key: bytes) -> bool:
    """Whether it is the key of a design document."""
    return key.startswith(DESIGN_PREFIX)


def _check_counters(chunk: Chunk) -> None:
    """Raises `ChunkError` when the value of an increment or decrement is not a delta."""
    operations, offsets = chunk.operations.tobytes(), chunk.value_offsets.tolist()
    for op, start, end in zip(operations, offsets, offsets[1:], strict=False):
        if op in COUNTS and end - start != COUNTER_DELTA_BYTES:
            CounterDelta.decode(chunk.value_bytes[start:end])
