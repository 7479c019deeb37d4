"""`upr user`: who may log in, and what each may do."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import Any

import click

from upr_protocol.cli.connection import ask
from upr_protocol.cli.grants import (
    GRANT_COLUMNS,
    RIGHTS_HELP,
    change_users,
    describe_grants,
    grant_arguments,
    grant_fields,
    new_grant_arguments,
    parse_name,
    user_argument,
)
from upr_protocol.cli.output import print_line, print_table
from upr_protocol.cli.parameters import TargetCommand, json_option, number_type, server_argument
from upr_protocol.cli.passwords import new_password
from upr_protocol.client import Address, read_password
from upr_protocol.limits import SCRAM_ITERATIONS_DEFAULT
from upr_protocol.scram import SALT_BYTES, new_verifier
from upr_protocol.users import (
    EVERYTHING,
    REVISION_MAX,
    AddUser,
    AssignRoles,
    Grant,
    GrantRights,
    Limits,
    RemoveUser,
    RevokeRights,
    SetLimits,
    SetPassword,
    UsersError,
    Verifier,
    WithdrawRoles,
)


@click.group()
def user() -> None:
    """Say who may log in, and what each may do.

    Nobody may do anything that was not granted. `upr-server init` makes the first user of a
    cluster. A change counts at once on the node that takes it, and on the others within about a
    second: streams that lived by a right that is revoked end.
    """


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


@user.command(cls=TargetCommand)
@server_argument
@user_argument
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
    change_users(target, AddUser(name, verifier))
    print_line(f"added user {name}; grant rights with `upr user grant`")


@user.command(cls=TargetCommand)
@server_argument
@user_argument
@_new_password_option
def password(target: Address, name: str, new_password_file: str | None) -> None:
    """Give a user another password.

    Connections that are open stay open. To end them, revoke what the user may do.
    """
    change_users(target, SetPassword(name, _new_verifier(name, new_password_file)))
    print_line(f"user {name} has another password")


@user.command(cls=TargetCommand, epilog=RIGHTS_HELP)
@server_argument
@user_argument
@new_grant_arguments
def grant(target: Address, name: str, grants: tuple[Grant, ...]) -> None:
    r"""Grant rights to a user.

    RIGHTS are one or several, with commas. BUCKETS is a bucket's name, in which each * stands for
    any characters; * alone stands for all buckets, and for the server itself.

    \b
    Examples:
      upr user grant uprs://db1:12000 bob read,write orders
      upr user grant uprs://db1:12000 ada read 'orders-*'
      upr user grant uprs://db1:12000 eve read,write orders --prefix eve/
    """
    change_users(target, GrantRights(name, grants))
    print_line(f"granted to {name}: {describe_grants(grants)}")


@user.command(cls=TargetCommand, epilog=RIGHTS_HELP)
@server_argument
@user_argument
@grant_arguments
def revoke(target: Address, name: str, grants: tuple[Grant, ...]) -> None:
    """Take rights from a user, and end the streams that lived by them.

    BUCKETS and --prefix must be the same as when they were granted. What the user's roles allow
    stays.
    """
    change_users(target, RevokeRights(name, grants))
    print_line(f"revoked from {name}: {describe_grants(grants)}")


def _roles(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[str, ...]:
    return tuple(parse_name("role", part.strip()) for part in text.split(","))


_roles_argument = click.argument("roles", metavar="ROLES", callback=_roles)


@user.command(cls=TargetCommand)
@server_argument
@user_argument
@_roles_argument
def assign(target: Address, name: str, roles: tuple[str, ...]) -> None:
    r"""Give roles to a user: the user may do what they allow.

    ROLES are one or several, with commas. `upr role` makes them.

    \b
    Examples:
      upr user assign uprs://db1:12000 bob editors,readers
    """
    change_users(target, AssignRoles(name, roles))
    print_line(f"{name} has the roles {','.join(roles)}, too")


@user.command(cls=TargetCommand)
@server_argument
@user_argument
@_roles_argument
def withdraw(target: Address, name: str, roles: tuple[str, ...]) -> None:
    """Take roles from a user, and end the streams that lived by them.

    ROLES are one or several, with commas.
    """
    change_users(target, WithdrawRoles(name, roles))
    print_line(f"{name} does not have the roles {','.join(roles)} any more")


def _limit_option(name: str, description: str) -> Callable[[Any], Any]:
    return click.option(
        name,
        type=number_type(0, REVISION_MAX),
        default=0,
        metavar="NUMBER",
        help=f"{description}; 0 for any.",
    )


@user.command(cls=TargetCommand)
@server_argument
@user_argument
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
    user_limits = Limits(**limits)
    try:
        user_limits.check()
    except UsersError as error:
        raise click.UsageError(str(error)) from error
    change_users(target, SetLimits(name, user_limits))
    print_line(
        f"the limits of {name}: {user_limits}" if str(user_limits) else f"{name} has no limits"
    )


@user.command(cls=TargetCommand)
@server_argument
@user_argument
def remove(target: Address, name: str) -> None:
    """Remove a user, and end the user's connections."""
    change_users(target, RemoveUser(name))
    print_line(f"removed user {name}")


@user.command("list", cls=TargetCommand)
@server_argument
@json_option
def list_users(target: Address, as_json: bool) -> None:
    """List the users and what each may do.

    There is one line for each grant of a user, and of each role that the user has. A user without
    any has a line without one.
    """
    listing = ask(target, lambda client: client.list_users(), bucket=False)
    roles = {role.name: role.grants for role in listing.roles}
    rows = [
        (
            info.name,
            "password" if info.has_password else "certificate",
            *row,
            str(info.limits),
        )
        for info in listing.users
        for row in [
            *((*grant_fields(grant), "") for grant in info.grants),
            *(
                (*fields, role)
                for role in info.roles
                for fields in map(grant_fields, roles.get(role, ()))
            ),
            *(("", "", "", role) for role in info.roles if not roles.get(role)),
        ]
        or [("", "", "", "")]
    ]
    columns = ("user", "logs_in_with", *GRANT_COLUMNS, "role", "limits")
    print_table(columns, rows, as_json=as_json)
    if not listing.revision:
        print_line(
            f"there are no users: everybody may do everything on {EVERYTHING}; `upr-server init` "
            "makes the first user",
            err=True,
        )
