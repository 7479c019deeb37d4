"""The command `upr-indexer`."""

from __future__ import annotations

import faulthandler
import os
import sys
from pathlib import Path
from typing import Any, Final

import click
import trio

from upr_protocol.concurrency import first_failure
from upr_protocol.errors import UprError
from upr_server.indexer.app import serve
from upr_server.indexer.config import load_config
from upr_server.indexer.indexer import SWITCH_INTERVAL_S
from upr_server.runtime import (
    SHORT_SLICE_S,
    ConfigError,
    collect_rarely,
    keep_heap_small,
    raise_file_limit,
    set_time_slice,
    set_up_logging,
)

EXIT_FAILED: Final = 1


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="upr-server", prog_name="upr-indexer")
@click.argument("bucket", metavar="URL", required=False)
@click.option(
    "--config",
    "config_path",
    type=click.Path(path_type=Path),
    envvar="UPR_INDEXER_CONFIG",
    help="A TOML file with settings.",
)
@click.option(
    "--ca",
    metavar="FILE",
    help="For uprs://: the authorities that may have signed the server's certificate.  [default: "
    "those that the system trusts]",
)
@click.option("--cert", metavar="FILE", help="For uprs://: the indexer's own certificate.")
@click.option(
    "--cert-key",
    metavar="FILE",
    help="The key of --cert.  [default: in the same file]",
)
@click.option(
    "--user",
    metavar="NAME",
    help="The user as whom the indexer logs in to the server.  [default: its certificate's name]",
)
@click.option(
    "--password-file",
    metavar="FILE",
    help="The file with that user's password in its first line.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where to answer over HTTP; port 0 takes a free one.  [default: 127.0.0.1:12080]",
)
@click.option(
    "--tls-certificate",
    metavar="FILE",
    help="The certificate to answer over HTTPS with.  [default: none, HTTP in the clear]",
)
@click.option(
    "--tls-key",
    metavar="FILE",
    help="The key of --tls-certificate.  [default: in the certificate's file]",
)
@click.option(
    "--tls-client-ca",
    metavar="FILE",
    help="Clients need a certificate that one of the authorities in this file has signed.  "
    "[default: none, and no certificate is needed]",
)
@click.option(
    "--tls-client-certificates",
    type=click.Choice(["required", "optional"]),
    help="Whether clients need a certificate, with --tls-client-ca.  [default: required]",
)
@click.option(
    "--tls-ca",
    metavar="FILE",
    help="The authorities of the other nodes' certificates.  [default: those that the system "
    "trusts]",
)
@click.option(
    "--tls-version-min",
    type=click.Choice(["1.2", "1.3"]),
    help="The oldest version of TLS, in both directions.  [default: 1.3]",
)
@click.option(
    "--insecure-no-authentication",
    is_flag=True,
    default=None,
    help="Answer everybody, whether the server has users or not, and also where other machines "
    "reach the indexer. Anybody there can then scan all indexes.",
)
@click.option(
    "--data-dir",
    metavar="DIR",
    help="Where indexes are kept; made when missing.  [default: the platform's data directory]",
)
@click.option(
    "--pool-bytes",
    type=int,
    metavar="BYTES",
    help="Memory for changes that wait to be indexed, and for scans.  [default: 30 % of the "
    "machine's]",
)
@click.option(
    "--queues",
    type=int,
    help="Among how many queues partitions are divided.  [default: 8]",
)
@click.option(
    "--workers",
    type=int,
    help="How many processes keep the indexes, each a slice of them. Another number builds the "
    "indexes again.  [default: one a core, at most 4]",
)
@click.option(
    "--worker-niceness",
    type=int,
    help="By how much workers are nicer than the process that answers scans, up to 19.  [default: "
    "0]",
)
@click.option(
    "--nodes",
    metavar="URL,URL…",
    help="Where each node answers, if several nodes keep the indexes; the same at each node, in "
    "the same order.  [default: this one is alone]",
)
@click.option(
    "--node",
    metavar="PLACE|URL",
    help="Which of --nodes this is: its place, from 0, or its URL.  [default: the one with the "
    "host and port of --listen]",
)
@click.option(
    "--slices",
    type=int,
    help="How many slices the indexes have on all nodes; the same at each node.  [default: one a "
    "node]",
)
@click.option(
    "--replicas",
    type=int,
    help="How many copies each slice has beside the first, 0 to 2; the same at each node.  "
    "[default: 0]",
)
@click.option(
    "--links-max",
    type=int,
    help="How many links other nodes may have to this one, half of them from one host.  [default: "
    "four times as many as they need]",
)
@click.option(
    "--undo-mutations",
    type=int,
    metavar="NUMBER",
    help="If the server loses changes, each slice can undo those of so many documents, the ones "
    "that changed last. Beyond that it indexes the partition again.  [default: 200000]",
)
@click.option(
    "--log-level",
    metavar="LEVEL",
    help="The lowest level to log: debug, info, warning or error.  [default: info]",
)
@click.option(
    "--log-format",
    metavar="FORM",
    help="The form of the log: console for people, json for programs.  [default: console]",
)
def main(config_path: Path | None, **options: Any) -> None:
    """Keep the indexes of the bucket that URL names, upr://HOST:PORT/BUCKET, and answer scans.

    Settings come from a TOML file (--config), then from environment variables (UPR_INDEXER_LISTEN
    and so on), then from options; each overrides the one before. It runs until Ctrl-C or SIGTERM; a
    second one ends it at once.

    The first line on standard output is `listening on http://HOST:PORT`, or https://, with
    --tls-certificate; the log goes to standard error. `upr index` makes indexes and asks them.
    """
    try:
        config = load_config(config_path, os.environ, options)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    set_up_logging(config.log_level, config.log_format)
    # A crash in C tells its place on standard error.
    faulthandler.enable(2)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_heap_small()
    raise_file_limit()
    # Where processors are scarce, a scan comes before what works for long.
    set_time_slice(SHORT_SLICE_S)
    # The received keys and the documents of a round are many objects, none of them in a cycle.
    collect_rarely()
    try:
        trio.run(serve, config, lambda url: print(f"listening on {url}", flush=True))
    except* (UprError, OSError) as errors:
        click.echo(f"upr-indexer: {first_failure(errors)}", err=True)
        sys.exit(EXIT_FAILED)
