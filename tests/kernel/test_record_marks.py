"""Marks of the log's records: the builds agree with each other, and with what the log writes."""

from __future__ import annotations

from typing import Final
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernel.builds import agreed
from upr_kernel.pure.record_marks import MARKED_BYTES_MAX
from upr_server.storage.records import CHUNK, CHUNK_HEAD, chunk_head, with_checksum

KEYS: Final = st.binary(max_size=60) | st.binary(max_size=60).map(CHUNK.__add__)
VALUES: Final = st.binary(max_size=80) | st.sampled_from([1024, 1025, 5000]).map(bytes)


def expected_mark(key: bytes, value: bytes) -> int:
    front = value[: CHUNK_HEAD.size] if len(value) <= MARKED_BYTES_MAX else b""
    return crc32(key + len(value).to_bytes(8) + front)


@st.composite
def written_records(draw: st.DrawFn) -> tuple[bytes, bytes]:
    key, value = draw(KEYS), draw(VALUES)
    if key[:1] != CHUNK:
        return key, with_checksum(key, value)
    return key, chunk_head(
        key, draw(st.integers(0, 1 << 31)), ends_snapshot=draw(st.booleans())
    ) + value


@given(KEYS, VALUES)
def test_a_mark_is_of_the_key_the_length_and_the_front(key: bytes, value: bytes) -> None:
    assert agreed("record_mark", key, value, False) == ("returned", expected_mark(key, value))
    answer, mark = agreed("record_mark", key, memoryview(value), True)
    assert answer == "returned"
    assert mark in (-1, expected_mark(key, value))


@given(written_records())
def test_what_was_written_is_intact(record: tuple[bytes, bytes]) -> None:
    assert agreed("record_mark", *record, True) == ("returned", expected_mark(*record))


@given(written_records().filter(lambda record: len(record[1]) <= MARKED_BYTES_MAX), st.data())
def test_a_flipped_bit_that_the_checksum_covers_is_damage(
    record: tuple[bytes, bytes], data: st.DataObject
) -> None:
    key, value = record
    covered_bytes = CHUNK_HEAD.size if key[:1] == CHUNK else len(value)
    bit = data.draw(st.integers(0, 8 * covered_bytes - 1))
    damaged = bytearray(value)
    damaged[bit // 8] ^= 1 << bit % 8
    assert agreed("record_mark", key, damaged, True) == ("returned", -1)


def test_of_a_long_value_no_checksum_is_compared() -> None:
    value = bytes(MARKED_BYTES_MAX + 1)
    assert agreed("record_mark", b"key", value, True) == (
        "returned",
        expected_mark(b"key", value),
    )


@pytest.mark.parametrize("length", [0, 511, 512])
def test_keys_end_where_those_of_the_disk_end(length: int) -> None:
    expected = ("raised", ValueError) if length > 511 else ("returned", -1)
    assert agreed("record_mark", bytes(length), b"abc", True) == expected


@pytest.mark.parametrize("arguments", [(b"k", b""), (b"k", 1, True), (1, b"", True)])
def test_other_arguments_are_refused(arguments: tuple[object, ...]) -> None:
    assert agreed("record_mark", *arguments) == ("raised", TypeError)
