"""The native kernel when there is no memory: a process in which its requests for it fail."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

import pytest

from tests.kernel.builds import BUILDS

COMPILER: Final = str(sysconfig.get_config_var("CC") or "cc").split()[0]
LIBRARY_SOURCE: Final = Path(__file__).with_name("failing_memory.c")

pytestmark = pytest.mark.skipif(
    "native" not in BUILDS
    or platform.libc_ver()[0] != "glibc"
    or not shutil.which(COMPILER)
    or "LD_PRELOAD" in os.environ,
    reason="needs the native kernel, a compiler, and glibc's memory without a sanitizer's",
)

# Writers and answers are at their limits, and the disk knows of them.
ANSWERS: Final = """
import ctypes
from upr_kernel._native import Answers

fail_after = ctypes.CDLL(None).fail_after
WRITERS = [bytes([number]) * 16 for number in range(4)]
PACKED = b"answer"


def full_answers():
    answers = Answers(2, 1000, 3, total_bytes_max, 7, 10, 5, 6)
    answers.track_unsaved()
    for step in range(6):
        answers.remember(WRITERS[step % 3], 1 + step, PACKED, 1 + step, 0)
    answers.take_unsaved(100, 100)
    return answers


def replace_without_memory(writer, allowed):
    answers = full_answers()
    counter, packed = answers.newest(writer)
    fail_after(allowed)
    try:
        answers.replace_newest(writer, b"other answer", 10, 1)
        is_replaced = True
    except MemoryError:
        is_replaced = False
    fail_after(-1)
    if not is_replaced:
        answers.check_invariants()
    assert answers.newest(writer) == (counter, b"other answer" if is_replaced else packed)
    answers.replace_newest(writer, b"newest answer", 11, 1)
    answers.check_invariants()
    return is_replaced


def remember_without_memory(writer, allowed):
    answers = full_answers()
    before = [answers.newest(each) for each in WRITERS]
    fail_after(allowed)
    try:
        answers.remember(writer, 10, PACKED, 10, 0)
        is_remembered = True
    except MemoryError:
        is_remembered = False
    fail_after(-1)
    for each, newest in zip(WRITERS, before):
        if each == writer:
            assert answers.newest(each) == ((10, PACKED) if is_remembered else newest)
        elif newest is not None:
            assert answers.newest(each) in (newest, None)
    if not is_remembered:
        answers.check_invariants()
    # The next answers make good what was not done.
    answers.remember(writer, 11, PACKED, 11, 0)
    answers.remember(WRITERS[0], 12, PACKED, 11, 0)
    answers.check_invariants()
    return is_remembered


# The second is what they take: then there is no room for more.
for total_bytes_max in 1 << 30, 3 * (7 + 2 * (10 + len(PACKED))):
    for writer in WRITERS:
        results = [remember_without_memory(writer, allowed) for allowed in range(12)]
        assert results == sorted(results), "with more memory it fails no more"
        print(results.count(False), results.count(True))
    for writer in WRITERS[:3]:
        results = [replace_without_memory(writer, allowed) for allowed in range(12)]
        assert results == sorted(results), "with more memory it fails no more"
        print(results.count(False), results.count(True))
"""

# A run has keys that are new, known before the snapshot, known in it, and in the run before.
RUNS: Final = """
import ctypes
from struct import Struct
from upr_kernel._native import Answers, KeyTable, OpenRows, add_runs
from upr_protocol.chunk import chunk_of_plain_sets

fail_after = ctypes.CDLL(None).fail_after
RUN = Struct("<IIQI4x")
WRITER = b"w" * 16
OLD_KEYS = [b"old %d" % number for number in range(KNOWN_KEYS)]
FIRST_KEYS = [b"first %d" % number for number in range(20)]
NEW_KEYS = [b"new %d" % number for number in range(NEW_KEYS)]


def add(rows, counter, keys):
    chunk = bytes(chunk_of_plain_sets(keys, [b"value"] * len(keys)))
    run = RUN.pack(0, len(keys), counter, 0)
    limits = (1 << 20, 1 << 30, False)
    _, left, *_ = add_runs(chunk, 0, run, WRITER, (rows,), 0, None, 1, *limits)
    return not left


