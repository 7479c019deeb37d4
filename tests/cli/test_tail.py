from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count, islice
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.cli.conftest import Run, Start, Tail
from tests.cli.processes import Line, Server, start_server
from tests.kit.effort import effort
from upr_protocol.cli.output import ProgressDisplay
from upr_protocol.cli.tail import report_unplaced
from upr_protocol.client import ConsumerStatistics
from upr_protocol.errors import ADVICE, Status
from upr_protocol.ids import PartitionId


def lines(out: bytes) -> list[Line]:
    return [json.loads(line) for line in out.splitlines()]


def mutations(events: Iterable[Line]) -> list[Line]:
    return [line for line in events if line["event"] == "mutation"]


def contents(events: Iterable[Line]) -> dict[str, str]:
    """What a copy holds that has followed the lines."""
    copy: dict[int, dict[str, str]] = {}
    for line in events:
        if line["event"] == "rollback":
            assert line["restarts_from"] == 0
            copy.pop(line["partition"], None)
        elif line["event"] == "mutation" and line["op"] == "set":
            copy.setdefault(line["partition"], {})[line["key"]] = line["value"]
        elif line["event"] == "mutation":
            copy.get(line["partition"], {}).pop(line["key"], None)
    return {key: value for partition in copy.values() for key, value in partition.items()}


@pytest.fixture
def filled(bucket: str, run: Run, tmp_path: Path) -> str:
    """The URL of a bucket with a hundred items."""
    path = tmp_path / "filled.csv"
    path.write_text("id,x\n" + "".join(f"k{n},{n}\n" for n in range(100)))
    run("load", bucket, str(path), "--key", "id")
    return bucket


# What is told.


def test_it_prints_everything_until_it_has_caught_up(filled: str, run: Run, tail: Tail) -> None:
    run("delete", filled, "k0")
    run("set", filled, "k1", "new")
    events = tail(filled)
    expected = {f"k{n}": json.dumps({"id": f"k{n}", "x": str(n)}, separators=(",", ":"))
                for n in range(2, 100)}  # fmt: skip
    assert contents(events) == {**expected, "k1": "new"}
    assert [line["key"] for line in mutations(events) if line["op"] == "delete"] == ["k0"]
    assert events[-1]["event"] == "barrier"
    assert events[-1]["cookie"] == "caught-up"


def test_each_partition_comes_in_snapshots(filled: str, tail: Tail) -> None:
    inside: Line | None = None
    ends = {}
    for line in tail(filled):
        if line["event"] == "snapshot_start":
            assert inside is None
            inside = line
        elif line["event"] == "mutation":
            assert inside is not None
            assert line["partition"] == inside["partition"]
            assert inside["start"] < line["seq"] <= inside["end"]
        elif line["event"] == "snapshot_end":
            assert inside is not None
            assert (line["partition"], line["end"]) == (inside["partition"], inside["end"])
            ends[str(line["partition"])] = line["end"]
            inside = None
        elif line["event"] == "barrier":
            assert line["ends"] == ends
    assert len(ends) == 8


def test_it_follows_one_partition_on_request(filled: str, tail: Tail) -> None:
    changes = mutations(tail(filled, "--partition", "3"))
    assert changes
    assert {line["partition"] for line in changes} == {3}


def test_it_follows_the_keys_with_a_prefix_on_request(filled: str, run: Run, tail: Tail) -> None:
    assert contents(tail(filled, "--prefix", "k9")).keys() == {"k9", *(f"k9{n}" for n in range(10))}
    assert mutations(tail(filled, "--prefix", "x")) == []
    refusal = run("tail", filled, "--state", "copy", "--prefix", "k9", code=2)
    assert "--state copies all keys; leave out --prefix" in refusal.stderr


def test_since_a_time_it_prints_the_changes_from_then_on(filled: str, run: Run, tail: Tail) -> None:
    run("set", filled, "late", "1", "--durability", "persisted")
    changes = mutations(tail(filled))
    assert len(changes) == 101
    since_us = max(int(line["cas"]) for line in changes) // 1000
    since = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=since_us)
    assert [line["key"] for line in mutations(tail(filled, "--since", since.isoformat()))] == [
        "late"
    ]
    assert len(mutations(tail(filled, "--since", "1h"))) == 101
    assert mutations(tail(filled, "--since", "2100-01-01T00:00:00Z")) == []
    refusal = run("tail", filled, "--since", "yesterday", code=2)
    assert (
        "'yesterday' is not a time from 1970 to 2554; write it as in 2026-01-31T12:00:00Z"
        in refusal.stderr
    )
    refusal = run("tail", filled, "--since", "1h", "--from", "now", code=2)
    assert "leave out --from, --resume and --state" in refusal.stderr


