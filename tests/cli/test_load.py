from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.conftest import Run, Start
from tests.cli.processes import DEADLINE_S, start_server
from upr_protocol.cli.load import BATCH_ITEMS_MAX, LOAD_BATCH_BYTES, LoadBatches
from upr_protocol.errors import ADVICE, Status
from upr_protocol.hashing import partition_of
from upr_protocol.ids import PartitionId


@pytest.fixture
def planes(tmp_path: Path) -> Path:
    path = tmp_path / "planes.csv"
    path.write_text("tailnum,seats,maker\nN1,10,A\nN2,NA,B\n,30,C\nN1,40,NA\n")
    return path


def test_the_rows_of_a_csv_file_become_items(bucket: str, run: Run, planes: Path) -> None:
    loaded = run("load", bucket, str(planes), "--key", "tailnum", "--null", "NA")
    assert loaded.stdout.startswith("loaded 3 of 4 rows, ")
    assert loaded.stderr == "upr: 1 rows skipped because they have no key: lines 4\n"
    values = run("get", bucket, "N1", "N2").stdout.splitlines()
    assert [json.loads(value) for value in values] == [
        {"tailnum": "N1", "seats": "40", "maker": None},
        {"tailnum": "N2", "seats": None, "maker": "B"},
    ]


def test_a_key_may_have_several_columns(bucket: str, run: Run, planes: Path) -> None:
    run("load", bucket, str(planes), "--key", "maker", "--key", "seats", "--separator", "/")
    run("get", bucket, "A/10", "B/NA", "C/30", "NA/40")


def test_json_lines_are_read_from_standard_input(bucket: str, run: Run, start: Start) -> None:
    process = start("load", bucket, "-", "--format", "jsonl", "--key", "id", stdin=subprocess.PIPE)
    out, err = process.finished(data=b'{"id": 7, "x": 1.50}\n\n{"id": 8}\n')
    assert out.startswith(b"loaded 2 of 2 rows, ")
    assert err == b""
    assert run("get", bucket, "7", "8").stdout == '{"id": 7, "x": 1.50}\n{"id": 8}\n'


def test_the_rows_of_a_parquet_file_become_items(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2, None], "x": ["a", None, "c"]}), path)
    loaded = run("load", bucket, str(path), "--key", "id")
    assert loaded.stdout.startswith("loaded 2 of 3 rows, ")
    assert "no key: rows 3" in loaded.stderr
    assert run("get", bucket, "1", "2").stdout == '{"id":1,"x":"a"}\n{"id":2,"x":null}\n'


