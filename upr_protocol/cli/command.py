"""The command `upr` itself."""

from __future__ import annotations

from typing import Any

import click

from upr_protocol.cli import keyvalue
from upr_protocol.cli.bucket import bucket
from upr_protocol.cli.events import events
from upr_protocol.cli.exits import EXIT_CODES_HELP, errors_as_exits
from upr_protocol.cli.explain import explain
from upr_protocol.cli.failover import failover
from upr_protocol.cli.index import index
from upr_protocol.cli.leases import leases
from upr_protocol.cli.load import load
from upr_protocol.cli.partitions import partitions
from upr_protocol.cli.replicas import replicas
from upr_protocol.cli.stats import stats
from upr_protocol.cli.tail import tail
from upr_protocol.cli.takeover import takeover


class _Commands(click.Group):
    """Lists its commands in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(self.commands)

    def invoke(self, ctx: click.Context) -> Any:
        with errors_as_exits():
            return super().invoke(ctx)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=EXIT_CODES_HELP,
)
@click.version_option(package_name="upr", prog_name="upr")
def main() -> None:
    r"""Talk to a UPR server: make buckets, load files, follow changes, read and write keys.

    Commands begin with the URL of a bucket, upr://HOST:PORT/BUCKET. The port is 12000 if you leave
    it out; and where the environment variable UPR_URL is set, you may leave out the whole URL. Of a
    bucket that several nodes hold, name any of them, or some, as in upr://HOST:PORT,HOST:PORT/BUCKET.

    \b
    To begin with:
      upr-server serve                                          (in another terminal)
      export UPR_URL=upr://127.0.0.1:12000/planes
      upr bucket create
      upr load planes.csv --key tailnum
      upr tail --until caught-up | head
      upr get N102UW
    """


for _command in (
    *(bucket, load, tail, events, explain, *keyvalue.COMMANDS, partitions, leases, stats),
    *(replicas, takeover, failover, index),
):
    main.add_command(_command)


def _keep_lines(command: click.Command) -> None:
    """Has click leave the lines of help texts as they are where those say so."""
    if command.help:
        # In the texts it stands as two characters, which is readable there.
        command.help = command.help.replace("\\b\n", "\b\n")
    if isinstance(command, click.Group):
        for one in command.commands.values():
            _keep_lines(one)


_keep_lines(main)
