"""The start of the server."""

from __future__ import annotations

from upr_server.startup import connections_within


def test_connections_leave_files_for_all_else() -> None:
    assert connections_within(1024) == 768
    # A server with so few serves some connections all the same.
    assert connections_within(64) == 32
