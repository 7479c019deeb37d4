"""Which server and bucket a command is about: its first argument, or `UPR_URL`."""

from __future__ import annotations

import os
from typing import Any, Final

import click

from upr_protocol.client import Address, AddressError

SCHEME: Final = "upr://"
VARIABLE: Final = "UPR_URL"


class TargetCommand(click.Command):
    """A command whose first argument, `target`, may be left out where `UPR_URL` is set."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Puts the address from the environment in front when the command line has none."""
        # With the options alone, the parser gives back all that is left, in order.
        options = [param for param in self.params if isinstance(param, click.Option)]
        parser = click.Command(None, params=list(options)).make_parser(ctx)
        _, positional, _ = parser.parse_args(list(args))
        asks_for_help = not set(args).isdisjoint(ctx.help_option_names)
        if not asks_for_help and not (positional and positional[0].startswith(SCHEME)):
            address = os.environ.get(VARIABLE)
            if not address:
                ctx.fail(
                    "the first argument is the server's URL, as in upr://127.0.0.1:12000/flights; "
                    f"or set {VARIABLE} to it"
                )
            args = [address, *args]
        return super().parse_args(ctx, args)


def _server(url: str) -> Address:
    try:
        return Address.parse(url)
    except AddressError as error:
        raise click.BadParameter(str(error)) from error


def _bucket(url: str) -> Address:
    try:
        return _server(url).with_bucket()
    except AddressError as error:
        raise click.BadParameter(str(error)) from error


def server_argument(command: Any) -> Any:
    """Declares the argument `target` of a `TargetCommand` for which a server will do."""
    return click.argument("target", metavar="URL", type=_server)(command)


def bucket_argument(command: Any) -> Any:
    """Declares the argument `target` of a `TargetCommand` that needs a bucket."""
    return click.argument("target", metavar="URL", type=_bucket)(command)
