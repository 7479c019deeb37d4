"""A server that encrypts its connections."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.kit.certificates import Certificates
from upr_server.app import Server, running_server
from upr_server.config import BucketConfig, ServerConfig
from upr_server.storage.simulated import SimulatedStore


@asynccontextmanager
async def tls_server(certificates: Certificates, **settings: Any) -> AsyncIterator[Server]:
    """A server that shows the certificate of `certificates`, and has a bucket `b`."""
    settings = {**certificates.server_settings(), **settings}
    config = ServerConfig(
        listen="127.0.0.1:0", buckets=(BucketConfig("b", 4),), shutdown_deadline_s=0.5, **settings
    )
    async with running_server(config, SimulatedStore()) as server:
        yield server
