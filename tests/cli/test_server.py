"""`upr bucket`, `upr leases` and `upr stats`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cli.conftest import Run, Start
from tests.cli.processes import Server
from upr_protocol.cli.server import lease_rows
from upr_protocol.client import BlockingClient
from upr_protocol.errors import ADVICE, RemoteProtocolError, ServerError, Status


def test_a_bucket_is_created_listed_and_deleted(server: Server, run: Run) -> None:
    url = server.url + "planes"
    created = run("bucket", "create", url, "--partitions", "16", "--quota", "64M")
    assert created.stdout == f"created {url}\n"
    rows = [json.loads(line) for line in run("bucket", "list", url, "--json").stdout.splitlines()]
    assert {"bucket": "planes", "partitions": 16, "quota_bytes": 64 * 2**20} in rows
    assert run("bucket", "delete", url, "--yes").stdout == f"deleted {url}\n"
    assert "planes" not in run("bucket", "list", server.url).stdout


def test_the_server_chooses_defaults_for_a_new_bucket(server: Server, run: Run) -> None:
    url = server.url + "defaults"
    run("bucket", "create", url)
    rows = [json.loads(line) for line in run("bucket", "list", url, "--json").stdout.splitlines()]
    (row,) = [row for row in rows if row["bucket"] == "defaults"]
    assert row["partitions"] == 64
    assert row["quota_bytes"] > 0


def test_buckets_are_listed_as_a_table(bucket: str, run: Run) -> None:
    head, *lines = run("bucket", "list", bucket).stdout.splitlines()
    assert head.split() == ["bucket", "partitions", "quota_bytes"]
    assert any(line.split()[1] == "8" for line in lines)


def test_deleting_asks_for_confirmation(bucket: str, run: Run) -> None:
    refusal = run("bucket", "delete", bucket, input="n\n", code=1)
    assert f"Delete {bucket} and all its items?" in refusal.stderr
    assert "say --yes" in run("bucket", "delete", bucket, input="", code=2).stderr
    run("partitions", bucket)
    run("bucket", "delete", bucket, input="y\n")
    run("partitions", bucket, code=3)


def test_a_bucket_that_exists_is_refused(bucket: str, run: Run) -> None:
    again = run("bucket", "create", bucket, code=3)
    assert again.stderr.startswith("upr: ")
    assert ADVICE[Status.BUCKET_EXISTS] in again.stderr


def test_a_bucket_that_does_not_exist_is_refused(server: Server, run: Run) -> None:
    refusal = run("bucket", "delete", server.url + "nowhere", "--yes", code=3)
    assert ADVICE[Status.NO_BUCKET] in refusal.stderr


def test_an_invalid_bucket_name_is_refused(server: Server, run: Run) -> None:
    run("bucket", "create", server.url + "two%20words", code=3)


def test_numbers_out_of_range_are_usage_errors(server: Server, run: Run) -> None:
    url = server.url + "x"
    assert (
        "1025 is not from 1 to 1024"
        in run("bucket", "create", url, "--partitions", "1025", code=2).stderr
    )
    assert "not a size" in run("bucket", "create", url, "--quota", "lots", code=2).stderr


def test_creating_needs_a_bucket_name(server: Server, run: Run) -> None:
    assert "the bucket is missing" in run("bucket", "create", server.url, code=2).stderr


def test_leases_are_listed_and_released(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v", "--durability", "persisted")
    with BlockingClient(bucket) as client:
        (row,) = [row for row in client.seqnos() if row.persisted_seq]
        lease = client.acquire_lease(
            [(row.partition, 0, row.persisted_seq)], time_to_live_s=60, owner="backup"
        )
        assert lease.time_to_live_s == 60
        assert client.renew_lease(lease.lease_id, time_to_live_s=90).time_to_live_s == 90
    (line,) = run("leases", "list", bucket, "--json").stdout.splitlines()
    row = json.loads(line)
    assert (row["owner"], row["partitions"], row["numbers"]) == ("backup", 1, 1)
    assert 60 < row["expires_in_s"] <= 90
    assert run("leases", "release", bucket, row["id"]).stdout == f"released {row['id']}\n"
    assert run("leases", "list", bucket, "--json").stdout == ""
    refusal = run("leases", "release", bucket, row["id"], code=3)
    assert "it was released or has expired" in refusal.stderr


@pytest.mark.parametrize(
    "statistics", [{}, {"leases": []}, {"leases": {"leases": [{"id": 7, "owner": "me"}]}}]
)
def test_statistics_without_a_list_of_leases_are_refused(statistics: dict[str, Any]) -> None:
    """A hostile server may send any JSON."""
    with pytest.raises(RemoteProtocolError, match="no list of leases"):
        lease_rows(statistics)


def test_unknown_leases_and_ranges_are_refused(bucket: str, run: Run) -> None:
    for lease_id in ("zebra", "", "f" * 17):
        assert "is not a lease's ID" in run("leases", "release", bucket, lease_id, code=2).stderr
    assert "is not a lease's ID" in run("leases", "release", bucket, "--", "-1", code=2).stderr
    with BlockingClient(bucket) as client:
        for ranges, message in (
            ([], "1 to 1024 ranges"),
            ([(99, 0, 0)], "partition 99 does not exist"),
            ([(0, 0, 5)], "not a range on disk"),
        ):
            with pytest.raises(ServerError, match=message):
                client.acquire_lease(ranges, time_to_live_s=60, owner="me")


def test_statistics_of_the_server(server: Server, bucket: str, run: Run) -> None:
    statistics = json.loads(run("stats", server.url).stdout)
    assert statistics["server"]["connections"] >= 1
    assert bucket.rpartition("/")[2] in str(statistics)


def test_statistics_of_a_bucket(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v")
    statistics = json.loads(run("stats", bucket).stdout)
    assert (statistics["partitions"], statistics["items"]) == (8, 1)


def test_statistics_of_a_missing_bucket_are_refused(server: Server, run: Run) -> None:
    assert ADVICE[Status.NO_BUCKET] in run("stats", server.url + "nowhere", code=3).stderr


def test_a_reader_that_leaves_ends_it_silently(server: Server, run: Run, start: Start) -> None:
    url = server.url + "many-partitions"
    run("bucket", "create", url, "--partitions", "1024")
    process = start("partitions", url, "--json")  # which is more than a pipe takes
    assert process.stdout is not None
    process.stdout.readline()
    process.leave()
    _, err = process.finished(code=141)
    assert err == b""
