"""`upr stats`: how the server is doing."""

from __future__ import annotations

import click
import msgspec

from upr_protocol.cli.connection import ask
from upr_protocol.cli.target import TargetCommand, server_argument
from upr_protocol.client import Address


@click.command(cls=TargetCommand)
@server_argument
def stats(target: Address) -> None:
    r"""Print statistics as JSON.

    They are of the bucket that URL names, or of the server where it names none. Sizes are in bytes,
    times in seconds.

    \b
    Examples:
      upr stats upr://127.0.0.1:12000
      upr stats upr://127.0.0.1:12000/flights
    """
    found = ask(target, lambda client: client.stats(target.bucket), bucket=False)
    click.echo(msgspec.json.format(msgspec.json.encode(found), indent=2))
