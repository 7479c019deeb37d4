"""`upr leases`."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Run
from upr_protocol.client import BlockingClient
from upr_protocol.errors import ServerError


def test_leases_are_listed_and_released(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v", "--durability", "persisted")
    with BlockingClient(bucket) as client:
        (row,) = [row for row in client.seqnos() if row.persisted_seq]
        held = client.acquire_lease(
            [(row.partition, 0, row.persisted_seq)], time_to_live_s=60, owner="backup"
        )
        assert held.time_to_live_s == 60
        assert client.renew_lease(held.lease_id, time_to_live_s=90).time_to_live_s == 90
    (line,) = run("leases", "list", bucket, "--json").stdout.splitlines()
    told = json.loads(line)
    assert (told["owner"], told["partitions"], told["numbers"]) == ("backup", 1, 1)
    assert 60 < told["expires_in_s"] <= 90
    assert run("leases", "release", bucket, told["id"]).stdout == f"released {told['id']}\n"
    assert run("leases", "list", bucket, "--json").stdout == ""
    refused = run("leases", "release", bucket, told["id"], code=3)
    assert "it was released already" in refused.stderr


def test_what_is_no_lease(bucket: str, run: Run) -> None:
    for lease_id in ("zebra", "", "f" * 17):
        assert "is no lease's ID" in run("leases", "release", bucket, lease_id, code=2).stderr
    assert "is no lease's ID" in run("leases", "release", bucket, "--", "-1", code=2).stderr
    with BlockingClient(bucket) as client:
        for ranges, said in (
            ([], "1 to 1024 ranges"),
            ([(99, 0, 0)], "no partition 99"),
            ([(0, 0, 5)], "no range that is on disk"),
        ):
            with pytest.raises(ServerError, match=said):
                client.acquire_lease(ranges, time_to_live_s=60, owner="me")
