"""What is asked of an `Environment`, of LMDB and of the simulated disk alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from upr_server.storage.environment import Environment, Reader, Writer
from upr_server.storage.errors import CorruptionError, DiskFullError, StoreFailedError
from upr_server.storage.lmdb_store import LmdbEnvironment
from upr_server.storage.simulated_disk import SimulatedDisk

MAP_BYTES: Final = 1024 * 1024
# The key of one byte of 0 is LMDB's own: see `lmdb_store.COMMIT`.
LOWEST, HIGHEST = b"\0\0", b"\xff" * 40

KEYS: Final = st.one_of(
    st.sampled_from([b"a", b"b", b"c", b"\0\0", b"\xff", b"a\0"]),
    st.binary(min_size=1, max_size=12).filter(lambda key: key != b"\0"),
)
VALUES: Final = st.one_of(st.binary(max_size=20), st.just(bytes(5_000)))

# A transaction: what it does, and whether it ends as it should.
Step = tuple[str, list[tuple[bytes, bytes]]]
STEPS: Final[st.SearchStrategy[Step]] = st.tuples(
    st.sampled_from(["put", "put_all", "delete"]), st.lists(st.tuples(KEYS, VALUES), max_size=6)
)
TRANSACTIONS: Final = st.lists(
    st.tuples(st.lists(STEPS, max_size=5), st.sampled_from([True, True, False])), max_size=12
)


class GivenUpError(Exception):
    """A transaction is not wanted any more."""


@pytest.fixture(params=["lmdb", "simulated"])
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Environment]:
    made: Environment
    if request.param == "lmdb":
        made = LmdbEnvironment(tmp_path, bytes_max=MAP_BYTES)
    else:
        made = SimulatedDisk(bytes_max=MAP_BYTES)
    yield made
    made.close()


@pytest.fixture
def lmdb_environment(tmp_path: Path) -> Iterator[LmdbEnvironment]:
    made = LmdbEnvironment(tmp_path, bytes_max=MAP_BYTES)
    yield made
    made.close()


def put(environment: Environment, items: Iterable[tuple[bytes, bytes]]) -> None:
    with environment.write() as writer:
        for key, value in items:
            writer.put(key, value)


def contents(environment: Environment) -> dict[bytes, bytes]:
    with environment.read() as reader:
        return seen_by(reader)


def seen_by(reader: Reader) -> dict[bytes, bytes]:
    return {bytes(key): bytes(value) for key, value in reader.scan(LOWEST, HIGHEST)}


def get(environment: Environment, key: bytes) -> bytes | None:
    with environment.read() as reader:
        value = reader.get(key)
        return None if value is None else bytes(value)


def last(environment: Environment, first: bytes, end: bytes) -> tuple[bytes, bytes] | None:
    with environment.read() as reader:
        found = reader.last(first, end)
        return None if found is None else (found[0], bytes(found[1]))


def test_nothing_is_in_a_new_one(environment: Environment) -> None:
    assert contents(environment) == {}
    assert get(environment, b"a") is None
    assert last(environment, LOWEST, HIGHEST) is None


def test_what_is_put_is_there_and_the_newest_counts(environment: Environment) -> None:
    put(environment, [(b"a", b"1"), (b"b", b""), (b"a", b"2")])
    assert contents(environment) == {b"a": b"2", b"b": b""}
    assert get(environment, b"b") == b""
    put(environment, [(b"a", b"3")])
    assert get(environment, b"a") == b"3"


def test_a_key_that_is_deleted_is_gone_and_one_that_is_missing_may_be_deleted(
    environment: Environment,
) -> None:
    put(environment, [(b"a", b"1"), (b"b", b"2")])
    with environment.write() as writer:
        writer.delete(b"a")
        writer.delete(b"never there")
        assert writer.get(b"a") is None
    assert contents(environment) == {b"b": b"2"}


def test_a_scan_has_both_of_its_ends_and_rises(environment: Environment) -> None:
    put(environment, [(key, key) for key in (b"d", b"b", b"a", b"c", b"bb")])
    with environment.read() as reader:
        assert [key for key, _ in reader.scan(b"b", b"c")] == [b"b", b"bb", b"c"]
        assert [key for key, _ in reader.scan(b"aa", b"bz")] == [b"b", b"bb"]
        assert list(reader.scan(b"e", b"z")) == []
        assert list(reader.scan(b"c", b"b")) == []


def test_the_last_key_of_a_range(environment: Environment) -> None:
    put(environment, [(key, b"of " + key) for key in (b"b", b"d", b"f")])
    assert last(environment, b"a", b"z") == (b"f", b"of f")
    assert last(environment, b"a", b"d") == (b"d", b"of d")
    assert last(environment, b"a", b"e") == (b"d", b"of d")
    assert last(environment, b"b", b"b") == (b"b", b"of b")
    assert last(environment, b"a", b"a") is None
    assert last(environment, b"e", b"ee") is None
    assert last(environment, b"g", b"z") is None


def test_a_writer_reads_what_it_has_written(environment: Environment) -> None:
    put(environment, [(b"a", b"1")])
    with environment.write() as writer:
        writer.put_all([(b"b", b"2"), (b"c", b"3")])
        writer.put(b"a", b"4")
        assert [(key, bytes(writer.get(key) or b"")) for key in (b"a", b"b", b"c")] == [
            (b"a", b"4"),
            (b"b", b"2"),
            (b"c", b"3"),
        ]


def test_a_transaction_that_raises_changes_nothing(environment: Environment) -> None:
    before = [(b"a", b"1"), (b"b", b"2")]
    put(environment, before)

    def change_and_give_up(writer: Writer) -> None:
        writer.put(b"a", b"other")
        writer.put(b"a", b"and another")
        writer.delete(b"b")
        writer.put_all([(b"c", b"new"), (b"d", b"new")])
        raise GivenUpError

    with pytest.raises(GivenUpError), environment.write() as writer:
        change_and_give_up(writer)
    assert contents(environment) == dict(before)
    put(environment, [(b"e", b"5")])
    assert contents(environment) == {**dict(before), b"e": b"5"}


def test_a_full_disk_changes_nothing_and_takes_what_fits(environment: Environment) -> None:
    kept = {b"key %d" % number: bytes(20_000) for number in range(20)}
    put(environment, kept.items())

    def write_too_much(writer: Writer) -> None:
        writer.put(b"key 3", b"changed")
        writer.delete(b"key 4")
        for number in range(100):
            writer.put(b"more %d" % number, bytes(20_000))

    with pytest.raises(DiskFullError), environment.write() as writer:
        write_too_much(writer)
    assert contents(environment) == kept
    put(environment, [(b"small", b"enough")])
    assert contents(environment) == {**kept, b"small": b"enough"}


def test_a_full_disk_has_room_again_when_something_was_deleted(environment: Environment) -> None:
    def fill(value: bytes) -> int:
        for number in range(1_000):
            try:
                put(environment, [(b"key %d" % number, value)])
            except DiskFullError:
                return number
        raise AssertionError("it is never full")

    filled = fill(bytes(30_000))
    assert filled > 10
    with environment.write() as writer:
        for number in range(filled // 2):
            writer.delete(b"key %d" % number)
    # LMDB gives pages back two commits later.
    put(environment, [(b"one", b"1")])
    put(environment, [(b"two", b"2")])
    put(environment, [(b"more %d" % number, bytes(30_000)) for number in range(filled // 4)])


def test_room_that_is_reserved_is_left(environment: Environment) -> None:
    with environment.write(reserve_bytes=MAP_BYTES // 2) as writer:
        writer.put(b"a", bytes(MAP_BYTES * 6 // 10))
    before = contents(environment)
    with (
        pytest.raises(DiskFullError, match="compaction"),
        environment.write(reserve_bytes=MAP_BYTES // 2),
    ):
        pytest.fail("there is no room")
    # What makes room asks for no reserve.
    with environment.write() as writer:
        writer.put(b"b", b"1")
    assert contents(environment) == {**before, b"b": b"1"}


def test_what_is_used_is_told(environment: Environment) -> None:
    put(environment, [(b"a", bytes(100_000))])
    figures = environment.statistics()
    assert 100_000 <= figures["bytes_used"] <= figures["bytes_in_file"] <= MAP_BYTES


def test_a_reader_keeps_seeing_what_it_saw(lmdb_environment: LmdbEnvironment) -> None:
    put(lmdb_environment, [(b"a", b"1")])
    with lmdb_environment.read() as reader:
        for number in range(10):
            put(lmdb_environment, [(b"a", b"later"), (b"b %d" % number, bytes(9_000))])
        assert seen_by(reader) == {b"a": b"1"}
    assert get(lmdb_environment, b"a") == b"later"


def test_what_was_committed_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    first = LmdbEnvironment(tmp_path, bytes_max=MAP_BYTES)
    put(first, [(b"a", b"1")])
    first.close()
    again = LmdbEnvironment(tmp_path, bytes_max=MAP_BYTES)
    assert contents(again) == {b"a": b"1"}
    again.close()


def test_one_that_cannot_be_opened_says_so(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"something else" * 1_000)
    with pytest.raises(CorruptionError, match="cannot be opened"):
        LmdbEnvironment(tmp_path, bytes_max=MAP_BYTES)


# The simulated disk's own faults.


def failing() -> None:
    raise StoreFailedError("the disk failed")


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_simulated_disk_that_fails_says_nothing_until_it_is_started_again(is_kept: bool) -> None:
    disk = SimulatedDisk(bytes_max=MAP_BYTES)
    put(disk, [(b"a", b"1")])
    used = disk.statistics()["bytes_used"]
    disk.fault, disk.keep_on_fault = failing, is_kept
    with pytest.raises(StoreFailedError):
        put(disk, [(b"a", b"22"), (b"b", b"333")])
    with pytest.raises(StoreFailedError):
        contents(disk)
    with pytest.raises(StoreFailedError):
        put(disk, [(b"c", b"4")])
    disk.crash()
    assert contents(disk) == ({b"a": b"22", b"b": b"333"} if is_kept else {b"a": b"1"})
    assert disk.statistics()["bytes_used"] == used + (5 if is_kept else 0)


# Anything at all, against a plain dict.


def check(environment: Environment, model: dict[bytes, bytes], key: bytes) -> None:
    with environment.read() as reader:
        assert list(seen_by(reader).items()) == sorted(model.items())
        assert reader.get(key) == model.get(key)
        below = [item for item in sorted(model.items()) if item[0] <= key]
        found = reader.last(LOWEST, key)
        assert (None if found is None else (found[0], bytes(found[1]))) == (
            below[-1] if below else None
        )


def apply(writer: Writer, model: dict[bytes, bytes], step: Step) -> None:
    what, items = step
    if what == "put_all":
        writer.put_all(items)
        model.update(items)
        return
    for key, value in items:
        if what == "put":
            writer.put(key, value)
            model[key] = value
        else:
            writer.delete(key)
            model.pop(key, None)


def run(environment: Environment, transactions: list[tuple[list[Step], bool]], key: bytes) -> None:
    model: dict[bytes, bytes] = {}
    for steps, is_kept in transactions:
        changed = dict(model)
        try:
            with environment.write() as writer:
                for step in steps:
                    apply(writer, changed, step)
                if not is_kept:
                    raise GivenUpError
        except GivenUpError:
            pass
        else:
            model = changed
        check(environment, model, key)
    environment.close()


def lmdb_in(folder: str) -> Environment:
    return LmdbEnvironment(Path(folder), bytes_max=MAP_BYTES)


def simulated(_folder: str) -> Environment:
    return SimulatedDisk(bytes_max=MAP_BYTES)


@pytest.mark.parametrize("make", [lmdb_in, simulated])
@settings(max_examples=60)
@given(transactions=TRANSACTIONS, key=KEYS)
def test_it_is_a_dict_that_is_sorted(
    make: Callable[[str], Environment], transactions: list[tuple[list[Step], bool]], key: bytes
) -> None:
    with TemporaryDirectory() as folder:
        run(make(folder), transactions, key)
