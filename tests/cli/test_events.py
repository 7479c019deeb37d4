"""`upr events`."""

from __future__ import annotations

import json
import signal

from tests.cli.conftest import Run, Start
from tests.cli.processes import Server
from upr_protocol.bucket_event import ANY_DESIGN, BucketEvent, BucketFate
from upr_protocol.cli.events import json_line, text_line
from upr_protocol.client import LookAtEverything


def test_events_are_printed_until_ctrl_c(bucket: str, run: Run, start: Start) -> None:
    name = bucket.rpartition("/")[2]
    # By the name in the URL, of all buckets of the server only this one's.
    following = start("events", bucket, "--json")
    assert following.stdout is not None
    assert json.loads(following.stdout.readline()) == {"event": "everything"}
    run("set", bucket, "_design/x", "{}")
    event = json.loads(following.stdout.readline())
    while not event["designs"]:
        event = json.loads(following.stdout.readline())
    assert (event["bucket"], event["deleted"], event["designs"]) == (name, False, ["_design/x"])
    run("bucket", "delete", bucket, "--yes")
    assert json.loads(following.stdout.readline())["deleted"] is True
    following.send_signal(signal.SIGINT)
    assert following.wait(30) == 130
    assert following.stderr is not None
    assert following.stderr.read() == b""


def test_bad_options_and_names_are_refused(server: Server, run: Run) -> None:
    assert (
        "invalid consumer name" in run("events", server.url, "--consumer", "no name", code=3).stderr
    )
    for option in ("--consumer", "--name"):
        assert "not UTF-8" in run("events", server.url, option, "\udcff", code=2).stderr
    run("events", server.url, "--kind", "changed", code=2)
    run("events", server.url, "--timeout", "0", code=2)
    run("events", "upr://127.0.0.1:1", "--retry-timeout", "0", code=4)


def test_an_event_as_text_and_as_json() -> None:
    assert text_line(LookAtEverything()) == b"everything may have changed\n"
    assert json_line(LookAtEverything()) == b'{"event":"everything"}\n'
    event = BucketEvent("b", 10, BucketFate.CREATED, 3, (b"_design/\x1b[2J", b"\xff", ANY_DESIGN))
    assert (
        text_line(event).decode()
        == "b created updated _design/\\x1b[2J \N{REPLACEMENT CHARACTER} _design/*\n"
    )
    assert json.loads(json_line(event)) == {
        "event": "bucket",
        "bucket": "b",
        "incarnation": "000000000000000a",
        "created": True,
        "deleted": False,
        "updates": 3,
        "designs": ["_design/\x1b[2J", {"base64": "/w=="}],
        "any_design": True,
    }
