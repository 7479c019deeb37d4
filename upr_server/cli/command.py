"""The command `upr-server` itself."""

from __future__ import annotations

import sys
from typing import Any

import click

from upr_server.cli.conformance import conformance_command
from upr_server.cli.init import init_command
from upr_server.cli.inspection import check_command, dump_command
from upr_server.cli.output import EXIT_INTERRUPTED
from upr_server.cli.repair import mend_command, restore_command
from upr_server.cli.serve import config_command, serve_command


class _Commands(click.Group):
    """Ends with 130 on Ctrl-C, wherever it comes."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except* KeyboardInterrupt:
            sys.exit(EXIT_INTERRUPTED)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="upr-server", prog_name="upr-server")
def main() -> None:
    """A server that stores changes and streams them to consumers in consistent snapshots.

    Settings come from a TOML file (--config), from environment variables (UPR_SERVER_LISTEN and so
    on) and from options. Options override environment variables, which override the file.
    """


for _command in (
    *(serve_command, conformance_command, config_command, init_command),
    *(check_command, dump_command, restore_command, mend_command),
):
    main.add_command(_command)
