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
    chunk_of_plain_sets,
    published_chunk,
)
from upr_protocol.ids import Operation, SeqNo

MIB = 1024 * 1024


def a_set(seq: int, key: bytes, value: bytes = b"") -> Mutation:
    return Mutation(Operation.SET, key, value, SeqNo(seq))


@given(st.lists(st.tuples(KEYS, VALUES), max_size=12))
def test_a_chunk_of_plain_sets_is_the_built_one(pairs: list[tuple[bytes, bytes]]) -> None:
    keys, values = [key for key, _ in pairs], [value for _, value in pairs]
    assert chunk_of_plain_sets(keys, values) == Chunk.build(
        [Mutation(Operation.SET, key, value) for key, value in pairs]
    )


@pytest.mark.parametrize(("keys", "values"), [(1, 2), (2, 1), (0, 1)])
def test_a_chunk_of_plain_sets_needs_as_many_values_as_keys(keys: int, values: int) -> None:
    with pytest.raises(ValueError, match="as many"):
        chunk_of_plain_sets([b"k"] * keys, [b"v"] * values)


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
