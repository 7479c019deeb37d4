"""The received keys against a plain dictionary, and their file."""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import trio
from hypothesis import event, given, settings
from hypothesis import strategies as st

from upr_protocol.client.rollback import received_keys as received_keys_module
from upr_protocol.client.rollback import received_keys_file, received_keys_rewrite
from upr_protocol.client.rollback.checksummed_file import ChecksummedFile, DamagedFileError
from upr_protocol.client.rollback.received_keys import (
    RECEIVED_KEY_BYTES,
    ReceivedKeys,
    ReceivedKeysLimits,
    ReceivedVersion,
)
from upr_protocol.client.rollback.received_keys_file import ReceivedKeysFile
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_protocol.steps import result_of

P = PartitionId(0)
LOG = FailoverLog.of_pairs([(2, 10), (1, 0)])
KEYS = st.binary(min_size=1, max_size=1)
Row = tuple[bytes, int, int]
ROWS = st.lists(st.tuples(KEYS, st.integers(1, 30), st.sampled_from([0, 1, 2, 3])), max_size=6)
OPERATIONS = st.sampled_from(["receive", "replace", "trim", "trim in order", "drop"])


def trim(received_keys: ReceivedKeys, droppable_seq: SeqNo, *, in_order: bool = False) -> bool:
    """Drops the oldest keys up to a number of every partition; gives what `trim` returns."""
    steps = received_keys.trim(lambda _: droppable_seq, in_order=in_order)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return bool(end.value)
        received_keys.check_invariants()


@given(st.lists(st.tuples(OPERATIONS, ROWS)))
def test_every_key_above_the_floor_is_known_by_its_last_version(
    operations: list[tuple[str, list[Row]]],
) -> None:
    received_keys = ReceivedKeys(ReceivedKeysLimits(entries=4))
    model: dict[bytes, ReceivedVersion] = {}
    for operation, drawn_rows in operations:
        rows = [(key, SeqNo(seq), HistoryId(history)) for key, seq, history in drawn_rows]
        if operation == "receive":
            received_keys.receive(P, rows)
            for key, seq, history in rows:
                if key not in model:
                    model[key] = ReceivedVersion(seq, history)
                elif model[key].seq < seq:
                    is_known = model[key].history_id > 0
                    model[key] = ReceivedVersion(seq, history if is_known else HistoryId(0))
        elif operation == "replace":
            versions = {key: ReceivedVersion(seq, history) for key, seq, history in rows}
            received_keys.replace(P, versions)
            model.update(versions)
        elif operation == "drop":
            result_of(received_keys.drop(P))
            model.clear()
            assert received_keys.floor(P) == 0
        elif operation == "trim in order":
            before = list(received_keys.versions())
            is_enough = trim(received_keys, SeqNo(20), in_order=True)
            after = list(received_keys.versions())
            assert before[len(before) - len(after) :] == after
            assert is_enough == (len(after) <= 3)
            assert is_enough or after[0][2].seq > 20
        else:
            # Nothing is dropped of a partition before its keys were compared with the server's.
            is_compared = all(v.history_id for _, _, v in received_keys.versions())
            droppable_seq = SeqNo(20 if is_compared else 0)
            trim(received_keys, droppable_seq)
            assert len(received_keys) <= 3 or all(
                version.seq > droppable_seq for _, _, version in received_keys.versions()
            )
        received_keys.check_invariants()
        known = {key: version for _, key, version in received_keys.versions()}
        floor = received_keys.floor(P)
        assert floor <= 20
        expected = {key: version for key, version in model.items() if version.seq > floor}
        assert {key: v for key, v in known.items() if v.seq > floor} == expected
        foreign = result_of(received_keys.foreign_keys(P, LOG, SeqNo(8)))
        outside = {key for key, v in known.items() if not LOG.contains(v.history_id, v.seq)}
        assert set(foreign.keys) == outside
        inside = [version.seq for key, version in known.items() if key not in outside]
        assert foreign.highest_seq == max([8, *inside])


