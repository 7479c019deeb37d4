"""The turns of large reads."""

from __future__ import annotations

from collections import Counter
from typing import Final

import trio
from hypothesis import given
from hypothesis import strategies as st

from upr_server.net.turns import TURN_READ_BYTES, ReadTurns
from upr_server.runtime import TurnTimer

HALF: Final = TURN_READ_BYTES // 2


class CountedTurns:
    """The loop's turns, counted by hand."""

    turn_count = 0


@given(st.lists(st.one_of(st.none(), st.integers(1, TURN_READ_BYTES))))
def test_reads_of_a_turn_are_bounded(reads: list[int | None]) -> None:
    """None is the end of a turn."""
    counter = CountedTurns()
    turns, nbytes = ReadTurns(counter), 0
    for read_bytes in reads:
        if read_bytes is None:
            counter.turn_count += 1
            nbytes = 0
        assert turns.may_read == (nbytes < TURN_READ_BYTES)
        if read_bytes is not None and turns.may_read:
            turns.note_read(read_bytes)
            nbytes += read_bytes


async def test_many_readers_share_the_loops_turns() -> None:
    timer = TurnTimer()
    timer.start()
    turns, bytes_by_turn, reads_by_reader = ReadTurns(timer), Counter[int](), Counter[int]()

    async def read(reader: int) -> None:
        for _ in range(5):
            await trio.lowlevel.checkpoint()
            if not turns.may_read:
                await turns.next_turn()
            turns.note_read(HALF)
            bytes_by_turn[timer.turn_count] += HALF
            reads_by_reader[reader] += 1

    async with trio.open_nursery() as nursery:
        for reader in range(20):
            nursery.start_soon(read, reader)
    # What begins below the bound ends above it, and so does the one that had waited.
    assert max(bytes_by_turn.values()) <= TURN_READ_BYTES + 2 * HALF
    assert all(reads_by_reader[reader] == 5 for reader in range(20))
