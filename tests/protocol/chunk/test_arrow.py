"""A chunk as Arrow reads it."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.protocol.strategies import (
    stored_chunks,
)
from upr_protocol.chunk import (
    Chunk,
    Mutation,
    to_arrow,
)
from upr_protocol.ids import Operation, SeqNo

MIB = 1024 * 1024


def a_set(seq: int, key: bytes, value: bytes = b"") -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq))


@given(stored_chunks())
def test_arrow_reads_the_same_rows_in_the_same_memory(chunk: Chunk) -> None:
    pa = pytest.importorskip("pyarrow")
    batch = to_arrow(chunk)
    batch.validate(full=True)
    assert batch.schema.names == ["seq", "cas", "expiry", "flags", "op", "key", "value"]
    assert batch.num_rows == len(chunk)
    rows = [
        Mutation(
            Operation(r["op"]), r["key"], r["value"], r["seq"], r["cas"], r["flags"], r["expiry"]
        )
        for r in batch.to_pylist()
    ]
    assert rows == list(chunk)
    whole = pa.py_buffer(chunk.encode())
    for column in batch.columns:
        assert column.null_count == 0
        for buffer in column.buffers():
            if buffer is not None and buffer.size:
                assert whole.address <= buffer.address
                assert buffer.address + buffer.size <= whole.address + whole.size
                assert buffer.address % 8 == 0


def test_arrow_keeps_the_chunk_alive() -> None:
    pytest.importorskip("pyarrow")
    batch = to_arrow(Chunk.build([a_set(1, b"key", b"value")]))
    assert batch.to_pylist()[0]["value"] == b"value"
