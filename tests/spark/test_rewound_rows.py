"""A Delta table returns each partition to what it was at a number, from its earlier versions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, write_deltalake

from upr_protocol.spark.errors import PipelineError
from upr_protocol.spark.recipes.rewound_rows import reached_metadata, rewound_rows, version_before

Rows = list[tuple[int, int, str]]
"""Partition, number and key."""


def commit(path: Path, reached: dict[int, int], rows: Rows, *, is_anew: bool = False) -> None:
    """Makes the next version, which has these rows. Records nothing where `reached` is empty."""
    columns = {
        "partition": pa.array([row[0] for row in rows], pa.int32()),
        "seq": pa.array([row[1] for row in rows], pa.int64()),
        "key": pa.array([row[2].encode() for row in rows], pa.binary()),
    }
    write_deltalake(
        str(path),
        pa.table(columns),
        mode="overwrite",
        commit_properties=CommitProperties(
            custom_metadata=reached_metadata(reached, is_anew=is_anew) if reached else {}
        ),
    )


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table"
    commit(path, {0: 2, 1: 1}, [(0, 1, "a"), (0, 2, "b"), (1, 1, "x")])
    commit(path, {0: 4}, [(0, 1, "a"), (0, 3, "c"), (0, 4, "b"), (1, 1, "x")])
    commit(path, {}, [(0, 1, "a"), (0, 3, "c"), (0, 4, "b"), (1, 1, "x")])
    # Partition 0 lost `a` to a deletion with number 5, and has `b` anew; 1 has `x` anew.
    commit(path, {0: 6, 1: 2}, [(0, 3, "c"), (0, 6, "b"), (1, 2, "x")])
    return path


def rewound(path: Path, went_to: dict[int, int]) -> Rows:
    def open_version(version: int) -> Any:
        return DeltaTable(str(path), version=version)

    rows = rewound_rows(DeltaTable(str(path)), open_version, went_to).to_pylist()
    return sorted((row["partition"], row["seq"], row["key"].decode()) for row in rows)


def test_rows_that_the_table_lost_since_come_back(table: Path) -> None:
    assert rewound(table, {0: 4}) == [(0, 1, "a"), (0, 4, "b")], "`c` is there unchanged"
    assert rewound(table, {0: 2, 1: 1}) == [(0, 1, "a"), (0, 2, "b"), (1, 1, "x")]
    assert rewound(table, {0: 0, 1: 1}) == [(1, 1, "x")], "at 0 a partition has nothing"
    assert rewound(table, {0: 1}) == [], "before its first commit a table has nothing"


@pytest.mark.parametrize(("seq", "version"), [(7, 3), (6, 3), (5, 2), (4, 2), (3, 0), (1, None)])
def test_the_version_is_the_newest_that_has_nothing_above_the_number(
    table: Path, seq: int, version: int
) -> None:
    assert version_before(DeltaTable(str(table)).history(), 0, seq) == version


def test_nothing_comes_back_of_a_query_before_the_table_was_begun_anew(table: Path) -> None:
    commit(table, {1: 1}, [(1, 1, "x")], is_anew=True)
    commit(table, {0: 9}, [(0, 9, "d"), (1, 1, "x")])
    commit(table, {1: 3}, [(0, 9, "d")])
    # The new query had come to 5 without a row of the partition, the earlier one to 6.
    assert rewound(table, {0: 5}) == []
    assert rewound(table, {1: 1}) == [(1, 1, "x")]
    assert version_before(DeltaTable(str(table)).history(), 1, 0) is None


def _remove_files(path: Path) -> None:
    for file in path.glob("*.parquet"):
        file.unlink()


def _forget_metadata(path: Path) -> None:
    commit(path, {}, [(0, 9, "d")])


def _clean_log(path: Path) -> None:
    """As Delta does with commits that are older than a month."""
    commit(path, {0: 9}, [(0, 9, "d")])
    DeltaTable(str(path)).create_checkpoint()
    for version in range(4):
        (path / "_delta_log" / f"{version:020d}.json").unlink()


@pytest.mark.parametrize("lose", [_remove_files, _forget_metadata, _clean_log])
def test_a_version_that_is_gone_is_an_error(table: Path, lose: Callable[[Path], None]) -> None:
    lose(table)
    with pytest.raises(PipelineError, match=r"\[UPR_TABLE\] partitions went back") as failed:
        rewound(table, {0: 7})
    assert failed.value.code == "UPR_TABLE"
