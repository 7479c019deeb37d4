"""The event bus: which buckets changed, not what changed in them.

Consumers come and go, and may die at any time. So no event is ever queued: for each consumer and
bucket there is one number, which counts (`packed_counter`). The reasons are in
docs/adr/0017-event-queues-in-memory.md.
"""

from upr_server.events.bus import EventBus
from upr_server.events.queues import EventBatch

__all__ = ["EventBatch", "EventBus"]
