"""`upr role`: names for what several users may do."""

from __future__ import annotations

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
    role_argument,
)
from upr_protocol.cli.output import print_line, print_table
from upr_protocol.cli.parameters import TargetCommand, json_option, server_argument
from upr_protocol.client import Address
from upr_protocol.users import AddRole, Grant, GrantToRole, RemoveRole, RevokeFromRole


@click.group()
def role() -> None:
    """Say what the users of a role may do.

    A role has rights, as a user has. A user who has the role may do what it allows: give it with
    `upr user assign`. A change counts as quickly as one of a user does.
    """


@role.command(cls=TargetCommand)
@server_argument
@role_argument
def add(target: Address, name: str) -> None:
    r"""Make a role, which allows nothing until something is granted.

    \b
    Examples:
      upr role add uprs://db1:12000 editors
    """
    change_users(target, AddRole(name))
    print_line(f"added role {name}; grant rights with `upr role grant`")


@role.command(cls=TargetCommand, epilog=RIGHTS_HELP)
@server_argument
@role_argument
@new_grant_arguments
def grant(target: Address, name: str, grants: tuple[Grant, ...]) -> None:
    r"""Grant rights to all who have a role.

    The arguments are those of `upr user grant`.

    \b
    Examples:
      upr role grant uprs://db1:12000 editors read,write 'orders-*'
    """
    change_users(target, GrantToRole(name, grants))
    print_line(f"granted to the role {name}: {describe_grants(grants)}")


@role.command(cls=TargetCommand, epilog=RIGHTS_HELP)
@server_argument
@role_argument
@grant_arguments
def revoke(target: Address, name: str, grants: tuple[Grant, ...]) -> None:
    """Take rights from a role, and end the streams that lived by them.

    BUCKETS and --prefix must be the same as when they were granted.
    """
    change_users(target, RevokeFromRole(name, grants))
    print_line(f"revoked from the role {name}: {describe_grants(grants)}")


@role.command(cls=TargetCommand)
@server_argument
@role_argument
def remove(target: Address, name: str) -> None:
    """Remove a role, and take it from all users."""
    change_users(target, RemoveRole(name))
    print_line(f"removed role {name}")


@role.command("list", cls=TargetCommand)
@server_argument
@json_option
def list_roles(target: Address, as_json: bool) -> None:
    """List the roles and what each allows.

    There is one line for each grant. A role without any has a line without one.
    """
    listing = ask(target, lambda client: client.list_users(), bucket=False)
    rows = [
        (info.name, *fields)
        for info in listing.roles
        for fields in [*map(grant_fields, info.grants)] or [("", "", "")]
    ]
    print_table(("role", *GRANT_COLUMNS), rows, as_json=as_json)
