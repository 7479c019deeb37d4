"""A chunk that was due at some time says so, whatever of it is left."""

from __future__ import annotations

import random

from benchmarks.kit.stamps import stamped, stamps
from benchmarks.kit.work import key_of, values
from upr_protocol.chunk import chunk_of_plain_sets


def test_every_value_of_a_stamped_chunk_begins_with_the_time() -> None:
    chunk = chunk_of_plain_sets([key_of(n) for n in range(5)], values(random.Random(1), 5))
    copy = stamped(chunk, 1_234_567_890_123)
    assert {value[:8] for value in copy.values()} == {(1_234_567_890_123).to_bytes(8, "little")}
    assert [value[8:] for value in copy.values()] == [value[8:] for value in chunk.values()]
    assert copy.keys() == chunk.keys()
    assert copy.crc != chunk.crc


def test_a_chunk_of_several_published_ones_has_the_times_of_all() -> None:
    several = [
        value
        for due in (7, 9, 8)
        for value in stamped(
            chunk_of_plain_sets([b"k"] * 3, values(random.Random(1), 3)), due
        ).values()
    ]
    chunk = chunk_of_plain_sets([key_of(n) for n in range(9)], several)
    assert stamps(chunk).tolist() == [7, 9, 8]
    assert stamps(chunk_of_plain_sets([b"k"], several[:1])).tolist() == [7]
