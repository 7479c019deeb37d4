"""The server that indexer processes follow."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cli.processes import start_server
from upr_protocol.client import BlockingClient


@pytest.fixture
def url() -> Iterator[str]:
    """The URL of a bucket of 8 partitions of a new server."""
    with start_server() as server:
        with BlockingClient(server.url) as client:
            client.create_bucket("b", 8)
        yield f"{server.url}b"