def state(rows):
    numbers = rows.high, rows.last_cas, rows.live, rows.superseded, rows.added, rows.seqs()
    table, answers = rows.table, rows.answers
    return numbers, bytes(rows.flags), table.entries(), table.items, answers.between(0, 1 << 62, 99)


def add_without_memory(allowed):
    rows = OpenRows(
        KeyTable(), Answers(4, 9000, 3, 1 << 30, 7, 10, 5, 6), 0, 1 << 20, 1 << 30, 1 << 20
    )
    for seq, key in enumerate(OLD_KEYS, 1):
        rows.table.put(key, seq, seq % 3 == 0)
    rows.begin(len(OLD_KEYS), 1 << 20)
    rows.history_id = 7
    assert add(rows, 1, FIRST_KEYS)
    keys = NEW_KEYS + OLD_KEYS[:9] + FIRST_KEYS[:9] + NEW_KEYS[:9]
    before = state(rows)
    fail_after(allowed)
    is_added = add(rows, 2, keys)
    fail_after(-1)
    rows.table.check_invariants()
    rows.answers.check_invariants()
    if not is_added:
        assert state(rows) == before
        assert add(rows, 2, keys)
    after = state(rows)
    rows.table.check_invariants()
    rows.table.evict(rows.high, len(rows.table))
    assert len(rows.table) == 0
    return is_added, after


results = [add_without_memory(allowed) for allowed in range(60)]
assert all(after == results[-1][1] for _, after in results), "no trace of what failed"
added = [is_added for is_added, _ in results]
assert added == sorted(added), "with more memory it fails no more"
print(added.count(False), added.count(True))
"""


# Two runs: the report tells of the first though there is no memory for the second.
SEVERAL_RUNS: Final = """
import ctypes
from struct import Struct
from upr_kernel._native import Answers, KeyTable, OpenRows, add_runs
from upr_protocol.chunk import chunk_of_plain_sets

fail_after = ctypes.CDLL(None).fail_after
RUN, LINE = Struct("<IIQI4x"), Struct("<IIQQQQ")
KEYS = [b"key %d" % number for number in range(200)]
CHUNK = bytes(chunk_of_plain_sets(KEYS, [b"value"] * 200))
RUNS = RUN.pack(0, 100, 1, 0) + RUN.pack(0, 100, 2, 0)


def numbers_of_lines(lines):
    return [seq for _, _, _, first, last, _ in LINE.iter_unpack(lines) for seq in (first, last)]


def sizes(rows):
    return rows.table.nbytes, rows.nbytes, rows.answers.nbytes


def add_both(allowed):
    rows = OpenRows(KeyTable(), Answers(4, 9000, 3, 1 << 30, 7, 10, 5, 6), 0, 999, 1 << 30, 999)
    rows.table.put(KEYS[0], 1)
    rows.high, rows.history_id, rows.has_counters, rows.is_awaited = 1, 7, True, True
    before = sizes(rows)
    fail_after(allowed)
    lines, left, notes, awaited, *growth = add_runs(
        CHUNK, 0, RUNS, b"w" * 16, (rows,), 0, None, 1, 999, 1 << 30, True
    )
    fail_after(-1)
    assert [after - size for after, size in zip(sizes(rows), before)] == growth
    added_count = 2 - len(left)
    assert left == [0, 1][added_count:]
    assert rows.high == 1 + 100 * added_count
    assert len(rows.table) == max(1, 100 * added_count)
    assert numbers_of_lines(lines) == [2, 101, 102, 201][: 2 * added_count] + [0, 0] * len(left)
    assert notes[:1] == [(0, [1])][:added_count]
    assert awaited == [0] * added_count
    rows.table.check_invariants()
    return added_count


results = [add_both(allowed) for allowed in range(40)]
assert results == sorted(results) and set(results) == {0, 1, 2}
print(results.count(1), results.count(2))
"""

# What is forgotten is said. Keys above the number are put to the end, which takes memory.
EVICTION: Final = """
import ctypes
from upr_kernel._native import KeyTable

fail_after = ctypes.CDLL(None).fail_after


