from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from upr_protocol.cli.row_reader import ITEMS_MAX, read_in_thread


async def test_all_comes_once_and_in_order() -> None:
    count = 10 * ITEMS_MAX + 1
    found: list[int] = []
    async with read_in_thread(iter(range(count))) as batches:
        async for batch in batches:
            assert len(batch) <= ITEMS_MAX
            found += batch
    assert found == list(range(count))


async def test_an_empty_source_ends() -> None:
    async with read_in_thread(iter(())) as batches:
        assert [batch async for batch in batches] == []


async def test_what_a_slow_source_gave_comes_before_it_goes_on() -> None:
    go_on = threading.Event()

    def source() -> Iterator[int]:
        yield 1
        assert go_on.wait(60)
        yield 2

    found = []
    async with read_in_thread(source()) as batches:
        async for batch in batches:
            found.append(batch)
            go_on.set()
    assert found == [[1], [2]]


async def test_the_thread_waits_while_nobody_takes() -> None:
    given = 0

    def source() -> Iterator[int]:
        nonlocal given
        for number in range(10 * ITEMS_MAX):
            given = number
            yield number

    async with read_in_thread(source()) as batches:
        async for batch in batches:
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert given <= batch[-1] + ITEMS_MAX + 1


async def test_an_error_of_the_source_comes_out() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise ValueError("broken")

    async def go_through() -> None:
        async with read_in_thread(source()) as batches:
            async for _ in batches:
                pass

    with pytest.RaisesGroup(pytest.RaisesExc(ValueError, match="broken")):
        await go_through()


async def test_cancelled_it_leaves_a_source_that_waits() -> None:
    go_on = threading.Event()

    def source() -> Iterator[int]:
        assert go_on.wait(60)
        yield 1

    with trio.move_on_after(0.01) as scope:
        async with read_in_thread(source()) as batches:
            async for _ in batches:
                pass
    assert scope.cancelled_caught
    go_on.set()
