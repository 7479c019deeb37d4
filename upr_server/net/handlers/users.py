"""Users: listing and changing them, and telling them to other nodes."""

from __future__ import annotations

from upr_protocol.errors import ServerError, Status
from upr_protocol.users import UsersError, user_change_from_json
from upr_protocol.wire import ChangeUsers, GetUsers, ListUsers, UsersReply
from upr_server.net.request_context import RequestContext


def list_users(context: RequestContext, request: ListUsers) -> None:
    """Lists the users, without what proves who they are."""
    listing = context.users.users.listing()
    context.send(UsersReply(listing.revision, listing.to_json(), opaque=request.opaque))


def change_users(context: RequestContext, request: ChangeUsers) -> None:
    """Changes a user."""
    if context.users.users.is_open:
        # Otherwise the first client that comes would own the cluster.
        raise ServerError(
            Status.BAD_ARGUMENT,
            "this cluster has no users yet: stop the server, make the first one with "
            "`upr-server init`, and start it again",
        )
    try:
        change = user_change_from_json(request.change)
    except UsersError as error:
        raise ServerError(Status.BAD_ARGUMENT, str(error)) from error

    async def apply() -> None:
        try:
            users = await context.users.apply_change(change.apply)
        except UsersError as error:
            raise ServerError(Status.BAD_ARGUMENT, str(error)) from error
        context.send(UsersReply(users.revision, opaque=request.opaque))

    context.reply_in_order(request, apply, len(request.change))


def get_users(context: RequestContext, request: GetUsers) -> None:
    """Tells another node the users, if it has others."""
    users = context.users.users
    is_same = (request.revision, request.digest) == (users.revision, context.users.digest)
    document = "" if is_same else users.to_json()
    if not is_same:
        # Nodes ask every half second, and nearly always have the same.
        context.access.note_told_users(request)
    context.send(UsersReply(users.revision, document, opaque=request.opaque))
