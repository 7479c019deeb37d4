"""The commands `serve` and `config`."""

from __future__ import annotations

import faulthandler
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog
import trio

import upr_kernel
from upr_protocol.concurrency import first_failure
from upr_protocol.errors import UprError
from upr_server.cli.output import EXIT_FAILED, EXIT_UNSAVED, discard_output, print_text, say
from upr_server.cli.parameters import with_settings
from upr_server.config import ServerConfig, load_config
from upr_server.runtime import (
    OUT_OF_MEMORY,
    ConfigError,
    collect_only_young,
    collect_rarely,
    keep_heap_small,
    keeps_ended_frames,
    raise_file_limit,
    set_up_logging,
)
from upr_server.startup import serve

if TYPE_CHECKING:
    from upr_server.app import Server

log = structlog.get_logger(__name__)


@click.command("serve")
@with_settings
def serve_command(config_path: Path | None, **options: Any) -> None:
    """Run the server until Ctrl-C or SIGTERM.

    A second signal closes all connections at once. If mutations that are only in memory are lost by
    that, or because the disk is full, the exit code is 3. The first line on standard output is
    `listening on HOST:PORT`; the log goes to standard error.
    """
    config = _loaded_config(config_path, **options)
    set_up_logging(config.log_level, config.log_format)

    # A crash in C tells its place on standard error.
    faulthandler.enable(2)
    keep_heap_small()
    # Each connection is a file.
    raise_file_limit()
    keeps_frames = keeps_ended_frames()
    if keeps_frames:
        # Ended calls are in reference cycles then, also those that are not young any more.
        collect_rarely()
    else:
        collect_only_young()

    loss, is_listening = "", False

    def on_listening(server: Server) -> None:
        nonlocal is_listening
        is_listening = True
        host = f"[{server.host}]" if ":" in server.host else server.host
        try:
            print(f"listening on {host}:{server.port}", flush=True)
        except OSError:
            # Nobody reads it, or its disk is full. The log says the same.
            discard_output()
        if keeps_frames:
            log.warning(
                "this release of Python keeps ended calls in reference cycles; the server looks "
                "for them among all objects now and then, and may stand still for some tenths of a "
                "second: use Python 3.11, or a newer release of 3.13 or 3.14",
                python=platform.python_version(),
            )

    try:
        loss = trio.run(serve, config, on_listening)
    except* UprError as errors:
        say(str(first_failure(errors)))
        sys.exit(EXIT_FAILED)
    except* MemoryError:
        say(OUT_OF_MEMORY if is_listening else "cannot start: out of memory; look at `ulimit -a`")
        sys.exit(EXIT_FAILED)
    except* (OSError, ImportError) as errors:
        # Later it is a fault of ours, and keeps its traceback.
        if is_listening:
            raise
        say(f"cannot start: {first_failure(errors)}; look at `ulimit -a`")
        sys.exit(EXIT_FAILED)
    if loss:
        say(f"{loss}; data that was only in memory is lost; the log says how much")
        sys.exit(EXIT_UNSAVED)


@click.command("config")
@with_settings
def config_command(config_path: Path | None, **options: Any) -> None:
    """Print the settings that `serve` would use, as a TOML file, and which kernel it would run."""
    settings = _loaded_config(config_path, **options).to_toml()
    print_text(f"# kernel: {upr_kernel.BUILD}\n{settings}", nl=False)


def _loaded_config(config_path: Path | None, **options: Any) -> ServerConfig:
    """The settings, from the file, the environment and the options of `with_settings`.

    Raises:
        click.UsageError: A setting is wrong; it says which.
    """
    try:
        return load_config(config_path, os.environ, options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
