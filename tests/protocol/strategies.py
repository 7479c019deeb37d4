"""Hypothesis strategies for the protocol's values: rows, chunks, failover logs, positions."""

from __future__ import annotations

from itertools import chain
from typing import Final

from hypothesis import strategies as st

from upr_protocol.chunk import Bundle, BundleRun, Chunk, Mutation
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import PARTITIONS_END, SEQ_MAX, Cas, HistoryId, Operation, PartitionId, SeqNo
from upr_protocol.limits import FAILOVER_ENTRIES_MAX, KEY_BYTES_MAX

U8: Final = st.integers(0, 0xFF)
U16: Final = st.integers(0, 0xFFFF)
U32: Final = st.integers(0, 0xFFFF_FFFF)
U64: Final = st.integers(0, SEQ_MAX)
SEQS: Final = U64.map(SeqNo)
HISTORY_IDS: Final = st.integers(1, SEQ_MAX).map(HistoryId)
PARTITIONS: Final = U16.map(PartitionId)

# Few keys, so that they repeat; any bytes; and the longest there may be.
KEYS: Final = st.one_of(
    st.sampled_from([b"a", b"b", b"\0", b"\xff\xfe"]),
    st.binary(min_size=1, max_size=12),
    st.binary(min_size=KEY_BYTES_MAX - 1, max_size=KEY_BYTES_MAX),
)
VALUES: Final = st.one_of(st.just(b""), st.binary(max_size=40))


def mutations(has_seqs: bool = True) -> st.SearchStrategy[Mutation]:
    """Rows without sequence numbers: as they are stored, or as a publisher sends them."""
    kinds = [Operation.SET, Operation.DELETE, Operation.EXPIRE]
    if not has_seqs:
        kinds = [op for op in Operation if op is not Operation.EXPIRE]
    return st.builds(
        Mutation,
        op=st.sampled_from(kinds),
        key=KEYS,
        value=VALUES,
        cas=U64.map(Cas),
        flags=U32,
        expiry=U32,
    )


@st.composite
def stored_rows(draw: st.DrawFn, max_size: int = 12, above: int = 0) -> list[Mutation]:
    """Rows with rising sequence numbers, all greater than `above`."""
    rows = draw(st.lists(mutations(), max_size=max_size))
    seq = above
    numbered = []
    for row in rows:
        seq += draw(st.integers(1, 3))
        numbered.append(
            Mutation(row.op, row.key, row.value, SeqNo(seq), row.cas, row.flags, row.expiry)
        )
    return numbered


@st.composite
def stored_chunks(draw: st.DrawFn, max_size: int = 12, above: int | None = None) -> Chunk:
    """Stored chunks, whose range may be wider than their numbers."""
    if above is None:
        above = draw(st.one_of(st.just(0), st.integers(0, 1 << 60)))
    start = above + draw(st.integers(0, 3))
    rows = draw(stored_rows(max_size, start))
    last = rows[-1].seq if rows else start
    return Chunk.build(rows, SeqNo(start), SeqNo(last + draw(st.integers(0, 3))))


def published_chunks(max_size: int = 12) -> st.SearchStrategy[Chunk]:
    """Chunks as a publisher sends them."""
    return st.lists(mutations(has_seqs=False), max_size=max_size).map(Chunk.build)


@st.composite
def bundles(draw: st.DrawFn, max_runs: int = 4) -> Bundle:
    """Bundles as a publisher sends them."""
    partitions = draw(st.sets(st.integers(0, PARTITIONS_END - 1), min_size=1, max_size=max_runs))
    rows_of_runs = [
        draw(st.lists(mutations(has_seqs=False), min_size=1, max_size=4)) for _ in partitions
    ]
    runs = [
        BundleRun(PartitionId(partition), len(rows), draw(U64), draw(U32))
        for partition, rows in zip(sorted(partitions), rows_of_runs, strict=True)
    ]
    return Bundle(Chunk.build(chain.from_iterable(rows_of_runs)), runs)


@st.composite
def failover_logs(
    draw: st.DrawFn, max_size: int = FAILOVER_ENTRIES_MAX, seqs: st.SearchStrategy[int] = U64
) -> FailoverLog:
    """Failover logs, empty ones too."""
    ids = draw(st.lists(HISTORY_IDS, max_size=max_size, unique=True))
    numbers = draw(st.lists(seqs, min_size=len(ids), max_size=len(ids)))
    return FailoverLog.of_pairs(zip(ids, sorted(numbers, reverse=True), strict=True))


@st.composite
def positions(draw: st.DrawFn) -> Position:
    """Positions that keep what `Position` promises."""
    log = draw(failover_logs(5))
    a, b, c, d = sorted(draw(st.lists(SEQS, min_size=4, max_size=4)))
    if draw(st.booleans()):
        return Position(log, b, b)
    partial = PartialSnapshot(draw(HISTORY_IDS), a, d)
    return Position(log, b, c, partial)
