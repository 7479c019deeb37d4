"""What is fuzzed of the kernel: functions of any bytes, which raise where the builds differ.

Under the sanitizers (`make sanitize`) a read beyond a buffer ends the process, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from struct import Struct
from typing import Final

from tests.fuzz.frames import MENDED
from tests.fuzz.mending import mended_chunk, mended_frames
from tests.kernel.answers import SeveralAnswers
from tests.kernel.builds import BUILDS, agreed, outcome
from tests.kernel.open_rows import PARTITIONS, Partitions
from tests.kernel.tables import Tables
from upr_kernel.pure.columns import HEAD, HEAD_BYTES
from upr_protocol.chunk import Chunk, chunk_of_plain_sets
from upr_protocol.ids import DESIGN_PREFIX, PUBLISHED_OPERATIONS, STORED_OPERATIONS

KEY_BYTES_MAX: Final = 20
VALUE_BYTES_MAX: Final = 100
RUN: Final = Struct("<IIQI4x")


def chunks(data: bytes) -> None:
    """A chunk, as of the target `chunk` of `tests/fuzz`: checked, entered in tables, gathered."""
    first, data = data[0] if data else 0, data[1:]
    chunk = mended_chunk(data) if first & MENDED else data
    count = HEAD.unpack_from(chunk)[0] if len(chunk) >= HEAD_BYTES else 0
    for operations in (PUBLISHED_OPERATIONS, STORED_OPERATIONS):
        for prefix in (b"", b"k", DESIGN_PREFIX):
            agreed("check", chunk, operations, KEY_BYTES_MAX, VALUE_BYTES_MAX, prefix)
            agreed("select_prefix", chunk, prefix)
    for parts in ([chunk], [chunk, chunk], [chunk[:-8], chunk]):
        agreed("index_entries", parts, b"k")
    for low, high in ((0, count), (count // 2, count), (1, 0), (0, count + 1)):
        for partition_count in (0, 1, 3, 1024):
            agreed("find_misplaced", chunk, low, high, first, partition_count, KEY_BYTES_MAX)
    tables = Tables()
    for low, high in ((0, min(count, 1000)), (count // 2, count), (1, 3), (0, 5)):
        tables.put_damaged(chunk, low, high, 1 + first)
    tables.check()
    _gather(chunk, count, first)
    _number(chunk, first)
    _add_runs(chunk, count, first)
    _join_runs(chunk, first)


def _gather(chunk: bytes, count: int, first: int) -> None:
    rows = min(count, 4096)
    skip = bytes(row % 3 == first % 3 for row in range(rows))
    halves = [(chunk, 0, rows // 2, None, None, 0), (chunk, rows // 2, rows, None, 7, 9)]
    for parts in (
        [],
        [(chunk, 0, count, None, None, 0)],
        [(chunk, 0, rows, skip, 100, 1 << 40)],
        [(chunk, 0, rows, bytes(rows), None, 0), (chunk, 0, rows, b"\1" * rows, None, 0)],
        [*halves, *halves, (chunk, 0, 1, None, 1, 1)],
        [(chunk, 0, rows + 1, None, 1, 1)],
        [(chunk, 1, 0, None, 1, 1)],
        [(chunk, 0, rows, skip + b"\0", 1, 1)],
    ):
        answer, gathered = agreed("gather", parts, 3, 4)
        if answer == "returned":
            result = Chunk(gathered)
            assert all(low <= high for low, high in pairwise(result.key_offsets.tolist()))


def _number(chunk: bytes, first: int) -> None:
    for numbers in ((1, 1 << 40, 0, first), (first, (1 << 64) - 1 - first, 7, 3)):
        memories = [bytearray(chunk) for _ in BUILDS]
        outcomes = [
            outcome(build.number_rows, memory, *numbers)
            for build, memory in zip(BUILDS.values(), memories, strict=True)
        ]
        assert all(result == outcomes[0] for result in outcomes), (chunk, numbers, outcomes)
        assert all(memory == memories[0] for memory in memories), (chunk, numbers)


def _join_runs(chunk: bytes, first: int) -> None:
    plain = bytes(chunk_of_plain_sets([b"key", b"k"], [b"", b"value"]))
    for runs in (
        [],
        [(first, chunk, 1 << 40, first)],
        [(0, plain, 1, 0), (1 + first, chunk, 2, 7), (0xFFFF_FFFF, plain, 3, 0)],
        [(first, chunk, 1, 0), (7, chunk, 1, 0)],
        [(0, chunk[:-8], 1, 0), (1, chunk, 1, 0)],
    ):
        answer, result = agreed("join_runs", runs)
        if answer == "returned":
            directory, joined = result
            assert sum(rows for _, rows, _, _ in RUN.iter_unpack(directory)) == len(Chunk(joined))


def _add_runs(chunk: bytes, count: int, first: int) -> None:
    partitions, rows = Partitions(), min(count, 40)
    for first_row, row_counts in (
        (0, (rows // 3, rows // 2, rows)),
        (rows, (0, 1, (1 << 32) - 1, 1)),
        (first % 3, (*[1 + first % 7] * (rows // 2), count)),
    ):
        runs = b"".join(
            RUN.pack(index % (PARTITIONS + 1), row_count, index, first == index)
            for index, row_count in enumerate(row_counts)
        )
        for writers in (b"w" * 16, b"w" * 15 + b"x" + bytes(16) * (len(row_counts) - 1), b""):
            partitions.add_damaged(chunk, runs, writers, first, first_row=first_row)
        partitions.add_damaged(chunk, runs[first % 24 :], b"w" * 16, first)
        for low, high in ((0, rows), (rows // 2, count + 1), (1, 0)):
            partitions.each(first % 3, "extend", chunk, low, high, 1 + first, first)
        partitions.agree()
        partitions.each(0, "clear")


def frames(data: bytes) -> None:
    """Frames of single operations, joined: a first byte that says how, then the frames."""
    first, data = data[0] if data else 0, data[1:]
    if first & MENDED:
        data = mended_frames(data)
    for offset in (0, first & 0x7F, len(data), len(data) + 1):
        agreed("read_header", data, offset)
        for frames_max, partition_count in ((0, 1), (1, 1), (64, 0), (64, 1), (64, 3)):
            agreed(
                "join_sets",
                *(data, offset, frames_max, partition_count, KEY_BYTES_MAX, VALUE_BYTES_MAX),
                data[-1:],
            )


def table(data: bytes) -> None:
    """Bytes as steps: two for each, what to do and how much of it."""
    tables, seq = Tables(), 1
    for step, (action, amount) in enumerate(zip(data[::2], data[1::2], strict=False)):
        if action < 0x60:
            tables.put(b"%d" % (amount % 32), seq, is_tombstone=action % 2 > 0)
            seq += 1
        elif action < 0xA0:
            keys = [b"%d" % ((amount + row * action) % 300) for row in range(action - 0x5F)]
            base = max(1, seq - amount)
            tables.put_run(keys, seq, max(0, seq - 2 * amount), base, seq + len(keys) - base)
            seq += len(keys)
        elif action < 0xC0:
            keys = [b"%d:%d" % (step, row) for row in range(1 + 4 * amount)]
            tables.put_run(keys, seq, seq - 1, seq, 0)
            seq += len(keys)
        elif action < 0xFC:
            tables.evict(
                max(0, seq - 8 * (action - 0xC0)), 3 * amount, tombstones_only=amount % 4 == 0
            )
        else:
            tables.clear()
        tables.check_key(b"%d" % (amount % 32))
        if step % 16 == 15:
            tables.check()
    tables.check()


def answers(data: bytes) -> None:
    """Bytes as steps: three for each, what to do, whose it is, and how much of it."""
    several = SeveralAnswers()
    for action, writer, amount in zip(data[::3], data[1::3], data[2::3], strict=False):
        several.step(action, writer, amount)
    several.check()


def replies(data: bytes) -> None:
    """A first byte that says how many bytes are opaques, opaques, and the lines."""
    count = 4 * (data[0] % 8) if data else 0
    for opaques, lines in ((data[1 : 1 + count], data[1 + count :]), (data[:count], data)):
        for end in (len(lines), len(lines) // 40 * 40):
            agreed("encode_replies", opaques, lines[:end])


TARGETS: Final[Mapping[str, Callable[[bytes], None]]] = {
    "answers": answers,
    "chunks": chunks,
    "frames": frames,
    "replies": replies,
    "table": table,
}
