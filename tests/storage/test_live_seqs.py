"""The set of sequence numbers that an index refers to, against a Python set."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_server.storage import live_seqs
from upr_server.storage.key_index import KeyIndex
from upr_server.storage.live_seqs import LiveSeqs


class Index:
    """The index of one partition, with these sequence numbers by key."""

    def __init__(self, seqs: list[int]) -> None:
        self._seqs = seqs

    def newest_seqs(self, partition: int, after: bytes, limit: int) -> tuple[list[int], bytes]:
        assert partition == 3
        begin = int(after or b"0")
        seqs = self._seqs[begin : begin + limit]
        return seqs, b"%d" % (begin + limit) if len(seqs) == limit else b""


@given(
    st.lists(st.integers(1, 10_000), unique=True, max_size=50),
    st.integers(0, 9_000),
    st.integers(1, 10_000),
    st.integers(1, 60),
)
def test_the_sequence_numbers_of_a_range_are_those_of_a_set(
    seqs: list[int], after: int, count: int, step_keys: int
) -> None:
    known_seqs = LiveSeqs(cast("KeyIndex", Index(seqs)), 3, after, after + count)
    steps = 0
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(live_seqs, "STEP_KEYS", step_keys)
        while not known_seqs.is_complete:
            known_seqs.read_step()
            steps += 1
    assert steps == len(seqs) // step_keys + 1
    asked = range(after + 1, after + count + 1)
    assert known_seqs.are_live(asked) == bytes(map(set(seqs).__contains__, asked))


def test_sequence_numbers_may_be_large() -> None:
    seqs = [1, 1 << 62, (1 << 63) - 1]
    known_seqs = LiveSeqs(cast("KeyIndex", Index(seqs)), 3, 0, (1 << 63) - 1)
    known_seqs.read_step()
    assert known_seqs.is_complete
    assert known_seqs.are_live([1, 2, 1 << 62, (1 << 62) + 1, (1 << 63) - 1]) == b"\1\0\1\0\1"
