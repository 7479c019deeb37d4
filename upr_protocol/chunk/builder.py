"""The chunk builder: a chunk being filled."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate, compress
from operator import itemgetter, sub
from typing import Final

from upr_protocol.chunk.chunk import Chunk
from upr_protocol.chunk.layout import (
    Buffer,
    covered_range,
    encode_columns,
    encoded_bytes,
    even_offsets,
)
from upr_protocol.ids import SeqNo

_INVERT: Final = bytes((1,)) + bytes(255)
"""Translates a selector into its opposite."""


class ChunkBuilder:
    """A chunk being filled: the same columns, growing.

    `append` costs O(1); `extend` costs O(mutations), mostly in copies of whole columns.
    """

    __slots__ = (
        "cas",
        "expiries",
        "flags",
        "key_bytes",
        "key_offsets",
        "operations",
        "seqs",
        "value_bytes",
        "value_offsets",
    )

    def __init__(self) -> None:
        self.seqs = array("Q")
        self.cas = array("Q")
        self.expiries = array("I")
        self.flags = array("I")
        self.key_offsets = array("i", (0,))
        self.value_offsets = array("i", (0,))
        self.operations = bytearray()
        self.key_bytes = bytearray()
        self.value_bytes = bytearray()

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def nbytes(self) -> int:
        """What the chunk would take, encoded."""
        return encoded_bytes(len(self), len(self.key_bytes), len(self.value_bytes))

    def append(
        self,
        op: int,
        key: Buffer,
        value: Buffer = b"",
        seq: int = 0,
        cas: int = 0,
        flags: int = 0,
        expiry: int = 0,
    ) -> None:
        """Adds one mutation at the end. If it raises, because a number or a value does not fit its
        column, nothing was added."""
        try:
            self.seqs.append(seq)
            self.cas.append(cas)
            self.expiries.append(expiry)
            self.flags.append(flags)
            self.operations.append(op)
            self.key_bytes += key
            self.value_bytes += value
            self.key_offsets.append(len(self.key_bytes))
            self.value_offsets.append(len(self.value_bytes))
        except BaseException:
            # That column is the last to grow.
            self._cut(len(self.value_offsets) - 1)
            raise

    def _cut(self, count: int) -> None:
        """Drops what any column has beyond the first `count` mutations."""
        for column in (self.seqs, self.cas, self.expiries, self.flags, self.operations):
            del column[count:]
        for data, offsets in (
            (self.key_bytes, self.key_offsets),
            (self.value_bytes, self.value_offsets),
        ):
            del data[offsets[count] :]
            del offsets[count + 1 :]

    def extend(self, chunk: Chunk, keep: Sequence[int] | None = None) -> None:
        """Adds the mutations of `chunk`; with `keep`, those at whose index it is true."""
        if keep is not None:
            self.extend_numbered(chunk, chunk.seqs, chunk.cas, keep)
        elif chunk.count == 1:
            self.append(*chunk.single())
        else:
            self.seqs.frombytes(chunk.seqs.tobytes())
            self.cas.frombytes(chunk.cas.tobytes())
            self._extend_unnumbered(chunk)

    def extend_numbered(
        self,
        chunk: Chunk,
        seqs: Sequence[int],
        cas: Sequence[int],
        keep: Sequence[int] | None = None,
    ) -> None:
        """`extend`, with these sequence numbers and CAS values in place of the chunk's own."""
        if keep is None:
            if chunk.count == 1:
                op, key, value, _, _, flags, expiry = chunk.single()
                self.append(op, key, value, seqs[0], cas[0], flags, expiry)
            else:
                self.seqs.fromlist(list(seqs))
                self.cas.fromlist(list(cas))
                self._extend_unnumbered(chunk)
            return
        selectors = bytes(keep)
        selected_count = len(selectors) - selectors.count(0)
        if not selected_count:
            return
        zeros = bytes(4 * chunk.count)
        for column, source in ((self.expiries, chunk.expiries), (self.flags, chunk.flags)):
            if source.tobytes() == zeros:
                column.frombytes(zeros[: 4 * selected_count])
            else:
                column.fromlist(list(compress(source, selectors)))
        if 2 * selected_count < chunk.count:
            self._extend_few(chunk, seqs, cas, selectors)
        else:
            self._extend_many(chunk, seqs, cas, selectors)

    def _extend_unnumbered(self, chunk: Chunk) -> None:
        """Adds all columns of `chunk` but the numbers and CAS values."""
        self.expiries.frombytes(chunk.expiries.tobytes())
        self.flags.frombytes(chunk.flags.tobytes())
        self.operations += chunk.operations
        for target, offsets, data, bounds, length in self._strings(chunk):
            base = len(target)
            if length:
                offsets.frombytes(even_offsets(base, length, chunk.count))
            else:
                offsets.fromlist([base + offset for offset in bounds[1:].tolist()])
            target += data

    def _extend_few(
        self, chunk: Chunk, seqs: Sequence[int], cas: Sequence[int], selectors: bytes
    ) -> None:
        """Picks the selected mutations by index: costs nothing for the others."""
        indexes = list(compress(range(chunk.count), selectors))
        pick = itemgetter(*indexes) if len(indexes) > 1 else _picker_of_one(indexes[0])
        self.seqs.extend(pick(seqs))
        self.cas.extend(pick(cas))
        self.operations += bytes(pick(chunk.operations.tobytes()))
        for target, offsets, data, source, _ in self._strings(chunk):
            # Slicing bytes costs a third of slicing a view, but only after a copy of them all.
            is_copy_dearer = 4 * len(indexes) < chunk.count
            copy = data if is_copy_dearer else data.tobytes()
            bounds = source if is_copy_dearer else source.tolist()
            lows, highs = pick(bounds), pick(bounds[1:])
            offsets.pop()
            offsets.extend(accumulate(map(sub, highs, lows), initial=len(target)))
            target += b"".join([copy[low:high] for low, high in zip(lows, highs, strict=True)])

    def _extend_many(
        self, chunk: Chunk, seqs: Sequence[int], cas: Sequence[int], selectors: bytes
    ) -> None:
        """Copies the runs between the mutations left out, whole: most columns cost nothing for the
        selected ones."""
        omitted = list(compress(range(chunk.count), selectors.translate(_INVERT)))
        # Some of the runs are empty.
        runs = list(
            zip([0, *[index + 1 for index in omitted]], [*omitted, chunk.count], strict=True)
        )
        selected_count = chunk.count - len(omitted)
        operations = chunk.operations.tobytes()
        if operations.count(operations[0]) == chunk.count:
            self.operations += operations[:selected_count]
        else:
            self.operations += bytes(compress(operations, selectors))
        for column, source in ((self.seqs, seqs), (self.cas, cas)):
            if isinstance(source, memoryview):
                column.frombytes(b"".join([source[low:high] for low, high in runs]))
            else:
                column.fromlist(list(compress(source, selectors)))
        for target, offsets, data, bounds, length in self._strings(chunk):
            base = len(target)
            if length:
                offsets.frombytes(even_offsets(base, length, selected_count))
                target += b"".join([data[length * low : length * high] for low, high in runs])
            else:
                starts = bounds.tolist()
                lengths = compress(map(sub, starts[1:], starts), selectors)
                offsets.pop()
                offsets.fromlist(list(accumulate(lengths, initial=base)))
                target += b"".join([data[starts[low] : starts[high]] for low, high in runs])

    def _strings(
        self, chunk: Chunk
    ) -> tuple[tuple[bytearray, array[int], memoryview, memoryview, int], ...]:
        """For keys and for values: the builder's bytes and offsets, the chunk's bytes and offsets,
        and the length that all of the chunk's have, or 0."""
        keys, values = chunk.key_offsets, chunk.value_offsets
        key_length, value_length = chunk.uniform_lengths()
        return (
            (self.key_bytes, self.key_offsets, chunk.key_bytes, keys, key_length),
            (self.value_bytes, self.value_offsets, chunk.value_bytes, values, value_length),
        )

    def build(self, start: SeqNo | None = None, end: SeqNo | None = None) -> Chunk:
        """The chunk as it stands; the builder may go on being filled.

        `start` and `end` are the covered range, by default from just below the first number to the
        last; a chunk without numbers covers (0, 0].
        """
        return Chunk(
            encode_columns(
                *covered_range(self.seqs, start, end),
                self.seqs,
                self.cas,
                self.expiries,
                self.flags,
                self.key_offsets,
                self.value_offsets,
                self.operations,
                self.key_bytes,
                self.value_bytes,
            )
        )


def _picker_of_one(index: int) -> Callable[[Sequence[int]], tuple[int, ...]]:
    return lambda column: (column[index],)