def test_from_now_it_prints_only_new_changes(
    filled: str, run: Run, tail: Tail, start: Start
) -> None:
    assert mutations(tail(filled, "--from", "now")) == []
    process = start("tail", filled, "--from", "now")
    process.event("completed")
    run("set", filled, "new", "x")
    assert process.event("mutation")["key"] == "new"
    process.stopped()


def test_an_empty_bucket_is_caught_up_at_once(bucket: str, tail: Tail) -> None:
    assert [line["event"] for line in tail(bucket)] == ["completed", "barrier"]


def test_it_prints_changes_as_they_happen(bucket: str, run: Run, start: Start) -> None:
    process = start("tail", bucket)
    for index in range(5):
        run("set", bucket, f"k{index}", "x")
        assert process.event("mutation")["key"] == f"k{index}"
    process.stopped()


def test_the_summary_counts_changes_snapshots_and_partitions(filled: str, start: Start) -> None:
    process = start("tail", filled, "--until", "caught-up", "--format", "summary")
    out, err = process.finished()
    assert out.startswith(b"100 changes in 8 snapshots of 8 partitions, ")
    assert out.count(b"\n") == 1
    assert err == b""


# Going on.


def test_a_resumed_tail_does_not_repeat_itself(
    filled: str, run: Run, tmp_path: Path, tail: Tail
) -> None:
    state = str(tmp_path / "state")
    assert len(mutations(tail(filled, "--resume", state))) == 100
    assert mutations(tail(filled, "--resume", state)) == []
    run("set", filled, "k5", "new")
    assert [line["key"] for line in mutations(tail(filled, "--resume", state))] == ["k5"]


def test_from_now_with_a_resume_file_resumes_there(
    filled: str, run: Run, tmp_path: Path, tail: Tail
) -> None:
    state = str(tmp_path / "state")
    assert mutations(tail(filled, "--from", "now", "--resume", state)) == []
    run("set", filled, "k5", "new")
    changes = mutations(tail(filled, "--from", "now", "--resume", state))
    assert [line["key"] for line in changes] == ["k5"]


