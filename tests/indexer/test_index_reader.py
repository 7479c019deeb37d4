"""Short scans of an index that another process writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import msgspec
import pytest

from tests.indexer.kit import by_brute_force
from tests.indexer.load import BY_A, DESIGN, KEYS, until_ready
from tests.indexer.processes import indexer_process, workers_of
from tests.indexer.queried_index import an_index
from upr_protocol.client import BlockingClient, IndexClient
from upr_server.indexer.definitions import Index, index_path
from upr_server.indexer.explanation import FreshnessLog
from upr_server.indexer.index_file import IndexFile
from upr_server.indexer.index_reader import OPEN_MAX, IndexReader
from upr_server.indexer.pure.definition import IndexDefinition, IndexName
from upr_server.indexer.query import Query, Range, RequiredWrite
from upr_server.indexer.short_scan import (
    ENTRIES_MAX,
    INCLUDED_MAX,
    RANGES_MAX,
    VALUES_MAX,
    is_short,
    reads_little,
)
from upr_server.indexer.slice_scanner import read_answer
from upr_server.indexer.slices import SliceAnswer, SliceScan

NAME: Final = IndexName("d", "i")
CONTENTS: Final = {b"k%d" % n: json.dumps({"a": n % 7}).encode() for n in range(50)}
REMOVE_WHEN_TOLD: Final = """
import sys
from pathlib import Path
from upr_server.indexer.index_file import IndexFile
file = IndexFile(Path(sys.argv[1]), "b")
print(file.opening, flush=True)
sys.stdin.read()
file.destroy()
"""
"""What a process does that has an index open, and removes it: one process opens a file once."""

SCAN: Final = SliceScan(NAME, BY_A, Query(prefix=[3], timestamps=True), 10**6)


AT_LEAST: Final = (RequiredWrite(0, "1", 1),)


@pytest.mark.parametrize(
    ("query", "little", "short"),
    [
        (Query(), True, True),
        (Query(limit=ENTRIES_MAX, ranges=(Range(),) * RANGES_MAX), True, True),
        (Query(limit=ENTRIES_MAX + 1), False, False),
        (Query(ranges=(Range(),) * (RANGES_MAX + 1)), False, False),
        (Query(prefix=[[0] * (VALUES_MAX - 1)]), True, True),
        (Query(prefix=[[0] * VALUES_MAX]), True, False),
        (Query(consistency="now"), True, False),
        (Query(consistency="at_least", written=AT_LEAST), True, False),
        (Query(written=AT_LEAST), True, False),
        (Query(hold_s=1), True, False),
        (Query(moment="m"), True, False),
        (Query(distinct=1), False, False),
        (Query(count=True), False, False),
        (Query(count=True, consistency="now"), False, False),
    ],
)
def test_a_scan_is_short_if_it_waits_for_nothing_and_reads_little(
    query: Query, little: bool, short: bool
) -> None:
    scan = SliceScan(NAME, BY_A, query, 10**6)
    assert (reads_little(scan), is_short(scan)) == (little, short)


def test_a_scan_of_included_values_is_short_up_to_fewer_entries() -> None:
    definition = IndexDefinition(("a",), include=("b",))
    for limit, short in ((INCLUDED_MAX, True), (INCLUDED_MAX + 1, False)):
        assert is_short(SliceScan(NAME, definition, Query(limit=limit), 10**6)) == short


def written(folder: Path) -> tuple[str, SliceAnswer]:
    """Writes an index, as the other process would; gives its opening, and what it answers."""
    with an_index(index_path(folder, NAME, BY_A), BY_A, CONTENTS) as index:
        index.file.mark_built()
        return index.file.opening, own_answer(index)


def own_answer(index: Index) -> SliceAnswer:
    """What the process that writes answers."""
    with index.file.open_view() as view:
        selection = SCAN.query.selection(len(BY_A.key))
        return read_answer(view, SCAN, selection, FreshnessLog())


def timeless(answer: SliceAnswer | None) -> SliceAnswer:
    """An answer without its time."""
    assert answer is not None
    return msgspec.structs.replace(answer, read_seconds=0)


def test_it_answers_as_the_process_that_writes(tmp_path: Path) -> None:
    opening, expected = written(tmp_path)
    assert len(expected.entries) == 7
    assert expected.timestamps
    assert expected.opening == opening
    with IndexReader(tmp_path) as reader:
        assert reader.answer(SCAN) is None
        reader.add(SCAN, opening)
        assert timeless(reader.answer(SCAN)) == timeless(expected)


def test_a_file_that_was_opened_again_is_not_read_until_an_answer_names_that(
    tmp_path: Path,
) -> None:
    first_opening, _ = written(tmp_path)
    path = index_path(tmp_path, NAME, BY_A)
    file = IndexFile(path, "b")
    file.close()
    with IndexReader(tmp_path) as reader:
        reader.add(SCAN, first_opening)
        assert reader.answer(SCAN) is None
        reader.add(SCAN, file.opening)
        assert reader.answer(SCAN) is not None


def test_a_file_that_was_removed_is_not_read(tmp_path: Path) -> None:
    """The reader has it open, and nobody has said that the index is gone."""
    written(tmp_path)
    path = index_path(tmp_path, NAME, BY_A)
    command = [sys.executable, "-c", REMOVE_WHEN_TOLD, str(path)]
    with (
        IndexReader(tmp_path) as reader,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as writer,
    ):
        assert writer.stdout is not None
        opening = writer.stdout.readline().strip()
        reader.add(SCAN, opening)
        assert reader.answer(SCAN) is not None
        writer.communicate("remove")
        assert not path.exists()
        assert reader.answer(SCAN) is None
        reader.add(SCAN, opening)
        assert reader.answer(SCAN) is None


def test_the_indexes_that_were_read_last_stay_open(tmp_path: Path) -> None:
    opening, _ = written(tmp_path)
    scans = [
        msgspec.structs.replace(SCAN, name=IndexName("d", f"i{number}"))
        for number in range(OPEN_MAX)
    ]
    for scan in scans:
        shutil.copytree(
            index_path(tmp_path, NAME, BY_A), index_path(tmp_path, scan.name, scan.definition)
        )
    with IndexReader(tmp_path) as reader:
        for scan in scans:
            reader.add(scan, opening)
        assert reader.answer(scans[0]) is not None
        reader.add(SCAN, opening)
        assert reader.answer(SCAN) is not None
        assert reader.answer(scans[0]) is not None
        assert reader.answer(scans[1]) is None
        assert all(reader.answer(scan) is not None for scan in scans[2:])


def test_an_index_that_is_being_built_is_not_read(tmp_path: Path) -> None:
    path = index_path(tmp_path, NAME, BY_A)
    with an_index(path, BY_A, CONTENTS) as index:
        opening = index.file.opening
    with IndexReader(tmp_path) as reader:
        reader.add(SCAN, opening)
        assert reader.answer(SCAN) is None


def test_an_index_that_is_defined_otherwise_is_not_read(tmp_path: Path) -> None:
    opening, _ = written(tmp_path)
    other = IndexDefinition(("b",))
    with IndexReader(tmp_path) as reader:
        reader.add(SCAN, opening)
        reader.keep_only({NAME: BY_A})
        assert reader.answer(msgspec.structs.replace(SCAN, definition=other)) is None
        assert reader.answer(SCAN) is not None
        reader.keep_only({NAME: other})
        assert reader.answer(SCAN) is None


def test_a_file_that_is_not_there_is_left_to_the_worker(tmp_path: Path) -> None:
    with IndexReader(tmp_path) as reader:
        reader.add(SCAN, "")
        assert reader.answer(SCAN) is None


def test_a_short_scan_asks_no_worker_and_never_reads_an_index_that_was_dropped(
    url: str, tmp_path: Path
) -> None:
    contents: dict[bytes, bytes] = {}
    with (
        BlockingClient(url) as client,
        indexer_process(url, tmp_path, workers=2) as indexer,
        IndexClient(indexer.url) as asking,
    ):

        def check_scan() -> None:
            page = asking.scan("d/a", limit=ENTRIES_MAX)
            assert [(e.key, e.id) for e in page.entries] == by_brute_force(BY_A, contents)

        for round_ in range(2):
            asking.create("d", DESIGN)
            until_ready(asking, {"d/a", "d/both"})
            for number in range(100):
                key, value = KEYS[number], json.dumps({"a": number + round_})
                client.set(key, value)
                contents[key.encode()] = value.encode()
            assert asking.count("d/a", consistency="now") == len(contents)
            check_scan()
            workers = workers_of(indexer)
            for pid in workers:
                os.kill(pid, signal.SIGSTOP)
            try:
                check_scan()
            finally:
                for pid in workers:
                    os.kill(pid, signal.SIGCONT)
            asking.drop("d")
