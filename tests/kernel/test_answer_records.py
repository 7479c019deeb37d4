"""Records of changed answers to publishers: the builds agree with each other, and with what the log
reads."""

from __future__ import annotations

from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import agreed
from tests.kit.answer_rows import pack_rows
from upr_server.storage.records import (
    TOKEN,
    parse_token_key,
    partition_key,
    token_key,
    with_checksum,
)

CHANGES: Final = st.lists(
    st.tuples(
        st.binary(min_size=16, max_size=16), st.integers(0, (1 << 64) - 1), st.binary(max_size=40)
    ),
    max_size=20,
)


@given(CHANGES, st.integers(0, 1023))
def test_each_change_is_a_record(changes: list[tuple[bytes, int, bytes]], partition: int) -> None:
    answer, records = agreed("answer_records", pack_rows(changes), partition_key(TOKEN, partition))
    assert answer == "returned"
    keys = [token_key(partition, writer, counter) for writer, counter, _ in changes]
    assert records == [
        (key, with_checksum(key, answer) if answer else b"")
        for key, (_, _, answer) in zip(keys, changes, strict=True)
    ]
    assert [parse_token_key(key) for key, _ in records] == [
        (partition, writer, counter) for writer, counter, _ in changes
    ]


@given(CHANGES.filter(len), st.data())
def test_rows_that_are_cut_short_are_refused(
    changes: list[tuple[bytes, int, bytes]], data: st.DataObject
) -> None:
    rows, last_row = pack_rows(changes), pack_rows(changes[-1:])
    cut = data.draw(st.integers(1, len(last_row) - 1))
    assert agreed("answer_records", rows[:-cut], b"") == ("raised", ValueError)


@pytest.mark.parametrize("arguments", [(bytes(28), ""), (b"",), (1, b"")])
def test_other_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    assert agreed("answer_records", *arguments) == ("raised", TypeError)
