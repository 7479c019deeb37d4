"""A change of the users, as a value that an operator sends to a node."""

from __future__ import annotations

import msgspec

from upr_protocol.users.names import UsersError
from upr_protocol.users.rights import Grant
from upr_protocol.users.user import NO_LIMITS, Limits, User, UserRole, Verifier
from upr_protocol.users.users import Users


class UserChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A change of one user, or of one role.

    Attributes:
        name: The user, or the role.
    """

    name: str

    def apply(self, users: Users) -> Users:
        """The next revision of the users.

        Raises:
            UsersError: The change is not possible.
        """
        raise NotImplementedError

    def to_json(self) -> str:
        """The change as JSON."""
        return msgspec.json.encode(self).decode()


class AddUser(UserChange, frozen=True):
    """Makes a user.

    Attributes:
        verifier: Checks the password; None for a user who shows a certificate.
        grants: What the user may do.
    """

    verifier: Verifier | None = None
    grants: tuple[Grant, ...] = ()

    def apply(self, users: Users) -> Users:
        """With one more user."""
        return users.with_user(User(self.name, self.verifier, self.grants))


class SetPassword(UserChange, frozen=True):
    """Replaces a user's password.

    Attributes:
        verifier: Checks the new password; None to have none.
    """

    verifier: Verifier | None = None

    def apply(self, users: Users) -> Users:
        """With another password."""
        return users.with_verifier(self.name, self.verifier)


class GrantRights(UserChange, frozen=True):
    """Grants rights to a user.

    Attributes:
        grants: What the user may do from now on, too.
    """

    grants: tuple[Grant, ...]

    def apply(self, users: Users) -> Users:
        """With more grants."""
        return users.granting(self.name, self.grants)


class RevokeRights(UserChange, frozen=True):
    """Takes rights from a user.

    Attributes:
        grants: What the user may not do any more.
    """

    grants: tuple[Grant, ...]

    def apply(self, users: Users) -> Users:
        """Without these grants."""
        return users.revoking(self.name, self.grants)


class SetLimits(UserChange, frozen=True):
    """Replaces a user's limits.

    Attributes:
        limits: All of them.
    """

    limits: Limits = NO_LIMITS

    def apply(self, users: Users) -> Users:
        """With other limits."""
        return users.with_limits(self.name, self.limits)


class RemoveUser(UserChange, frozen=True):
    """Removes a user."""

    def apply(self, users: Users) -> Users:
        """Without the user."""
        return users.without_user(self.name)


class AssignRoles(UserChange, frozen=True):
    """Gives roles to a user.

    Attributes:
        roles: The names of the roles.
    """

    roles: tuple[str, ...]

    def apply(self, users: Users) -> Users:
        """With more roles."""
        return users.assigning(self.name, self.roles)


class WithdrawRoles(UserChange, frozen=True):
    """Takes roles from a user.

    Attributes:
        roles: The names of the roles.
    """

    roles: tuple[str, ...]

    def apply(self, users: Users) -> Users:
        """Without these roles."""
        return users.withdrawing(self.name, self.roles)


class AddRole(UserChange, frozen=True):
    """Makes a role, which allows nothing yet."""

    def apply(self, users: Users) -> Users:
        """With one more role."""
        return users.with_role(UserRole(self.name))


class GrantToRole(UserChange, frozen=True):
    """Grants rights to a role.

    Attributes:
        grants: What each user with the role may do from now on, too.
    """

    grants: tuple[Grant, ...]

    def apply(self, users: Users) -> Users:
        """With more grants."""
        return users.granting_to_role(self.name, self.grants)


class RevokeFromRole(UserChange, frozen=True):
    """Takes rights from a role.

    Attributes:
        grants: What nobody may do any more by this role.
    """

    grants: tuple[Grant, ...]

    def apply(self, users: Users) -> Users:
        """Without these grants."""
        return users.revoking_from_role(self.name, self.grants)


class RemoveRole(UserChange, frozen=True):
    """Removes a role, and takes it from all users."""

    def apply(self, users: Users) -> Users:
        """Without the role."""
        return users.without_role(self.name)


AnyUserChange = (
    AddUser
    | SetPassword
    | GrantRights
    | RevokeRights
    | SetLimits
    | AssignRoles
    | WithdrawRoles
    | RemoveUser
    | AddRole
    | GrantToRole
    | RevokeFromRole
    | RemoveRole
)


def user_change_from_json(document: str) -> AnyUserChange:
    """The change that `to_json` made `document` of.

    Raises:
        UsersError: The document is not a change of users. The message shows nothing of a verifier.
    """
    try:
        change: AnyUserChange = msgspec.json.decode(document, type=AnyUserChange)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise UsersError(f"not a change of users: {error}") from error
    return change