@pytest.mark.parametrize(
    ("signal_number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143)],
    ids=["ctrl-c", "sigterm"],
)
def test_a_signal_ends_it_cleanly_and_saves_the_position(
    filled: str, tmp_path: Path, signal_number: int, code: int, tail: Tail, start: Start
) -> None:
    state = str(tmp_path / "state")
    process = start("tail", filled, "--resume", state)
    process.event("completed")
    process.send_signal(signal_number)
    _, err = process.finished(code=code)
    assert err == b""
    assert mutations(tail(filled, "--resume", state)) == []


def test_killed_at_any_moment_it_resumes_and_nothing_is_missing(
    bucket: str, start: Start, tail: Tail, tmp_path: Path
) -> None:
    state, out = str(tmp_path / "state"), tmp_path / "out.jsonl"
    loader = start("load", bucket, "-", "--format", "jsonl", "--key", "id", stdin=subprocess.PIPE)
    lots = random.Random(7)
    ids = count()
    for _ in range(effort(3, 12)):
        size = out.stat().st_size if out.exists() else 0
        with out.open("ab") as file:
            process = start("tail", bucket, "--resume", state, stdout=file)
        # Each key comes once only, so that whatever is left out stays missing.
        while process.returncode is None:
            new_ids = islice(ids, lots.randrange(1, 50))
            loader.feed(b"".join(b'{"id":%d}\n' % row_id for row_id in new_ids))
            if out.stat().st_size > size and lots.random() < 0.05:
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(lots.uniform(0, 0.02))
        assert process.returncode == -signal.SIGKILL
    loader.finished(data=b"")
    all_ids = {str(index) for index in range(next(ids))}
    with out.open("ab") as file:
        process = start("tail", bucket, "--resume", state, stdout=file)
    while contents(whole_lines(out.read_bytes())).keys() != all_ids:
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
        assert process.returncode is None
    assert contents(tail(bucket)).keys() == all_ids


def test_killed_with_a_full_pipe_it_resumes_before_what_was_not_read(
    bucket: str, run: Run, start: Start, tail: Tail, tmp_path: Path
) -> None:
    rows, state = tmp_path / "rows.csv", str(tmp_path / "state")
    rows.write_text("id,x\n" + "".join(f"{n},{'x' * 100}\n" for n in range(10_000)))
    run("load", bucket, str(rows), "--key", "id", "--quiet")
    killed = start("tail", bucket, "--resume", state)
    changes = [killed.event("mutation")]  # and a pipe takes but a part of its chunk
    killed.kill()
    out, _ = killed.finished(code=-signal.SIGKILL)
    changes += mutations(whole_lines(out))
    assert len(changes) < 10_000
    changes += mutations(tail(bucket, "--resume", state))
    assert {line["key"] for line in changes} == {str(index) for index in range(10_000)}


def whole_lines(out: bytes) -> Iterator[Line]:
    """The lines that were not cut by a kill."""
    for line in out.splitlines():
        try:
            yield json.loads(line)
        except ValueError:
            assert not line.endswith(b"}")


@pytest.mark.parametrize("already", [b'{"event":"mutat', b'{"event":"completed","cycle":1}\n', b""])
def test_half_a_line_left_by_a_kill_is_ended_first(
    filled: str, tmp_path: Path, already: bytes, start: Start
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_bytes(already)
    state = str(tmp_path / "state")
    with out.open("ab") as file:
        start("tail", filled, "--resume", state, "--until", "caught-up", stdout=file).finished()
    lines_before = out.read_bytes()
    cut = already and not already.endswith(b"\n")
    before = already + (b"\n" if cut else b"")
    assert lines_before.startswith(before + b'{"event":"snapshot_start"')
    assert len(mutations(whole_lines(lines_before))) == 100


# Where nobody reads.


def test_a_reader_that_closes_its_end_stops_it_silently(filled: str, start: Start) -> None:
    process = start("tail", filled)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, err = process.finished(code=141)
    assert err == b""


def test_a_reader_that_closes_its_end_is_noticed_while_nothing_changes(
    filled: str, start: Start
) -> None:
    process = start("tail", filled)
    process.event("completed")
    process.leave()
    _, err = process.finished(code=141)
    assert err == b""


def test_a_slow_reader_is_waited_for(bucket: str, run: Run, tmp_path: Path, start: Start) -> None:
    rows = tmp_path / "rows.csv"
    rows.write_text("id,x\n" + "".join(f"k{n},{'x' * 100}\n" for n in range(20_000)))
    run("load", bucket, str(rows), "--key", "id")
    process = start("tail", bucket)
    process.event("snapshot_start")
    assert process.poll() is None  # far more is to come than a pipe takes
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.finished(code=130)


def test_a_full_disk_is_reported(filled: str, start: Start) -> None:
    with open("/dev/full", "wb") as full:
        _, err = start("tail", filled, "--until", "caught-up", stdout=full).finished(code=1)
    assert err == b"upr: standard output: No space left on device\n"


# What ends it.


def test_it_ends_when_its_bucket_is_deleted(filled: str, run: Run, start: Start) -> None:
    process = start("tail", filled)
    process.event("completed")
    run("bucket", "delete", filled, "--yes")
    out, err = process.finished(code=3)
    assert [line["reason"] for line in lines(out)] == ["bucket_deleted"] * 8
    assert b"was deleted" in err


def test_partitions_restart_when_the_server_has_lost_their_history(
    run: Run, tmp_path: Path, tail: Tail
) -> None:
    state = str(tmp_path / "state")
    with start_server() as before:
        url = before.url + "b"
        run("bucket", "create", url, "--partitions", "1")
        run("set", url, "old", "x")
        first_lines = tail(url, "--resume", state)
        before.stop()
    with start_server(before.url.removeprefix("upr://").rstrip("/")):
        run("bucket", "create", url, "--partitions", "1")
        run("set", url, "new", "y")
        later_lines = tail(url, "--resume", state)
    assert contents(first_lines) == {"old": "x"}
    assert later_lines[0]["event"] == "rollback"
    assert contents(first_lines + later_lines) == {"new": "y"}


def test_a_lost_connection_is_reported_and_made_again(
    run: Run, start: Start, tmp_path: Path
) -> None:
    config = tmp_path / "server.toml"
    config.write_text('[[buckets]]\nname = "b"\npartitions = 1\n')
    with start_server("127.0.0.1:0", "--config", str(config)) as before:
        url = before.url + "b"
        process = start("tail", url)
        process.event("completed")
        before.stop()
    assert process.stderr is not None
    line = process.stderr.readline()
    assert b"the connection is lost (" in line
    assert b"); trying again for up to 300 s" in line
    address = before.url.removeprefix("upr://").rstrip("/")
    with start_server(address, "--config", str(config)):
        run("set", url, "k", "v")
        assert process.event("mutation")["key"] == "k"
        assert process.stderr.readline() == b"upr: connected again\n"
        process.stopped()


def test_a_server_that_goes_away_for_good_is_a_lost_connection(run: Run, start: Start) -> None:
    with start_server() as server:
        url = server.url + "b"
        run("bucket", "create", url)
        process = start("tail", url, "--retry-timeout", "0")
        process.event("completed")
        server.stop()
        _, err = process.finished(code=4)
    assert err.startswith(b"upr: ")
    assert err.count(b"\n") == 1


def unplaced_statistics() -> ConsumerStatistics:
    """Figures that say that no node serves some partitions, from 3 to 7 s and from 9 s on."""
    is_unplaced = 3 <= trio.current_time() < 7 or trio.current_time() >= 9
    partitions = [PartitionId(0), PartitionId(1)] if is_unplaced else []
    return ConsumerStatistics(1, True, 0, 0, 0, 0, 0, 0, 0, "", partitions, "")


async def test_it_says_what_it_waits_for_each_time_that_no_node_serves_a_partition(
    autojump_clock: trio.testing.MockClock, capsys: pytest.CaptureFixture[str]
) -> None:
    progress = ProgressDisplay(str, 1.0)
    with trio.move_on_after(20.5):
        await report_unplaced(unplaced_statistics, 300, progress)
    sentence = (
        "upr: waiting for a node that serves partitions 0-1 (no node tells a newer partition map); "
        "trying for up to 300 s\n"
    )
    assert capsys.readouterr().err == 2 * sentence


def test_a_missing_bucket_is_refused(server: Server, run: Run) -> None:
    assert ADVICE[Status.NO_BUCKET] in run("tail", server.url + "nowhere", code=3).stderr


@pytest.mark.parametrize("data", [b"", b"{}", b"\xff"])
def test_a_file_that_is_not_a_resume_state_is_refused(
    filled: str, tmp_path: Path, data: bytes, run: Run
) -> None:
    state = tmp_path / "state"
    state.write_bytes(data)
    assert "resume state" in run("tail", filled, "--resume", str(state), code=2).stderr
    assert state.read_bytes() == data


def test_a_resume_state_of_another_bucket_is_refused(
    filled: str, server: Server, run: Run, tmp_path: Path, tail: Tail
) -> None:
    state = str(tmp_path / "state")
    tail(filled, "--resume", state)
    run("bucket", "create", server.url + "another")
    refusal = run("tail", server.url + "another", "--resume", state, code=2)
    assert "is of the bucket" in refusal.stderr


def test_a_resume_state_of_another_prefix_is_refused(
    filled: str, run: Run, tmp_path: Path, tail: Tail
) -> None:
    """The command would omit the changes of the keys that were left out before."""
    state = tmp_path / "state"
    first_keys = [
        line["key"] for line in mutations(tail(filled, "--prefix", "k1", "--resume", state))
    ]
    assert len(first_keys) == 11
    saved_state = state.read_bytes()
    for args in ([], ["--prefix", "k2"]):
        refusal = run("tail", filled, *args, "--resume", str(state), code=2)
        assert "the resume state is of the keys that begin with 'k1', not of" in refusal.stderr
        assert state.read_bytes() == saved_state
    run("set", filled, "k17", "new")
    lines = mutations(tail(filled, "--prefix", "k1", "--resume", state))
    assert [line["key"] for line in lines] == ["k17"]


def test_partitions_that_a_resumed_tail_adds_start_at_the_beginning(
    filled: str, tmp_path: Path, tail: Tail
) -> None:
    state = tmp_path / "state"
    lines = mutations(tail(filled, "--partition", "1", "--resume", state))
    lines += mutations(tail(filled, "--partition", "2", "--resume", state))
    lines += mutations(tail(filled, "--resume", state))
    assert sorted(line["key"] for line in lines) == sorted(f"k{number}" for number in range(100))


@pytest.mark.parametrize(
    "args",
    [
        ["--from", "yesterday"],
        ["--until", "tomorrow"],
        ["--format", "xml"],
        ["--partition", "1024"],
        ["--resume", "/nowhere/state"],
        ["--since", "99999d"],
        ["extra"],
    ],
)
def test_wrong_arguments_of_tail_are_usage_errors(bucket: str, run: Run, args: list[str]) -> None:
    run("tail", bucket, *args, code=2)
