"""How commands connect to a server, run until a signal, and report a lost connection."""

from __future__ import annotations

import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar, TypeVarTuple

import attrs
import click
import trio

from upr_protocol.cli.errors import CONNECTION_ADVICE, say
from upr_protocol.client import Address, Client, connect
from upr_protocol.concurrency import background_nursery
from upr_protocol.limits import IDENTITY_BYTES_MAX

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

_POLL_S: Final = 0.5
"""A connection that is back sooner than this is not reported."""

SILENT_S: Final = 3.0
"""How long a command waits for an answer before it says that it does."""


def command_identity(command: str) -> str:
    """The name under which the server logs and counts a command."""
    return f"upr-{command}:{socket.gethostname()}"[:IDENTITY_BYTES_MAX]


def ask(target: Address, request: Callable[[Client], Awaitable[T]], *, bucket: bool = True) -> T:
    """The answer to `request`, over a connection to `target`.

    Args:
        target: The server and the bucket.
        request: What to ask.
        bucket: Whether to open the bucket first.

    Raises:
        BrokenError: The server cannot be reached.
        ServerError: There is no such bucket, or the server refused the request.
    """
    name = command_identity(click.get_current_context().info_name or "")
    address = target if bucket else attrs.evolve(target, bucket="")

    async def run() -> T:
        client: Client | None = None

        def last_failure() -> str:
            return "" if client is None else client.statistics().last_failure

        async with background_nursery() as nursery:
            nursery.start_soon(report_waiting, address, last_failure)
            async with connect(address, identity=name) as client:
                return await request(client)

    return trio.run(run)


async def report_waiting(address: Address, last_failure: Callable[[], str]) -> None:
    """Says on standard error, after `SILENT_S`, that there is no answer yet, and why not if that is
    known."""
    await trio.sleep(SILENT_S)
    reason = last_failure()
    say(f"no answer from {address} yet{f' ({reason})' if reason else ''}; still waiting")


def run_until_signal(function: Callable[[*Ts], Awaitable[None]], *args: *Ts) -> None:
    """Runs an async function, which the first Ctrl-C or SIGTERM cancels.

    Cancelling, unlike KeyboardInterrupt, lets the function clean up and never cuts a line in half.

    Raises:
        click.exceptions.Exit: A signal came; with the exit code that a shell gives it.
    """
    stop_signal: signal.Signals | None = None

    async def run() -> None:
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async with trio.open_nursery() as nursery:

                async def watch() -> None:
                    nonlocal stop_signal
                    async for signal_number in signals:
                        stop_signal = signal.Signals(signal_number)
                        nursery.cancel_scope.cancel()

                nursery.start_soon(watch)
                await function(*args)
                nursery.cancel_scope.cancel()

    trio.run(run)
    if stop_signal is not None:
        raise click.exceptions.Exit(128 + stop_signal)


async def report_connection(
    status: Callable[[], tuple[bool, str]],
    retry_timeout_s: int,
    *,
    was_connected: bool,
    before: Callable[[], None] = lambda: None,
) -> None:
    """Says on standard error when there is no connection, and when there is one (again). Runs until
    cancelled.

    Args:
        status: Whether there is a connection now, and why the last one, or the last attempt to make
            one, ended; "" if none did.
        retry_timeout_s: How long the client keeps trying to connect.
        was_connected: Whether there was a connection at first.
        before: Called before anything is printed.
    """
    is_waiting = False
    while True:
        await trio.sleep(_POLL_S)
        is_connected, last_failure = status()
        sentence = ""
        if is_connected:
            if is_waiting:
                sentence = "connected again" if was_connected else "connected"
            was_connected, is_waiting = True, False
        elif not is_waiting and (was_connected or last_failure):
            sentence = f"({last_failure}); trying again for up to {retry_timeout_s:,} s"
            if was_connected:
                sentence = f"the connection is lost {sentence}"
            else:
                sentence = f"there is no connection {sentence}; {CONNECTION_ADVICE}"
            is_waiting = True
        if sentence:
            before()
            say(sentence)
