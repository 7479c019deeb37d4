"""Runs scenarios, one after the other, and tells what became of each."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence

import attrs
import trio

from upr_protocol.errors import ProtocolError
from upr_server.conformance.client_run import play_client_scenario
from upr_server.conformance.client_scenarios import CLIENT_SCENARIOS
from upr_server.conformance.failure import ConformanceError
from upr_server.conformance.server_scenarios import ServerUnderTest, server_scenarios


@attrs.frozen
class Verdict:
    """What became of one scenario.

    Attributes:
        scenario: Its name.
        failure: What the other side did wrong; empty when it passed.
    """

    scenario: str
    failure: str


async def check_server(
    host: str, port: int, names: Collection[str] = ()
) -> AsyncGenerator[Verdict, None]:
    """Plays a client to a server.

    Args:
        host: Where the server listens.
        port: Where the server listens.
        names: The scenarios; none for all.
    """
    server = ServerUnderTest(host, port)
    for name, scenario in server_scenarios().items():
        if names and name not in names:
            continue
        try:
            await server.play(scenario)
        except (ConformanceError, ProtocolError) as error:
            yield Verdict(name, str(error))
        else:
            yield Verdict(name, "")


async def check_client(
    command: Sequence[str], names: Collection[str] = ()
) -> AsyncGenerator[Verdict, None]:
    """Plays a server to a client.

    Args:
        command: Starts the client. It reads its task from standard input, as JSON.
        names: The scenarios; none for all.
    """
    for name, scenario in CLIENT_SCENARIOS.items():
        if names and name not in names:
            continue
        try:
            await play_client_scenario(scenario, command)
        except (ConformanceError, ProtocolError, trio.BrokenResourceError) as error:
            yield Verdict(name, str(error))
        else:
            yield Verdict(name, "")


def server_scenario_names() -> list[str]:
    """The names of the scenarios of `check_server`."""
    return list(server_scenarios())
