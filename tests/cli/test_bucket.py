from __future__ import annotations

import json

from tests.cli.conftest import Run
from tests.cli.processes import Server


def test_a_bucket_is_created_listed_and_deleted(server: Server, run: Run) -> None:
    url = server.url + "planes"
    created = run("bucket", "create", url, "--partitions", "16", "--quota", "64M")
    assert created.stdout == f"created {url}\n"
    rows = [json.loads(line) for line in run("bucket", "list", url, "--json").stdout.splitlines()]
    assert {"bucket": "planes", "partitions": 16, "quota_bytes": 64 * 2**20} in rows
    assert run("bucket", "delete", url, "--yes").stdout == f"deleted {url}\n"
    assert "planes" not in run("bucket", "list", server.url).stdout


def test_the_server_chooses_what_is_left_out(server: Server, run: Run) -> None:
    url = server.url + "defaults"
    run("bucket", "create", url)
    rows = [json.loads(line) for line in run("bucket", "list", url, "--json").stdout.splitlines()]
    (row,) = [row for row in rows if row["bucket"] == "defaults"]
    assert row["partitions"] == 64
    assert row["quota_bytes"] > 0


def test_people_get_a_table(bucket: str, run: Run) -> None:
    head, *lines = run("bucket", "list", bucket).stdout.splitlines()
    assert head.split() == ["bucket", "partitions", "quota_bytes"]
    assert any(line.split()[1] == "8" for line in lines)


def test_deleting_asks_first(bucket: str, run: Run) -> None:
    refused = run("bucket", "delete", bucket, input="n\n", code=1)
    assert f"Delete {bucket} and all that is in it?" in refused.stderr
    run("partitions", bucket)
    run("bucket", "delete", bucket, input="y\n")
    run("partitions", bucket, code=3)


def test_a_bucket_that_exists_is_refused(bucket: str, run: Run) -> None:
    again = run("bucket", "create", bucket, code=3)
    assert again.stderr.startswith("upr: ")
    assert "use the bucket that is there, or delete it first" in again.stderr


def test_a_bucket_that_does_not_exist_is_refused(server: Server, run: Run) -> None:
    refused = run("bucket", "delete", server.url + "nowhere", "--yes", code=3)
    assert "create the bucket first, or correct its name" in refused.stderr


def test_a_name_that_no_bucket_may_have_is_refused(server: Server, run: Run) -> None:
    run("bucket", "create", server.url + "two%20words", code=3)


def test_numbers_out_of_range_are_usage_errors(server: Server, run: Run) -> None:
    url = server.url + "x"
    assert (
        "1025 is not from 1 to 1024"
        in run("bucket", "create", url, "--partitions", "1025", code=2).stderr
    )
    assert "no size" in run("bucket", "create", url, "--quota", "lots", code=2).stderr


def test_creating_needs_a_name(server: Server, run: Run) -> None:
    assert "the bucket is missing" in run("bucket", "create", server.url, code=2).stderr
