"""`upr bucket`, `upr leases` and `upr stats`: what a server holds."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import click
import msgspec

from upr_protocol.cli.connection import ask, command_identity
from upr_protocol.cli.output import print_json, print_line, print_table
from upr_protocol.cli.parameters import (
    TargetCommand,
    bucket_argument,
    json_option,
    number_type,
    parse_size,
    server_argument,
)
from upr_protocol.client import Address, Client
from upr_protocol.client.operator import (
    NotDoneError,
    Operator,
    active_partitions_of,
    partitions_text,
)
from upr_protocol.errors import RemoteProtocolError, ServerError
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
    type=number_type(1, PARTITIONS_MAX),
    metavar="NUMBER",
    help=f"How many partitions the bucket has, 1 to {PARTITIONS_MAX}. It cannot be changed later. "
    f"[default: {PARTITIONS_DEFAULT}]",
)
@click.option(
    "--quota",
    type=parse_size,
    metavar="SIZE",
    help="How much memory the bucket may use, as in 512M or 2G. [default: the server's]",
)
def create(target: Address, partitions: int | None, quota: int | None) -> None:
    r"""Create the bucket that URL names.

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
    print_line(f"created {target}")


@bucket.command(cls=TargetCommand)
@bucket_argument
@click.option("--yes", is_flag=True, help="Delete without asking.")
@click.option(
    "--force",
    is_flag=True,
    help="Delete the copy on this node even if it is active for partitions that other nodes hold.",
)
def delete(target: Address, yes: bool, force: bool) -> None:
    """Delete the bucket that URL names, with all its items.

    Consumers of the bucket are told, and their streams end. Of several nodes that hold the bucket,
    only the one that URL names deletes it. If this node is active for partitions, the command
    refuses: no node would accept writes, and what only this node has would be lost. Move the
    partitions first, with `upr takeover`. To delete the bucket on all nodes, run the command with
    the URL of each node, and --force.
    """
    if not force:
        name = command_identity("bucket-delete")
        ask(target, lambda _: _check_not_active(Operator(target, name)), bucket=False)
    if not yes:
        _confirm_deletion(target)
    ask(target, lambda client: client.delete_bucket(target.bucket), bucket=False)
    print_line(f"deleted {target}")


def _confirm_deletion(target: Address) -> None:
    try:
        click.confirm(f"Delete {target} and all its items?", abort=True, err=True)
    except click.Abort as error:
        if isinstance(error.__context__, EOFError):
            raise click.UsageError(
                "nobody has answered: say --yes, which deletes without asking"
            ) from None
        raise


async def _check_not_active(operator: Operator) -> None:
    """Refuses to delete the copy of a node that is active by the bucket's map, which names others.

    Raises:
        NotDoneError: The node is active, or was the last to be so.
    """
    try:
        report = await operator.first_report()
    except ServerError:
        # There is nothing that could be active: the bucket does not exist, or is damaged.
        return
    if report.map is None or len(report.map.nodes) == 1:
        return
    active_partitions = active_partitions_of(report.map, report.name)
    if active_partitions:
        raise NotDoneError(
            f"{report.name} is active for {partitions_text(active_partitions)}: let another node "
            "take over first, with `upr takeover`; or if you delete the bucket on all its nodes, "
            "say --force"
        )


@bucket.command("list", cls=TargetCommand)
@server_argument
@json_option
def list_buckets(target: Address, as_json: bool) -> None:
    """List the buckets of the server at URL."""
    buckets = ask(target, lambda client: client.list_buckets(), bucket=False)
    print_table(
        ("bucket", "partitions", "quota_bytes"),
        [(info.name, info.partition_count, info.quota_bytes) for info in buckets],
        as_json=as_json,
    )


@click.group()
def leases() -> None:
    """List and release leases.

    A lease keeps a range of changes readable for a reader that takes its time, such as a backup.
    The range takes room on the disk until the lease ends: when its owner releases it, or no longer
    renews it.
    """


@leases.command("list", cls=TargetCommand)
@bucket_argument
@json_option
def list_leases(target: Address, as_json: bool) -> None:
    """List the leases on the bucket that URL names.

    `numbers` counts the sequence numbers that a lease holds, over all its partitions.
    """

    async def lease_rows_there(client: Client) -> list[LeaseRow]:
        return lease_rows(await client.stats(target.bucket))

    rows = ask(target, lease_rows_there, bucket=False)
    print_table(
        LeaseRow.__struct_fields__, [msgspec.structs.astuple(row) for row in rows], as_json=as_json
    )


class LeaseRow(msgspec.Struct, frozen=True):
    """A lease as the statistics of its bucket list it.

    Attributes:
        id: Its ID, in hexadecimal digits.
        owner: Who has it.
        partitions: How many partitions it names.
        numbers: How many sequence numbers it holds.
        time_to_live_s: For how long it is renewed, in seconds.
        expires_in_s: When it expires, in seconds from now.
    """

    id: str
    owner: str
    partitions: int
    numbers: int
    time_to_live_s: float
    expires_in_s: float


class _Leases(msgspec.Struct):
    leases: list[LeaseRow]


class _BucketStatistics(msgspec.Struct):
    leases: _Leases


def lease_rows(statistics: dict[str, Any]) -> list[LeaseRow]:
    """The leases that a bucket's statistics list.

    Raises:
        RemoteProtocolError: They list none: the server is another program, or has another version.
    """
    try:
        return msgspec.convert(statistics, _BucketStatistics).leases.leases
    except msgspec.ValidationError:
        raise RemoteProtocolError("the server's statistics have no list of leases") from None


def _lease_number(lease_id: str) -> int:
    """The number that a lease's ID stands for."""
    with suppress(ValueError):
        number = int(lease_id, 16)
        if 0 <= number < 1 << 64:
            return number
    raise click.UsageError(f"{lease_id!r} is not a lease's ID: see `upr leases list`")


@leases.command(cls=TargetCommand)
@bucket_argument
@click.argument("lease_id", metavar="ID")
def release(target: Address, lease_id: str) -> None:
    """End the lease with this ID, as `upr leases list` prints it.

    Its owner may find that the changes it was reading are gone.
    """
    number = _lease_number(lease_id)
    ask(target, lambda client: client.release_lease(number))
    print_line(f"released {lease_id}")


@click.command(cls=TargetCommand)
@server_argument
def stats(target: Address) -> None:
    r"""Print statistics as JSON.

    They are the bucket's if URL names one, otherwise the server's. Sizes are in bytes, times in
    seconds.

    \b
    Examples:
      upr stats upr://127.0.0.1:12000
      upr stats upr://127.0.0.1:12000/flights
    """
    statistics = ask(target, lambda client: client.stats(target.bucket), bucket=False)
    print_json(statistics, indent=2)
