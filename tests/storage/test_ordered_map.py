"""What every `Environment` must do, with LMDB and with the simulated disk."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upr_server.storage.errors import (
    CorruptionError,
    DataDirectoryError,
    DiskFullError,
    StoreFailedError,
)
from upr_server.storage.lmdb_file import check_length, read_last_commit
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.lmdb_space import MAP_BYTES_DEFAULT
from upr_server.storage.ordered_map import OrderedMap, ReadTransaction, WriteTransaction
from upr_server.storage.simulated_disk import SimulatedDisk

MAP_BYTES: Final = 1024 * 1024
LMDB_MAGIC: Final = (0xBEEFC0DE).to_bytes(4, "little")
LAST_PAGE: Final = 136  # the offset, in a meta page, of the number of the last page in use
# The map itself uses the key of one zero byte; see `lmdb_transactions.COMMIT`.
LOWEST, HIGHEST = b"\0\0", b"\xff" * 40

KEYS: Final = st.one_of(
    st.sampled_from([b"a", b"b", b"c", b"\0\0", b"\xff", b"a\0"]),
    st.binary(min_size=1, max_size=12).filter(lambda key: key != b"\0"),
)
VALUES: Final = st.one_of(st.binary(max_size=20), st.just(bytes(5_000)))

# A transaction: its operations, and whether it commits.
Step = tuple[str, list[tuple[bytes, bytes]]]
STEPS: Final[st.SearchStrategy[Step]] = st.tuples(
    st.sampled_from(["put", "put_all", "put_new", "delete"]),
    st.lists(st.tuples(KEYS, VALUES), max_size=6),
)
TRANSACTIONS: Final = st.lists(
    st.tuples(st.lists(STEPS, max_size=5), st.sampled_from([True, True, False])), max_size=12
)


class GivenUpError(Exception):
    """Raised to abort a transaction."""


@pytest.fixture(params=["lmdb", "simulated"])
def ordered_map(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OrderedMap]:
    new_map: OrderedMap
    if request.param == "lmdb":
        new_map = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    else:
        new_map = SimulatedDisk(bytes_max=MAP_BYTES)
    yield new_map
    new_map.close()


@pytest.fixture
def lmdb_environment(tmp_path: Path) -> Iterator[LmdbOrderedMap]:
    lmdb_ordered_map = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    yield lmdb_ordered_map
    lmdb_ordered_map.close()


def put(ordered_map: OrderedMap, items: Iterable[tuple[bytes, bytes]]) -> None:
    with ordered_map.write() as transaction:
        for key, value in items:
            transaction.put(key, value)


def contents(ordered_map: OrderedMap) -> dict[bytes, bytes]:
    with ordered_map.read() as transaction:
        return seen_by(transaction)


def seen_by(transaction: ReadTransaction) -> dict[bytes, bytes]:
    return {bytes(key): bytes(value) for key, value in transaction.scan(LOWEST, HIGHEST)}


def get(ordered_map: OrderedMap, key: bytes) -> bytes | None:
    with ordered_map.read() as transaction:
        value = transaction.get(key)
        return None if value is None else bytes(value)


def last(ordered_map: OrderedMap, first: bytes, end: bytes) -> tuple[bytes, bytes] | None:
    with ordered_map.read() as transaction:
        last = transaction.last(first, end)
        return None if last is None else (last[0], bytes(last[1]))


def test_a_new_map_is_empty(ordered_map: OrderedMap) -> None:
    assert contents(ordered_map) == {}
    assert get(ordered_map, b"a") is None
    assert last(ordered_map, LOWEST, HIGHEST) is None


def test_put_replaces_the_value_of_a_key(ordered_map: OrderedMap) -> None:
    put(ordered_map, [(b"a", b"1"), (b"b", b""), (b"a", b"2")])
    assert contents(ordered_map) == {b"a": b"2", b"b": b""}
    assert get(ordered_map, b"b") == b""
    put(ordered_map, [(b"a", b"3")])
    assert get(ordered_map, b"a") == b"3"


def test_a_key_can_be_deleted_even_if_it_is_missing(
    ordered_map: OrderedMap,
) -> None:
    put(ordered_map, [(b"a", b"1"), (b"b", b"2")])
    with ordered_map.write() as transaction:
        transaction.delete(b"a")
        transaction.delete(b"never there")
        assert transaction.get(b"a") is None
    assert contents(ordered_map) == {b"b": b"2"}


def test_a_scan_includes_both_ends_in_rising_order(ordered_map: OrderedMap) -> None:
    put(ordered_map, [(key, key) for key in (b"d", b"b", b"a", b"c", b"bb")])
    with ordered_map.read() as transaction:
        assert [key for key, _ in transaction.scan(b"b", b"c")] == [b"b", b"bb", b"c"]
        assert [key for key, _ in transaction.scan(b"aa", b"bz")] == [b"b", b"bb"]
        assert list(transaction.scan(b"e", b"z")) == []
        assert list(transaction.scan(b"c", b"b")) == []


def test_the_last_key_of_a_range(ordered_map: OrderedMap) -> None:
    put(ordered_map, [(key, b"of " + key) for key in (b"b", b"d", b"f")])
    assert last(ordered_map, b"a", b"z") == (b"f", b"of f")
    assert last(ordered_map, b"a", b"d") == (b"d", b"of d")
    assert last(ordered_map, b"a", b"e") == (b"d", b"of d")
    assert last(ordered_map, b"b", b"b") == (b"b", b"of b")
    assert last(ordered_map, b"a", b"a") is None
    assert last(ordered_map, b"e", b"ee") is None
    assert last(ordered_map, b"g", b"z") is None


def test_a_write_transaction_reads_its_own_changes(ordered_map: OrderedMap) -> None:
    put(ordered_map, [(b"a", b"1")])
    with ordered_map.write() as transaction:
        transaction.put_all([(b"b", b"2"), (b"c", b"3")])
        transaction.put(b"a", b"4")
        assert [(key, bytes(transaction.get(key) or b"")) for key in (b"a", b"b", b"c")] == [
            (b"a", b"4"),
            (b"b", b"2"),
            (b"c", b"3"),
        ]


def test_a_transaction_that_raises_changes_nothing(ordered_map: OrderedMap) -> None:
    before = [(b"a", b"1"), (b"b", b"2")]
    put(ordered_map, before)

    def change_and_give_up(transaction: WriteTransaction) -> None:
        transaction.put(b"a", b"other")
        transaction.put(b"a", b"and another")
        transaction.delete(b"b")
        transaction.put_all([(b"c", b"new"), (b"d", b"new")])
        raise GivenUpError

    with pytest.raises(GivenUpError), ordered_map.write() as transaction:
        change_and_give_up(transaction)
    assert contents(ordered_map) == dict(before)
    put(ordered_map, [(b"e", b"5")])
    assert contents(ordered_map) == {**dict(before), b"e": b"5"}


def test_a_full_disk_changes_nothing_and_accepts_what_fits(ordered_map: OrderedMap) -> None:
    items = {b"key %d" % index: bytes(20_000) for index in range(20)}
    put(ordered_map, items.items())

    def write_too_much(transaction: WriteTransaction) -> None:
        transaction.put(b"key 3", b"changed")
        transaction.delete(b"key 4")
        for index in range(100):
            transaction.put(b"more %d" % index, bytes(20_000))

    with pytest.raises(DiskFullError), ordered_map.write() as transaction:
        write_too_much(transaction)
    assert contents(ordered_map) == items
    put(ordered_map, [(b"small", b"enough")])
    assert contents(ordered_map) == {**items, b"small": b"enough"}


def test_a_full_disk_has_space_again_after_deletions(ordered_map: OrderedMap) -> None:
    def fill(value: bytes) -> int:
        for index in range(1_000):
            try:
                put(ordered_map, [(b"key %d" % index, value)])
            except DiskFullError:
                return index
        raise AssertionError("it is never full")

    filled = fill(bytes(30_000))
    assert filled > 10
    with ordered_map.write() as transaction:
        for index in range(filled // 2):
            transaction.delete(b"key %d" % index)
    # LMDB reuses freed pages two commits later.
    put(ordered_map, [(b"one", b"1")])
    put(ordered_map, [(b"two", b"2")])
    put(ordered_map, [(b"more %d" % index, bytes(30_000)) for index in range(filled // 4)])


def test_reserved_space_is_left_free(ordered_map: OrderedMap) -> None:
    with ordered_map.write(reserve_bytes=MAP_BYTES // 2) as transaction:
        transaction.put(b"a", bytes(MAP_BYTES * 6 // 10))
    before = contents(ordered_map)
    with (
        pytest.raises(DiskFullError, match="compaction"),
        ordered_map.write(reserve_bytes=MAP_BYTES // 2),
    ):
        pytest.fail("there is no room")
    # Transactions that free space may use the reserve.
    with ordered_map.write() as transaction:
        transaction.put(b"b", b"1")
    assert contents(ordered_map) == {**before, b"b": b"1"}


def test_statistics_report_the_bytes_in_use(ordered_map: OrderedMap) -> None:
    put(ordered_map, [(b"a", bytes(100_000))])
    figures = ordered_map.statistics()
    assert 100_000 <= figures["bytes_used"] <= figures["bytes_in_file"] <= MAP_BYTES


def test_a_read_transaction_keeps_seeing_one_state(lmdb_environment: LmdbOrderedMap) -> None:
    put(lmdb_environment, [(b"a", b"1")])
    with lmdb_environment.read() as transaction:
        for index in range(10):
            put(lmdb_environment, [(b"a", b"later"), (b"b %d" % index, bytes(9_000))])
        assert seen_by(transaction) == {b"a": b"1"}
    assert get(lmdb_environment, b"a") == b"later"


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_large_value_is_deleted_without_being_copied(tmp_path: Path, is_summed: bool) -> None:
    value = bytes(256 * 1024)
    lmdb_ordered_map = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES, is_summed=is_summed)
    put(lmdb_ordered_map, [(b"large", value)])
    tracemalloc.start()
    try:
        with lmdb_ordered_map.write() as transaction:
            transaction.delete(b"large")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(value)
    assert contents(lmdb_ordered_map) == {}
    lmdb_ordered_map.close()


def test_committed_data_survives_a_reopening(tmp_path: Path) -> None:
    first = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    put(first, [(b"a", b"1")])
    first.close()
    again = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    assert contents(again) == {b"a": b"1"}
    again.close()


def test_a_map_that_cannot_be_opened_raises(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1_000)
    with pytest.raises(CorruptionError, match="cannot be opened"):
        LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)


def test_a_map_for_which_there_is_no_file_left_says_what_to_do(tmp_path: Path) -> None:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    first_free = os.dup(0)
    os.close(first_free)
    # A map takes three.
    resource.setrlimit(resource.RLIMIT_NOFILE, (first_free + 2, hard_limit))
    try:
        with pytest.raises(DataDirectoryError, match=r"Too many open files; raise the limit of"):
            LmdbOrderedMap(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))
    LmdbOrderedMap(tmp_path).close()


def test_every_flipped_version_of_the_meta_pages_is_damage(tmp_path: Path) -> None:
    LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES).close()
    file = tmp_path / "data.mdb"
    content = bytearray(file.read_bytes())
    place = content.index(LMDB_MAGIC) + len(LMDB_MAGIC)
    for bit in range(32):
        flipped = content.copy()
        flipped[place + bit // 8] ^= 1 << bit % 8
        file.write_bytes(flipped)
        with pytest.raises(CorruptionError, match="cannot be opened"):
            LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)


def test_a_file_shorter_than_its_damaged_meta_pages_say_is_damage(tmp_path: Path) -> None:
    first = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    put(first, [(b"a", b"1")])
    first.close()
    file = tmp_path / "data.mdb"
    content = bytearray(file.read_bytes())
    for page in range(2):
        # Set the last page's number to the highest that the map can hold.
        content[page * 4096 + LAST_PAGE] = MAP_BYTES // 4096 - 1
    file.write_bytes(content)
    damaged = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    with pytest.raises(CorruptionError, match="shorter than its meta page says"):
        damaged.verify_length()
    damaged.close()


def test_a_cut_file_is_refused_or_serves_everything(tmp_path: Path) -> None:
    """The file is cut at each page. The missing part must never be read, which would raise SIGBUS.
    The last pages of a file may be free ones, which LMDB may not have written."""
    folder = tmp_path / "whole"
    folder.mkdir()
    first = LmdbOrderedMap(folder, bytes_max=MAP_BYTES)
    put(first, [(b"%04d" % index, b"v" * 60) for index in range(600)])
    put(first, [(b"large %d" % index, bytes(20_000)) for index in range(8)])
    with first.write() as transaction:
        for index in range(8):
            transaction.delete(b"large %d" % index)
    for index in range(4):
        put(first, [(b"another", b"%d" % index)])
    expected = contents(first)
    first.close()
    whole = (folder / "data.mdb").read_bytes()
    served: list[bool] = []
    for page in range(len(whole) // 4096):
        cut = tmp_path / "cut"
        cut.mkdir(exist_ok=True)
        (cut / "data.mdb").write_bytes(whole[: page * 4096 + 2048 * (page % 2)])
        if not page:
            continue  # an empty file is a new map
        try:
            open_map = LmdbOrderedMap(cut, bytes_max=MAP_BYTES)
        except CorruptionError:
            served.append(False)
            continue
        open_map.verify_length()
        assert contents(open_map) == expected
        put(open_map, [(b"more", bytes(30_000))])
        open_map.close()
        served.append(True)
    assert served == sorted(served)
    assert 10 < served.count(False) < len(served)


def test_a_page_that_leads_to_itself_is_damage(tmp_path: Path) -> None:
    """The tree is only checked if the file was cut, so this file is cut, too."""
    first = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    put(first, [(b"%04d" % index, b"v" * 60) for index in range(600)])
    first.close()
    file = tmp_path / "data.mdb"
    with file.open("rb") as open_file:
        commit = read_last_commit(open_file)
    assert commit is not None
    root = commit.roots[-1]
    content = bytearray(file.read_bytes())
    page = memoryview(content)[root * 4096 : (root + 1) * 4096]
    node = int.from_bytes(page[16:18], "little")
    page[node : node + 6] = root.to_bytes(6, "little")
    page.release()
    for meta in range(2):
        content[meta * 4096 + LAST_PAGE + 1] = 1
    file.write_bytes(content)
    with pytest.raises(CorruptionError, match="leads to itself"):
        check_length(file)


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "folder"])
def test_something_else_in_the_place_of_a_file_or_its_folder_is_damage(
    tmp_path: Path, name: str
) -> None:
    folder = tmp_path / "folder"
    if name == "folder":
        folder.touch()
    else:
        (folder / name).mkdir(parents=True)
    for bytes_max in (0, MAP_BYTES):
        with pytest.raises(CorruptionError, match="cannot be opened"):
            LmdbOrderedMap(folder, bytes_max=bytes_max)


def test_a_missing_folder_is_created(tmp_path: Path) -> None:
    LmdbOrderedMap(tmp_path / "index").close()
    assert (tmp_path / "index" / "data.mdb").is_file()


# LMDB's memory map, and a disk that grows.


def set_disk_size(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    blocks = nbytes // 4096
    disk = SimpleNamespace(f_frsize=4096, f_blocks=blocks, f_bavail=blocks)
    monkeypatch.setattr(os, "statvfs", lambda _path: disk)


def fill_up(ordered_map: LmdbOrderedMap) -> int:
    """Writes until the disk is full; returns how many records were written."""
    for index in range(1_000):
        try:
            with ordered_map.write(reserve_bytes=MAP_BYTES // 4) as transaction:
                transaction.put(b"%03d" % index, bytes(50_000))
        except DiskFullError:
            return index
    pytest.fail("the disk is never full")


def test_a_disk_that_grows_has_room_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_disk_size(monkeypatch, MAP_BYTES)
    growing = LmdbOrderedMap(tmp_path)
    records = fill_up(growing)
    set_disk_size(monkeypatch, 8 * MAP_BYTES)
    assert fill_up(growing) > 4 * records
    assert len(contents(growing)) > 4 * records
    growing.close()


def test_a_map_does_not_move_under_an_open_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_disk_size(monkeypatch, MAP_BYTES)
    growing = LmdbOrderedMap(tmp_path)
    put(growing, [(b"a", bytes(50_000))])
    set_disk_size(monkeypatch, 8 * MAP_BYTES)
    with growing.read() as transaction:
        value = transaction.get(b"a")
        assert value is not None
        put(growing, [(b"b", b"1")])
        assert bytes(value) == bytes(50_000)
        assert growing.free_bytes < MAP_BYTES
    put(growing, [(b"c", b"1")])
    assert growing.free_bytes > 7 * MAP_BYTES
    growing.close()


def test_a_setting_bounds_the_map_however_large_the_disk_becomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    records = fill_up(bounded)
    set_disk_size(monkeypatch, 8 * MAP_BYTES)
    assert fill_up(bounded) == 0
    assert len(contents(bounded)) == records
    bounded.close()


@pytest.mark.parametrize(
    ("bytes_max", "advice"),
    [
        (MAP_BYTES, rf"may have {MAP_BYTES} bytes .* bytes left.*, or raise disk_bytes_max$"),
        (0, "^the disk of .* bytes left.*; make room there$"),
    ],
)
def test_the_error_of_a_full_disk_says_what_is_full_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bytes_max: int, advice: str
) -> None:
    set_disk_size(monkeypatch, 8 * MAP_BYTES if bytes_max else MAP_BYTES)
    full = LmdbOrderedMap(tmp_path, bytes_max=bytes_max)
    fill_up(full)
    with (
        pytest.raises(DiskFullError, match=advice),
        full.write(reserve_bytes=MAP_BYTES // 4),
    ):
        pytest.fail("there is room")
    with (
        pytest.raises(DiskFullError, match=advice.rpartition(" ")[2]),
        full.write() as transaction,
    ):
        transaction.put(b"large", bytes(MAP_BYTES))
    full.close()


@pytest.fixture
def limit_file_size() -> Iterator[Callable[[int], None]]:
    """Sets how large the system lets this process make files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("is_limited_at_start", [False, True])
