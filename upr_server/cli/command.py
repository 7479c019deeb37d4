"""The command `upr-server` itself."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Final

import click

from upr_server.cli.output import EXIT_INTERRUPTED

_MODULES: Final = {
    "check": "inspection",
    "config": "serve",
    "conformance": "conformance",
    "dump": "inspection",
    "init": "init",
    "mend": "repair",
    "restore": "repair",
    "serve": "serve",
}
"""By each command the module that has it. It is imported when the command is named: those that read
a data directory need nothing of what a server needs, which takes longer to import than the rest."""


class _Commands(click.Group):
    """Ends with 130 on Ctrl-C, wherever it comes."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in _MODULES:
            return None
        module = import_module(f"upr_server.cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, f"{cmd_name}_command")
        return command

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
