"""Large values are referred to, numbered in place, and joined and moved in pieces."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine.helpers import NOW, cursor_at, get_item, items, new_partition, send
from upr_protocol.chunk import LARGE_BYTES, Chunk, ChunkPieces, LargeRow, Mutation, WidenedChunk
from upr_protocol.ids import Cas, Operation, SeqNo
from upr_server.engine import Partition, batch_of, evaluation_steps
from upr_server.engine.evaluation import UNLIMITED_COST
from upr_server.engine.snapshots import collapse, open_snapshot
from upr_server.engine.snapshots.document_arrays import ARRAY_BYTES_MAX

LARGE: Final = ARRAY_BYTES_MAX + 1
"""Large in this file."""

KEYS: Final = (b"a", b"b", b"c")
SIZES: Final = st.sampled_from([3, LARGE, LARGE + 5])
COSTS: Final = st.sampled_from([1, 50, UNLIMITED_COST])


@pytest.fixture(autouse=True)
def small_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values above `ARRAY_BYTES_MAX` are large, and pieces are small."""
    for module in ("chunk.chunk", "chunk.layout"):
        monkeypatch.setattr(f"upr_protocol.{module}.LARGE_BYTES", ARRAY_BYTES_MAX)
    for patched_module in (open_snapshot, evaluation_steps, collapse):
        monkeypatch.setattr(patched_module, "LARGE_BYTES", ARRAY_BYTES_MAX)
    monkeypatch.setattr(evaluation_steps, "JOINED_BYTES", 40_000)
    monkeypatch.setattr(collapse, "WIDEN_BYTES", 40_000)


def value_of(letter: int, size: int) -> bytes:
    return bytes([letter]) * size


def writable(*rows: Mutation) -> Chunk:
    """A publisher's chunk, in memory of its own that can be written, as it is received."""
    return Chunk(bytearray(bytes(Chunk.build(rows))))


def apply(partition: Partition, row: Mutation, cost: int) -> None:
    """Applies one operation, in slices of this cost."""
    batch = batch_of(writable(row))
    evaluation = partition.evaluate(batch, now=NOW)
    while evaluation is not None and not evaluation.is_done:
        assert not evaluation.step(cost_max=cost)
    partition.mutate(batch, now=NOW, evaluation=evaluation)


