"""What all connections of a server share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import attrs

from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.transport import new_scratch
from upr_protocol.wire import Message
from upr_server.buckets import BucketCatalog
from upr_server.net.credit import CreditShares
from upr_server.net.frame_budget import FrameBudget
from upr_server.net.partition_queue import PartitionQueues
from upr_server.net.request_context import Cluster, Events, Handler

REPLICATION_TIMEOUT_S: Final = 30.0
"""Long enough for a replica that is being started again; then the publisher is told what is so."""


@attrs.define(eq=False)
class ServerResources:
    """What all connections of a server share.

    Attributes:
        identity: The server's name for itself, told to clients.
        catalog: The buckets.
        cluster: The partition maps.
        events: The event bus; None on a server without one.
        credit_shares: Divides the bytes that publishers may send.
        handlers: How requests are answered, by their kind.
        time: Seconds since 1970.
        send_timeout_s: How long a peer may take nothing of what waits for it.
        replication_timeout_s: How long replicas may take to have a batch.
        statistics_of: The figures of a bucket, or of the server for an empty name.
        frame_budget: Memory for large frames.
        queues: Requests that wait for the disk.
        scratch: What sockets are read into.
    """

    identity: str
    catalog: BucketCatalog
    cluster: Cluster
    events: Events | None
    credit_shares: CreditShares
    handlers: Mapping[type[Message], Handler]
    time: Callable[[], float]
    statistics_of: Callable[[str], dict[str, object]]
    send_timeout_s: float = SEND_TIMEOUT_S
    replication_timeout_s: float = REPLICATION_TIMEOUT_S
    frame_budget: FrameBudget = attrs.field(factory=FrameBudget)
    queues: PartitionQueues = attrs.field(factory=PartitionQueues)
    scratch: memoryview = attrs.field(factory=new_scratch)
