"""Bugs in who may do what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from tests.simulation.bugs.patch import replaced
from tests.simulation.bugs.planted_bug import planted
from tests.simulation.profiles import HOSTILE_NODE
from upr_protocol.wire import Stream
from upr_server.net.access import Access


@planted(HOSTILE_NODE)
def allow_everything() -> Iterator[None]:
    """A node does not check what a client may do."""
    with replaced(Access, "check_message", lambda _self, _message, **_: None):
        yield


@planted(HOSTILE_NODE)
def stream_to_any_replica() -> Iterator[None]:
    """The streams of replicas need the right to read, as all others do."""
    check: Any = Access.check_message

    def check_as_consumer(self: Access, message: Any, **options: Any) -> None:
        if isinstance(message, Stream):
            message = replace(message, with_answers=False)
        check(self, message, **options)

    with replaced(Access, "check_message", check_as_consumer):
        yield


@planted(HOSTILE_NODE)
def write_any_key() -> Iterator[None]:
    """A user who may write some keys of a bucket may write all of them."""
    with replaced(Access, "check_changed_keys", lambda _self, _message: None):
        yield


BUGS = (allow_everything, stream_to_any_replica, write_any_key)
