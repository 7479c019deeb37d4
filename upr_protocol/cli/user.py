"""`upr user`: who may log in, and what each may do."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import click

from upr_protocol.cli.connection import ask
from upr_protocol.cli.output import print_line, print_table
from upr_protocol.cli.parameters import TargetCommand, json_option, number, server_argument
from upr_protocol.cli.passwords import new_password
from upr_protocol.client import Address, read_password
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import SALT_BYTES, new_verifier
from upr_protocol.users import (
    EVERYTHING,
    REVISION_MAX,
    AddUser,
    Grant,
    GrantRights,
    Limits,
    RemoveUser,
    RevokeRights,
    Right,
    SetLimits,
    SetPassword,
    UserChange,
    UsersError,
    Verifier,
    normalised_name,
)

_RIGHTS_HELP = """\b
Rights:
  read       read keys, stream changes, hold leases
  write      change keys, without design documents
  index      define and delete indexes: change design documents
  operate    create and delete buckets, change partition maps, read statistics
  replicate  be a node: follow partitions, exchange maps; on * also the users
  secure     change users; it is always granted on *
"""


@click.group()
def user() -> None:
    """Say who may log in, and what each may do.

    Nobody may do anything that was not granted. `upr-server init` makes the first user of a
    cluster. A change counts at once on the node that takes it, and on the others within about a
    second: streams that lived by a right that is revoked end.
    """


def _name(_ctx: click.Context, _param: click.Parameter, text: str) -> str:
    try:
        return normalised_name(text, "the user's name")
    except UsersError as error:
        raise click.BadParameter(str(error)) from error


def _rights(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[Right, ...]:
    try:
        return tuple(Right(part.strip()) for part in text.split(","))
    except ValueError:
        names = ", ".join(right.value for right in Right)
        raise click.BadParameter(
            f"{text!r} is not one of {names}, or several with commas"
        ) from None


def _grants(rights: tuple[Right, ...], pattern: str) -> tuple[Grant, ...]:
    grants = tuple(Grant(right, pattern) for right in rights)
    try:
        for grant in grants:
            grant.check()
    except UsersError as error:
        raise click.UsageError(str(error)) from error
    return grants


_name_argument = click.argument("name", metavar="NAME", callback=_name)
_rights_argument = click.argument("rights", metavar="RIGHTS", callback=_rights)
_pattern_argument = click.argument("pattern", metavar="BUCKETS")

_new_password_option = click.option(
    "--new-password-file",
    metavar="FILE",
    help="The file with the new password in its first line.  [default: asks for it]",
)


def _new_verifier(name: str, path: str | None) -> Verifier:
    """What the server keeps of a new password, which itself does not leave this process."""
    password = new_password(name, "--new-password-file") if path is None else read_password(path)
    try:
        return new_verifier(password, secrets.token_bytes(SALT_BYTES), SCRAM_ITERATIONS_DEFAULT)
    except UsersError as error:
        raise click.UsageError(str(error)) from error


def _change(target: Address, change: UserChange) -> None:
    ask(target, lambda client: client.change_users(change), bucket=False)


@user.command(cls=TargetCommand)
@server_argument
@_name_argument
@_new_password_option
@click.option(
    "--certificate-only",
    is_flag=True,
    help="The user has no password, and logs in with a certificate that has this name.",
)
def add(target: Address, name: str, new_password_file: str | None, certificate_only: bool) -> None:
    r"""Make a user, who may do nothing until something is granted.

    \b
    Examples:
      upr user add uprs://db1:12000 bob
      upr user add uprs://db1:12000 node2 --certificate-only
    """
    if certificate_only and new_password_file is not None:
        raise click.UsageError("give either --certificate-only or --new-password-file")
    verifier = None if certificate_only else _new_verifier(name, new_password_file)
    _change(target, AddUser(name, verifier))
    print_line(f"added user {name}; grant rights with `upr user grant`")


@user.command(cls=TargetCommand)
@server_argument
@_name_argument
@_new_password_option
def password(target: Address, name: str, new_password_file: str | None) -> None:
    """Give a user another password.

    Connections that are open stay open. To end them, revoke what the user may do.
    """
    _change(target, SetPassword(name, _new_verifier(name, new_password_file)))
    print_line(f"user {name} has another password")


@user.command(cls=TargetCommand, epilog=_RIGHTS_HELP)
@server_argument
@_name_argument
@_rights_argument
@_pattern_argument
def grant(target: Address, name: str, rights: tuple[Right, ...], pattern: str) -> None:
    r"""Grant rights to a user.

    RIGHTS are one or several, with commas. BUCKETS is a bucket's name, in which each * stands for
    any characters; * alone stands for all buckets, and for the server itself.

    \b
    Examples:
      upr user grant uprs://db1:12000 bob read,write orders
      upr user grant uprs://db1:12000 ada read 'orders-*'
    """
    _change(target, GrantRights(name, _grants(rights, pattern)))
    print_line(f"granted {_names(rights)} on {pattern} to {name}")


@user.command(cls=TargetCommand, epilog=_RIGHTS_HELP)
@server_argument
@_name_argument
@_rights_argument
@_pattern_argument
def revoke(target: Address, name: str, rights: tuple[Right, ...], pattern: str) -> None:
    """Take rights from a user, and end the streams that lived by them.

    BUCKETS must be the same as when they were granted.
    """
    _change(target, RevokeRights(name, _grants(rights, pattern)))
    print_line(f"revoked {_names(rights)} on {pattern} from {name}")


def _limit_option(name: str, what: str) -> Callable[[Any], Any]:
    return click.option(
        name, type=number(0, REVISION_MAX), default=0, metavar="NUMBER", help=f"{what}; 0 for any."
    )


@user.command(cls=TargetCommand)
@server_argument
@_name_argument
@_limit_option("--connections", "The most connections")
@_limit_option("--streams", "The most streams, of all connections together")
@_limit_option("--leases", "The most leases")
@_limit_option("--bytes-in", "The most bytes a second that a node reads, 1048576 or more")
@_limit_option("--bytes-out", "The most bytes a second that a node writes, 1048576 or more")
def limit(target: Address, name: str, **limits: int) -> None:
    r"""Limit what a user may have of each node at a time.

    The limits replace those from before: what is not named has none. More connections, streams and
    leases are refused; bytes wait. What is open stays open.

    \b
    Examples:
      upr user limit uprs://db1:12000 bob --connections 10 --bytes-in 10000000
      upr user limit uprs://db1:12000 bob
    """
    of_user = Limits(**limits)
    try:
        of_user.check()
    except UsersError as error:
        raise click.UsageError(str(error)) from error
    _change(target, SetLimits(name, of_user))
    print_line(f"the limits of {name}: {of_user}" if str(of_user) else f"{name} has no limits")


@user.command(cls=TargetCommand)
@server_argument
@_name_argument
def remove(target: Address, name: str) -> None:
    """Remove a user, and end the user's connections."""
    _change(target, RemoveUser(name))
    print_line(f"removed user {name}")


@user.command("list", cls=TargetCommand)
@server_argument
@json_option
def list_users(target: Address, as_json: bool) -> None:
    """List the users and what each may do.

    There is one line for each grant. A user without any has a line without one.
    """
    listing = ask(target, lambda client: client.list_users(), bucket=False)
    rows = [
        (
            *(info.name, "password" if info.has_password else "certificate", right, pattern),
            str(info.limits),
        )
        for info in listing.users
        for right, pattern in (
            [(grant.right.value, grant.pattern) for grant in info.grants] or [("", "")]
        )
    ]
    print_table(("user", "logs_in_with", "right", "buckets", "limits"), rows, as_json=as_json)
    if not listing.revision:
        print_line(
            f"there are no users: everybody may do everything on {EVERYTHING}; `upr-server init` "
            "makes the first user",
            err=True,
        )


def _names(rights: tuple[Right, ...]) -> str:
    return ",".join(right.value for right in rights)