def test_the_bytes_of_the_keys_are_bounded_and_not_only_their_number() -> None:
    nbytes = 8 * (RECEIVED_KEY_BYTES + 100)
    received_keys = ReceivedKeys(ReceivedKeysLimits(nbytes=nbytes))
    rows = [(b"%0100d" % seq, SeqNo(seq), HistoryId(1)) for seq in range(1, 10)]
    received_keys.receive(P, rows[:8])
    assert not received_keys.is_overfull
    received_keys.receive(P, rows[8:])
    assert received_keys.is_overfull
    trim(received_keys, SeqNo(9))
    # Seven are left: an eighth more goes than must.
    assert [key for _, key, _ in received_keys.versions()] == [key for key, _, _ in rows[2:]]
    assert received_keys.floor(P) == 2
    received_keys.check_invariants()


def test_keys_are_dropped_in_steps_that_may_be_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """To drop 25,000 keys held the event loop for 28 ms. Cancelled between two steps, nothing is
    missing above the floor."""
    monkeypatch.setattr(received_keys_module, "TRIM_STEP", 10)
    received_keys = ReceivedKeys(ReceivedKeysLimits(entries=80))
    rows = [(b"%d" % seq, SeqNo(seq), HistoryId(1)) for seq in range(1, 101)]
    received_keys.receive(P, rows)
    for dropped, _ in enumerate(received_keys.trim(lambda _: SeqNo(100)), 1):
        assert [key for _, key, _ in received_keys.versions()] == [
            key for key, _, _ in rows[10 * dropped :]
        ]
        assert received_keys.floor(P) == 10 * dropped
        received_keys.check_invariants()
    assert len(received_keys) == 70


def test_keys_that_must_be_kept_are_not_looked_at_again_and_again() -> None:
    """While a node is down, none of its partitions' keys can be dropped. Where these were too many,
    each event of the others looked at all of them, 0.1 s each time."""
    received_keys = ReceivedKeys(ReceivedKeysLimits(entries=80))

    def receive(first: int, last: int) -> None:
        rows = [(b"%d" % seq, SeqNo(seq), HistoryId(1)) for seq in range(first, last + 1)]
        received_keys.receive(P, rows)

    receive(1, 100)
    assert received_keys.is_overfull
    assert not trim(received_keys, SeqNo(5))
    assert len(received_keys) == 95
    receive(101, 110)
    assert not received_keys.is_overfull
    receive(111, 111)
    assert received_keys.is_overfull
    assert trim(received_keys, SeqNo(111))
    receive(112, 121)
    assert not received_keys.is_overfull
    receive(122, 122)
    assert received_keys.is_overfull


