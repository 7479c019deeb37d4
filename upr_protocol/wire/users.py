"""Users and roles: listing them, changing them, and telling them to other nodes."""

from __future__ import annotations

import construct as cs

from upr_protocol.errors import Status
from upr_protocol.users import USERS_BYTES_MAX
from upr_protocol.wire.columns import octets, text
from upr_protocol.wire.message import CONTROL, Message, Role


class UsersReply(Message, frozen=True):
    """The users of the cluster, as the node has them now. Only `upr user` and nodes ask for them:
    this page does not describe their JSON."""

    opcode = 0xA8
    sender = Role.SERVER
    states = CONTROL
    body_bytes_max = 2 * USERS_BYTES_MAX
    layout = cs.Struct(
        "revision" / cs.Int64ul * "the revision of the users; 0: the cluster has none",
        "document" / text(cs.Int32ul) * "JSON, as the request says; may be empty",
    )

    revision: int
    document: str = ""


class ListUsers(Message, frozen=True):
    """Asks for the users and roles and their rights, without what proves who the users are."""

    opcode = 0x28
    sender = Role.CLIENT
    states = CONTROL
    answers = (UsersReply,)
    layout = cs.Struct()


class ChangeUsers(Message, frozen=True):
    """Changes one user, or one role. The node has the next revision on disk when it answers, with
    an empty document."""

    opcode = 0x29
    sender = Role.CLIENT
    states = CONTROL
    answers = (UsersReply,)
    refusals = (Status.BAD_ARGUMENT, Status.TEMPORARY_FAILURE)
    layout = cs.Struct("change" / text() * "the change, as JSON")

    change: str


class GetUsers(Message, frozen=True):
    """Asks for the users with what proves who they are, for another node. The document is empty if
    the asking node has the same users."""

    opcode = 0x2A
    sender = Role.CLIENT
    states = CONTROL
    answers = (UsersReply,)
    layout = cs.Struct(
        "revision" / cs.Int64ul * "the revision of the users that the asking node has; 0 for none",
        "digest" / octets(cs.Int8ul) * "SHA-256 of their JSON; empty for none",
    )

    revision: int = 0
    digest: bytes = b""
