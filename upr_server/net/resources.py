"""What all connections of a server share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterator
from itertools import count
from typing import Final, Protocol

import attrs

from upr_protocol.bucket_event import BucketEvent, EventFilter
from upr_protocol.concurrency import Notifier
from upr_protocol.ids import PartitionId
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_protocol.partition_map import PartitionMap
from upr_protocol.transport import new_scratch
from upr_server.buckets import BucketCatalog
from upr_server.net.connection_ends import ConnectionEnds
from upr_server.net.credit import CreditShares
from upr_server.net.frame_budget import FrameBudget
from upr_server.net.log_in import LogInResources
from upr_server.net.partition_request_queue import PartitionRequestQueues
from upr_server.net.replies import ReplySteps
from upr_server.net.step_writes import StepWrites
from upr_server.net.strangers import Strangers
from upr_server.net.turns import (
    CONNECTION_LANES,
    HANDSHAKE_LANES,
    STEP_LANES,
    TURN_CONNECTIONS,
    TURN_HANDSHAKES_S,
    TURN_READ_BYTES,
    TURN_STEPS_S,
    TURN_WRITE_BYTES,
    WRITE_LANES,
    BudgetedTurns,
    NetworkQueue,
    Turns,
)
from upr_server.runtime import AuditLog, TurnTimer, YoungObjects
from upr_server.user_store import UserStore

REPLICATION_TIMEOUT_S: Final = 30.0
"""Long enough for a replica that is being started again; then the publisher gets an answer."""


class PartitionMapProvider(Protocol):
    """The partition maps, by bucket."""

    @property
    def node(self) -> str:
        """What maps call this node."""

    def map_of(self, bucket: str) -> PartitionMap | None:
        """The bucket's map; None while this node holds it alone."""

    def revision(self, bucket: str) -> int:
        """The map's revision; 0 for none."""

    def settled_revision(self, bucket: str) -> int:
        """The revision of the map that all partitions of the bucket follow; 0 for none."""

    def replicas(self, bucket: str, partition: PartitionId) -> list[str]:
        """The nodes that replicate a partition from this one."""

    def is_replica(self, bucket: str, partition: PartitionId, name: str) -> bool:
        """Whether the node `name` replicates a partition from this one."""

    async def set_map(self, expected_revision: int, document: str) -> PartitionMap:
        """Applies a map in place of the one with `expected_revision`."""

    async def adopt_map_from(self, bucket: str, address: str) -> PartitionMap:
        """Asks another node for a bucket's map, and applies it."""

    def statistics(self, bucket: str) -> dict[str, object]:
        """Figures of a bucket."""


class EventProvider(Protocol):
    """Tells consumers what became of buckets; `EventBus` is one."""

    async def next_events(
        self,
        consumer: str,
        event_filter: EventFilter,
        *,
        timeout_s: float,
        acknowledged: int,
        wait_s: float,
        rights: Hashable = None,
    ) -> tuple[int, bool, tuple[BucketEvent, ...]]:
        """Waits for events of a consumer. With other rights than those of the question before, the
        consumer must look at everything.

        Returns:
            The batch's number, or 0 for no events; whether the consumer must look at everything;
            and what became of buckets.

        Raises:
            ServerError: `SUPERSEDED`, `LIMIT_REACHED`, `UNSUPPORTED`.
            StorageError: The events cannot be read.
        """

    def statistics(self) -> dict[str, object]:
        """The figures of the event bus."""


