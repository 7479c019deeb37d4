"""`upr partitions`, `replicas`, `takeover` and `failover`, with server processes."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Run
from tests.cli.processes import Server, start_server


def test_partitions_of_one_node_as_json(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v")
    rows = [json.loads(line) for line in run("partitions", bucket, "--json").stdout.splitlines()]
    assert [row["partition"] for row in rows] == list(range(8))
    assert sorted(row["high_seq"] for row in rows) == [0] * 7 + [1]
    assert {row["state"] for row in rows} == {"active"}
    assert len({row["history"] for row in rows}) == 8
    assert {row["lag"] for row in rows} == {0}


def test_partitions_as_a_table_line_by_line(bucket: str, run: Run) -> None:
    head, *lines = run("partitions", bucket, "--all").stdout.splitlines()
    assert head.split() == [
        "partition", "node", "state", "history", "high_seq", "persisted_seq", "lag",
    ]  # fmt: skip
    assert len(lines) == 8
    assert len({len(line) for line in (head, *lines)}) == 1


def test_partitions_with_the_same_holders_are_one_line(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v", "--durability", "persisted")
    head, line = run("partitions", bucket).stdout.splitlines()
    assert head.split() == ["partitions", "node", "state", "high_seq", "persisted_seq", "lag"]
    numbers, _, state, *sums = line.split()
    assert (numbers, state, sums) == ("0-7", "active", ["1", "1", "0"])


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[dict[str, Server]]:
    with ExitStack() as stack:
        servers = {}
        for name in "abc":
            path = tmp_path / f"{name}.toml"
            path.write_text(f'node = "{name}"\n')
            servers[name] = stack.enter_context(start_server("127.0.0.1:0", "--config", str(path)))
        yield servers


def place(server: Server) -> str:
    return server.url.removeprefix("upr://").rstrip("/")


def table(run: Run, url: str) -> list[list[str]]:
    text = run("partitions", url).stdout
    lines = [re.split(r"  +", line.strip()) for line in text.rpartition("\n\n")[2].splitlines()]
    return [line[:3] for line in lines[1:]]


def test_replicas_takeover_and_failover_on_three_nodes(nodes: dict[str, Server], run: Run) -> None:
    url = {name: server.url + "planes" for name, server in nodes.items()}
    run("bucket", "create", url["a"], "--partitions", "8")
    run("set", url["a"], "N102UW", "AIRBUS")
    assert "holds 'planes' alone" in run("takeover", url["a"], "0", "--to", "b", code=3).stderr

    added = run("replicas", "add", url["a"], f"b={place(nodes['b'])}").stderr
    assert "b: revision 16, a replica of partitions 0-7\n" in added
    assert "b has caught up on partitions 0-7\n" in added
    run("replicas", "add", url["b"], f"c={place(nodes['c'])}", "--partitions", "0-3", "--no-wait")
    run("replicas", "add", url["b"], "c", "--partitions", "4-7", "--from", "b")
    assert table(run, url["c"]) == [
        ["0-7", "a", "active"],
        ["0-7", "b", "replica"],
        ["0-7", "c", "replica"],
    ]

    refusal = run("bucket", "delete", url["a"], "--yes", code=3).stderr
    assert "a is active for partitions 0-7: let another node take over first" in refusal
    assert run("get", url["a"], "N102UW").stdout == "AIRBUS\n"

    out = run("takeover", url["c"], "--all-of", "a", "--to", "b").stderr.splitlines()
    assert [line.split(": ")[0] for line in out] == ["a", "b", out[2].split(": ")[0]]
    run("set", url["b"], "N102UW", "AIRBUS INDUSTRIE")
    refusal = run("failover", url["a"], "--all-of", "b", "--to", "a", code=3).stderr
    assert "b is running, and is active for partitions 0-7: use `upr takeover`" in refusal

    run("takeover", url["c"], "0-7", "--to", "a")
    nodes["a"].stop(signal.SIGKILL)
    output = run("partitions", url["b"]).stdout
    assert re.search(r"^a +\S+ +cannot be reached: ", output, re.MULTILINE)
    assert ["0-7", "a", "unreachable, to be active"] in table(run, url["b"])
    run("failover", url["c"], "--all-of", "a", "--to", "b")
    assert run("get", url["b"], "N102UW").stdout == "AIRBUS INDUSTRIE\n"
    assert table(run, url["c"])[0] == ["0-7", "b", "active"]
    rows: list[dict[str, Any]] = [
        json.loads(line) for line in run("partitions", url["c"], "--json").stdout.splitlines()
    ]
    assert {row["state"] for row in rows if row["node"] == "a"} == {"unreachable, to be replica"}
    assert {row["history"] for row in rows if row["node"] == "a"} == {None}

    assert "a no longer holds partitions 0-7" in run("replicas", "remove", url["c"], "a").stderr
    assert "\na " not in run("partitions", url["c"]).stdout
    assert "bring back a node" not in run("failover", url["c"], "9", code=3).stderr
    run("bucket", "delete", url["c"], "--yes")
    run("bucket", "delete", url["b"], "--yes", code=3)
    run("bucket", "delete", url["b"], "--yes", "--force")
    assert "planes" not in run("bucket", "list", nodes["b"].url).stdout


def test_wrong_command_lines_are_refused(bucket: str, run: Run) -> None:
    for command in ("takeover", "failover"):
        for args in (["--to", "b"], ["1", "--all-of", "a", "--to", "b"]):
            assert "name the partitions" in run(command, bucket, *args, code=2).stderr
        assert "is not a partition" in run(command, bucket, "x", "--to", "b", code=2).stderr
    assert "write NODE=HOST:PORT" in run("replicas", "add", bucket, "b b", code=3).stderr
    assert "Missing option '--to'" in run("takeover", bucket, "1", code=2).stderr
    url = "upr://127.0.0.1:1/b"
    run("partitions", url, code=4)
    run("failover", url, "1", code=4)
