"""The ring buffer against a plain list, and its file against crashes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from upr_protocol.client.journal import Journal, JournalError
from upr_protocol.client.ring import Entry, Ring, RingLimits
from upr_protocol.client.ring_file import RingFile
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, PartitionId, SeqNo

P = PartitionId(0)
LOG = FailoverLog.of([(2, 10), (1, 0)])
KEYS = st.binary(min_size=1, max_size=1)
Row = tuple[bytes, int, int]
ROWS = st.lists(st.tuples(KEYS, st.integers(1, 30), st.sampled_from([1, 2, 3])), max_size=6)


@given(st.lists(st.tuples(st.sampled_from(["receive", "replace", "trim", "drop"]), ROWS)))
def test_what_is_known_is_what_was_received_last(said: list[tuple[str, list[Row]]]) -> None:
    """Whatever the ring lets go of lies at or below its floor."""
    ring = Ring(RingLimits(entries=4))
    model: dict[bytes, Entry] = {}
    for what, rows in said:
        found = [(key, SeqNo(seq), HistoryId(h)) for key, seq, h in rows]
        if what == "receive":
            ring.receive(P, found)
            for key, seq, history in found:
                if key not in model or model[key].seq < seq:
                    model[key] = Entry(seq, history)
        elif what == "replace":
            entries = {key: Entry(seq, history) for key, seq, history in found}
            ring.replace(P, entries)
            model.update(entries)
        elif what == "drop":
            ring.drop(P)
            model.clear()
            assert ring.floor(P) == 0
        else:
            ring.trim(lambda _: SeqNo(20))
            assert not ring.overfull or all(entry.seq > 20 for _, _, entry in ring.entries())
        ring.check_invariants()
        known = {key: entry for _, key, entry in ring.entries()}
        assert ring.floor(P) <= 20
        above = {key: entry for key, entry in model.items() if entry.seq > ring.floor(P)}
        assert {k: entry for k, entry in known.items() if entry.seq > ring.floor(P)} == above
        look = ring.look(P, LOG, SeqNo(8))
        foreign = {k for k, e in known.items() if not LOG.holds(e.history_id, e.seq)}
        assert set(look.foreign) == foreign
        assert look.ahead == max([8, *(e.seq for k, e in known.items() if k not in foreign)])


def test_a_number_belongs_to_the_branch_in_which_it_was_given() -> None:
    assert [LOG.branch_of(SeqNo(n)) for n in (0, 1, 10, 11)] == [0, 1, 1, 2]
    later = LOG.branch(HistoryId(3), SeqNo(8))
    assert later.holds(HistoryId(1), SeqNo(8))
    assert not later.holds(HistoryId(1), SeqNo(9))
    assert not later.holds(HistoryId(2), SeqNo(11))
    assert later.holds(HistoryId(3), SeqNo(11))


# The file.


def journal_of(path: Path, *records: bytes) -> bytes:
    journal, _ = Journal.open(path)
    for record in records:
        journal.append(record)
    journal.close()
    return path.read_bytes()


def records_of(path: Path) -> list[bytes]:
    journal, records = Journal.open(path)
    journal.close()
    return records


def test_a_torn_tail_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = journal_of(path, b"one", b"two")
    data = journal_of(path, b"three")
    for length in range(len(before), len(data)):
        path.write_bytes(data[:length])
        assert records_of(path) == [b"one", b"two"]
        assert path.read_bytes() == before
        # The file had its length before it had its contents.
        path.write_bytes(data[:length] + bytes(len(data) - length))
        assert records_of(path) == [b"one", b"two"]
    path.write_bytes(data)
    assert records_of(path) == [b"one", b"two", b"three"]


def test_damage_is_told_and_never_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    before = journal_of(path, b"one", b"two")
    data = journal_of(path, b"three")
    for at in range(len(before)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(JournalError, match="damaged at byte"):
            records_of(path)


def test_records_are_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal, _ = Journal.open(path)
    journal.append(b"one")
    journal.replace([b"two", b"three"])
    journal.append(b"four")
    journal.close()
    assert records_of(path) == [b"two", b"three", b"four"]


async def test_a_ring_file_knows_what_it_was_told(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = RingFile(path, "b")
    assert not ring.found
    one, two = HistoryId(1), HistoryId(2)
    await ring.receive(P, [(b"a", SeqNo(5), one), (b"b", SeqNo(6), one)])
    await ring.undone(P, {b"b": Entry(SeqNo(4), two)})
    await ring.receive(PartitionId(1), [(b"c", SeqNo(5), one)])
    await ring.undone(PartitionId(1), None)
    await ring.raise_floor(PartitionId(2), SeqNo(7))
    ring.close()
    again = RingFile(path, "b")
    again.close()
    assert again.found
    assert list(again.ring.entries()) == [
        (P, b"a", Entry(SeqNo(5), one)),
        (P, b"b", Entry(SeqNo(4), two)),
    ]
    assert again.ring.floors() == {PartitionId(2): 7}
    with pytest.raises(JournalError, match="of the bucket 'b', not of 'other'"):
        RingFile(path, "other")


async def test_a_ring_file_does_not_grow_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    ring = RingFile(path, "b", RingLimits(entries=100))
    largest = 0
    for number in range(60):
        rows = [
            (b"%d-%d" % (number, n) + bytes(200), SeqNo(number * 1000 + n + 1), HistoryId(1))
            for n in range(500)
        ]
        await ring.receive(P, rows)
        await ring.tidy(lambda _: SeqNo(1 << 40))
        largest = max(largest, path.stat().st_size)
    assert len(ring.ring) == 87
    floor = ring.ring.floor(P)
    ring.close()
    assert largest < 5_000_000
    again = RingFile(path, "b", RingLimits(entries=100))
    again.ring.trim(lambda _: SeqNo(1 << 40))
    again.close()
    assert list(again.ring.entries()) == list(ring.ring.entries())
    assert again.ring.floor(P) == floor > 0


def test_what_is_no_ring_file(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    journal_of(path, b"nonsense")
    with pytest.raises(JournalError, match="no ring buffer"):
        RingFile(path, "b")
