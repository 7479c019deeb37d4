"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from upr_server.storage.directory import default_data_dir

_options = (
    click.option(
        "--config",
        "config_path",
        type=click.Path(path_type=Path),
        envvar="UPR_SERVER_CONFIG",
        help="A TOML file with settings. `upr-server config` prints one.",
    ),
    click.option(
        "--listen",
        metavar="HOST:PORT",
        help="Where to listen. Port 0 stands for any free port.  [default: 127.0.0.1:12000]",
    ),
    click.option(
        "--data-dir",
        metavar="DIR",
        help="Where buckets are stored.  [default: the platform's data directory]",
    ),
    click.option(
        "--tls-certificate",
        metavar="FILE",
        help="The server's certificate; then every connection is encrypted.  [default: none]",
    ),
    click.option(
        "--tls-key",
        metavar="FILE",
        help="The key of the certificate.  [default: in the certificate's file]",
    ),
    click.option(
        "--tls-client-ca",
        metavar="FILE",
        help="Clients need a certificate that one of the authorities in this file has signed.  "
        "[default: none, and no certificate is needed]",
    ),
    click.option(
        "--tls-ca",
        metavar="FILE",
        help="The authorities of the other nodes' certificates.  [default: the system's]",
    ),
    click.option(
        "--node-user",
        metavar="NAME",
        help="The user as whom the server logs in to other nodes.  [default: its certificate's "
        "name]",
    ),
    click.option(
        "--node-password-file",
        metavar="FILE",
        help="The file with that user's password in its first line.",
    ),
    click.option(
        "--insecure-no-authentication",
        is_flag=True,
        default=None,
        help="Listen where other machines reach the server without users or encryption. Anybody "
        "there can then read and change everything.",
    ),
    click.option(
        "--node",
        metavar="NAME",
        help="The server's name in partition maps.  [default: its identity, which is the host's "
        "name unless the configuration sets it]",
    ),
    click.option(
        "--quota-bytes",
        type=int,
        metavar="BYTES",
        help="The memory quota of a bucket that is created without one, at least 1048576.  "
        "[default: 1073741824]",
    ),
    click.option(
        "--log-level",
        metavar="LEVEL",
        help="The lowest level to log: debug, info, warning or error.  [default: info]",
    ),
    click.option(
        "--log-format",
        metavar="FORM",
        help="The form of the log: console for people, json for programs.  [default: console]",
    ),
)


def with_settings(command: Any) -> Any:
    """Gives a command an option for each setting that has one. It gets their values by name, and
    `config_path`."""
    for option in reversed(_options):
        command = option(command)
    return command


with_data_dir = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    envvar="UPR_SERVER_DATA_DIR",
    default=default_data_dir,
    help="The data directory.  [default: where `serve` stores a user's data]",
)
"""Gives a command the option `--data-dir`."""
