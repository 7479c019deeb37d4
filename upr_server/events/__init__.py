"""The event bus: who changed, not what changed (seed 004).

Consumers come and go, and may die at any time. So nothing is queued: for each consumer and bucket
there is one number, which atomic operations change (`counter`), in a store that could be one of a
whole cluster (`store`). See docs/adr/0012-the-event-bus.md.
"""

from upr_server.events.bus import EventBus
from upr_server.events.consumer import News
from upr_server.events.disk_store import DiskStore
from upr_server.events.memory_store import MemoryStore
from upr_server.events.store import EventStore

__all__ = ["DiskStore", "EventBus", "EventStore", "MemoryStore", "News"]
