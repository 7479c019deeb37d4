"""`upr-server check` and `upr-server dump`, on directories that are well and that are not."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.storage.log_model import chunk_of, row
from tests.storage.small_directory import BUCKET, KEYS, PARTITIONS, answers, key_of, make
from upr_protocol.ids import HistoryId, Operation, PartitionState, SeqNo
from upr_server.cli import main
from upr_server.storage.bucket_storage import BucketStorage
from upr_server.storage.chunk_log import ChunkLog
from upr_server.storage.directory import default_data_dir, lock, lock_for_reading
from upr_server.storage.errors import DataDirectoryError
from upr_server.storage.lmdb_ordered_map import LmdbOrderedMap
from upr_server.storage.offline.bucket_files import open_bucket
from upr_server.storage.offline.check import BucketCheck
from upr_server.storage.offline.dump import BucketDump, DumpOptions
from upr_server.storage.offline.findings import Problem
from upr_server.storage.ordered_map import WriteTransaction
from upr_server.storage.partition_write import PartitionWrite
from upr_server.storage.records import (
    CHUNK,
    EXPIRY,
    KEY,
    LEASE,
    PARTITION,
    PURGE,
    SEQS_END,
    WATERMARK,
    KeyIndexEntry,
    LeaseRecord,
    PartialRecord,
    PartitionRecord,
    Watermark,
    chunk_key,
    index_entry_key,
    lease_key,
    pack_record,
    parse_record,
    partition_key,
)

COMMAND = (sys.executable, "-c", "from upr_server.cli import main; main()")


@pytest.fixture(scope="module")
def intact_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "data"
    make(path)
    return path


@pytest.fixture
def data(intact_data: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact_data, tmp_path / "data"))


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the command as a process."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def check(data: Path) -> Result:
    """Runs `check` in this process; only what it starts to read the directory is another one."""
    result = CliRunner().invoke(main, ("check", "--data-dir", str(data)), prog_name="upr-server")
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def hashes(path: Path) -> dict[str, tuple[str, int]]:
    return {
        str(file): (hashlib.sha256(file.read_bytes()).hexdigest(), file.stat().st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def file_of(data: Path, part: str) -> Path:
    return data / "buckets" / BUCKET / part / "data.mdb"


def change(data: Path, part: str, do: Callable[[WriteTransaction], None]) -> None:
    ordered_map = LmdbOrderedMap(
        data / "buckets" / BUCKET / part, bytes_max=1 << 30, is_summed=part == "log"
    )
    with ordered_map.write() as transaction:
        do(transaction)
    ordered_map.close()


def problems_in(data: Path) -> list[tuple[int | None, str]]:
    log, index = open_bucket(data / "buckets" / BUCKET)
    try:
        return [
            (finding.partition, finding.description)
            for finding in BucketCheck(BUCKET, log, index).run()
            if isinstance(finding, Problem)
        ]
    finally:
        log.close()
        index.close()


def first(transaction: WriteTransaction, kind: bytes) -> tuple[bytes, bytes]:
    key, value = next(transaction.scan(kind, kind + b"\xff" * 30))
    return key, bytes(value)


# What is well.


def test_a_sound_directory_is_reported_in_one_sentence(data: Path) -> None:
    before = hashes(data)
    checked = run("check", "--data-dir", data)
    assert checked.returncode == 0, checked
    assert checked.stdout.count("\n") == 1
    assert " has no problems: 1 buckets, " in checked.stdout
    assert not checked.stderr
    assert hashes(data) == before


def test_a_directory_without_buckets_is_sound(tmp_path: Path) -> None:
    (tmp_path / "buckets").mkdir()
    (tmp_path / "format").write_text("upr 1\n")
    assert check(tmp_path).exit_code == 0


def test_a_half_made_bucket_is_not_checked(data: Path) -> None:
    (data / "buckets" / ".new-other").mkdir()
    assert check(data).exit_code == 0


def test_a_missing_index_is_rebuilt_at_the_next_start(data: Path) -> None:
    # The advice that `check` gives.
    file_of(data, "index").unlink()
    assert "the server rebuilds it" in check(data).stdout
    ordered_map = LmdbOrderedMap(data / "buckets" / BUCKET / "index", bytes_max=1 << 30)
    ordered_map.close()
    checked = check(data)
    assert checked.exit_code == 0, checked


def test_the_default_directory_is_the_users_own() -> None:
    assert default_data_dir().name == "upr"


# Directories that cannot be read.


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    for command in ("check", "dump", "mend"):
        checked = run(command, "--data-dir", tmp_path)
        assert checked.returncode == 1
        assert checked.stderr.endswith("is not a data directory; name one with --data-dir\n")
    assert not list(tmp_path.iterdir())


def test_another_version_is_refused(data: Path) -> None:
    (data / "format").write_text("upr 2\n")
    checked = check(data)
    assert checked.exit_code == 1
    assert "has the format 'upr 2'" in checked.stderr


def test_a_directory_that_a_server_uses_is_refused(data: Path) -> None:
    descriptor = lock(data)
    assert descriptor is not None
    try:
        checked = check(data)
    finally:
        os.close(descriptor)
    assert checked.exit_code == 1
    assert "is in use by a server" in checked.stderr


def test_two_may_check_at_a_time(data: Path) -> None:
    descriptor = os.open(data / "lock", os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    try:
        assert check(data).exit_code == 0
    finally:
        os.close(descriptor)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_directory_that_may_only_be_read_is_checked(intact_data: Path) -> None:
    # Its parents must let another user pass, which pytest's do not.
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        data = Path(shutil.copytree(intact_data, Path(parent) / "data"))
        before = hashes(data)
        assert checked_as_nobody(data) == 0
        (data / "format").chmod(0)
        assert checked_as_nobody(data) == 3
        assert hashes(data) == before


def checked_as_nobody(data: Path) -> int:
    """How many problems a user without any rights finds, or 3 when it is not let in. Python itself
    may lie where that user cannot start it, so it is this process that becomes it."""
    child = os.fork()
    if not child:
        code = 4
        try:
            os.setgid(65534)
            os.setuid(65534)
            with lock_for_reading(data):
                code = len(problems_in(data))
        except DataDirectoryError:
            code = 3
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_an_unknown_bucket_is_a_wrong_command_line(data: Path) -> None:
    assert run("dump", "--data-dir", data, "--bucket", "other").returncode == 2
    assert run("dump", "--data-dir", data, "--partition", "x").returncode == 2


# Files that were cut.


@pytest.mark.parametrize(
    ("part", "share"),
    [(part, share) for part in ("log", "index") for share in (0, 0.01, 0.03, 0.1, 0.3, 0.6)],
)
def test_a_truncated_file_is_noticed(data: Path, part: str, share: float) -> None:
    path = file_of(data, part)
    os.truncate(path, int(path.stat().st_size * share))
    before = hashes(data)
    checked = check(data)
    assert checked.exit_code == 1, checked
    assert "Traceback" not in checked.stderr
    assert checked.stdout.startswith(f"bucket {BUCKET}")
    assert "restore" in checked.stdout or "rebuilds it" in checked.stdout
    assert hashes(data) == before


def test_a_dump_without_room_does_not_speak_of_damage(data: Path) -> None:
    command = [*COMMAND, "dump", "--data-dir", str(data)]
    with open("/dev/full", "wb") as full:
        dumped = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert dumped.returncode == 1
    assert "the output cannot be written: No space left on device; make room" in dumped.stderr
    assert "backup" not in dumped.stderr


@pytest.mark.parametrize("command", ["check", "config"])
def test_an_output_without_room_is_one_sentence(data: Path, command: str) -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*COMMAND, command, "--data-dir", str(data)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "upr-server: the output cannot be written: No space left on device\n"


def test_a_dump_continues_after_a_truncated_part(data: Path) -> None:
    whole = run("dump", "--data-dir", data).stdout.splitlines()
    path = file_of(data, "log")
    os.truncate(path, int(path.stat().st_size * 0.9))
    dumped = run("dump", "--data-dir", data)
    assert dumped.returncode == 1
    assert "cannot be read to the end" in dumped.stderr
    # Whatever is printed is whole, and of what is there.
    assert {json.loads(line)["bucket"] for line in dumped.stdout.splitlines()} <= {BUCKET}
    assert len(dumped.stdout.splitlines()) < len(whole)


# Records that are wrong, though the file is whole.


def test_a_chunk_that_is_missing_is_noticed(data: Path) -> None:
    change(data, "log", lambda transaction: transaction.delete(first(transaction, CHUNK)[0]))
    assert (0, "the log has no chunks from 0 to ") in [(p, w[:32]) for p, w in problems_in(data)]


def test_the_last_chunk_missing_is_noticed(data: Path) -> None:
    def take(transaction: WriteTransaction) -> None:
        last_chunk = transaction.last(chunk_key(1, 0), chunk_key(1, SEQS_END))
        assert last_chunk is not None
        transaction.delete(last_chunk[0])

    change(data, "log", take)
    assert any(p == 1 and w.startswith("the log ends at ") for p, w in problems_in(data))


def test_a_wrong_checksum_is_noticed_and_left_out_of_a_dump(data: Path) -> None:
    def spoil(transaction: WriteTransaction) -> None:
        key, value = first(transaction, CHUNK)
        transaction.put(key, value[:-9] + bytes([value[-9] ^ 1]) + value[-8:])

    change(data, "log", spoil)
    assert any(p == 0 and "checksum mismatch" in w for p, w in problems_in(data))
    dumped = run("dump", "--data-dir", data)
    assert dumped.returncode == 1
    assert "left out" in dumped.stderr
    assert {json.loads(line)["partition"] for line in dumped.stdout.splitlines()} == {0, 1, 2}


@pytest.mark.parametrize("history", [False, True])
def test_a_dump_ends_before_the_part_of_a_snapshot_that_a_replica_has(
    tmp_path: Path, data: Path, history: bool
) -> None:
    def dump() -> list[str]:
        log, index = open_bucket(data / "buckets" / BUCKET)
        path = tmp_path / "dump"
        with path.open("wb") as output:
            options = DumpOptions(partition=0, history=history)
            findings = list(BucketDump(BUCKET, log, options, output.fileno()).run())
        assert not any(isinstance(finding, Problem) for finding in findings)
        log.close()
        index.close()
        return path.read_text().splitlines()

    lines = dump()
    folder = data / "buckets" / BUCKET / "log"
    log = ChunkLog(LmdbOrderedMap(folder, bytes_max=1 << 30, is_summed=True))
    high = log.high_seq(0)
    partial = PartialRecord(HistoryId(7), high, SeqNo(high + 9), SeqNo(high + 1))
    record = PartitionRecord(PartitionState.REPLICA, ((7, 0),), high, 1, partial)
    chunk = chunk_of([row(Operation.SET, key_of(0), high + 1, 1)], high, high + 1)
    log.commit([PartitionWrite(0, record, [chunk])])
    log.ordered_map.close()
    assert len(dump()) == len(lines) + history
    assert dump()[: len(lines)] == lines


def test_a_replica_that_was_stopped_while_it_copied_a_partition_is_sound(data: Path) -> None:
    """The active node has removed deletions beyond what has come so far."""
    folder = data / "buckets" / BUCKET
    storage = BucketStorage(
        LmdbOrderedMap(folder / "log", bytes_max=1 << 30, is_summed=True),
        LmdbOrderedMap(folder / "index", bytes_max=1 << 30),
    )
    storage.open()
    storage.empty_partition(0, PartitionRecord(PartitionState.REPLICA, (), SeqNo(0), 0))
    partial = PartialRecord(HistoryId(7), SeqNo(0), SeqNo(9), SeqNo(1))
    record = PartitionRecord(PartitionState.REPLICA, ((7, 0),), SeqNo(0), 1, partial)
    chunk = chunk_of([row(Operation.SET, key_of(0), 1, 1)], 0, 1)
    storage.commit([PartitionWrite(0, record, [chunk], purge_seq=SeqNo(5))])
    storage.close()
    assert problems_in(data) == []


def test_a_copy_that_was_given_up_before_data_of_its_newest_history_came_is_sound(
    data: Path,
) -> None:
    """A replica has the source's failover log on disk first, and keeps it when a map makes it
    dead."""
    folder = data / "buckets" / BUCKET / "log"
    log = ChunkLog(LmdbOrderedMap(folder, bytes_max=1 << 30, is_summed=True))
    high = log.high_seq(0)
    pairs = ((8, high + 3), (7, 0))
    log.start_serving([(0, PartitionRecord(PartitionState.DEAD, pairs, high, 1))])
    log.ordered_map.close()
    assert problems_in(data) == []


def test_a_partition_record_below_the_log_is_noticed(data: Path) -> None:
    def lower(transaction: WriteTransaction) -> None:
        key = partition_key(PARTITION, 2)
        value = transaction.get(key)
        assert value is not None
        record = parse_record(key, value, PartitionRecord)
        older = PartitionRecord(record.state, record.failover_log, SeqNo(record.high - 1), 0)
        transaction.put(key, pack_record(key, older))

    change(data, "log", lower)
    problems = problems_in(data)
    assert any(p == 2 and w.startswith("the log ends at ") for p, w in problems)
    assert any(p == 2 and w.startswith("the index is at ") for p, w in problems)


@pytest.mark.parametrize("kind", [PARTITION, b"b"])
def test_a_record_that_is_missing_is_noticed(data: Path, kind: bytes) -> None:
    change(data, "log", lambda transaction: transaction.delete(first(transaction, kind)[0]))
    assert any("has no record of" in problem for _, problem in problems_in(data))


def test_a_purge_number_and_a_lease_above_the_log_are_noticed(data: Path) -> None:
    def raise_them(transaction: WriteTransaction) -> None:
        transaction.put(
            partition_key(PURGE, 0), pack_record(partition_key(PURGE, 0), SeqNo(1 << 40))
        )
        lease = LeaseRecord(9, "nobody", ((0, 5, 1 << 40),), 60, 0)
        transaction.put(lease_key(9), pack_record(lease_key(9), lease))

    change(data, "log", raise_them)
    problems = " ".join(problem for _, problem in problems_in(data))
    assert "above the high" in problems
    assert "it leases (5, " in problems


def test_a_record_of_unknown_kind_is_noticed(data: Path) -> None:
    for part in ("log", "index"):
        change(data, part, lambda transaction: transaction.put(b"?", b"?"))
    assert sum("no record has this kind of key" in problem for _, problem in problems_in(data)) == 2


def test_a_lease_under_another_key_is_noticed(data: Path) -> None:
    def move(transaction: WriteTransaction) -> None:
        _, value = first(transaction, LEASE)
        transaction.put(lease_key(77), value)

    change(data, "log", move)
    assert any("checksum mismatch" in problem for _, problem in problems_in(data))


# The index.


def test_an_index_entry_that_is_missing_is_noticed(data: Path) -> None:
    change(data, "index", lambda transaction: transaction.delete(first(transaction, KEY)[0]))
    problems = [problem for _, problem in problems_in(data)]
    assert any(problem.startswith("the index does not find the key") for problem in problems)


def test_an_older_number_in_the_index_is_noticed(data: Path) -> None:
    def older(transaction: WriteTransaction) -> None:
        key, _ = first(transaction, KEY)
        transaction.put(key, KeyIndexEntry(1, 0).pack(key))

    change(data, "index", older)
    assert any(w.startswith("the newest mutation of the key") for _, w in problems_in(data))


def test_a_key_that_only_the_index_has_is_noticed(data: Path) -> None:
    key = index_entry_key(0, b"never written")
    change(data, "index", lambda transaction: transaction.put(key, KeyIndexEntry(5, 0).pack(key)))
    problems = [problem for _, problem in problems_in(data)]
    assert any(
        problem.startswith("the log has no mutation of the key 'never written'")
        for problem in problems
    )
    assert any("items, and should have" in problem for problem in problems)


def test_an_expiry_that_is_missing_is_noticed(data: Path) -> None:
    change(data, "index", lambda transaction: transaction.delete(first(transaction, EXPIRY)[0]))
    assert any("has no expiry record" in problem for _, problem in problems_in(data))


def test_entries_that_an_interrupted_rollback_has_left_are_no_problem(data: Path) -> None:
    """The next start deletes them, and indexes the partition anew."""
    folder = data / "buckets" / BUCKET
    storage = BucketStorage(
        LmdbOrderedMap(folder / "log", bytes_max=1 << 30, is_summed=True),
        LmdbOrderedMap(folder / "index", bytes_max=1 << 30),
    )
    assert storage.index.delete_entries(0, 1)
    storage.close()
    assert problems_in(data) == []


def test_a_watermark_above_the_log_is_noticed(data: Path) -> None:
    key = partition_key(WATERMARK, 1)
    mark = Watermark(SeqNo(1 << 40), 0, 0)
    change(data, "index", lambda transaction: transaction.put(key, pack_record(key, mark)))
    assert (1, "the index is at ") in [(p, w[:16]) for p, w in problems_in(data)]


def test_of_very_many_problems_the_first_are_reported(data: Path) -> None:
    def many(transaction: WriteTransaction) -> None:
        for index in range(100):
            transaction.put(b"? %d" % index, b"")

    change(data, "index", many)
    assert any("80 problems more" in problem for _, problem in problems_in(data))


# What is dumped.


def test_a_dump_is_the_newest_of_each_key(data: Path) -> None:
    before = hashes(data)
    dumped = run("dump", "--data-dir", data)
    assert dumped.returncode == 0, dumped
    assert not dumped.stderr
    assert hashes(data) == before
    rows = [json.loads(line) for line in dumped.stdout.splitlines()]
    log, index = open_bucket(data / "buckets" / BUCKET)
    good = answers(BucketStorage(log, index))
    log.close()
    index.close()
    for partition in range(PARTITIONS):
        items = {
            key: (item.seq, item.value, item.flags, item.expiry)
            for key, item in good.items[partition].items()
            if item is not None
        }
        assert items == {
            row["key"].encode(): (row["seq"], value_of(row), row["flags"], row["expiry"])
            for row in rows
            if row["partition"] == partition and row["op"] == "set"
        }
    deleted_rows = [row for row in rows if row["op"] == "delete"]
    assert deleted_rows
    assert not any("value" in row for row in deleted_rows)


def value_of(row: dict[str, str]) -> bytes:
    if row.get("value_encoding") == "base64":
        return base64.b64decode(row["value"])
    return row["value"].encode()


def test_a_dump_may_be_of_one_partition_its_keys_or_its_history(data: Path) -> None:
    def rows(*options: object) -> list[dict[str, object]]:
        dumped = run("dump", "--data-dir", data, "--bucket", BUCKET, *options)
        assert dumped.returncode == 0
        return [json.loads(line) for line in dumped.stdout.splitlines()]

    partition_rows = rows("--partition", 1)
    assert {row["partition"] for row in partition_rows} == {1}
    assert {row["key"] for row in partition_rows} <= {
        key_of(index).decode() for index in range(KEYS)
    }
    assert not any("value" in row for row in rows("--keys-only"))
    history = rows("--history", "--partition", 1)
    assert len(history) > len(partition_rows)
    assert [row["seq"] for row in history] == sorted({int(str(row["seq"])) for row in history})
    refused = run("dump", "--data-dir", data, "--bucket", BUCKET, "--partition", 900)
    assert refused.returncode == 2
    assert f"{data} has no partition 900 of bucket '{BUCKET}'" in refused.stderr


def test_a_closed_pipe_ends_a_dump_silently(data: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "dump", "--data-dir", str(data)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(60) == 128 + signal.SIGPIPE


def test_ctrl_c_ends_a_dump_quietly(data: Path) -> None:
    # Nobody reads, so that the dump stands still with its pipe full.
    process = subprocess.Popen(
        [*COMMAND, "dump", "--history", "--data-dir", str(data)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        process.stdout.read(1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, errors) == (130, b"")
