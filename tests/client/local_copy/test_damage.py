"""A local copy with bytes that a disk has changed: each error says that the copy is damaged."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest

from tests.kit.effort import effort
from upr_protocol.client import LocalCopyError, LocalCopyReader, ResumeStateError
from upr_protocol.client.local_copy.database import FILE_NAME, ITEM_COLUMNS, uint64_blob
from upr_protocol.client.local_copy.file import LocalCopyFile
from upr_protocol.failover import FailoverLog, Position
from upr_protocol.ids import HistoryId, PartitionId, SeqNo

LOG = FailoverLog.of_pairs([(HistoryId(8), SeqNo(50)), (HistoryId(7), SeqNo(0))])
KEYS = 100
PARTITION = PartitionId(1)


def fill(folder: Path) -> None:
    """Makes a copy of one partition."""
    with closing(LocalCopyFile.open(folder, "b")) as file:
        file.set_position(PARTITION, Position(LOG, SeqNo(KEYS), SeqNo(KEYS), None), SeqNo(0))
        file._commit()
    rows = [
        (
            PARTITION,
            b"key %d" % index,
            bytes(60) if index % 3 else None,
            index + 1,
            uint64_blob(LOG.branch_of(SeqNo(index + 1))),
            uint64_blob(index),
            0,
            0,
        )
        for index in range(KEYS)
    ]
    with closing(sqlite3.connect(folder / FILE_NAME)) as database, database:
        places = ", ".join("?" * len(rows[0]))
        database.executemany(f"INSERT INTO items ({ITEM_COLUMNS}) VALUES ({places})", rows)


def read_all(folder: Path) -> None:
    """Asks the copy everything that can be asked."""
    with closing(LocalCopyReader(folder)) as reader:
        for item in reader.items():
            assert item.cas < 2**64
        reader.get(PARTITION, b"key 1")
        len(reader)
        assert all(floor >= 0 for floor in reader.rollback_floors().values())
        assert all(end >= 0 for end in reader.consistent_ends().values())


def follow(folder: Path) -> None:
    """Does with the copy what a follower does, but for the events."""
    with closing(LocalCopyFile.open(folder, "b")) as file:
        assert file._guard(file._floor, PARTITION) >= 0
        foreign_keys = file._guard(file._foreign_keys, PARTITION, LOG, SeqNo(KEYS))
        assert all(isinstance(key, bytes) for key in foreign_keys.keys)
        file.set_position(PARTITION, Position(LOG, SeqNo(KEYS), SeqNo(KEYS), None), SeqNo(0))
        file._guard(file._drop, PARTITION)
        file._guard(file._commit)


@pytest.mark.parametrize("use", [read_all, follow])
def test_changed_bytes_are_called_damage_or_change_a_value(
    tmp_path: Path, use: Callable[[Path], None]
) -> None:
    fill(tmp_path)
    path, draw = tmp_path / FILE_NAME, Random(1)
    whole, errors = path.read_bytes(), 0
    for _ in range(effort(150, 1000)):
        damaged = bytearray(whole)
        for _ in range(draw.choice((1, 5, 50))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        for leftover in tmp_path.glob(f"{FILE_NAME}-*"):
            leftover.unlink()
        path.write_bytes(damaged)
        try:
            use(tmp_path)
        except (LocalCopyError, ResumeStateError):
            errors += 1
    assert errors


@pytest.mark.parametrize(
    ("use", "change"),
    [
        (read_all, "UPDATE items SET history = CAST(history AS TEXT)"),
        (read_all, "UPDATE items SET cas = x'0102'"),
        (read_all, "UPDATE items SET key = CAST(key AS TEXT)"),
        (read_all, "UPDATE items SET seq = CAST(seq AS BLOB)"),
        (read_all, "UPDATE partitions SET floor = 'text'"),
        (read_all, "UPDATE partitions SET position = 1"),
        (follow, "UPDATE items SET history = CAST(history AS TEXT)"),
        (follow, "UPDATE items SET history = x'0102'"),
        (follow, "UPDATE items SET key = CAST(key AS TEXT), history = zeroblob(8)"),
        (follow, "UPDATE partitions SET floor = 'text'"),
        (follow, "UPDATE partitions SET position = 1"),
    ],
)
def test_a_value_of_another_type_is_called_damage(
    tmp_path: Path, use: Callable[[Path], None], change: str
) -> None:
    """A single bit in the header of a row makes bytes a text."""
    fill(tmp_path)
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as database, database:
        database.execute(change)
    with pytest.raises(LocalCopyError, match="name another directory"):
        use(tmp_path)


def test_a_closed_copy_is_not_called_damaged(tmp_path: Path) -> None:
    fill(tmp_path)
    reader = LocalCopyReader(tmp_path)
    reader.close()
    with pytest.raises(sqlite3.ProgrammingError):
        len(reader)
