"""An index on disk, compared with a dict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import lmdb
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.indexer.index_batches import (
    LOG,
    ByValue,
    apply,
    batch,
    entries,
    scan,
    whole,
)
from upr_protocol.failover import FailoverLog, PartialSnapshot, Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo
from upr_server.indexer import document_rows
from upr_server.indexer.document_rows import RoundChanges
from upr_server.indexer.entry_reader import EntrySelection, KeyRange
from upr_server.indexer.index_batch import IndexBatch
from upr_server.indexer.index_file import (
    DiskFullError,
    IndexFile,
    IndexFileError,
    NotSettledError,
    entries_bytes,
    errors,
)
from upr_server.indexer.index_file import file as file_module
from upr_server.indexer.mark import Mark
from upr_server.indexer.pure.extractor import decode_values


@pytest.fixture
def file(tmp_path: Path) -> IndexFile:
    return IndexFile(tmp_path / "i", "b")


def part(start: int, seq: int, end: int) -> Mark:
    partial = PartialSnapshot(HistoryId(7), SeqNo(start), SeqNo(end))
    return Mark(Position(LOG, SeqNo(start), SeqNo(seq), partial))


def entry_count(file: IndexFile, selection: EntrySelection) -> int | None:
    with file.open_view() as view:
        return view.summarize(selection, count=True).count


KEYS = st.sampled_from([b"a", b"b", b"\xff", b"\0"])
VALUES = st.sampled_from([b"x", b"y", b"xa", b"-", None])
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(["changes", "changes", "again", "undo", "forget", "reopen"]),
        st.lists(st.tuples(KEYS, VALUES), max_size=4, unique_by=lambda item: item[0]),
        st.sampled_from([True, True, False]),
    ),
    max_size=12,
)


@settings(max_examples=120)
@given(STEPS, st.booleans())
@example([(2, "changes", [(b"a", b"x")], False), (2, "again", [(b"a", b"x")], True)], False)
def test_an_index_file_holds_what_a_dict_would(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[int, str, list[tuple[bytes, bytes | None]], bool]],
    is_single: bool,
) -> None:
    path = tmp_path_factory.mktemp("index")
    file = IndexFile(path, "b")
    model: dict[tuple[int, bytes], bytes] = {}
    reached = [0, 0, 0]
    batches: list[IndexBatch] = []
    for partition, kind, items, is_commit in [*steps, (0, "changes", [], True)]:
        # A key belongs to one partition only.
        items = [(b"%d" % partition + key, value) for key, value in items]
        if kind == "reopen":
            apply(file, *batches, is_single=is_single)
            batches.clear()
            file.close()
            file = IndexFile(path, "b")
            continue
        if kind == "forget":
            batches.append(IndexBatch(PartitionId(partition), Mark(), clears_one_of=3))
            model = {key: value for key, value in model.items() if key[0] != partition}
            reached[partition] = 0
            continue
        if kind == "undo":
            reached[partition] //= 2
            mark = whole(reached[partition])
            batches.append(IndexBatch(PartitionId(partition), mark, rollback_documents=dict(items)))
        elif kind == "again":
            # Changes that the index already has are skipped, so the value `old` has no effect.
            numbered = [(1, key, b"old") for key, _ in items if reached[partition]]
            batches.append(batch(partition, whole(min(1, reached[partition])), numbered))
            continue
        else:
            first = reached[partition] + 1
            reached[partition] += len(items)
            numbered_items = [(first + n, key, value) for n, (key, value) in enumerate(items)]
            batches.append(batch(partition, whole(reached[partition]), numbered_items))
        for key, value in items:
            model.pop((partition, key), None)
            if value is not None and not value.startswith(b"-"):
                model[partition, key] = value
        if is_commit:
            apply(file, *batches, is_single=is_single)
            batches.clear()
            file.check_invariants()
    assert entries(file) == sorted(b"\x09" + value + key for (_, key), value in model.items())
    assert file.entry_count() == len(model)
    assert [file.mark(PartitionId(partition)).seq for partition in range(3)] == reached
    file.close()


LOGS = [LOG, LOG, FailoverLog.of_pairs([(8, 5), (7, 0)])]


@given(
    st.sampled_from(
        [whole(0), whole(6), part(2, 6, 9), attrs.evolve(whole(4), settles_at=SeqNo(6))]
    ),
    st.lists(
        st.tuples(st.integers(1, 4), KEYS, VALUES, st.booleans(), st.sampled_from(LOGS)),
        max_size=6,
    ),
)
def test_batches_in_one_round_have_the_same_effect_as_in_separate_rounds(
    tmp_path_factory: pytest.TempPathFactory,
    begin: Mark,
    steps: list[tuple[int, bytes, bytes | None, bool, FailoverLog]],
) -> None:
    """The index may be ahead of the stream, which starts at sequence number 2."""
    batches, seq, last_end = [], 2, 2
    for advance, key, value, is_whole, log in steps:
        seq += advance
        position = Position(log, SeqNo(seq), SeqNo(seq))
        if not is_whole:
            partial = PartialSnapshot(log.current, SeqNo(last_end), SeqNo(seq + 9))
            position = Position(log, SeqNo(last_end), SeqNo(seq), partial)
        else:
            last_end = seq
        batches.append(batch(0, Mark(position), [(seq, key, value)]))
    folder = tmp_path_factory.mktemp("index")
    together, one_by_one = IndexFile(folder / "a", "b"), IndexFile(folder / "b", "b")
    for file in together, one_by_one:
        apply(file, IndexBatch(PartitionId(0), begin, rollback_documents={b"a": b"old"}))
    apply(together, *batches)
    for each in batches:
        apply(one_by_one, each)
    assert scan(together, settled=False) == scan(one_by_one, settled=False)
    mark, expected = together.mark(PartitionId(0)), one_by_one.mark(PartitionId(0))
    assert mark.position == expected.position
    assert mark.is_settled == expected.is_settled
    for file in together, one_by_one:
        file.check_invariants()
        file.close()


def test_ranges_are_read_in_both_directions(file: IndexFile) -> None:
    apply(file, batch(0, whole(5), [(n, b"k%d" % n, b"v%d" % n) for n in range(1, 6)]))
    every = entries(file)
    assert len(every) == 5
    for low in range(5):
        for high in range(5):
            selection = EntrySelection((KeyRange(every[low], every[high]),))
            assert scan(file, selection).entries == every[low:high]
            assert entry_count(file, selection) == max(0, high - low)
            down = attrs.evolve(selection, descending=True)
            assert scan(file, down).entries == every[low:high][::-1]
    assert scan(file, EntrySelection(descending=True), 2).entries == every[:2:-1]
    result = scan(file, limit=5)
    assert (result.entries, result.has_more) == (every, False)
    with file.open_view() as view:
        assert view.timestamps() == {0: (7, 5)}
    assert scan(file, limit=4).has_more
    two_entries = entries_bytes(every[:2])
    for bytes_max, count in (two_entries, 2), (two_entries - 1, 1), (1, 1), (10**6, len(every)):
        result = scan(file, bytes_max=bytes_max)
        assert (result.entries, result.has_more) == (every[:count], count < len(every))


def test_inside_a_snapshot_an_index_is_not_settled(file: IndexFile) -> None:
    apply(file, batch(0, part(0, 2, 3), [(2, b"k", b"v")]), batch(1, whole(1), [(1, b"l", b"w")]))
    with pytest.raises(NotSettledError):
        file.open_view()
    assert scan(file, settled=False).entries == [b"\x09vk", b"\x09wl"]
    file.check_invariants()
    apply(file, batch(0, whole(3), [(3, b"k", None)]))
    assert entries(file) == [b"\x09wl"]


def test_after_a_rollback_an_index_is_settled_from_the_given_number_on(file: IndexFile) -> None:
    apply(file, batch(0, whole(9), [(9, b"k", b"v")]))
    back = attrs.evolve(whole(4), settles_at=SeqNo(6))
    apply(file, IndexBatch(PartitionId(0), back, rollback_documents={b"k": b"w"}))
    with pytest.raises(NotSettledError):
        file.open_view()
    apply(file, batch(0, whole(5), [(5, b"l", b"x")]))
    with pytest.raises(NotSettledError):
        file.open_view()
    apply(file, batch(0, whole(6), [(6, b"l", b"y")]))
    assert entries(file) == [b"\x09wk", b"\x09yl"]


def test_an_index_that_is_ahead_takes_nothing_twice(file: IndexFile) -> None:
    """A stream starts at the position of the index that is furthest behind, so the others receive
    changes that they have."""
    before = attrs.evolve(whole(3), settles_at=SeqNo(9))
    apply(file, IndexBatch(PartitionId(0), before, rollback_documents={b"k": b"first"}))
    apply(file, batch(0, whole(5), [(4, b"k", b"second"), (5, b"l", b"x")]))
    log = FailoverLog.of_pairs([(8, 5), (7, 0)])
    behind = Mark(Position(log, SeqNo(4), SeqNo(4)))
    assert apply(file, batch(0, behind, [(3, b"k", b"first"), (4, b"l", None)])) == 0
    assert scan(file, settled=False).entries == [b"\x09secondk", b"\x09xl"]
    ahead = Position(log, SeqNo(5), SeqNo(5))
    assert file.mark(PartitionId(0)) == Mark(ahead, SeqNo(9)), "only the log is the stream's"
    with pytest.raises(NotSettledError):
        file.open_view()
    file.check_invariants()


def test_marks_can_be_iterated_while_a_commit_adds_marks(file: IndexFile) -> None:
    """Another thread commits. If the iteration failed, the indexer's status would fail, and a
    stream could end."""
    apply(file, batch(0, whole(1), []), batch(1, whole(1), []))
    partitions = iter(file.marks)
    next(partitions)
    apply(file, batch(2, whole(1), []))
    assert list(partitions) == [1]
    assert list(file.marks) == [0, 1, 2]


def test_changes_after_a_rollback_in_the_same_commit_are_applied(file: IndexFile) -> None:
    apply(file, batch(0, whole(9), [(9, b"k", b"lost")]))
    rollback = IndexBatch(PartitionId(0), whole(4), rollback_documents={b"k": b"kept"})
    apply(file, rollback, batch(0, whole(6), [(5, b"l", b"new"), (6, b"m", b"new")]))
    assert entries(file) == [b"\x09keptk", b"\x09newl", b"\x09newm"]
    assert file.mark(PartitionId(0)) == whole(6)


def last_commit(path: Path) -> int:
    """The number of the last commit in an index that is closed."""
    with lmdb.open(str(path), readonly=True) as environment:
        return int(environment.info()["last_txnid"])


def test_entries_and_marks_are_one_commit(file: IndexFile) -> None:
    """If they were two commits, a process killed between them would leave entries that the marks
    do not cover."""
    apply(file, batch(0, whole(9), [(9, b"k", b"lost")]))
    file.close()
    before = last_commit(file.path)
    file = IndexFile(file.path, "b")
    rollback = IndexBatch(PartitionId(0), whole(4), rollback_documents={b"k": b"kept"})
    cleared = IndexBatch(PartitionId(1), Mark(), clears_one_of=3)
    apply(file, rollback, cleared, batch(0, part(4, 5, 6), [(5, b"l", b"new")]))
    file.close()
    # Opening the file is a commit, too.
    assert last_commit(file.path) == before + 2
    again = IndexFile(file.path, "b")
    assert again.mark(PartitionId(0)) == part(4, 5, 6)
    assert scan(again, settled=False).entries == [b"\x09keptk", b"\x09newl"]
    again.close()


def test_a_mark_says_whether_a_write_is_applied_or_lost() -> None:
    mark = Mark(Position(FailoverLog.of_pairs([(8, 5), (7, 0)]), SeqNo(9), SeqNo(9)))
    assert mark.has_change(HistoryId(7), SeqNo(5))
    assert mark.has_change(HistoryId(8), SeqNo(9))
    assert not mark.has_change(HistoryId(8), SeqNo(10))
    assert not mark.has_lost(HistoryId(8), SeqNo(10))
    assert not mark.has_change(HistoryId(7), SeqNo(6))
    assert mark.has_lost(HistoryId(7), SeqNo(6))
    assert not mark.has_change(HistoryId(9), SeqNo(1))
    assert not mark.has_lost(HistoryId(9), SeqNo(1))


def test_an_index_of_another_format_is_empty(file: IndexFile) -> None:
    """Its data must not be read as the new format. Nothing is lost: the server has all
    documents."""
    apply(file, batch(0, whole(1), [(1, b"k", b"v")]))
    file.mark_built()
    file.close()
    with (
        lmdb.open(str(file.path), max_dbs=3) as environment,
        environment.begin(write=True) as old_index,
    ):
        old_index.delete(b"v", db=environment.open_db(b"meta", txn=old_index))
    again = IndexFile(file.path, "b")
    assert (entries(again), again.entry_count(), again.is_built) == ([], 0, False)
    assert again.mark(PartitionId(0)) == Mark()
    again.check_invariants()
    again.close()


def test_an_index_file_belongs_to_one_bucket(file: IndexFile) -> None:
    file.close()
    with pytest.raises(IndexFileError, match="of the bucket 'b', not of 'c'"):
        IndexFile(file.path, "c")


def test_a_failed_commit_changes_nothing(file: IndexFile) -> None:
    apply(file, batch(0, whole(1), [(1, b"k", b"v")]))
    with pytest.raises(IndexFileError):
        apply(file, batch(0, whole(3), [(2, b"k", b"w"), (3, b"l", b"x" * 600)]))
    assert entries(file) == [b"\x09vk"]
    assert file.mark(PartitionId(0)).seq == 1
    file.check_invariants()


@pytest.mark.parametrize("log", [LOG, FailoverLog.of_pairs([(8, 9), (7, 0)])])
def test_changes_that_a_part_of_a_snapshot_left_out_count_later(
    file: IndexFile, log: FailoverLog
) -> None:
    """The snapshot was interrupted at 9, and has `k` only at 11. Another index is behind, so the
    stream continues from 5, perhaps in a history without 11. The next snapshot ends at 10, so `k`
    is in it at 7, and the index must not skip that change."""
    apply(file, batch(0, whole(5), [(5, b"k", b"old")]))
    apply(file, batch(0, part(5, 9, 12), [(6, b"a", b"x"), (9, b"b", b"x")]))
    chunks = batch(0, whole(10), [(6, b"a", b"x"), (7, b"k", b"new"), (9, b"b", b"x")]).chunks
    mark = Mark(Position(log, SeqNo(10), SeqNo(10)))
    apply(file, IndexBatch(PartitionId(0), mark, chunks))
    assert file.mark(PartitionId(0)) == mark
    assert entries(file) == [b"\x09newk", b"\x09xa", b"\x09xb"]
    file.check_invariants()


def test_an_index_that_is_ahead_inside_a_snapshot_goes_back_to_the_stream(file: IndexFile) -> None:
    """If it kept its position, it would claim to have change 9, which older changes have
    replaced."""
    apply(file, batch(0, whole(5), [(5, b"k", b"old")]))
    apply(file, batch(0, part(5, 9, 12), [(6, b"a", b"x"), (9, b"b", b"x")]))
    apply(file, batch(0, whole(8), [(7, b"k", b"new"), (8, b"b", None)]))
    assert file.mark(PartitionId(0)) == attrs.evolve(whole(8), settles_at=SeqNo(9))
    with pytest.raises(NotSettledError):
        file.open_view()
    apply(file, batch(0, whole(10), [(9, b"b", b"x")]))
    assert entries(file) == [b"\x09newk", b"\x09xa", b"\x09xb"]
    file.check_invariants()


def test_documents_are_decoded_again_only_for_partitions_that_an_index_has_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partitions of an index that is being built join the running stream one after the other, each
    with batches that the index already has. That must not decode all documents of the round
    again."""
    decoded: list[bytes] = []

    def note_decoded(values: Sequence[bytes]) -> list[Any]:
        decoded.extend(values)
        return decode_values(values)

    running, new = IndexFile(tmp_path / "running", "b"), IndexFile(tmp_path / "new", "b")
    apply(new, batch(1, whole(1), [(1, b"1a", b"x")]))
    changes = RoundChanges(
        [
            batch(0, whole(1), [(1, b"0a", b"y")]),
            batch(1, whole(2), [(1, b"1a", b"x"), (2, b"1b", b"z")]),
        ]
    )
    monkeypatch.setattr(document_rows, "decode_values", note_decoded)
    for file in (running, new):
        file.apply_changes(changes, ByValue())
        file.check_invariants()
    assert entries(new) == entries(running)
    assert decoded == [b"y", b"x", b"z", b"z"]
    for file in (running, new):
        file.close()


def test_an_index_of_the_largest_size_reports_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (errors, file_module):
        monkeypatch.setattr(module, "FILE_BYTES_MAX", 1024 * 1024)
    file = IndexFile(tmp_path, "b")
    items = [(seq, b"k%04d" % seq, b"v" * 300) for seq in range(1, 3001)]
    with pytest.raises(DiskFullError, match="has 1048576 bytes, the most it may: drop it"):
        apply(file, batch(0, whole(3000), items))
    apply(file, batch(0, whole(1), [(1, b"k", b"v")]))
    assert entries(file) == [b"\x09vk"]
    file.check_invariants()
    file.close()
