"""The conformance suite on the stores that there are, and what the one on disk is beside that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
import trio

from tests.events.conformance import Conformance, put, rows_of
from upr_server.events import DiskStore, EventStore, MemoryStore
from upr_server.events.store import (
    ATTEMPTS_MAX,
    ConflictError,
    RangeRead,
    Transaction,
    range_read,
)
from upr_server.storage.errors import DiskFullError, StorageError
from upr_server.storage.ledger import Ledger, LedgerCall
from upr_server.storage.messages import Unpacker, pack
from upr_server.storage.processes import open_store


@asynccontextmanager
async def on_disk(path: Path) -> AsyncIterator[DiskStore]:
    """A store in a ledger of this process."""
    ledger, unpacker = Ledger(path), Unpacker()

    async def ask(call: LedgerCall) -> Any:
        # As it goes through a pipe.
        sent, _ = pack(call)
        await trio.lowlevel.checkpoint()
        answer, _ = pack(ledger.answer(unpacker.unpack(sent, LedgerCall, ())))
        return unpacker.unpack(answer, call.answer_type, ())

    try:
        store = DiskStore(ask)
        async with store.opened():
            yield store
    finally:
        ledger.close()


class TestMemoryStore(Conformance):
    @pytest.fixture
    async def store(self) -> EventStore:
        return MemoryStore()


class TestDiskStore(Conformance):
    @pytest.fixture
    async def store(self, tmp_path: Path) -> AsyncIterator[EventStore]:
        async with on_disk(tmp_path / "events") as store:
            yield store


async def test_after_a_clean_stop_everything_is_there(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "events") as store:
        await put(store, {b"a": b"1"})
    for _ in range(2):
        async with on_disk(tmp_path / "events") as store:
            assert await rows_of(store) == {b"a": b"1"}
            await put(store, {b"a": b"1"})
            assert not (tmp_path / "events" / "clean").exists()


async def test_after_anything_else_nothing_is(tmp_path: Path) -> None:
    with suppress(KeyError):
        async with on_disk(tmp_path / "events") as store:
            await put(store, {b"a": b"1"})
            raise KeyError
    async with on_disk(tmp_path / "events") as store:
        assert await rows_of(store) == {}
        await put(store, {b"a": b"1"})
        store.is_whole = False
    async with on_disk(tmp_path / "events") as store:
        assert await rows_of(store) == {}


async def test_what_is_damaged_is_thrown_away(tmp_path: Path) -> None:
    path = tmp_path / "events"
    async with on_disk(path) as store:
        await put(store, {b"key": b"a value that is easily found"})
    data = (path / "data.mdb").read_bytes()
    assert b"easily found" in data
    for damaged in (data.replace(b"easily found", b"rarely found"), b"no environment"):
        (path / "data.mdb").write_bytes(damaged)
        with structlog.testing.capture_logs() as logs:
            async with on_disk(path) as store:
                assert await rows_of(store) == {}
        assert [log["event"] for log in logs] == ["the ledger is damaged, and begins anew"]


async def test_a_mark_that_cannot_be_removed_is_told_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "events"
    async with on_disk(path) as store:
        await put(store, {b"a": b"1"})
    async with on_disk(path) as store:
        (path / "clean").unlink()
        (path / "clean").mkdir()
        with pytest.raises(StorageError, match="cannot be used"):
            await put(store, {b"a": b"2"})
        assert await rows_of(store) == {b"a": b"1"}
        (path / "clean").rmdir()
        await put(store, {b"a": b"2"})
        assert await rows_of(store) == {b"a": b"2"}


async def test_a_stop_that_cannot_be_marked_is_a_stop(tmp_path: Path) -> None:
    path = tmp_path / "events"
    async with on_disk(path) as store:
        await put(store, {b"a": b"1"})
        path.rename(tmp_path / "gone")
    async with on_disk(path) as store:
        assert await rows_of(store) == {}


async def test_in_the_process_that_reads(tmp_path: Path) -> None:
    for expected in ({}, {b"a": b"1"}):
        async with open_store(tmp_path / "data") as disk:
            store = DiskStore(disk.ledger)
            async with store.opened():
                assert await rows_of(store) == expected
                await put(store, {b"a": b"1"})
    assert (tmp_path / "data" / "events" / "clean").exists()


async def test_where_there_is_no_ledger_it_is_in_memory() -> None:
    async def ask(_call: LedgerCall) -> None:
        await trio.lowlevel.checkpoint()
        raise DiskFullError("the disk is full")

    store = DiskStore(ask)
    async with store.opened():
        await put(store, {b"a": b"1"})
        assert await rows_of(store) == {b"a": b"1"}


async def test_a_store_that_is_closed_says_so(tmp_path: Path) -> None:
    async with on_disk(tmp_path / "events") as store:
        pass
    with pytest.raises(StorageError, match="closed"):
        await rows_of(store)


async def test_conflicts_without_end_are_told() -> None:
    store = MemoryStore()
    attempts = 0

    async def body(transaction: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        await transaction.read(b"a", b"b")
        await put(store, {b"a": b""})
        transaction.put(b"z", b"")

    with pytest.raises(ConflictError):
        await store.transact(body)
    assert attempts == ATTEMPTS_MAX


async def test_a_transaction_of_long_ago_has_met_a_conflict() -> None:
    store = MemoryStore()
    attempts = 0

    async def body(transaction: Transaction) -> None:
        nonlocal attempts
        attempts += 1
        await transaction.read(b"a", b"b")
        if attempts == 1:
            for _ in range(300):
                await put(store, {b"z": b""})
        transaction.put(b"y", b"")

    await store.transact(body)
    assert attempts == 2


def test_a_limited_read_ends_behind_its_last_row() -> None:
    rows = [(b"a", b""), (b"b", b""), (b"c", b"")]
    assert range_read(b"a", b"z", 2, rows) == RangeRead(b"a", b"b\0", tuple(rows[:2]))
    assert range_read(b"a", b"z", 4, rows) == RangeRead(b"a", b"z", tuple(rows))
