"""Keys and their partitions, against CRC-32 computed bit by bit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.hashing import partition_of
from upr_protocol.limits import PARTITIONS_MAX


def crc32_bit_by_bit(data: bytes) -> int:
    """IEEE 802.3's CRC-32, reflected."""
    crc = 0xFFFF_FFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB8_8320 if crc & 1 else 0)
    return crc ^ 0xFFFF_FFFF


def test_the_oracle_knows_the_standard_check_value() -> None:
    assert crc32_bit_by_bit(b"123456789") == 0xCBF4_3926


@given(st.binary(max_size=250), st.integers(1, PARTITIONS_MAX))
def test_the_partition_follows_couchbases_rule(key: bytes, partitions: int) -> None:
    expected = ((crc32_bit_by_bit(key) >> 16) & 0x7FFF) % partitions
    assert partition_of(key, partitions) == expected
    assert 0 <= partition_of(key, partitions) < partitions


@pytest.mark.parametrize(
    ("key", "of_1024", "of_64"),
    [
        # (0xCBF43926 >> 16) & 0x7FFF is 0x4BF4: the top bit is masked away.
        (b"123456789", 0x3F4, 0x34),
        (b"", 0, 0),
        # CRC-32 of "a" is 0xE8B7BE43.
        (b"a", 0x0B7, 0x37),
    ],
)
def test_partitions_computed_by_hand(key: bytes, of_1024: int, of_64: int) -> None:
    assert partition_of(key, 1024) == of_1024
    assert partition_of(key, 64) == of_64
    assert partition_of(key, 1) == 0


def test_the_top_bit_of_the_checksum_is_masked_before_the_remainder() -> None:
    # With a power of two the mask makes no difference; with 1,000 it does.
    assert partition_of(b"123456789", 1000) == 0x4BF4 % 1000 != 0xCBF4 % 1000
