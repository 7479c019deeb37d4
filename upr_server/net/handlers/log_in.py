"""The log-in."""

from __future__ import annotations

from upr_protocol.wire import ContinueLogIn, StartLogIn
from upr_server.net.request_context import RequestContext


def start_log_in(context: RequestContext, request: StartLogIn) -> None:
    """Starts the log-in."""
    context.log_in.begin(request)


def continue_log_in(context: RequestContext, request: ContinueLogIn) -> None:
    """Checks what the client proves, and ends the log-in."""
    context.log_in.check_response(request)
