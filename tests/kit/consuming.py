"""Helpers for tests of consumers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TypeVar

from tests.kit.fake_server import FakeServer
from tests.kit.mirror import Mirror
from upr_protocol.client import (
    Consumer,
    CycleCompleted,
    Event,
)

T = TypeVar("T")


async def until_completed(events: AsyncIterator[T]) -> list[T]:
    """The events up to the first `CycleCompleted`."""
    received: list[T] = []
    async for event in events:
        received.append(event)
        if isinstance(event, CycleCompleted):
            break
    return received


def fill_one_partition(server: FakeServer, count: int, value: bytes = b"v") -> None:
    """Removes all partitions but one from the server, and puts the keys `0`, `1`, … into it."""
    server.partitions = server.partitions[:1]
    for index in range(count):
        server.put(b"%d" % index, value)


async def follow(consumer: Consumer, mirror: Mirror) -> None:
    async for event in consumer:
        mirror.apply(event)


async def until(consumer: Consumer, kind: type[Event]) -> list[Event]:
    events: list[Event] = []
    async for event in consumer:
        events.append(event)
        if isinstance(event, kind):
            break
    return events