def test_a_limit_of_file_sizes_is_a_full_disk_until_it_is_raised(
    tmp_path: Path, limit_file_size: Callable[[int], None], *, is_limited_at_start: bool
) -> None:
    """A write that crosses the limit would be cut in the middle."""
    limit, advice = 3 * MAP_BYTES // 2 + 1, r"\(ulimit -f\).*`prlimit --fsize=unlimited --pid \d+`$"
    if is_limited_at_start:
        limit_file_size(limit)
    full = LmdbOrderedMap(tmp_path, bytes_max=4 * MAP_BYTES)
    put(full, [(b"first", bytes(MAP_BYTES))])
    limit_file_size(limit)
    for reserve_bytes in 0, MAP_BYTES // 2:
        with (
            pytest.raises(DiskFullError, match=advice),
            full.write(reserve_bytes=reserve_bytes) as transaction,
        ):
            transaction.put(b"second", bytes(MAP_BYTES))
    assert full.free_bytes < MAP_BYTES // 2
    put(full, [(b"small", b"1")])
    limit_file_size(4 * MAP_BYTES)
    put(full, [(b"second", bytes(MAP_BYTES))])
    assert contents(full).keys() == {b"first", b"small", b"second"}
    full.close()


def test_nothing_is_written_where_the_limit_of_file_sizes_is_below_the_files(
    tmp_path: Path, limit_file_size: Callable[[int], None]
) -> None:
    full = LmdbOrderedMap(tmp_path)
    put(full, [(b"first", bytes(MAP_BYTES))])
    limit_file_size(MAP_BYTES // 2)
    with pytest.raises(DiskFullError, match="has 0 bytes left"), full.write(reserve_bytes=1):
        pytest.fail("there is room")
    with pytest.raises(DiskFullError, match=r"has no room left: .*`prlimit "):
        put(full, [(b"second", bytes(MAP_BYTES))])
    assert contents(full) == {b"first": bytes(MAP_BYTES)}
    full.close()


@pytest.mark.parametrize("is_lowered_late", [False, True])
def test_a_limit_of_file_sizes_that_is_lowered_into_the_file_changes_nothing(
    tmp_path: Path, limit_file_size: Callable[[int], None], *, is_lowered_late: bool
) -> None:
    """A write to free pages in the file would be cut in the middle. Key indexes, leases and maps
    are written without a reserve."""
    full = LmdbOrderedMap(tmp_path)
    put(full, [(b"first", b"1"), (b"second", bytes(MAP_BYTES))])
    with full.write() as transaction:
        transaction.delete(b"second")
    put(full, [(b"third", b"3")])
    limit = MAP_BYTES // 2 + 1

    def write_across_the_limit() -> None:
        if not is_lowered_late:
            limit_file_size(limit)
        with full.write() as transaction:
            transaction.put(b"second", b"x" * (MAP_BYTES // 2 + MAP_BYTES // 4))
            limit_file_size(limit)

    with pytest.raises(DiskFullError, match=r"has no room left: .*`prlimit "):
        write_across_the_limit()
    assert contents(full) == {b"first": b"1", b"third": b"3"}
    limit_file_size(4 * MAP_BYTES)
    put(full, [(b"second", b"2")])
    full.close()
    again = LmdbOrderedMap(tmp_path)
    again.verify()
    assert contents(again) == {b"first": b"1", b"second": b"2", b"third": b"3"}
    again.close()


@pytest.mark.parametrize("is_left", [True, False])
def test_without_room_for_a_lock_file_a_map_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_left: bool
) -> None:
    """LMDB would be killed by SIGBUS. A failed attempt leaves a lock file without blocks."""
    LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES).close()
    with monkeypatch.context() as patch:
        set_disk_size(patch, 0)
        # An existing lock file needs no room.
        LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES).close()
        (tmp_path / "lock.mdb").unlink()
        if is_left:
            with (tmp_path / "lock.mdb").open("wb") as file:
                file.truncate(8192)
        with pytest.raises(DiskFullError, match="no room for a lock file; make room there"):
            LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES).close()


