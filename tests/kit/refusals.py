"""Checks that each request is refused only with the statuses that it declares, which are those in
the protocol document."""

from __future__ import annotations

from typing import Final

from upr_protocol.errors import Status
from upr_protocol.wire import Message
from upr_server.net.request_context import RequestContext

_REFUSE: Final = RequestContext.refuse


def refuse(context: RequestContext, request: Message, status: Status, sentence: str) -> None:
    """Refuses a request, as `RequestContext.refuse` does.

    Raises:
        AssertionError: The request does not declare the status.
    """
    kind = type(request)
    assert not kind.answers or status in (*kind.refusals, Status.NOT_ALLOWED), (
        f"{kind.__name__} is refused with {status.name}, which it does not declare"
    )
    _REFUSE(context, request, status, sentence)
