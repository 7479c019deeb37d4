"""`upr tail --state` and `upr explain`, with servers that are killed and go back in time."""

from __future__ import annotations

import json
import random
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import count, islice
from pathlib import Path

import pytest

from tests.cli.conftest import Run, Start, Tail
from tests.cli.processes import Line
from tests.kit.effort import effort
from tests.spark.server import BlockingServer, blocking_server
from upr_protocol.chunk import Mutation
from upr_protocol.client import BlockingClient, Client, LocalCopyReader
from upr_protocol.ids import Durability, Operation


def lines(out: bytes) -> list[Line]:
    return [json.loads(line) for line in out.splitlines()]


def contents(folder: Path) -> dict[str, str]:
    """What a local copy holds."""
    with closing(LocalCopyReader(folder)) as reader:
        return {item.key.decode(): item.value.decode() for item in reader.items()}


def explained(run: Run, url: str, file: str) -> list[Line]:
    return [json.loads(line) for line in run("explain", url, file, "--json").stdout.splitlines()]


def copied(lines: list[Line]) -> dict[str, str]:
    """What the server has, by the lines of a tail from the beginning."""
    items: dict[str, str] = {}
    for line in lines:
        if line["event"] == "mutation" and line["op"] == "set":
            items[line["key"]] = line["value"]
        elif line["event"] == "mutation":
            items.pop(line["key"], None)
    return items


@pytest.fixture
def restorable(tmp_path: Path) -> Iterator[RestorableServer]:
    with blocking_server() as server:
        yield RestorableServer(server, tmp_path)


class RestorableServer:
    """A server whose data can go back to where they were."""

    def __init__(self, server: BlockingServer, folder: Path) -> None:
        self.server = server
        self._copy = folder / "copy"
        self.url = server.create_bucket("b", 4)

    def write(self, numbers: range, value: str) -> None:
        with BlockingClient(self.url, durability=Durability.PERSISTED) as client:
            client.apply(
                Mutation(Operation.SET, b"key %d" % key_number, value.encode())
                for key_number in numbers
            )

    def delete(self, numbers: range) -> None:
        with BlockingClient(self.url) as client:
            client.apply(
                Mutation(Operation.DELETE, b"key %d" % key_number, b"") for key_number in numbers
            )

    def go_back(self, between: Callable[[], object]) -> None:
        """Does something that the server then never had."""
        self.server.kill()
        shutil.copytree(self.server.data_dir, self._copy)
        self.server.start()
        between()
        self.server.kill()
        shutil.rmtree(self.server.data_dir)
        self._copy.rename(self.server.data_dir)
        self.server.start()


def test_a_local_copy_follows_and_resumes(
    bucket: str, run: Run, tail: Tail, tmp_path: Path
) -> None:
    folder = str(tmp_path / "local-copy")
    run("set", bucket, "a", "1")
    run("set", bucket, "b", "2")
    tail(bucket, "--state", folder)
    assert contents(tmp_path / "local-copy") == {"a": "1", "b": "2"}
    run("delete", bucket, "a")
    run("set", bucket, "c", "3")
    lines = tail(bucket, "--state", folder)
    assert [line["key"] for line in lines if line["event"] == "mutation"] in (
        ["a", "c"],
        ["c", "a"],
    )
    assert contents(tmp_path / "local-copy") == {"b": "2", "c": "3"}


def test_the_copy_of_another_bucket_is_refused(
    bucket: str, tail: Tail, run: Run, tmp_path: Path
) -> None:
    folder = str(tmp_path / "local-copy")
    tail(bucket, "--state", folder)
    other_bucket = bucket + "-other"
    run("bucket", "create", other_bucket)
    err = run("tail", other_bucket, "--state", folder, code=2).stderr
    assert "of the bucket" in err
    assert err.count("\n") == 1
    run("tail", bucket, "--state", folder, "--resume", "x", code=2)


def test_a_copy_in_use_is_refused(bucket: str, start: Start, tmp_path: Path) -> None:
    folder = str(tmp_path / "local-copy")
    process = start("tail", bucket, "--state", folder)
    process.event("completed")
    _, err = start("tail", bucket, "--state", folder).finished(code=2)
    assert b"in use by another process" in err
    process.stopped()


def test_a_copy_resumes_after_its_disk_was_full(bucket: str, start: Start, tmp_path: Path) -> None:
    rows = b"".join(b'{"id":%d}\n' % index for index in range(20_000))
    loader = start("load", bucket, "-", "--format", "jsonl", "--key", "id", stdin=subprocess.PIPE)
    loader.finished(data=rows)
    folder = tmp_path / "local-copy"
    args = ("tail", bucket, "--until", "caught-up", "--state", str(folder), "--format", "summary")
    process = start(*args)
    limits = (1 << 19, resource.RLIM_INFINITY)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, limits)
    _, err = process.finished(code=1)
    assert b"check that the disk has room" in err
    assert b"Traceback" not in err
    start(*args).finished()
    assert len(contents(folder)) == 20_000


def test_a_copy_killed_at_any_moment_ends_equal_to_the_server(
    bucket: str, start: Start, tail: Tail, tmp_path: Path
) -> None:
    folder = tmp_path / "local-copy"
    loader = start("load", bucket, "-", "--format", "jsonl", "--key", "id", stdin=subprocess.PIPE)
    lots = random.Random(7)
    ids = count()
    for _ in range(effort(3, 10)):
        with (tmp_path / "out").open("wb") as file:
            process = start("tail", bucket, "--state", str(folder), stdout=file)
        while process.returncode is None:
            new_ids = islice(ids, lots.randrange(1, 50))
            loader.feed(b"".join(b'{"id":%d}\n' % row_id for row_id in new_ids))
            if (tmp_path / "out").stat().st_size and lots.random() < 0.05:
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(lots.uniform(0, 0.02))
        assert process.returncode == -signal.SIGKILL
    loader.finished(data=b"")
    tail(bucket, "--state", str(folder))
    assert contents(folder) == copied(tail(bucket))
    assert len(contents(folder)) == next(ids)


