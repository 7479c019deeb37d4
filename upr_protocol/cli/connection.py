"""Connections as commands make them."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import attrs
import click
import trio

from upr_protocol.cli.numbers import number
from upr_protocol.client import Address, Client, connect
from upr_protocol.limits import IDENTITY_BYTES_MAX

T = TypeVar("T")


def identity(command: str) -> str:
    """Who a command says it is, for the server's log and statistics."""
    return f"upr-{command}:{socket.gethostname()}"[:IDENTITY_BYTES_MAX]


def ask(target: Address, question: Callable[[Client], Awaitable[T]], *, bucket: bool = True) -> T:
    """The answer to `question`, over a connection to `target` with its bucket opened or without.

    Raises:
        BrokenError: There is no connection to be had.
        ServerError: There is no such bucket, or what the question comes to.
    """
    name = identity(click.get_current_context().info_name or "")
    address = target if bucket else attrs.evolve(target, bucket="")

    async def run() -> T:
        async with connect(address, identity=name) as client:
            return await question(client)

    return trio.run(run)


def patience_option(command: Any) -> Any:
    """Declares the option `--patience`."""
    return click.option(
        "--patience",
        type=number(0, 10**9),
        default=300,
        show_default=True,
        metavar="SECONDS",
        help="How long to go on trying when the connection is lost.",
    )(command)
