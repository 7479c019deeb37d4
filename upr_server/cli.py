"""The command `upr-server`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click
import trio

from upr_protocol.errors import UprError
from upr_server.app import Server, serve
from upr_server.config import Config, ConfigError, load_config
from upr_server.log import set_up_logging

EXIT_USAGE = 2
EXIT_FAILED = 1

_options = (
    click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        envvar="UPR_SERVER_CONFIG",
        help="A TOML file with settings; `upr-server config` prints one.",
    ),
    click.option("--listen", metavar="HOST:PORT", help="Where to listen; port 0 takes a free one."),
    click.option(
        "--data-dir",
        metavar="DIR",
        help="Where buckets are kept; made when missing.  [default: the platform's data directory]",
    ),
    click.option("--quota-bytes", type=int, help="Memory of a bucket that is created without one."),
    click.option("--log-level", help="debug, info, warning or error."),
    click.option("--log-format", help="console for people, json for machines."),
)


def _with_options(command: Any) -> Any:
    for option in reversed(_options):
        command = option(command)
    return command


def _config(config_path: Path | None, **options: Any) -> Config:
    try:
        return load_config(config_path, os.environ, options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="upr", prog_name="upr-server")
def main() -> None:
    """A server that takes mutations and streams them, consistent, to all who follow.

    Settings come from a TOML file (--config), then from environment variables (UPR_SERVER_LISTEN
    and so on), then from options; each overrides the one before.
    """


@main.command("serve")
@_with_options
def serve_command(config_path: Path | None, **options: Any) -> None:
    """Run the server until Ctrl-C or SIGTERM; a second one drops its peers at once.

    The first line on standard output is `listening on HOST:PORT`; the log goes to standard error.
    """
    config = _config(config_path, **options)
    set_up_logging(config.log_level, config.log_format)

    def on_listening(server: Server) -> None:
        host = f"[{server.host}]" if ":" in server.host else server.host
        print(f"listening on {host}:{server.port}", flush=True)

    try:
        trio.run(serve, config, on_listening)
    except* UprError as errors:
        for error in errors.exceptions:
            click.echo(f"upr-server: {error}", err=True)
        sys.exit(EXIT_FAILED)


@main.command("config")
@_with_options
def config_command(config_path: Path | None, **options: Any) -> None:
    """Print the settings that `serve` would run with, as a TOML file."""
    click.echo(_config(config_path, **options).to_toml(), nl=False)