def test_a_copy_rolls_back_with_its_server_as_explain_predicts(
    restorable: RestorableServer, tail: Tail, run: Run, tmp_path: Path
) -> None:
    """Only what the server never had is undone; the rest of the copy stays as it is."""
    folder, file = str(tmp_path / "local-copy"), str(tmp_path / "state")
    restorable.write(range(40), "old")
    tail(restorable.url, "--state", folder)
    rows = explained(run, restorable.url, folder)
    assert {row["outcome"] for row in rows} == {"goes on"}

    def between() -> None:
        restorable.write(range(30, 50), "never had")
        restorable.delete(range(5))
        tail(restorable.url, "--state", folder)
        tail(restorable.url, "--resume", file)

    restorable.go_back(between)
    restorable.write(range(60, 65), "later")
    before = (tmp_path / "state").read_bytes(), contents(tmp_path / "local-copy")
    rows = explained(run, restorable.url, folder)
    rolled = {row["partition"]: row for row in rows if row["outcome"] == "rolls back"}
    assert rolled
    assert all(row["from"] == row["ceiling"] > 0 for row in rolled.values())
    files = explained(run, restorable.url, file)
    assert {row["partition"] for row in files if row["outcome"] == "rolls back"} == set(rolled)
    assert all(row["from"] == 0 for row in files if row["outcome"] == "rolls back")
    assert "diverge" in run("explain", restorable.url, file).stdout
    assert before == ((tmp_path / "state").read_bytes(), contents(tmp_path / "local-copy"))
    lines = tail(restorable.url, "--state", folder)
    undone = {line["partition"]: line for line in lines if line["event"] == "undone"}
    assert {p: line["restarts_from"] for p, line in undone.items()} == {
        partition: row["from"] for partition, row in rolled.items()
    }
    keys = {document["key"] for line in undone.values() for document in line["documents"]}
    assert keys == {f"key {n}" for n in (*range(5), *range(30, 50))}
    assert contents(tmp_path / "local-copy") == copied(tail(restorable.url))
    rows = explained(run, restorable.url, folder)
    assert {row["outcome"] for row in rows} == {"goes on"}


def test_explain_refuses_a_bad_file(bucket: str, run: Run, tmp_path: Path) -> None:
    refusal = run("explain", bucket, str(tmp_path / "none"), code=2)
    assert "does not exist" in refusal.stderr
    empty = tmp_path / "folder"
    empty.mkdir()
    assert "does not hold a local copy" in run("explain", bucket, str(empty), code=2).stderr
    other_path = tmp_path / "other"
    other_path.write_text('{"version":1,"bucket":"other","partitions":{}}')
    assert (
        f"{other_path}: the resume state is of"
        in run("explain", bucket, str(other_path), code=2).stderr
    )
    for text in ("nonsense", "{}", "[1]", '{"version":2}'):
        other_path.write_text(text)
        err = run("explain", bucket, str(other_path), code=2).stderr
        assert f"{other_path}: " in err
        assert "resume state" in err
        assert "DecodeError" not in err
        assert err in run("tail", bucket, "--resume", str(other_path), code=2).stderr
        assert "name another file" in err


def test_explain_refuses_the_copy_of_another_bucket(
    bucket: str, run: Run, tail: Tail, tmp_path: Path
) -> None:
    folder = tmp_path / "local-copy"
    tail(bucket, "--state", str(folder))
    other_bucket = bucket + "-other"
    run("bucket", "create", other_bucket)
    for args in (
        ["explain", other_bucket, str(folder)],
        ["tail", other_bucket, "--state", str(folder)],
    ):
        assert f"{folder}: the resume state is of" in run(*args, code=2).stderr


def test_explain_of_a_partition_without_an_active_node(
    bucket: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = bucket.rsplit("/", 1)[1]
    file = tmp_path / "file"
    file.write_text(f'{{"version":1,"bucket":"{name}","partitions":{{}}}}')
    all_of = Client.partitions
    monkeypatch.setattr(Client, "partitions", lambda client: all_of(client)[1:])
    rows = lines(run("explain", bucket, str(file), "--json", code=1).stdout_bytes)
    assert [row["partition"] for row in rows] == list(range(8))
    assert [row["outcome"] for row in rows] == ["is elsewhere"] + ["goes on"] * 7
    assert "ask again later" in rows[0]["reason"]


def test_explain_of_partitions_that_are_gone_or_new(bucket: str, run: Run, tmp_path: Path) -> None:
    position = '{"log":[["1",0]],"last_complete":5,"highest_received":5,"partial":null}'
    name = bucket.rsplit("/", 1)[1]
    file = tmp_path / "file"
    file.write_text(f'{{"version":1,"bucket":"{name}","partitions":{{"8":{position}}}}}')
    rows = [
        json.loads(line) for line in run("explain", bucket, str(file), "--json").stdout.splitlines()
    ]
    assert [row["outcome"] for row in rows] == ["goes on"] * 8 + ["rolls back"]
    assert "does not have this partition" in rows[8]["reason"]
    assert rows[0]["from"] == 0
    assert rows[0]["ceiling"] is None
