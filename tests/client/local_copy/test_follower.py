"""A local copy, on servers that fail over at any moment; killed anywhere."""

from __future__ import annotations

import math
import sqlite3
import tempfile
from collections import Counter
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from tests.kit.branches import Branches
from tests.kit.consuming import until_completed
from tests.kit.drawn_schedule import FailoverSchedule
from tests.kit.effort import effort
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from upr_protocol import failover
from upr_protocol.client import (
    ChunkReceived,
    Item,
    LocalCopyError,
    LocalCopyReader,
    ResumeStateError,
    SaveLimits,
    Undone,
    keep_local_copy,
)
from upr_protocol.client.local_copy.database import LocalCopyWriteError
from upr_protocol.client.local_copy.file import LocalCopyFile
from upr_protocol.errors import BrokenError
from upr_protocol.limits import FAILOVER_ENTRIES_MAX

URL = "upr://fake/b"


class KilledError(Exception):
    """The application failed; what was dealt with is committed."""


def contents(folder: Path) -> dict[bytes, bytes]:
    with closing(LocalCopyReader(folder)) as reader:
        return {item.key: item.value for item in reader.items()}


def check_ends(folder: Path, branches: Branches) -> int:
    """Checks each partition that claims to equal a state of the server; gives how many do."""
    with closing(LocalCopyReader(folder)) as reader:
        ends = reader.consistent_ends()
        items = list(reader.items())
        logs = {p: position.log for p, position in reader.state.positions.items()}
    for partition, end in ends.items():
        expected = branches.contents(partition, logs[partition].current, end) if end else {}
        assert {i.key: i.value for i in items if i.partition == partition} == expected, partition
    return len(ends)


class Schedule(FailoverSchedule):
    """What happens to a copy and a server, drawn from a seed."""

    def __init__(self, seed: int, folder: Path) -> None:
        super().__init__(seed)
        self.ends = 0
        self.folder = folder

    async def _follow_for_a_while(self) -> None:
        assert self._net is not None
        async with keep_local_copy(
            URL,
            self.folder,
            dial=self._net.dial,
            draw=self._rng.random,
            deletions_max=3,
            commit_limits=SaveLimits(0.0, 0.0),
        ) as copy:
            for _ in range(self._rng.randrange(60)):
                with trio.move_on_after(10):
                    await anext(copy)
                self.ends += check_ends(self.folder, self.branches)
                self._disturb()
                if self._chance(40):
                    raise KilledError

    async def _main(self) -> None:
        async with trio.open_nursery() as nursery:
            self._net = FakeNet(nursery, self.server)
            for _ in range(6):
                self._change()
                self._net.budgets = self._budgets()
                with suppress(BrokenError, KilledError):
                    await self._follow_for_a_while()
            self._net.budgets = iter(())
            self._disasters = False
            async with keep_local_copy(URL, self.folder, dial=self._net.dial) as copy:
                await until_completed(copy)
            nursery.cancel_scope.cancel()


