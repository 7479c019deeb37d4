from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from upr_protocol.cli.row_reader import BYTES_MAX, ITEMS_MAX, read_in_thread


def size(_: int) -> int:
    return 1


async def test_every_row_comes_once_and_in_order() -> None:
    count = 10 * ITEMS_MAX + 1
    received: list[int] = []
    async with read_in_thread(iter(range(count)), size) as batches:
        async for batch in batches:
            assert len(batch) <= ITEMS_MAX
            received += batch
    assert received == list(range(count))


async def test_an_empty_source_ends() -> None:
    async with read_in_thread(iter(()), size) as batches:
        assert [batch async for batch in batches] == []


async def test_rows_of_a_slow_source_arrive_before_it_continues() -> None:
    go_on = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        assert go_on.wait(60)
        yield 2

    received = []
    async with read_in_thread(source(), size) as batches:
        async for batch in batches:
            received.append(batch)
            go_on.set()
    assert received == [[1], [2]]


async def test_the_thread_waits_while_no_rows_are_taken() -> None:
    produced = 0

    def source() -> Iterator[int]:
        nonlocal produced
        for index in range(10 * ITEMS_MAX):
            produced = index
            yield index

    async with read_in_thread(source(), size) as batches:
        async for batch in batches:
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert produced <= batch[-1] + ITEMS_MAX + 1


async def test_large_rows_are_not_read_far_ahead() -> None:
    produced = received = 0

    def source() -> Iterator[int]:
        nonlocal produced
        for index in range(100):
            produced += 1
            yield index

    async with read_in_thread(source(), lambda _: BYTES_MAX // 10) as batches:
        async for batch in batches:
            received += len(batch)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert produced <= received + 22
    assert received == 100


async def test_an_error_of_the_source_is_raised() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    async def go_through() -> None:
        async with read_in_thread(source(), size) as batches:
            async for _ in batches:
                pass

    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="broken")):
        await go_through()


async def test_cancelling_abandons_a_source_that_blocks() -> None:
    go_on = threading.Event()

    def source() -> Iterator[int]:
        assert go_on.wait(60)
        yield 1

    with trio.move_on_after(0.01) as scope:
        async with read_in_thread(source(), size) as batches:
            async for _ in batches:
                pass
    assert scope.cancelled_caught
    go_on.set()
