"""A fake server, and the way to it."""

from __future__ import annotations

import pytest
import trio

from tests.kit.fake_net import FakeNet
from tests.kit.fake_server import FakeServer


@pytest.fixture
def server() -> FakeServer:
    return FakeServer()


@pytest.fixture
def net(nursery: trio.Nursery, server: FakeServer) -> FakeNet:
    return FakeNet(nursery, server)
