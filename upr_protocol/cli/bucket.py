"""`upr bucket`: which buckets there are."""

from __future__ import annotations

import click

from upr_protocol.cli.connection import ask
from upr_protocol.cli.numbers import number
from upr_protocol.cli.sizes import size
from upr_protocol.cli.table import print_table
from upr_protocol.cli.target import TargetCommand, bucket_argument, server_argument
from upr_protocol.client import Address
from upr_protocol.limits import PARTITIONS_DEFAULT, PARTITIONS_MAX


@click.group()
def bucket() -> None:
    """Create, list and delete buckets.

    A bucket is a named set of items, divided into partitions by a hash of the key.
    """


@bucket.command(cls=TargetCommand)
@bucket_argument
@click.option(
    "--partitions",
    type=number(1, PARTITIONS_MAX),
    metavar="NUMBER",
    help=f"How many partitions it has, 1 to {PARTITIONS_MAX}. This is for ever. "
    f"[default: {PARTITIONS_DEFAULT}]",
)
@click.option(
    "--quota",
    type=size,
    metavar="SIZE",
    help="Memory it may take, as in 512M or 2G. [default: the server's]",
)
def create(target: Address, partitions: int | None, quota: int | None) -> None:
    r"""Make the bucket that URL names.

    \b
    Examples:
      upr bucket create upr://127.0.0.1:12000/flights
      upr bucket create upr://127.0.0.1:12000/counts --partitions 16 --quota 512M
    """
    ask(
        target,
        lambda client: client.create_bucket(target.bucket, partitions or 0, quota or 0),
        bucket=False,
    )
    click.echo(f"created {target}")


@bucket.command(cls=TargetCommand)
@bucket_argument
@click.option("--yes", is_flag=True, help="Do not ask.")
def delete(target: Address, yes: bool) -> None:
    """Delete the bucket that URL names, and all that is in it.

    Those who stream it are told so, and their streams end.
    """
    if not yes:
        click.confirm(f"Delete {target} and all that is in it?", abort=True, err=True)
    ask(target, lambda client: client.delete_bucket(target.bucket), bucket=False)
    click.echo(f"deleted {target}")


@bucket.command("list", cls=TargetCommand)
@server_argument
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def list_buckets(target: Address, as_json: bool) -> None:
    """List the buckets of the server at URL."""
    found = ask(target, lambda client: client.list_buckets(), bucket=False)
    print_table(
        ("bucket", "partitions", "quota_bytes"),
        [(info.name, info.partition_count, info.quota_bytes) for info in found],
        as_json=as_json,
    )
