"""The batch: what a publisher sends to one partition at once, a run of its bundle."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import cast

from upr_protocol.chunk import COUNTER_DELTA_BYTES, Bundle, Chunk, CounterDelta
from upr_protocol.errors import ChunkError, Status
from upr_protocol.ids import DESIGN_PREFIX, SeqNo
from upr_server.engine.operations import COUNTS
from upr_server.engine.publisher_answers import WriterToken


class CheckedChunk:
    """A published chunk, with what one look at whole columns tells. It keeps the rules, but for
    keys and values of a wrong length: each such row fails alone.

    Args:
        chunk: The chunk.

    Attributes:
        chunk: The chunk.
        keys: Its keys.
        misfits: The rows that fail for the length of their key or value, each with the reason.
        is_unconditional: Whether each mutation is a `SET` that expects no CAS, and none fails.
        may_expire: Whether any mutation has an expiry time.
        may_hold_designs: Whether any key may be a design document's.

    Raises:
        ChunkError: The chunk breaks a rule of published chunks.
    """

    __slots__ = ("chunk", "is_unconditional", "keys", "may_expire", "may_hold_designs", "misfits")

    def __init__(self, chunk: Chunk) -> None:
        self.chunk = chunk
        self.misfits: Mapping[int, Status] = {}
        try:
            self.keys = chunk.check_published()
        except ChunkError:
            self.misfits = chunk.published_misfits()
            self.keys = chunk.keys()
        self.is_unconditional = chunk.is_unconditional and not self.misfits
        self.may_expire = chunk.may_expire
        if not chunk.is_unconditional:
            _check_counters(chunk)
        key_bytes = chunk.key_bytes.tobytes()
        # The search for one byte is thirty times as fast, and mostly finds nothing.
        self.may_hold_designs = DESIGN_PREFIX[:1] in key_bytes and DESIGN_PREFIX in key_bytes


class MutationBatch:
    """A publisher's batch, checked: some neighbouring rows of a chunk.

    Args:
        columns: The chunk; the engine keeps rows of it, or copies.
        low: The batch's first row.
        high: One more than its last.
        token: The batch's name; None for one that nobody will send again.
        attempt: Which run of the publisher's task sends it; 0 where it has none.
        chain: What the publisher gives to vouch for the batch and all before it; 0 for nothing.

    Attributes:
        columns: The chunk.
        low: The batch's first row.
        high: One more than its last.
        token: The batch's name.
        attempt: Which run of the publisher's task sends it.
        chain: What vouches for the batch.
    """

    __slots__ = ("__dict__", "attempt", "chain", "columns", "high", "low", "token")

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

    @cached_property
    def chunk(self) -> Chunk:
        """Its rows as a chunk of their own. A copy, unless they are the whole chunk."""
        chunk = self.columns.chunk
        if len(self) == chunk.count:
            return chunk
        return chunk.rows(self.low, self.high, SeqNo(0), SeqNo(0))

    @cached_property
    def misfits(self) -> Mapping[int, Status]:
        """Which of its rows fail for the length of their key or value, by place in the batch."""
        misfits = self.columns.misfits
        return {row - self.low: misfits[row] for row in misfits if self.low <= row < self.high}

    @cached_property
    def is_plain(self) -> bool:
        """Whether each mutation is a `SET` that expects no CAS and has a key and value of right
        lengths. Such a batch cannot fail, whatever the keys hold."""
        return self.columns.is_unconditional or (
            self.columns.chunk.are_unconditional(self.low, self.high) and not self.misfits
        )

    def piece(self, first: int, rows_max: int, bytes_max: int) -> Chunk:
        """Some of its rows as a chunk of their own: a copy, unless they are the whole chunk.

        Args:
            first: Which of its rows is the first.
            rows_max: How many at most.
            bytes_max: How many bytes of values at most, if it is more than one row.
        """
        chunk, low = self.columns.chunk, self.low + first
        high = min(low + rows_max, self.high)
        if high - low == chunk.count and chunk.nbytes <= bytes_max:
            return chunk
        offsets = cast("Sequence[int]", chunk.value_offsets)
        if offsets[high] - offsets[low] > bytes_max:
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


def batches_of(
    bundle: Bundle, writer: bytes | None = None, attempt: int = 0
) -> list[MutationBatch]:
    """The batches of a bundle, one a run. Its columns are checked once.

    Args:
        bundle: The bundle.
        writer: Who publishes it; None for one that nobody will send again.
        attempt: Which run of the publisher's task sends it; 0 where it has none.

    Raises:
        ChunkError: The chunk breaks a rule of published chunks.
    """
    columns, bounds = CheckedChunk(bundle.chunk), bundle.bounds
    return [
        MutationBatch(
            columns,
            bounds[index],
            bounds[index + 1],
            None if writer is None else WriterToken(writer, run.counter),
            attempt,
            run.chain,
        )
        for index, run in enumerate(bundle.runs)
    ]


def _check_counters(chunk: Chunk) -> None:
    """Raises `ChunkError` when the value of an increment or decrement is not a delta."""
    operations, offsets = chunk.operations.tobytes(), chunk.value_offsets.tolist()
    for op, start, end in zip(operations, offsets, offsets[1:], strict=False):
        if op in COUNTS and end - start != COUNTER_DELTA_BYTES:
            CounterDelta.decode(chunk.value_bytes[start:end])
