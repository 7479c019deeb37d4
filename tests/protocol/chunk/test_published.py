"""Published chunks made from whole columns, against those built of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocol.strategies import (
    KEYS,
    VALUES,
)
from upr_protocol.chunk import (
    Chunk,
    Mutation,
    plain_chunk,
    published_chunk,
)
from upr_protocol.ids import Operation, SeqNo

MIB = 1024 * 1024


def a_set(seq: int, key: bytes, value: bytes = b"") -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq))


@given(st.lists(st.tuples(KEYS, VALUES), max_size=12), st.data())
def test_a_plain_chunk_is_the_built_one(
    pairs: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    assert plain_chunk(keys, values) == Chunk.build(
        [Mutation(Operation.SET, key, value) for key, value in pairs]
    )
    kinds = st.sampled_from([Operation.ADD, Operation.DELETE, Operation.TOUCH])
    operations = data.draw(st.lists(kinds, min_size=len(pairs), max_size=len(pairs)))
    assert plain_chunk(keys, values, bytes(operations)) == Chunk.build(
        [Mutation(op, *pair) for op, pair in zip(operations, pairs, strict=True)]
    )


@pytest.mark.parametrize(
    ("keys", "values", "operations"),
    [(1, 2, 1), (2, 3, 2), (2, 1, 2), (3, 3, 2), (3, 3, 4), (0, 1, 0)],
)
def test_a_plain_chunk_needs_as_many_values_and_operations_as_keys(
    keys: int, values: int, operations: int
) -> None:
    with pytest.raises(ValueError, match="as many"):
        plain_chunk([b"k"] * keys, [b"v"] * values, b"\1" * operations)


@given(
    st.lists(
        st.builds(
            Mutation,
            st.sampled_from(Operation),
            st.binary(min_size=1, max_size=9),
            st.binary(max_size=9),
            cas=st.integers(0, 2**64 - 1),
            flags=st.integers(0, 2**32 - 1),
            expiry=st.integers(0, 2**32 - 1),
        )
    )
)
def test_a_published_chunk_of_columns_is_that_of_its_rows(rows: list[Mutation]) -> None:
    chunk = Chunk.build(rows)
    columns = (chunk.key_offsets, chunk.key_bytes, chunk.value_offsets, chunk.value_bytes)
    published = published_chunk(
        *columns, chunk.operations, cas=chunk.cas, flags=chunk.flags, expiries=chunk.expiries
    )
    assert published == chunk
    plain = published_chunk(*columns, chunk.operations)
    assert list(plain) == [Mutation(row.op, row.key, row.value) for row in rows]
    with pytest.raises(ValueError, match="do not belong"):
        published_chunk(*columns, bytes(len(rows) + 1))
