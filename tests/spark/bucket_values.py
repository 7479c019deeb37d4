"""The values that a bucket holds, read without Spark."""

from __future__ import annotations

from tests.kit.mirror import Mirror
from upr_protocol.client import BlockingConsumer


def contents(url: str) -> dict[bytes, bytes]:
    """Every item of a bucket."""
    mirror = Mirror()
    with BlockingConsumer(url, end="now") as consumer:
        for event in consumer:
            mirror.apply(event)
    return mirror.contents
