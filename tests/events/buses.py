"""An event bus, and buckets that report to it."""

from __future__ import annotations

from itertools import count
from typing import Final

import trio

from upr_protocol.bucket_event import EventFilter
from upr_protocol.ids import HistoryId
from upr_server.engine import Buckets
from upr_server.events import EventBatch, EventBus
from upr_server.storage.simulated import SimulatedStore

ALL: Final = EventFilter()
EVERYTHING: Final = EventBatch(everything=True)


def new_bus(store: SimulatedStore | None = None, first_id: int = 1) -> EventBus:
    ids = count(first_id)
    return EventBus(
        SimulatedStore() if store is None else store,
        time=trio.current_time,
        new_id=lambda: next(ids),
    )


def buckets_of(bus: EventBus) -> Buckets:
    ids = count(1)
    return Buckets(lambda: HistoryId(next(ids)), observer=bus.producer)