def test_a_partition_of_many_keys_is_compared_and_dropped_in_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where 200,000 keys were of one partition, that held the event loop for 25 ms at each new
    connection, and for 90 ms where the partition began again."""
    monkeypatch.setattr(received_keys_module, "COMPARE_STEP", 10)
    monkeypatch.setattr(received_keys_module, "TRIM_STEP", 10)
    received_keys = ReceivedKeys(ReceivedKeysLimits())
    received_keys.receive(P, [(b"%d" % seq, SeqNo(seq), HistoryId(2)) for seq in range(1, 36)])
    received_keys.raise_floor(P, SeqNo(3))
    assert len(list(received_keys.foreign_keys(P, LOG, SeqNo(8)))) == 3
    foreign = result_of(received_keys.foreign_keys(P, LOG, SeqNo(8)))
    assert (len(foreign.keys), foreign.highest_seq) == (0, 35)
    for _ in received_keys.drop(P):
        # What is left must still not look as if it were all.
        assert received_keys.floor(P) == 3
        received_keys.check_invariants()
    assert (len(received_keys), received_keys.floor(P)) == (0, 0)


def test_a_sequence_number_belongs_to_the_branch_that_assigned_it() -> None:
    assert [LOG.branch_of(SeqNo(n)) for n in (0, 1, 10, 11)] == [0, 1, 1, 2]
    later = LOG.with_branch(HistoryId(3), SeqNo(8))
    assert later.contains(HistoryId(1), SeqNo(8))
    assert not later.contains(HistoryId(1), SeqNo(9))
    assert not later.contains(HistoryId(2), SeqNo(11))
    assert later.contains(HistoryId(3), SeqNo(11))


def reopened(path: Path) -> ReceivedKeysFile:
    """The file as the next process finds it; closed."""
    file = ReceivedKeysFile(path, "b")
    file.close()
    return file


async def test_the_file_holds_what_was_written_before(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    file = ReceivedKeysFile(path, "b")
    old_history, new_history = HistoryId(1), HistoryId(2)
    await file.receive(P, [(b"a", SeqNo(5), old_history), (b"b", SeqNo(6), old_history)])
    await file.confirm_rollback(P, {b"b": ReceivedVersion(SeqNo(4), new_history)})
    await file.receive(PartitionId(1), [(b"c", SeqNo(5), old_history)])
    await file.confirm_rollback(PartitionId(1), None)
    await file.raise_floor(PartitionId(2), SeqNo(7))
    file.close()
    again = reopened(path)
    assert list(again.keys.versions()) == [
        (P, b"a", ReceivedVersion(SeqNo(5), old_history)),
        (P, b"b", ReceivedVersion(SeqNo(4), new_history)),
    ]
    assert again.keys.floors() == {PartitionId(2): 7}
    with pytest.raises(DamagedFileError, match="of the bucket 'b', not of 'other'"):
        ReceivedKeysFile(path, "other")


async def test_buffered_keys_are_written_with_one_record(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    file = ReceivedKeysFile(path, "b", is_buffered=True)
    length = path.stat().st_size
    for partition in range(1, 4):
        await file.receive(PartitionId(partition), [(b"k", SeqNo(partition), HistoryId(1))])
    assert path.stat().st_size == length
    assert len(file.keys) == 3
    file.flush()
    written = path.stat().st_size
    assert written > length
    file.flush()
    assert path.stat().st_size == written
    # What comes later than buffered keys is written after them.
    await file.receive(P, [(b"k", SeqNo(5), HistoryId(1))])
    await file.confirm_rollback(P, None)
    await file.receive(PartitionId(9), [(b"k", SeqNo(9), HistoryId(1))])
    file.close()
    again = reopened(path)
    expected = [
        (PartitionId(n), b"k", ReceivedVersion(SeqNo(n), HistoryId(1))) for n in (1, 2, 3, 9)
    ]
    assert list(again.keys.versions()) == [version for version in expected if version[0] != P]
    # A crash leaves all of a record or none of it.
    data = path.read_bytes()
    path.write_bytes(data[: written - 1])
    assert len(reopened(path).keys) == 0


async def test_keys_that_come_while_others_are_written_are_written_too(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    file = ReceivedKeysFile(path, "b", is_buffered=True)
    is_done = threading.Event()

    def flush_again_and_again() -> None:
        while not is_done.is_set():
            file.flush()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.to_thread.run_sync, flush_again_and_again)
        for index in range(1, 1001):
            await file.receive(P, [(b"%d" % index, SeqNo(index), HistoryId(1))])
        is_done.set()
    file.close()
    again = reopened(path)
    assert len(again.keys) == 1000


async def test_keys_that_could_not_be_written_stay_buffered(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    file = ReceivedKeysFile(path, "b", is_buffered=True)
    await file.receive(P, [(b"k", SeqNo(1), HistoryId(1))])
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    file.flush()
    file.close()
    again = reopened(path)
    assert list(again.keys.versions()) == [(P, b"k", ReceivedVersion(SeqNo(1), HistoryId(1)))]


@pytest.mark.parametrize("is_written", [False, True])
async def test_ctrl_c_while_keys_are_written_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_written: bool
) -> None:
    path = tmp_path / "keys"
    file = ReceivedKeysFile(path, "b", is_buffered=True)
    await file.receive(P, [(b"k", SeqNo(1), HistoryId(1))])
    append = file._file.append

    def interrupted(record: bytes) -> None:
        if is_written:
            append(record)
        raise KeyboardInterrupt

    monkeypatch.setattr(file._file, "append", interrupted)
    with pytest.raises(KeyboardInterrupt):
        file.flush()
    monkeypatch.undo()
    await file.receive(P, [(b"l", SeqNo(2), HistoryId(1))])
    file.close()
    again = reopened(path)
    assert [(key, version.seq) for _, key, version in again.keys.versions()] == [
        (b"k", 1),
        (b"l", 2),
    ]


async def test_the_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    file = ReceivedKeysFile(path, "b", ReceivedKeysLimits(entries=100))
    largest = rewrites = size = 0
    for index in range(60):
        rows = [
            (b"%d-%d" % (index, n) + bytes(200), SeqNo(index * 1000 + n + 1), HistoryId(1))
            for n in range(500)
        ]
        await file.receive(P, rows)
        await file.trim(lambda _: SeqNo(1 << 40))
        await file.rewrite_if_due()
        rewrites += path.stat().st_size < size
        size = path.stat().st_size
        largest = max(largest, size)
    assert len(file.keys) == 87
    assert rewrites
    floor = file.keys.floor(P)
    file.close()
    assert largest < 5_000_000
    again = ReceivedKeysFile(path, "b", ReceivedKeysLimits(entries=100))
    trim(again.keys, SeqNo(1 << 40))
    again.close()
    assert list(again.keys.versions()) == list(file.keys.versions())
    assert again.keys.floor(P) == floor > 0


async def test_a_file_that_begins_with_garbage_is_rewritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each start took all that it found for data, and let the file grow to twice of it."""
    monkeypatch.setattr(received_keys_file, "_GARBAGE_BYTES", 1000)
    path = tmp_path / "keys"
    file = ReceivedKeysFile(path, "b")
    for seq in range(1, 101):
        await file.receive(P, [(b"k", SeqNo(seq), HistoryId(1))])
    file.close()
    again = ReceivedKeysFile(path, "b")
    for seq in range(101, 104):
        await again.receive(P, [(b"k", SeqNo(seq), HistoryId(1))])
        await again.rewrite_if_due()
    again.close()
    assert path.stat().st_size < 1000
    assert list(reopened(path).keys.versions()) == [
        (P, b"k", ReceivedVersion(SeqNo(103), HistoryId(1)))
    ]


