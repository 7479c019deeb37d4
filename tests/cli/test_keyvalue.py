from __future__ import annotations

import json
from typing import Any

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from tests.cli.conftest import Run
from tests.kit.endless import endless_input
from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer
from upr_protocol.cli.keyvalue import with_doubt
from upr_protocol.client import connect
from upr_protocol.errors import ADVICE, BrokenError, Status
from upr_protocol.limits import VALUE_BYTES_MAX
from upr_protocol.wire import Mutate


def item(run: Run, bucket: str, key: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(run("get", bucket, key, "--json").stdout)
    return fields


def test_get_prints_what_set_stored(bucket: str, run: Run) -> None:
    assert run("set", bucket, "k", "välue").stdout.startswith("partition ")
    assert run("get", bucket, "k").stdout == "välue\n"
    assert run("get", bucket, "k", "--raw").stdout == "välue"


def test_get_prints_several_values_in_order(bucket: str, run: Run) -> None:
    for key in "abc":
        run("set", bucket, key, key.upper())
    assert run("get", bucket, "c", "a", "b").stdout == "C\nA\nB\n"


def test_a_missing_key_is_named_and_the_rest_is_printed(bucket: str, run: Run) -> None:
    run("set", bucket, "here", "x")
    result = run("get", bucket, "gone", "here", code=1)
    assert (result.stdout, result.stderr) == ("x\n", "upr: gone: no such key\n")


def test_a_missing_key_that_is_not_utf8_is_named_by_its_bytes(bucket: str, run: Run) -> None:
    result = run("get", bucket, "\udcff~", code=1)
    assert result.stderr == "upr: \\xff~: no such key\n"


def test_get_prints_an_item_as_json(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v", "--flags", "7", "--expire-in", "3600")
    fields = item(run, bucket, "k")
    assert (fields["key"], fields["value"], fields["flags"], fields["seq"]) == ("k", "v", 7, 1)
    assert fields["expiry"] > 1_700_000_000
    assert int(fields["cas"]) > 0


def test_values_that_are_not_utf8_are_printed_unchanged_or_as_base64(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "-", input=b"\xff\x00\n")
    assert run("get", bucket, "k", "--raw").stdout_bytes == b"\xff\x00\n"
    fields = item(run, bucket, "k")
    assert (fields["value"], fields["value_encoding"]) == ("/wAK", "base64")


def test_a_change_with_an_old_cas_is_refused(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "1")
    cas = item(run, bucket, "k")["cas"]
    run("set", bucket, "k", "2", "--cas", cas)
    refusal = run("set", bucket, "k", "3", "--cas", cas, code=3)
    assert "cas mismatch" in refusal.stderr
    assert ADVICE[Status.CAS_MISMATCH] in refusal.stderr
    assert run("get", bucket, "k").stdout == "2\n"


def test_add_needs_a_new_key_and_replace_an_existing_one(bucket: str, run: Run) -> None:
    run("replace", bucket, "k", "0", code=3)
    run("add", bucket, "k", "1")
    run("add", bucket, "k", "2", code=3)
    run("replace", bucket, "k", "3")
    assert run("get", bucket, "k").stdout == "3\n"


def test_append_and_prepend_extend_an_existing_value(bucket: str, run: Run) -> None:
    run("append", bucket, "k", "x", code=3)
    run("set", bucket, "k", "b")
    run("append", bucket, "k", "c")
    run("prepend", bucket, "k", "a")
    assert run("get", bucket, "k").stdout == "abc\n"


def test_delete_removes_an_existing_key(bucket: str, run: Run) -> None:
    run("delete", bucket, "k", code=3)
    run("set", bucket, "k", "v")
    run("delete", bucket, "k")
    run("get", bucket, "k", code=1)


def test_counters_count_from_an_initial_value_and_stop_at_zero(bucket: str, run: Run) -> None:
    assert run("increment", bucket, "n").stdout == "1\n"
    assert run("increment", bucket, "n", "--by", "41").stdout == "42\n"
    assert run("decrement", bucket, "n", "--by", "50").stdout == "0\n"
    assert run("increment", bucket, "m", "--by", "5", "--initial", "100").stdout == "100\n"
    assert run("increment", bucket, "m", "--by", "5", "--initial", "100").stdout == "105\n"
    run("increment", bucket, "new", "--existing", code=3)
    for command in ("increment", "decrement"):
        refusal = run(command, bucket, "new", "--existing", "--initial", "3", code=2)
        assert "leave one of them out" in refusal.stderr
    assert run("get", bucket, "n", "m").stdout == "0\n105\n"


def test_a_counter_must_be_decimal_text(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "seven")
    assert "decimal text" in run("increment", bucket, "k", code=3).stderr


def test_an_item_cannot_expire_later_than_the_wire_can_say(bucket: str, run: Run) -> None:
    for seconds in (3_000_000_000, 2**32 - 1):
        refusal = run("set", bucket, "k", "v", "--expire-in", str(seconds), code=2)
        assert "no item expires after 2106" in refusal.stderr


def test_touch_changes_when_an_item_expires(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v", "--expire-in", "60")
    run("touch", bucket, "k")
    assert item(run, bucket, "k")["expiry"] == 0
    run("touch", bucket, "k", "--expire-in", "60")
    assert item(run, bucket, "k")["expiry"] > 0


def test_a_persisted_change_can_be_read(bucket: str, run: Run) -> None:
    run("set", bucket, "k", "v", "--durability", "persisted")
    assert run("get", bucket, "k").stdout == "v\n"


@pytest.mark.parametrize("level", ["replicated", "replicated-and-persisted"])
def test_a_durability_without_enough_replicas_is_refused(bucket: str, run: Run, level: str) -> None:
    refusal = run("set", bucket, "k", "v", "--durability", level, code=3)
    assert "has 0 replicas that follow this node, not 1" in refusal.stderr
    run("get", bucket, "k", code=1)


@pytest.mark.parametrize(
    ("is_sent", "notes"),
    [(True, ["the change may have been made or not: read the key to find out"]), (False, [])],
)
async def test_a_lost_answer_leaves_open_whether_the_change_was_made(
    nursery: trio.Nursery, is_sent: bool, notes: list[str], autojump_clock: MockClock
) -> None:
    server = FakeServer()
    server.held = {Mutate}
    net = FakeNet(nursery, server)

    async def cut() -> None:
        await trio.testing.wait_all_tasks_blocked()
        net.cut()

    async with connect("upr://fake/b", dial=net.dial) as client:
        if is_sent:
            nursery.start_soon(cut)
        else:
            await cut()
            await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(BrokenError) as caught:
            await with_doubt(lambda client: client.increment("n"))(client)
    assert getattr(caught.value, "__notes__", []) == notes


def test_an_input_that_does_not_end_is_not_read_into_memory(bucket: str, run: Run) -> None:
    endless = endless_input(b"", 2 * VALUE_BYTES_MAX)
    result = run("set", bucket, "k", "-", input=endless, code=2)
    assert result.stderr == (
        "upr: standard input has more than 20 MiB, the limit of a value; store less at a key\n"
    )


def test_a_key_that_is_too_long_is_refused(bucket: str, run: Run) -> None:
    assert "keys are 1 to 250 bytes" in run("get", bucket, "x" * 251, code=3).stderr


@pytest.mark.parametrize(
    "args",
    [
        ["set", "k"],
        ["get"],
        ["set", "k", "v", "--flags", "-1"],
        ["set", "k", "v", "--flags", "x"],
        ["set", "k", "v", "--cas", str(2**64)],
        ["set", "k", "v", "--durability", "forever"],
        ["touch", "k", "--expire-in", "0"],
        ["delete", "k", "k2"],
    ],
)
def test_wrong_arguments_of_single_key_commands_are_usage_errors(
    bucket: str, run: Run, args: list[str]
) -> None:
    run(args[0], bucket, *args[1:], code=2)
