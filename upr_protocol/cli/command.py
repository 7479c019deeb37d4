"""The command `upr` itself."""

from __future__ import annotations

from typing import Any

import click

from upr_protocol.cli import keyvalue
from upr_protocol.cli.errors import EXIT_CODES_HELP, errors_as_exits
from upr_protocol.cli.events import events
from upr_protocol.cli.explain import explain
from upr_protocol.cli.index import index
from upr_protocol.cli.load import load
from upr_protocol.cli.operator import failover, replicas, takeover
from upr_protocol.cli.partitions import partitions
from upr_protocol.cli.role import role
from upr_protocol.cli.server import bucket, leases, stats
from upr_protocol.cli.tail import tail
from upr_protocol.cli.user import user


class _Commands(click.Group):
    """Lists its commands in the order in which a beginner needs them."""

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
@click.version_option(package_name="upr-server", prog_name="upr")
def main() -> None:
    r"""Talk to a UPR server: create buckets, load files, follow changes, read and write keys.

    The first argument is the URL of a bucket, upr://HOST:PORT/BUCKET. The default port is 12000.
    If the environment variable UPR_URL is set, you may leave the URL out. If several nodes hold the
    bucket, name one or more of them, as in upr://HOST:PORT,HOST:PORT/BUCKET.

    \b
    First steps:
      upr-server serve                                          (in another terminal)
      export UPR_URL=upr://127.0.0.1:12000/planes
      upr bucket create
      upr load planes.csv --key tailnum
      upr tail --until caught-up | head
      upr get N102UW
    """


for _command in (
    *(bucket, load, tail, events, explain, *keyvalue.COMMANDS, partitions, leases, stats),
    *(replicas, takeover, failover, index, user, role),
):
    main.add_command(_command)


def _keep_line_breaks(command: click.Command) -> None:
    """Marks the paragraphs of help texts whose lines click must not wrap."""
    if command.help:
        # The texts spell click's mark, a backspace, as two characters, which stay readable.
        command.help = command.help.replace("\\b\n", "\b\n")
    if isinstance(command, click.Group):
        for subcommand in command.commands.values():
            _keep_line_breaks(subcommand)


_keep_line_breaks(main)