OPERATIONS: Final = st.lists(
    st.tuples(
        st.sampled_from(KEYS),
        st.sampled_from([Operation.SET, Operation.APPEND, Operation.PREPEND, Operation.TOUCH]),
        SIZES,
        COSTS,
        st.booleans(),
    ),
    max_size=14,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(OPERATIONS)
def test_they_are_what_was_written_wherever_they_are(
    operations: list[tuple[bytes, Operation, int, int, bool]],
) -> None:
    partition = new_partition()
    model: dict[bytes, bytes] = {}
    # It closes the open snapshot wherever it comes to, so that some are collapsed.
    reader = cursor_at(partition)
    received: dict[bytes, bytes] = {}
    for letter, (key, operation, size, cost, is_read) in enumerate(operations):
        value = b"" if operation is Operation.TOUCH else value_of(letter, size)
        apply(partition, Mutation(operation, key, value), cost)
        if operation is Operation.SET:
            model[key] = value
        elif key in model and operation is Operation.APPEND:
            model[key] += value
        elif key in model and operation is Operation.PREPEND:
            model[key] = value + model[key]
        if is_read:
            received |= {
                row.key: row.value
                for item in items(reader)
                if isinstance(item, Chunk)
                for row in item
            }
            while partition.manager.needs_collapse:
                partition.manager.collapse_step(1)
        stored_items = {key: get_item(partition, key) for key in KEYS}
        assert {
            key: bytes(row.value) for key, row in stored_items.items() if row is not None
        } == model
    received |= {
        row.key: row.value for item in items(reader) if isinstance(item, Chunk) for row in item
    }
    assert received == model
    from_the_beginning = {
        row.key: row.value
        for item in items(cursor_at(partition))
        if isinstance(item, Chunk)
        for row in item
    }
    assert from_the_beginning == model
    partition.check_invariants()


def test_a_touched_value_is_copied_in_pieces_before_it_is_stored() -> None:
    """A reader that closes the snapshot copies nothing more."""
    partition = new_partition()
    apply(partition, Mutation(Operation.SET, b"k", bytes(LARGE)), UNLIMITED_COST)
    batch = batch_of(writable(Mutation(Operation.TOUCH, b"k", b"", expiry=int(NOW) + 9)))
    evaluation = partition.evaluate(batch, now=NOW)
    assert evaluation is not None
    step_count = 0
    while not evaluation.is_done:
        evaluation.step(cost_max=1)
        step_count += 1
    assert step_count > LARGE // 40_000
    partition.mutate(batch, now=NOW, evaluation=evaluation)
    published = evaluation.result.large_chunks[b"k"].encode().obj
    (chunk,) = [item for item in items(cursor_at(partition)) if isinstance(item, Chunk)]
    assert chunk.encode().obj is published


def test_a_received_chunk_becomes_the_stored_one_without_a_copy() -> None:
    partition = new_partition()
    memory = bytearray(bytes(Chunk.build([Mutation(Operation.SET, b"k", bytes(LARGE))])))
    partition.mutate(batch_of(Chunk(memory)), now=NOW)
    (chunk,) = [item for item in items(cursor_at(partition)) if isinstance(item, Chunk)]
    assert chunk.encode().obj is memory
    assert chunk.encode().readonly
    chunk.check()


def test_memory_that_cannot_be_written_is_copied() -> None:
    partition = new_partition()
    published = Chunk.build([Mutation(Operation.SET, b"k", bytes(LARGE))])
    before = bytes(published)
    partition.mutate(batch_of(published), now=NOW)
    (chunk,) = [item for item in items(cursor_at(partition)) if isinstance(item, Chunk)]
    assert (bytes(published), list(chunk.seqs)) == (before, [1])


def test_an_older_version_that_was_collapsed_leaves_the_large_one_alone() -> None:
    """The new chunk begins where the older one did, and is made in pieces."""
    partition = new_partition()
    reader = cursor_at(partition)
    for letter in range(10):
        send(partition, Mutation(Operation.SET, b"k", value_of(letter, LARGE)))
        list(items(reader))
    steps = 0
    while partition.manager.needs_collapse:
        partition.manager.collapse_step(1)
        steps += 1
    chunks = [item for item in items(cursor_at(partition)) if isinstance(item, Chunk)]
    assert [(chunk.start, chunk.end, chunk.count) for chunk in chunks] == [(0, 10, 1)]
    assert chunks[0].value(0) == value_of(9, LARGE)
    assert steps > LARGE // 40_000
    partition.check_invariants()


ROWS: Final = st.lists(
    st.builds(
        Mutation,
        op=st.sampled_from([Operation.SET, Operation.DELETE]),
        key=st.binary(max_size=300),
        value=st.binary(max_size=30),
        seq=st.integers(0, 1 << 60).map(SeqNo),
        cas=st.integers(0, 1 << 60).map(Cas),
        flags=st.integers(0, (1 << 32) - 1),
        expiry=st.integers(0, (1 << 32) - 1),
    ),
    min_size=1,
    max_size=5,
)


@given(ROWS)
def test_pieces_are_the_chunk(rows: list[Mutation]) -> None:
    pieces = ChunkPieces(rows, SeqNo(0), SeqNo(9))
    assert pieces.count == len(rows)
    assert b"".join(pieces.pieces()) == bytes(Chunk.build(rows, SeqNo(0), SeqNo(9)))
    assert len(pieces.pieces()) == 1, "small ones are one object while they wait to be sent"


def test_large_values_are_pieces_of_their_own() -> None:
    rows = [
        Mutation(Operation.SET, b"key", value, SeqNo(seq), Cas(1))
        for seq, value in enumerate((b"small", bytes(LARGE_BYTES), b"small", bytes(LARGE_BYTES)), 1)
    ]
    pieces = ChunkPieces(rows, SeqNo(0), SeqNo(9)).pieces()
    assert [piece for piece in pieces if piece is rows[1].value or piece is rows[3].value] == [
        rows[1].value,
        rows[3].value,
    ]
    assert b"".join(pieces) == bytes(Chunk.build(rows, SeqNo(0), SeqNo(9)))


@given(
    st.binary(min_size=1, max_size=20),
    st.lists(st.binary(max_size=20), max_size=5),
    st.integers(0, 9),
    st.integers(0, 9),
)
def test_a_row_made_of_pieces_is_that_of_the_whole_value(
    key: bytes, pieces: list[bytes], flags: int, expiry: int
) -> None:
    value = b"".join(pieces)
    row = LargeRow(key, len(value), flags, expiry)
    for piece in pieces:
        row.add(piece)
    mutation = Mutation(Operation.SET, key, value, flags=flags, expiry=expiry)
    assert row.chunk() == Chunk.build([mutation], SeqNo(0), SeqNo(0))


@given(st.integers(0, 7), st.integers(1, 60))
def test_a_widened_chunk_differs_in_its_start(start: int, nbytes: int) -> None:
    rows = [Mutation(Operation.SET, b"key", b"a value", SeqNo(8), Cas(1))]
    widened = WidenedChunk(Chunk.build(rows, SeqNo(7), SeqNo(9)), SeqNo(start))
    while not widened.copy(nbytes):
        pass
    assert widened.chunk() == Chunk.build(rows, SeqNo(start), SeqNo(9))


def test_a_batch_of_large_values_is_taken_in_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out while its values are copied."""
    partition = new_partition()
    chunk = writable(*[Mutation(Operation.SET, key, value_of(1, LARGE)) for key in KEYS])
    copies, mutation = iter(range(3)), Chunk.mutation

    def copied(chunk: Chunk, row: int) -> Mutation:
        if next(copies) == 2:
            raise MemoryError
        return mutation(chunk, row)

    with monkeypatch.context() as patch:
        patch.setattr(Chunk, "mutation", copied)
        with pytest.raises(MemoryError):
            partition.mutate(batch_of(chunk), now=NOW)
    assert (partition.high_seq, len(partition.table)) == (0, 0)
    partition.check_invariants()
    partition.mutate(batch_of(chunk), now=NOW)
    assert partition.item_count == len(KEYS)
    partition.check_invariants()