def test_more_rows_than_one_batch_holds_are_loaded(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,x\n" + "".join(f"{n},{n * n}\n" for n in range(30_000)))
    assert run("load", bucket, str(path), "--key", "id").stdout.startswith(
        "loaded 30,000 of 30,000 rows, "
    )
    assert json.loads(run("get", bucket, "29999").stdout) == {"id": "29999", "x": "899940001"}
    stats = json.loads(run("stats", bucket).stdout)
    assert stats["items"] == 30_000


def test_a_bad_row_stops_the_load_and_is_named(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,x\n1,a\n2\n3,c\n")
    stopped = run("load", bucket, str(path), "--key", "id", code=1)
    assert "line 3: 1 values for 2 columns" in stopped.stderr
    assert "--skip-bad-rows" in stopped.stderr
    assert stopped.stdout == "stopped after 2 rows; rows already loaded stay\n"
    run("get", bucket, "1")
    run("get", bucket, "3", code=1)


def test_bad_rows_are_skipped_and_counted_on_request(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    bad = ["[1]", "{", '{"id": [1]}', json.dumps({"id": "x" * 251})]
    path.write_text("\n".join(['{"id": 1}', *bad, '{"id": 2}']))
    loaded = run("load", bucket, str(path), "--key", "id", "--skip-bad-rows")
    assert loaded.stdout.startswith("loaded 2 of 6 rows, ")
    assert "4 bad rows skipped: lines 2 (expected one JSON object" in loaded.stderr
    assert "4 (id holds a list, which cannot be part of a key)" in loaded.stderr
    assert "5 (its key has 251 bytes; the limit is 250)" in loaded.stderr


def test_only_the_first_of_many_bad_lines_are_named(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,x\n1,a\n" + ",b\n" * 1000)
    loaded = run("load", bucket, str(path), "--key", "id")
    assert "1,000 rows skipped because they have no key: lines 3, 4, 5, 6, 7, …" in loaded.stderr


def test_a_value_that_is_too_large_is_a_bad_row(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": 1, "x": "y" * (20 * 2**20)}))
    stopped = run("load", bucket, str(path), "--key", "id", code=1)
    assert "line 1: it has 20.0 MiB; the limit is 20 MiB" in stopped.stderr


def test_a_load_without_any_key_fails(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{"id": 2}\n')
    loaded = run("load", bucket, str(path), "--key", "ID", code=1)
    assert "no row could be loaded" in loaded.stderr


def test_an_empty_file_is_loaded(bucket: str, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id,x\n")
    assert run("load", bucket, str(path), "--key", "id").stdout.startswith("loaded 0 of 0 rows")


def test_a_durability_without_enough_replicas_is_refused(
    bucket: str, run: Run, planes: Path
) -> None:
    refusal = run(
        "load", bucket, str(planes), "--key", "tailnum", "--durability", "replicated", code=3
    )
    assert ADVICE[Status.TOO_FEW_REPLICAS] in refusal.stderr
    assert refusal.stdout == "stopped after 4 rows; rows already loaded stay\n"
    run("get", bucket, "N1", code=1)


def test_copies_need_a_replicated_level(bucket: str, run: Run, planes: Path) -> None:
    options = ("--durability", "persisted", "--copies", "2")
    refusal = run("load", bucket, str(planes), "--key", "tailnum", *options, code=2)
    assert "--copies goes with --durability replicated or replicated-and" in refusal.stderr
    run("get", bucket, "N1", code=1)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["{file}"], "--key"),
        (
            ["{file}", "--key", "tail"],
            "there is no column 'tail'; the columns are tailnum, seats, maker",
        ),
        (["{file}.missing", "--key", "a"], "does not exist"),
        (["{text}", "--key", "a"], "name its format with --format"),
        (["-", "--key", "a"], "standard input needs --format"),
        (["-", "--format", "parquet", "--key", "a"], "save it to a file first"),
        (["{file}", "--format", "parquet", "--key", "a"], "not a Parquet file"),
        (["{file}", "--format", "xml", "--key", "a"], "xml"),
        (["{empty}", "--key", "a"], "the file is empty"),
    ],
)
def test_wrong_arguments_of_load_are_usage_errors_that_say_why(
    bucket: str, run: Run, planes: Path, args: list[str], sentence: str
) -> None:
    text, empty = planes.with_suffix(".txt"), planes.with_name("empty.csv")
    text.touch()
    empty.touch()
    filled = [arg.format(file=planes, text=text, empty=empty) for arg in args]
    assert sentence in run("load", bucket, *filled, code=2).stderr


def test_rows_of_a_slow_source_are_stored_at_once(bucket: str, start: Start) -> None:
    loader = start("load", bucket, "-", "--format", "jsonl", "--key", "id", stdin=subprocess.PIPE)
    tail = start("tail", bucket)
    loader.feed(b'{"id": 1}\n')
    assert tail.event("mutation")["key"] == "1"
    out, err = loader.finished(data=b'{"id": 2}\n')
    assert out.startswith(b"loaded 2 of 2 rows")
    assert err == b""


def test_ctrl_c_ends_a_load_that_waits_for_its_source(bucket: str, start: Start) -> None:
    loader = start("load", bucket, "-", "--format", "jsonl", "--key", "id", stdin=subprocess.PIPE)
    tail = start("tail", bucket)
    loader.feed(b'{"id": 1}\n')
    tail.event("mutation")
    loader.send_signal(signal.SIGINT)
    assert loader.wait(DEADLINE_S) == 130  # though its standard input is open
    assert loader.finished(code=130) == (b"stopped after 1 rows; rows already loaded stay\n", b"")


def test_a_load_that_did_nothing_says_the_error_alone(run: Run, planes: Path) -> None:
    args = ("load", "upr://127.0.0.1:1/b", str(planes), "--key", "tailnum", "--retry-timeout", "1")
    refusal = run(*args, code=4)
    assert refusal.stdout == ""
    assert "127.0.0.1:1" in refusal.stderr


def test_a_server_that_goes_away_for_good_is_a_lost_connection(run: Run, start: Start) -> None:
    with start_server() as server:
        url = server.url + "b"
        run("bucket", "create", url)
        args = ("load", url, "-", "--format", "csv", "--key", "a", "--retry-timeout", "1")
        loader = start(*args, stdin=subprocess.PIPE)
        tail = start("tail", url)
        loader.feed(b"a\n1\n")
        tail.event("mutation")
        server.stop()
        _, err = loader.finished(code=4, data=b"2\n")
    told_at_once, told_at_last = err.splitlines()
    assert told_at_once.startswith(b"upr: the connection is lost (")
    assert b"gave up after" in told_at_last


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.binary(max_size=3)), max_size=50),
    st.integers(1, 5),
)
def test_batches_hold_each_item_once_by_partition_and_in_order(
    items: list[tuple[bytes, bytes]], partition_count: int
) -> None:
    batches = LoadBatches(partition_count)
    assert all(batches.add(key, value) is None for key, value in items)
    bundles = batches.take_all()
    for partition, chunk in bundles:
        chunk.check_published()
        of_partition = [
            item for item in items if partition_of(item[0], partition_count) == partition
        ]
        assert list(zip(chunk.keys(), chunk.values(), strict=True)) == of_partition
    assert sum(chunk.count for _, chunk in bundles) == len(items)
    assert batches.take_all() == []


def test_a_batch_is_full_with_enough_items() -> None:
    batches = LoadBatches(1)
    full = [batches.add(b"%d" % index, b"") for index in range(2 * BATCH_ITEMS_MAX)]
    assert [index for index, batch in enumerate(full) if batch is not None] == [
        BATCH_ITEMS_MAX - 1,
        2 * BATCH_ITEMS_MAX - 1,
    ]
    assert batches.take_all() == []


def test_a_batch_is_full_with_enough_bytes() -> None:
    batches = LoadBatches(1)
    assert batches.add(b"a", b"") is None
    full = batches.add(b"b", bytes(LOAD_BATCH_BYTES))
    assert full is not None
    assert full[0] == PartitionId(0)
    assert full[1].keys() == [b"a", b"b"]
    assert batches.add(b"c", bytes(LOAD_BATCH_BYTES)) is not None
    assert batches.take_all() == []
