"""How each request is answered: what a client's message does to the buckets.

A handler sees one moment of the server: it answers at once, between two checkpoints, unless it
needs something from disk. Then it answers when that is there, and requests about the same partition
come after it. A handler that has much to do returns an iterator; each of its steps sees one moment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from upr_protocol.wire import (
    Await,
    ChangeUsers,
    ContinueLogIn,
    CreateBucket,
    DeleteBucket,
    Get,
    GetMap,
    GetUsers,
    Join,
    Lease,
    ListBuckets,
    ListUsers,
    Message,
    Mutate,
    NextEvents,
    Open,
    ReplicaAck,
    Seqnos,
    SeqnosAt,
    SetMap,
    StartLogIn,
    Stats,
    Stream,
)
from upr_server.net.handlers import (
    admin,
    data,
    events,
    leases,
    log_in,
    partition_map,
    publishing,
    streams,
    users,
)
from upr_server.net.request_context import Handler

HANDLERS: Final[Mapping[type[Message], Handler]] = {
    StartLogIn: log_in.start_log_in,
    ContinueLogIn: log_in.continue_log_in,
    Open: streams.open_bucket,
    Stream: streams.stream,
    ReplicaAck: streams.replica_ack,
    Mutate: publishing.mutate,
    Get: data.get,
    Seqnos: data.seqnos,
    SeqnosAt: data.seqnos_at_time,
    Await: data.await_durable,
    Lease: leases.lease,
    CreateBucket: admin.create_bucket,
    DeleteBucket: admin.delete_bucket,
    ListBuckets: admin.list_buckets,
    Stats: admin.stats,
    GetMap: partition_map.get_map,
    SetMap: partition_map.set_map,
    Join: partition_map.join,
    NextEvents: events.next_events,
    ListUsers: users.list_users,
    ChangeUsers: users.change_users,
    GetUsers: users.get_users,
}
"""By the kind of request."""