def test_a_map_that_cannot_grow_keeps_its_size_and_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_disk_size(monkeypatch, MAP_BYTES)
    growing = LmdbOrderedMap(tmp_path)
    records = fill_up(growing)
    set_disk_size(monkeypatch, MAP_BYTES_DEFAULT)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MAP_BYTES_DEFAULT, limits[1]))
    try:
        assert fill_up(growing) == 0
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert len(contents(growing)) == records
    put(growing, [(b"a", b"1")])
    growing.close()


def test_a_reader_follows_the_map_of_a_writer_in_another_process(tmp_path: Path) -> None:
    first = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    put(first, [(b"a", b"1")])
    first.close()
    reader = LmdbOrderedMap(tmp_path, readonly=True, bytes_max=MAP_BYTES)
    assert get(reader, b"a") == b"1"
    program = f"""
from pathlib import Path
from upr_server.storage.lmdb_file import check_length, read_last_commit
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.lmdb_space import MAP_BYTES_DEFAULT

writer = LmdbOrderedMap(Path({str(tmp_path)!r}), bytes_max={8 * MAP_BYTES})
with writer.write() as transaction:
    transaction.put(b"b", bytes({4 * MAP_BYTES}))
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert get(reader, b"b") == bytes(4 * MAP_BYTES)
    assert get(reader, b"a") == b"1"
    reader.close()


META_PAGES: Final = {
    "zeros": bytes(8192),
    "ones": b"\xff" * 8192,
    "some": b"\xaa" * 8192,
    "random": Random(1).randbytes(8192),
}


def overwrite_meta_pages(path: Path, content: bytes) -> None:
    with (path / "data.mdb").open("r+b") as file:
        file.write(content)


@pytest.mark.parametrize("content", META_PAGES.values(), ids=META_PAGES.keys())
@pytest.mark.parametrize("is_derived", [False, True])
def test_meta_pages_that_are_overwritten_in_an_open_file_are_damage(
    tmp_path: Path, content: bytes, *, is_derived: bool
) -> None:
    """They may name any number of pages: the map is neither grown for that, nor full."""
    damaged = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES, is_derived=is_derived)
    put(damaged, [(b"a", b"1")])
    put(damaged, [(b"b", b"1")])
    overwrite_meta_pages(tmp_path, content)
    name = re.escape(f"{tmp_path}/data.mdb is damaged: ")
    for _ in range(2):
        with pytest.raises(CorruptionError, match=name):
            contents(damaged)
        with pytest.raises(CorruptionError, match=name):
            damaged.statistics()
        for reserve_bytes in 0, MAP_BYTES // 2:
            error = CorruptionError if is_derived else StoreFailedError
            with (
                pytest.raises(error, match=f"{name}.*; st.* the server again: it "),
                damaged.write(reserve_bytes=reserve_bytes) as transaction,
            ):
                transaction.put(b"a", b"2")
    damaged.close()


@pytest.mark.parametrize("content", META_PAGES.values(), ids=META_PAGES.keys())
def test_a_reader_does_not_follow_damaged_meta_pages(tmp_path: Path, content: bytes) -> None:
    first = LmdbOrderedMap(tmp_path, bytes_max=MAP_BYTES)
    put(first, [(b"a", b"1")])
    first.close()
    reader = LmdbOrderedMap(tmp_path, readonly=True, bytes_max=MAP_BYTES)
    assert get(reader, b"a") == b"1"
    meta_pages = (tmp_path / "data.mdb").read_bytes()[:8192]
    overwrite_meta_pages(tmp_path, content)
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"/data.mdb is damaged: "):
            get(reader, b"a")
    overwrite_meta_pages(tmp_path, meta_pages)
    assert get(reader, b"a") == b"1"
    reader.close()


# The simulated disk's own faults.


def failing() -> None:
    raise StoreFailedError("the disk failed")


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_failed_simulated_disk_refuses_everything_until_a_restart(is_kept: bool) -> None:
    disk = SimulatedDisk(bytes_max=MAP_BYTES)
    put(disk, [(b"a", b"1")])
    used_bytes = disk.statistics()["bytes_used"]
    disk.fault, disk.keep_on_fault = failing, is_kept
    with pytest.raises(StoreFailedError):
        put(disk, [(b"a", b"22"), (b"b", b"333")])
    with pytest.raises(StoreFailedError):
        contents(disk)
    with pytest.raises(StoreFailedError):
        put(disk, [(b"c", b"4")])
    disk.crash()
    assert contents(disk) == ({b"a": b"22", b"b": b"333"} if is_kept else {b"a": b"1"})
    assert disk.statistics()["bytes_used"] == used_bytes + (5 if is_kept else 0)


# Any operations, against a plain dict.


def check(ordered_map: OrderedMap, model: dict[bytes, bytes], key: bytes) -> None:
    with ordered_map.read() as transaction:
        assert list(seen_by(transaction).items()) == sorted(model.items())
        assert transaction.get(key) == model.get(key)
        below = [item for item in sorted(model.items()) if item[0] <= key]
        last = transaction.last(LOWEST, key)
        assert (None if last is None else (last[0], bytes(last[1]))) == (
            below[-1] if below else None
        )


def apply(transaction: WriteTransaction, model: dict[bytes, bytes], step: Step) -> None:
    action, items = step
    if action == "put_all":
        transaction.put_all(items)
        model.update(items)
        return
    if action == "put_new":
        unique_items = dict(items)
        new_items = {key: value for key, value in unique_items.items() if key not in model}
        assert transaction.put_new(list(unique_items.items())) == len(new_items)
        model.update(new_items)
        return
    for key, value in items:
        if action == "put":
            transaction.put(key, value)
            model[key] = value
        else:
            transaction.delete(key)
            model.pop(key, None)


def run(ordered_map: OrderedMap, transactions: list[tuple[list[Step], bool]], key: bytes) -> None:
    model: dict[bytes, bytes] = {}
    for steps, is_kept in transactions:
        changed = dict(model)
        try:
            with ordered_map.write() as transaction:
                for step in steps:
                    apply(transaction, changed, step)
                if not is_kept:
                    raise GivenUpError
        except GivenUpError:
            pass
        else:
            model = changed
        check(ordered_map, model, key)
    ordered_map.close()


def lmdb_in(folder: str) -> OrderedMap:
    return LmdbOrderedMap(Path(folder), bytes_max=MAP_BYTES)


def simulated(_folder: str) -> OrderedMap:
    return SimulatedDisk(bytes_max=MAP_BYTES)


@pytest.mark.parametrize("make", [lmdb_in, simulated])
@settings(max_examples=60)
@given(transactions=TRANSACTIONS, key=KEYS)
def test_the_map_behaves_like_a_sorted_dict(
    make: Callable[[str], OrderedMap], transactions: list[tuple[list[Step], bool]], key: bytes
) -> None:
    with TemporaryDirectory() as folder:
        run(make(folder), transactions, key)
