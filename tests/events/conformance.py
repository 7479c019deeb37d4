"""What a store must pass to carry the event bus: derive from `Conformance`, with a fixture `store`
that gives an empty one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import pytest
import trio

from upr_server.events.store import EventStore, Transaction
from upr_server.storage.ledger import NUMBER, Atomic, Operate, Row, operate

ALL: Final = (b"\1", b"\xff")


def number(value: int) -> bytes:
    """A number as it is stored."""
    return NUMBER.pack(value)


async def rows_of(
    store: EventStore, first: bytes = ALL[0], end: bytes = ALL[1]
) -> dict[bytes, bytes]:
    """What there is."""

    async def body(transaction: Transaction) -> Sequence[Row]:
        return await transaction.read(*ALL)

    return dict(await store.transact(body))


async def change(store: EventStore, body: Callable[[Transaction], None]) -> None:
    """A transaction that reads nothing."""

    async def run(transaction: Transaction) -> None:
        await trio.lowlevel.checkpoint()
        body(transaction)

    await store.transact(run)


async def put(store: EventStore, rows: dict[bytes, bytes]) -> None:
    """Puts rows."""

    def body(transaction: Transaction) -> None:
        for key, value in rows.items():
            transaction.put(key, value)

    await change(store, body)


class Conformance:
    """The suite."""

    async def test_an_empty_store(self, store: EventStore) -> None:
        assert await rows_of(store) == {}

    async def test_what_was_put_is_read_in_order_and_within_its_range(
        self, store: EventStore
    ) -> None:
        keys = [b"b", b"a", b"c", b"ab", b"b\0", b"\xfe"]
        await put(store, {key: b"value of " + key for key in keys})
        found: list[tuple[Row, ...]] = []

        async def body(transaction: Transaction) -> None:
            found.append(await transaction.read(b"a", b"c"))
            found.append(await transaction.read(b"a", b"c", limit=2))
            found.append(await transaction.read(b"b", b"b\0"))
            found.append(await transaction.read(b"d", b"e"))

        await store.transact(body)
        assert [[key for key, _ in rows] for rows in found] == [
            [b"a", b"ab", b"b", b"b\0"],
            [b"a", b"ab"],
            [b"b"],
            [],
        ]
        assert found[2] == ((b"b", b"value of b"),)

    async def test_a_range_is_cleared_without_its_end(self, store: EventStore) -> None:
        await put(store, dict.fromkeys((b"a", b"b", b"b\x00", b"c"), b""))

        def body(transaction: Transaction) -> None:
            transaction.clear(b"b", b"c")

        await change(store, body)
        assert await rows_of(store) == {b"a": b"", b"c": b""}

    async def test_atomic_operations(self, store: EventStore) -> None:
        def body(transaction: Transaction) -> None:
            # Of a number that is not there.
            transaction.minimum(b"min", 5)
            transaction.maximum(b"max", 5)
            transaction.add(b"add", 5)
            # On one number they are done in their order.
            transaction.add(b"several", 8)
            transaction.minimum(b"several", 1)
            transaction.maximum(b"several", 3)
            transaction.add(b"several", 4)

        await change(store, body)
        assert await rows_of(store) == {
            b"min": number(5),
            b"max": number(5),
            b"add": number(5),
            b"several": number(7),
        }

        def again(transaction: Transaction) -> None:
            transaction.minimum(b"min", 9)
            transaction.maximum(b"max", 3)
            transaction.add(b"add", 1 << 33)
            transaction.minimum(b"several", 1)

        await change(store, again)
        assert await rows_of(store) == {
            b"min": number(5),
            b"max": number(5),
            b"add": number(5 + (1 << 33)),
            b"several": number(1),
        }

    async def test_atomic_operations_of_many_at_once_all_count(self, store: EventStore) -> None:
        def body(transaction: Transaction) -> None:
            transaction.add(b"n", 4)

        async with trio.open_nursery() as nursery:
            for _ in range(50):
                nursery.start_soon(change, store, body)
        assert await rows_of(store) == {b"n": number(200)}

    async def test_read_and_write_of_many_at_once_all_count(self, store: EventStore) -> None:
        attempts = 0

        async def body(transaction: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            rows = await transaction.read(b"n", b"n\0")
            before = NUMBER.unpack(rows[0][1])[0] if rows else 0
            transaction.put(b"n", number(before + 1))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(store.transact, body)
        assert await rows_of(store) == {b"n": number(20)}
        assert attempts > 20

    @pytest.mark.parametrize("way", ["put", "new", "clear", "add"])
    async def test_what_was_read_and_has_changed_is_read_again(
        self, store: EventStore, way: str
    ) -> None:
        await put(store, {b"a": number(1), b"c": number(3)})
        seen: list[list[bytes]] = []

        def disturb(transaction: Transaction) -> None:
            if way == "put":
                transaction.put(b"a", number(2))
            elif way == "new":
                transaction.put(b"b", number(2))
            elif way == "clear":
                transaction.clear(b"a", b"b")
            else:
                transaction.add(b"c", 1)

        async def body(transaction: Transaction) -> None:
            rows = await transaction.read(b"a", b"d")
            seen.append([value for _, value in rows])
            if len(seen) == 1:
                await change(store, disturb)
            transaction.put(b"z", number(len(rows)))

        await store.transact(body)
        assert len(seen) == 2
        assert seen[0] != seen[1]
        assert (await rows_of(store))[b"z"] == number(len(seen[1]))

    async def test_what_changes_beside_is_no_conflict(self, store: EventStore) -> None:
        await put(store, {b"a": b"", b"b": b"", b"c": b"", b"d": b""})
        attempts = 0

        def disturb(transaction: Transaction) -> None:
            transaction.put(b"d", b"behind the end")
            transaction.put(b"c", b"behind the limit")
            transaction.clear(b"0", b"a")

        async def body(transaction: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            assert len(await transaction.read(b"a", b"d", limit=2)) == 2
            if attempts == 1:
                await change(store, disturb)
            transaction.put(b"z", b"")

        await store.transact(body)
        assert attempts == 1

    async def test_a_snapshot_read_is_no_conflict(self, store: EventStore) -> None:
        await put(store, {b"a": b"1"})
        attempts = 0

        async def body(transaction: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            await transaction.read(b"a", b"b", snapshot=True)
            await put(store, {b"a": b"2"})
            transaction.put(b"z", b"")

        await store.transact(body)
        assert attempts == 1

    async def test_a_conflict_leaves_nothing(self, store: EventStore) -> None:
        class StopError(Exception):
            pass

        attempts = 0

        async def body(transaction: Transaction) -> None:
            nonlocal attempts
            attempts += 1
            if attempts == 2:
                raise StopError
            await transaction.read(b"a", b"b")
            await put(store, {b"a": b""})
            transaction.put(b"z", b"")
            transaction.add(b"n", 1)

        with pytest.raises(StopError):
            await store.transact(body)
        assert await rows_of(store) == {b"a": b""}

    async def test_a_read_behind_a_change_is_refused(self, store: EventStore) -> None:
        async def body(transaction: Transaction) -> None:
            transaction.put(b"a", b"")
            await transaction.read(b"a", b"b")

        with pytest.raises(AssertionError, match="reads first"):
            await store.transact(body)

    async def test_cancelled_all_of_it_is_there_or_nothing(self, store: EventStore) -> None:
        def body(transaction: Transaction) -> None:
            for key in (b"a", b"b", b"c"):
                transaction.add(key, 1)

        for checkpoints in range(4):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(change, store, body)
                for _ in range(checkpoints):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
            found = await rows_of(store)
            assert len(set(found.values())) <= 1
            assert len(found) in (0, 3)

    async def test_random_transactions_come_to_what_a_dictionary_does(
        self, store: EventStore
    ) -> None:
        draw = random.Random(7)
        model: dict[bytes, bytes] = {}
        keys = [b"k%d" % index for index in range(8)]
        for _ in range(60):

            def body(transaction: Transaction) -> None:
                for key in draw.sample(keys, 3):
                    way = draw.randrange(5)
                    operand = draw.randrange(20)
                    if way == 0:
                        transaction.put(key, number(operand))
                        model[key] = number(operand)
                    elif way == 1:
                        transaction.clear(key, key + b"\0")
                        model.pop(key, None)
                    else:
                        operation = Operate(key, list(Atomic)[way - 2], operand)
                        transaction.changes.append(operation)
                        model[key] = operate(model.get(key), operation)

            await change(store, body)
            assert await rows_of(store) == model