@attrs.define(eq=False)
class ServerResources:
    """What all connections of a server share.

    Attributes:
        identity: The server's name for itself, told to clients.
        catalog: The buckets.
        users: The users of the cluster, and what they may do.
        log_ins: How clients prove who they are.
        partition_maps: The partition maps.
        events: The event bus; None on a server without one.
        credit_shares: Divides the bytes that publishers may send.
        time: Seconds since 1970.
        send_timeout_s: How long a peer may take nothing of what waits for it.
        replication_timeout_s: How long replicas may take to have a batch.
        statistics_of: The figures of a bucket, or of the server for an empty name, in steps.
        audit_log: Where it is noted who asked for what; None for nowhere.
        turn_timer: Measures the loop, if it was started.
        young_objects: Is told of objects that are made, and live for some time.
        strangers: Connections whose clients have yet to say who they are.
        frame_budget: Memory for frames that are not whole yet.
        queues: Requests that wait for the disk.
        step_writes: Connections to write to at the end of a step.
        connection_numbers: The numbers of the next connections.
        connection_ends: Connections that are over.
        reply_steps: Connections with many replies to send.
        streams_may_begin: Notified when streams may begin of partitions of which none could.
        scratch: What sockets are read into.
        read_turns: The turns of reads of large bodies.
        write_turns: The turns of writers that have much to write.
        step_turns: The turns of connections whose requests take long.
        connection_turns: The turns of connections on which something is due that may be due on
            thousands at the same time.
        handshake_turns: The turns of encrypted connections whose handshake goes on.
        handshake_queues: Those who wait for these turns, by network.
        wait_turns: The turns of answers to those who wait for numbers.
    """

    identity: str
    catalog: BucketCatalog
    users: UserStore
    log_ins: LogInResources
    partition_maps: PartitionMapProvider
    events: EventProvider | None
    credit_shares: CreditShares
    time: Callable[[], float]
    statistics_of: Callable[[str], Generator[None, None, dict[str, object]]]
    send_timeout_s: float = SEND_TIMEOUT_S
    replication_timeout_s: float = REPLICATION_TIMEOUT_S
    audit_log: AuditLog | None = None
    turn_timer: TurnTimer = attrs.field(factory=TurnTimer)
    young_objects: YoungObjects = attrs.field(factory=YoungObjects)
    strangers: Strangers = attrs.field(factory=Strangers)
    frame_budget: FrameBudget = attrs.field(factory=FrameBudget)
    queues: PartitionRequestQueues = attrs.field(factory=PartitionRequestQueues)
    step_writes: StepWrites = attrs.field(factory=StepWrites)
    connection_numbers: Iterator[int] = attrs.field(factory=lambda: count(1))
    connection_ends: ConnectionEnds = attrs.field(factory=ConnectionEnds)
    reply_steps: ReplySteps = attrs.field(factory=ReplySteps)
    streams_may_begin: Notifier = attrs.field(factory=Notifier)
    scratch: memoryview = attrs.field(factory=new_scratch)
    read_turns: BudgetedTurns = attrs.field(
        default=attrs.Factory(
            lambda self: BudgetedTurns(self.turn_timer, TURN_READ_BYTES), takes_self=True
        )
    )
    write_turns: BudgetedTurns = attrs.field(
        default=attrs.Factory(
            lambda self: BudgetedTurns(self.turn_timer, TURN_WRITE_BYTES, WRITE_LANES),
            takes_self=True,
        )
    )
    step_turns: BudgetedTurns = attrs.field(
        default=attrs.Factory(
            lambda self: BudgetedTurns(self.turn_timer, TURN_STEPS_S, STEP_LANES), takes_self=True
        )
    )
    connection_turns: BudgetedTurns = attrs.field(
        default=attrs.Factory(
            lambda self: BudgetedTurns(self.turn_timer, TURN_CONNECTIONS, CONNECTION_LANES),
            takes_self=True,
        )
    )
    handshake_turns: BudgetedTurns = attrs.field(
        default=attrs.Factory(
            lambda self: BudgetedTurns(self.turn_timer, TURN_HANDSHAKES_S, HANDSHAKE_LANES),
            takes_self=True,
        )
    )
    handshake_queues: dict[str, NetworkQueue] = attrs.field(factory=dict)
    wait_turns: Turns = attrs.field(factory=Turns)
