from __future__ import annotations

import json

from tests.cli.conftest import Run, Start
from tests.cli.processes import Server


def test_of_the_server(server: Server, bucket: str, run: Run) -> None:
    found = json.loads(run("stats", server.url).stdout)
    assert found["server"]["connections"] >= 1
    assert bucket.rpartition("/")[2] in str(found)


def test_of_a_bucket(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v")
    found = json.loads(run("stats", bucket).stdout)
    assert (found["partitions"], found["items"]) == (8, 1)


def test_of_a_bucket_that_does_not_exist(server: Server, run: Run) -> None:
    assert "create the bucket first" in run("stats", server.url + "nowhere", code=3).stderr


def test_a_reader_that_leaves_ends_it_silently(server: Server, run: Run, start: Start) -> None:
    url = server.url + "many-partitions"
    run("bucket", "create", url, "--partitions", "1024")
    process = start("partitions", url, "--json")  # which is more than a pipe takes
    assert process.stdout is not None
    process.stdout.readline()
    process.leave()
    _, err = process.finished(code=141)
    assert err == b""
