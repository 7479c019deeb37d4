"""The project's own server passes every scenario of the conformance runner."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from tests.kit.process import UPR_SERVER, run, server_process
from upr_protocol.errors import Status
from upr_protocol.wire import Error, Message, Noop
from upr_server.app import running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.conformance import CLIENT_SCENARIOS, check_server, server_scenario_names
from upr_server.conformance.failure import ConformanceError, expect_message
from upr_server.storage.simulated import SimulatedStore


async def test_this_server_passes_every_scenario(subtests: pytest.Subtests) -> None:
    config = ServerConfig(listen="127.0.0.1:0")
    passed_titles = []
    async with (
        running_server(config, SimulatedStore()) as server,
        aclosing(check_server("127.0.0.1", server.port)) as verdicts,
    ):
        async for verdict in verdicts:
            with subtests.test(verdict.scenario):
                assert verdict.failure == ""
            passed_titles.append(verdict.scenario)
    assert passed_titles == server_scenario_names()


async def test_a_refusal_is_told_in_the_words_of_the_other_side() -> None:
    """The runner said only that there was one, so nobody learned what to mend."""
    config = ServerConfig(listen="127.0.0.1:0", buckets=(BucketConfig("conformance", 1),))
    async with (
        running_server(config, SimulatedStore()) as server,
        aclosing(check_server("127.0.0.1", server.port, ["get"])) as verdicts,
    ):
        failures = [verdict.failure async for verdict in verdicts]
    (failure,) = failures
    assert failure.startswith("expected BucketDone; the server said Refusal (BUCKET_EXISTS, ")
    assert "conformance" in failure

    async def receive() -> Message:
        return Error("the chunk\x1b[2J is wrong", "", status=Status.MALFORMED)

    with pytest.raises(ConformanceError) as caught:
        await expect_message("client", Noop, receive, ())
    # What a terminal would obey is shown as text.
    assert str(caught.value) == (
        r"expected Noop; the client said Error (MALFORMED, 'the chunk\x1b[2J is wrong')"
    )


async def test_the_command_names_what_fails_and_ends_with_1() -> None:
    async with server_process() as server:
        address = f"{server.host}:{server.port}"
        good = await run((*UPR_SERVER, "conformance", "--server", address, "get", "same-token"))
        assert (good.code, good.out.splitlines()) == (0, ["ok      same-token", "ok      get"])
    dead = await run((*UPR_SERVER, "conformance", "--client", "false", "get"))
    assert dead.code == 1
    assert dead.out == "FAILED  get: the client ended with code 1\n"
    listed = await run((*UPR_SERVER, "conformance", "--list"))
    assert listed.code == 0
    assert listed.out.splitlines() == [
        "With --client:",
        *CLIENT_SCENARIOS,
        "",
        "With --server:",
        *server_scenario_names(),
    ]
    unknown = await run((*UPR_SERVER, "conformance", "--client", "false", "nonsense"))
    assert unknown.code == 2
    assert "there is no scenario 'nonsense'" in unknown.err
    for client, sentence in (
        ("'open", "no command: No closing quotation"),
        (" ", "name the command"),
    ):
        wrong = await run((*UPR_SERVER, "conformance", "--client", client))
        assert (wrong.code, wrong.out) == (2, "")
        assert sentence in wrong.err