FILE_OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["receive"] * 3 + ["trim"] * 3 + ["replace", "drop", "flush"]),
        st.integers(0, 2),
        st.lists(st.integers(0, 30), min_size=1, max_size=8),
    ),
    min_size=20,
    max_size=80,
)


@given(FILE_OPERATIONS, st.booleans())
@settings(max_examples=30)
def test_whatever_changes_while_the_file_is_rewritten_is_in_it(
    operations: list[tuple[str, int, list[int]]], is_buffered: bool
) -> None:
    """Of each partition, every key above the floor has its last version."""
    model: dict[tuple[int, bytes], ReceivedVersion] = {}
    sizes: list[int] = []

    async def run_on(path: Path) -> ReceivedKeys:
        file = ReceivedKeysFile(path, "b", ReceivedKeysLimits(entries=12), is_buffered=is_buffered)
        for seq, (operation, number, keys) in enumerate(operations, 1):
            partition = PartitionId(number)
            version = ReceivedVersion(SeqNo(seq), HistoryId(1))
            names = {b"k%d" % key for key in keys}
            if operation == "receive":
                await file.receive(partition, [(name, SeqNo(seq), HistoryId(1)) for name in names])
            elif operation == "replace":
                await file.confirm_rollback(partition, dict.fromkeys(names, version))
            elif operation == "drop":
                await file.confirm_rollback(partition, None)
                for key in [key for key in model if key[0] == number]:
                    del model[key]
            elif operation == "trim":
                await file.trim(lambda _: SeqNo(1 << 40))
                await file.rewrite_if_due()
            else:
                file.flush()
            if operation in ("receive", "replace"):
                model.update(dict.fromkeys(((number, name) for name in names), version))
            sizes.append(file._file.nbytes)
        file.close()
        return file.keys

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(received_keys_file, "_GARBAGE_BYTES", 0)
        patch.setattr(received_keys_rewrite, "VERSIONS_PER_RECORD", 3)
        keys = trio.run(run_on, Path(folder) / "keys")
        again = reopened(Path(folder) / "keys").keys
    event(f"rewritten: {any(after < before for before, after in pairwise(sizes))}")
    for (number, name), version in model.items():
        partition = PartitionId(number)
        assert again.floor(partition) <= keys.floor(partition)
        known_version = again.version(partition, name)
        assert known_version == version or version.seq <= again.floor(partition)


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    log, _ = ChecksummedFile.open(path)
    log.append(b"nonsense")
    log.close()
    with pytest.raises(DamagedFileError, match="not a received-keys file"):
        ReceivedKeysFile(path, "b")


@pytest.mark.parametrize("is_new", [False, True])
def test_a_file_that_is_refused_is_not_left_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    path = tmp_path / "keys"
    if is_new:

        def fail(*_: object) -> None:
            raise OSError("no room")

        monkeypatch.setattr(ChecksummedFile, "replace", fail)
    else:
        ReceivedKeysFile(path, "other").close()
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError if is_new else DamagedFileError):
        ReceivedKeysFile(path, "b")
    assert set(os.listdir("/proc/self/fd")) == before