@given(st.integers(0, 2**32))
@settings(max_examples=effort(7, 15), deadline=None)
def test_a_committed_partition_equals_the_servers_state_wherever_it_claims_to(seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        schedule = Schedule(seed, Path(folder))
        schedule.run()
        assert contents(schedule.folder) == schedule.server.contents()
        check_ends(schedule.folder, schedule.branches)


@pytest.mark.parametrize("entries_max", [2, 5])
def test_copies_are_right_when_failover_logs_are_full(
    entries_max: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As above, with logs so short that histories are dropped all the time."""
    monkeypatch.setattr(failover, "FAILOVER_ENTRIES_MAX", entries_max)
    for seed in range(effort(2, 20)):
        schedule = Schedule(seed, tmp_path / str(seed))
        schedule.run()
        assert contents(schedule.folder) == schedule.server.contents()
        check_ends(schedule.folder, schedule.branches)


async def test_a_rollback_replaces_just_the_keys_that_the_server_does_not_have(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    server.partitions = server.partitions[:1]
    for index in range(30):
        server.put(b"%d" % index, b"old")
    async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
        await until_completed(copy)
        assert await copy.count() == 30
        assert await copy.get("29") is not None
    server.partitions[0].fail_over(77, 25)
    server.put(b"3", b"new")
    async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
        undone, *_ = await until_completed(copy)
        assert isinstance(undone, Undone)
        assert (undone.ceiling, undone.to) == (25, 25)
        assert set(undone.documents) == {b"25", b"26", b"27", b"28", b"29"}
        assert set(undone.documents.values()) == {None}
        item = await copy.get("3")
        assert isinstance(item, Item)
        assert (item.value, item.seq) == (b"new", 26)
    assert contents(tmp_path) == server.contents()
    with closing(LocalCopyReader(tmp_path)) as reader:
        assert len(reader) == 25
        assert reader.consistent_ends() == {0: 26}
        assert reader.get(0, b"3") == item


@pytest.mark.parametrize("failovers", [FAILOVER_ENTRIES_MAX, 2 * FAILOVER_ENTRIES_MAX])
async def test_items_from_before_the_oldest_known_history_are_not_read_again_and_again(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock, failovers: int
) -> None:
    """All items of a partition, at each new connection, would not fit into memory."""
    server.partitions = server.partitions[:1]
    for index in range(30):
        server.put(b"%d" % index, b"old")
    async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
        await until_completed(copy)
    read_again: Counter[bytes] = Counter()
    for index in range(failovers):
        server.partitions[0].fail_over(5000 + index, 30 + index)
        server.put(b"new %d" % index, b"")
        async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
            for event in await until_completed(copy):
                if isinstance(event, Undone):
                    read_again.update(list(event.documents))
        async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
            events = await until_completed(copy)
            assert not [event for event in events if isinstance(event, Undone)]
    # Once for as many failovers as lie between the middle of a log and its end.
    assert max(read_again.values()) <= failovers // (FAILOVER_ENTRIES_MAX // 2) - 1
    assert contents(tmp_path) == server.contents()


@pytest.mark.parametrize("fails_at", ["commit", "put"])
async def test_a_full_disk_loses_nothing_that_was_committed(
    net: FakeNet,
    server: FakeServer,
    tmp_path: Path,
    autojump_clock: MockClock,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: str,
) -> None:
    """SQLite takes the transaction back; the positions in it must go as well."""
    server.chunk_mutations = 100
    seldom = SaveLimits(math.inf, math.inf)

    def full(file: LocalCopyFile, *_: object) -> None:
        file._database.execute("ROLLBACK")  # as SQLite does of itself
        raise sqlite3.OperationalError("database or disk is full")

    for index in range(40):
        server.put(b"first %d" % index, b"x")
    async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
        await until_completed(copy)
    for index in range(400):
        server.put(b"second %d" % index, b"x" * 100)
    with pytest.raises(KilledError):  # noqa: PT012
        async with keep_local_copy(URL, tmp_path, dial=net.dial, commit_limits=seldom) as copy:
            received = [await anext(copy) for _ in range(12)]
            assert any(isinstance(event, ChunkReceived) for event in received)
            file = copy._file
            with pytest.raises(LocalCopyWriteError, match="is full; check that the disk has room"):  # noqa: PT012
                if fails_at == "commit":
                    monkeypatch.setattr(file, "_commit", partial(full, file))
                    await copy.save()
                else:
                    await file._run(full, file)
            monkeypatch.undo()
            for again in (copy.save, copy.count, partial(copy.get, "first 1")):
                with pytest.raises(LocalCopyWriteError, match="could not be written before"):
                    await again()
            raise KilledError
    assert len(contents(tmp_path)) == 40
    async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
        await until_completed(copy)
    assert contents(tmp_path) == server.contents()


async def test_nothing_is_written_outside_of_a_transaction(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    server.put(b"k", b"v")
    with pytest.raises(LocalCopyWriteError, match="the transaction has ended"):  # noqa: PT012
        async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
            await until_completed(copy)
            copy._file._database.execute("ROLLBACK")
    async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
        await until_completed(copy)
    assert contents(tmp_path) == server.contents()


async def test_a_copy_in_use_or_of_another_bucket_is_refused(
    net: FakeNet, tmp_path: Path, autojump_clock: MockClock
) -> None:
    async with keep_local_copy(URL, tmp_path, dial=net.dial):
        with pytest.raises(LocalCopyError, match="in use by another process"):
            async with keep_local_copy(URL, tmp_path, dial=net.dial):
                pass
    with pytest.raises(ResumeStateError, match="of the bucket 'b', not of 'other'"):
        async with keep_local_copy("upr://fake/other", tmp_path, dial=net.dial):
            pass


async def test_a_directory_without_a_copy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalCopyError, match="does not hold a local copy"):
        LocalCopyReader(tmp_path)
    path = tmp_path / "map.sqlite"
    path.write_bytes(b"something else, and long enough to be looked at" * 100)
    with pytest.raises(LocalCopyError, match="does not hold a readable local copy"):
        LocalCopyReader(tmp_path)
    with pytest.raises(LocalCopyError, match="does not hold a readable local copy"):
        async with keep_local_copy(URL, tmp_path):
            pass


async def test_a_copy_that_is_damaged_inside_says_that_it_must_be_made_anew(
    net: FakeNet, server: FakeServer, tmp_path: Path, autojump_clock: MockClock
) -> None:
    """To start again, as after a full disk, would meet the same damage for ever."""
    for index in range(300):
        server.put(b"%d" % index, bytes(500))
    async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
        await until_completed(copy)
    path = tmp_path / "map.sqlite"
    with path.open("r+b") as file:
        file.seek(16 * 4096)  # behind the schema and the positions
        file.write(b"?" * (path.stat().st_size - file.tell()))
    for index in range(300):
        server.put(b"%d" % index, b"new")
    with pytest.raises(LocalCopyError, match="is malformed; name another directory"):
        async with keep_local_copy(URL, tmp_path, dial=net.dial) as copy:
            await until_completed(copy)