def evict(allowed, kept_every):
    table = KeyTable()
    for number in range(9000):
        seq = 20000 + number if kept_every and number % kept_every == 0 else 1 + number
        table.put(b"key %d" % number, seq)
    length = len(table)
    fail_after(allowed)
    try:
        evicted_count = table.evict(10000, length)
    except MemoryError:
        evicted_count = 0
    fail_after(-1)
    assert len(table) == length - evicted_count
    table.check_invariants()
    kept_count = 9000 // kept_every if kept_every else 0
    is_done = evicted_count == length - kept_count
    table.evict(10000, 2 * length)
    assert len(table) == kept_count
    table.check_invariants()
    return is_done


# Without keys that are kept only shrinking takes memory, which may wait.
assert all(evict(allowed, 0) for allowed in range(5))
results = [evict(allowed, 2) for allowed in range(60)]
assert results == sorted(results), "with more memory it fails no more"
print(results.count(False), results.count(True))
"""


# A partition takes a batch's keys in with its rows, or neither. The answer comes after both.
BATCHES: Final = """
import ctypes
from upr_protocol.chunk import Chunk, chunk_of_plain_sets
from upr_protocol.ids import HistoryId, PartitionId
from upr_server.engine import MemoryAccount, Partition, batch_of

fail_after = ctypes.CDLL(None).fail_after


def send(partition, prefix, count):
    keys = [prefix + b"%d" % number for number in range(count)]
    chunk = Chunk(chunk_of_plain_sets(keys, [b"value" * 20] * count).encode())
    partition.mutate(batch_of(chunk), now=1e9)


def send_without_memory(count, allowed):
    memory = MemoryAccount()
    partition = Partition(PartitionId(0), lambda: HistoryId(7), memory=memory)
    send(partition, b"first", 20)
    fail_after(allowed)
    try:
        send(partition, b"second", count)
        is_taken_in = True
    except MemoryError:
        is_taken_in = False
    fail_after(-1)
    added_count = count if is_taken_in else 0
    assert partition.high_seq == len(partition.table) == 20 + added_count
    send(partition, b"third", count)
    assert partition.high_seq == len(partition.table) == 20 + added_count + count
    partition.check_invariants()
    recount = MemoryAccount()
    partition.recount(recount)
    assert recount == memory
    return is_taken_in


for count in 5, 63, 200:
    results = [send_without_memory(count, allowed) for allowed in range(40)]
    assert results == sorted(results), "with more memory it fails no more"
    print(results.count(False), results.count(True))
"""


def _check_without_memory(program: str, folder: Path) -> None:
    """Runs a program that prints, in each line, how many calls failed and how many did not."""
    library = folder / "failing_memory.so"
    subprocess.run(
        [COMPILER, "-shared", "-fPIC", "-O1", str(LIBRARY_SOURCE), "-o", str(library), "-ldl"],
        check=True,
    )
    # The kernel in C is what is tested, also in a run of the tests without it.
    environment = {**os.environ, "LD_PRELOAD": str(library), "UPR_PURE_PYTHON": "0"}
    finished = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    for line in finished.stdout.splitlines():
        failed_count, successful_count = map(int, line.split())
        assert failed_count > 0
        assert successful_count > 0


def test_answers_to_publishers_are_remembered_or_not_at_all(tmp_path: Path) -> None:
    _check_without_memory(ANSWERS, tmp_path)


@pytest.mark.parametrize(("known_keys", "new_keys"), [(0, 1), (9, 70), (9, 5000), (4000, 60)])
def test_runs_are_added_or_not_at_all(known_keys: int, new_keys: int, tmp_path: Path) -> None:
    """A table that has no slots yet, that grows at once, and that grows in steps."""
    program = RUNS.replace("range(KNOWN_KEYS)", f"range({known_keys})")
    _check_without_memory(program.replace("range(NEW_KEYS)", f"range({new_keys})"), tmp_path)


def test_a_report_tells_of_the_runs_before_the_one_that_failed(tmp_path: Path) -> None:
    _check_without_memory(SEVERAL_RUNS, tmp_path)


def test_a_table_says_what_it_has_forgotten(tmp_path: Path) -> None:
    """Not heard of, an item that only the disk has would be taken for missing."""
    _check_without_memory(EVICTION, tmp_path)


def test_a_partition_takes_a_batch_in_or_not_at_all(tmp_path: Path) -> None:
    """Keys without rows would have the numbers of those that come next."""
    _check_without_memory(BATCHES, tmp_path)
