"""The log-in."""

from __future__ import annotations

from upr_protocol.wire import ContinueLogIn, StartLogIn
from upr_server.net.request_context import RequestContext


def log_in(context: RequestContext, request: StartLogIn) -> None:
    """Begins the log-in."""
    context.log_in.begin(request)


def log_in_response(context: RequestContext, response: ContinueLogIn) -> None:
    """Ends it."""
    context.log_in.check_response(response)
