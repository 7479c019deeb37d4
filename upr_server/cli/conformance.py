"""The command `conformance`."""

from __future__ import annotations

import shlex
import sys
from contextlib import aclosing

import click
import trio

from upr_protocol.address import Address, AddressError
from upr_server.cli.output import EXIT_FAILED, print_text, say


@click.command("conformance")
@click.option("--client", metavar="COMMAND", help="Play a server to the client that this starts.")
@click.option(
    "--server", metavar="HOST:PORT", help="Play a client to the server that listens there."
)
@click.option("--list", "is_list", is_flag=True, help="Print the names of the scenarios.")
@click.argument("scenarios", nargs=-1)
def conformance_command(
    client: str | None, server: str | None, is_list: bool, scenarios: tuple[str, ...]
) -> None:
    """Check whether a client, or a server, keeps the protocol.

    Plays all SCENARIOS, or those named, and prints one line for each: `ok`, or `FAILED` with what
    the other side did wrong. Ends with 1 if any failed. A client gets its task as JSON on standard
    input; docs/protocol.md describes the tasks. At a server, the scenarios create and delete the
    bucket `conformance`.
    """
    # Here, as no other command needs it: a server should start soon.
    from upr_server.conformance import (
        CLIENT_SCENARIOS,
        check_client,
        check_server,
        server_scenario_names,
    )

    if is_list and client is None and server is None:
        print_text("\n".join(("With --client:", *CLIENT_SCENARIOS)))
        print_text("\n".join(("", "With --server:", *server_scenario_names())))
        return
    if (client is None) == (server is None):
        raise click.UsageError("give either --client or --server")
    if client is not None:
        names, verdicts = list(CLIENT_SCENARIOS), check_client(_command(client), scenarios)
    else:
        assert server is not None
        try:
            address = Address.parse(f"upr://{server}")
        except AddressError as error:
            raise click.UsageError(f"--server: {error}") from error
        names = server_scenario_names()
        verdicts = check_server(address.host, address.port, scenarios)
    if unknown := set(scenarios) - set(names):
        raise click.UsageError(f"there is no scenario {min(unknown)!r}; --list prints the names")
    if is_list:
        print_text("\n".join(names))
        return

    async def play() -> int:
        failed = 0
        async with aclosing(verdicts):
            async for verdict in verdicts:
                failed += bool(verdict.failure)
                line = f"FAILED  {verdict.scenario}: {verdict.failure}"
                print_text(line if verdict.failure else f"ok      {verdict.scenario}")
        return failed

    try:
        failed = trio.run(play)
    except OSError as error:
        say(f"cannot reach {server}: {error.strerror or error}")
        sys.exit(EXIT_FAILED)
    sys.exit(EXIT_FAILED if failed else 0)


def _command(text: str) -> list[str]:
    """The program and the arguments that `--client` names."""
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise click.UsageError(f"--client: {text!r} is no command: {error}") from error
    if not command:
        raise click.UsageError("--client: name the command that starts the client")
    return command
