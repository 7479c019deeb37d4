"""The connections of a server: accepted up to a limit, counted, and ended."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Final

import structlog
import trio

from upr_protocol.errors import Status, TlsError
from upr_protocol.ids import PartitionId
from upr_protocol.limits import HANDSHAKE_TIMEOUT_S
from upr_protocol.transport import TlsStream, allow_unsent_bytes
from upr_protocol.wire import Message
from upr_server.buckets import BucketCatalog, Upkeep
from upr_server.engine import Bucket, Partition
from upr_server.net.connection import AcceptedConnection
from upr_server.net.credit import CreditShares
from upr_server.net.log_in import LogInResources
from upr_server.net.request_context import Handler
from upr_server.net.resources import EventProvider, PartitionMapProvider, ServerResources
from upr_server.net.streamer import streams_in_steps
from upr_server.net.turns import SLICE_S, NetworkTurns
from upr_server.runtime import AuditLog, Certificates, network_of, sums_in_steps
from upr_server.user_store import UserStore

CONNECTIONS_TOLD_MAX: Final = 1000
BUCKETS_TOLD_MAX: Final = 1000
"""How many connections and buckets the server's statistics tell of. With identities and names of
the longest kind that is 2 MiB of JSON, and 8 MiB fit a `StatsReply`. The statistics say how many
were left out; those of a bucket are to be had by its name."""

STEP_CONNECTIONS: Final = 128
"""Connections that one step of the statistics tells of: below a millisecond."""

CONNECTION_BYTES: Final = 32 * 1024
STREAM_BYTES: Final = 1300
"""What an idle connection takes, and each of its streams, about."""

REFUSALS_MAX: Final = 100
"""Connections beyond the limit that get an error at a time; the others are just closed."""

log = structlog.get_logger(__name__)


class ConnectionServer:
    """Serves the connections of one server.

    Args:
        catalog: The buckets.
        users: The users of the cluster, and what they may do.
        upkeep: Works on the buckets.
        partition_maps: The partition maps.
        events: The event bus; None on a server without one.
        handlers: How requests are answered, by their kind.
        identity: The server's name for itself, told to clients.
        time: Seconds since 1970.
        connections_max: Connections at a time; one more is refused at once. So are those of a
            network that has too many of strangers.
        send_timeout_s: How long a peer may take nothing of what waits for it.
        replication_timeout_s: How long replicas may take to have a batch.
        certificates: Encrypts connections; None for connections in the clear.
        audit_log: Where it is noted who asked for what; None for nowhere.

    Attributes:
        connections: The connections that are open.
        resources: What they share.
        handlers: How requests are answered, by their kind.
    """

    def __init__(
        self,
        catalog: BucketCatalog,
        users: UserStore,
        upkeep: Upkeep,
        partition_maps: PartitionMapProvider,
        events: EventProvider | None,
        handlers: Mapping[type[Message], Handler],
        *,
        identity: str,
        time: Callable[[], float],
        connections_max: int,
        send_timeout_s: float,
        replication_timeout_s: float,
        certificates: Certificates | None = None,
        audit_log: AuditLog | None = None,
    ) -> None:
        self.connections: dict[AcceptedConnection, None] = {}
        self.resources = ServerResources(
            identity,
            catalog,
            users,
            LogInResources(users),
            partition_maps,
            events,
            CreditShares(upkeep),
            time,
            self.statistics,
            send_timeout_s,
            replication_timeout_s,
            audit_log,
        )
        self.handlers = handlers
        self._connections_max = connections_max
        self._certificates = certificates
        self._refused_count = 0
        self._being_refused = 0
        self._started_at = trio.current_time()
        catalog.call_on_delete(self._leave_bucket)
        catalog.call_on_damage(self._end_damaged)
        users.call_on_change(self._apply_rights)
        upkeep.count_memory(self._memory_bytes)

    async def serve(self, stream: trio.abc.HalfCloseableStream) -> None:
        """Serves one connection until it ends; what goes wrong in it stays in it."""
        peer = _peer_of(stream)
        try:
            await self._serve(stream, peer)
        except Exception:
            # A fault of ours must not take the other connections with it.
            log.exception("connection failed", peer=peer)

    async def _serve(self, stream: trio.abc.HalfCloseableStream, peer: str) -> None:
        allow_unsent_bytes(stream)
        if self._certificates is not None:
            turns, queues = self.resources.handshake_turns, self.resources.handshake_queues
            stream = self._certificates.encrypt_stream(
                stream, NetworkTurns(turns, queues, network_of(peer))
            )
        connection = self.new_connection(stream, peer)
        if reason := self._reason_to_refuse(connection.network):
            await self._refuse(connection, stream, reason)
            return
        self.connections[connection] = None
        self.resources.strangers.add(connection, connection.network)
        try:
            await connection.run()
        finally:
            self.connections.pop(connection, None)
            self.resources.strangers.discard(connection)
            connection.context.credit.close()

    def _reason_to_refuse(self, network: str) -> str:
        """Why there may not be another connection from a network; empty if there may. O(1).

        The strangers of a network leave as many places as they take. So nobody takes them all, and
        of those who come after, each leaves some to the next. Many clients of one network may come
        together: each is a stranger for a moment.
        """
        count = len(self.connections)
        if count >= self._connections_max:
            return f"there are {count} connections already"
        stranger_count = self.resources.strangers.count_of(network)
        free_count = self._connections_max - count
        if stranger_count > free_count:
            return (
                f"there are {stranger_count} connections from {network} already whose clients have "
                f"not said who they are, and {free_count} more may be open"
            )
        return ""

    def new_connection(self, stream: trio.abc.HalfCloseableStream, peer: str) -> AcceptedConnection:
        """A connection that is not served yet."""
        return AcceptedConnection(self.resources, self.handlers, stream, peer)

    async def _refuse(
        self, connection: AcceptedConnection, stream: trio.abc.HalfCloseableStream, reason: str
    ) -> None:
        self._refused_count += 1
        log.warning("too many connections; refusing one", peer=connection.peer, reason=reason)
        if self._being_refused >= REFUSALS_MAX:
            await trio.aclose_forcefully(stream)
            return
        connection.session.fail(Status.TOO_MANY, reason)
        self._being_refused += 1
        try:
            await self._shake_hands(stream)
            await connection.run()
        finally:
            self._being_refused -= 1

    async def _shake_hands(self, stream: trio.abc.HalfCloseableStream) -> None:
        """Completes the TLS handshake of an encrypted connection: no error can be sent before."""
        if isinstance(stream, TlsStream):
            with (
                suppress(TlsError, trio.BrokenResourceError, trio.TooSlowError),
                trio.move_on_after(HANDSHAKE_TIMEOUT_S),
            ):
                await stream.handshake()

    def end_streams(
        self,
        bucket: Bucket,
        partitions: Container[PartitionId],
        status: Status,
        *,
        of_replicas: bool = True,
    ) -> Iterator[None]:
        """Ends the streams of some partitions with `status`, those of replicas if `of_replicas`. In
        steps, between which others may have their turn."""

        def streams() -> Iterator[None]:
            for connection in list(self.connections):
                if connection.context.bucket is bucket:
                    yield from connection.context.streamer.end_each(
                        status, partitions, of_replicas=of_replicas
                    )
                    connection.wake()
                yield

        return streams_in_steps(streams())

    def _end_damaged(
        self, bucket: Bucket, partition: Partition, is_on_disk: bool
    ) -> Iterator[None]:
        # Replicas go on where they take what this node has in memory only. A consumer's barrier
        # must not come back from here once another node is active.
        status = Status.STATE_CHANGED
        return self.end_streams(bucket, {partition.id}, status, of_replicas=is_on_disk)

    def _leave_bucket(self, bucket: Bucket) -> Iterator[None]:
        # No connection can open the bucket any more. Until its step comes, a connection goes on as
        # before.
        for connection in list(self.connections):
            if connection.context.bucket is bucket:
                yield from connection.context.leave_bucket()
                yield
        self.resources.credit_shares.remove_bucket(bucket)
        self.resources.queues.remove_bucket(bucket)
        self.resources.log_ins.usages.forget_bucket(bucket.name)

    def _apply_rights(self) -> Iterator[None]:
        # Nobody may begin anything more, from the first step on: see `Access.rights`.
        began = trio.current_time()
        for connection in list(self.connections):
            if trio.current_time() - began > SLICE_S:
                yield
                began = trio.current_time()
            if connection.loses_rights():
                yield from connection.end_revoked()

    def _memory_bytes(self) -> Iterator[int]:
        """What the connections hold, about, in parts."""
        yield self.resources.frame_budget.used_bytes
        yield from sums_in_steps(
            self.connections,
            lambda connection: CONNECTION_BYTES + STREAM_BYTES * len(connection.session.streams),
        )

    def shut_down(self) -> Iterator[None]:
        """Ends every connection with a reason; each closes once its peer took what is queued. In
        steps, between which others may have their turn."""
        for connection in list(self.connections):
            yield from connection.shut_down()
            yield

    def statistics(self, bucket_name: str = "") -> Generator[None, None, dict[str, object]]:
        """The figures of a bucket, or of the server; sizes in bytes, times in seconds. In steps,
        between which others may have their turn.

        Raises:
            ServerError: There is no such bucket.
        """
        if bucket_name:
            return (yield from self._bucket_statistics(bucket_name))
        resources, catalog = self.resources, self.resources.catalog
        figures: dict[str, object] = {
            "server": self._server_figures(),
            "buckets_left_out": max(0, len(catalog.buckets) - BUCKETS_TOLD_MAX),
            "damaged_buckets": dict(islice(catalog.damaged.items(), BUCKETS_TOLD_MAX)),
            "events": {} if resources.events is None else resources.events.statistics(),
            "connections_left_out": max(0, len(self.connections) - CONNECTIONS_TOLD_MAX),
        }
        buckets: dict[str, object] = {}
        for bucket in list(islice(catalog.buckets, BUCKETS_TOLD_MAX)):
            if bucket in catalog.disks:
                buckets[bucket.name] = {
                    **bucket.statistics(),
                    **catalog.disks[bucket].statistics(),
                }
                yield
        connections: list[object] = []
        for connection in list(islice(self.connections, CONNECTIONS_TOLD_MAX)):
            connections.append(connection.statistics())
            if len(connections) % STEP_CONNECTIONS == 0:
                yield
        return {**figures, "buckets": buckets, "connections": connections}

    def _bucket_statistics(self, name: str) -> Generator[None, None, dict[str, object]]:
        resources, catalog = self.resources, self.resources.catalog
        bucket = catalog.bucket(name)
        disk = catalog.disks[bucket]
        book = disk.leases
        # All but the lists' rows is read first: the bucket may be deleted between the steps.
        figures = {
            "bucket": name,
            **bucket.statistics(),
            **disk.statistics(),
            **resources.partition_maps.statistics(name),
        }
        leases = book.statistics()
        lease_rows, consumer_rows = book.list_held(), book.list_consumers()
        leases["leases"] = yield from lease_rows
        leases["consumers"] = yield from consumer_rows
        return {**figures, "leases": leases}

    def _server_figures(self) -> dict[str, object]:
        resources = self.resources
        failures, turn_timer = resources.log_ins.failures, resources.turn_timer
        audit_log = resources.audit_log
        return {
            "identity": resources.identity,
            "uptime_s": trio.current_time() - self._started_at,
            "connections": len(self.connections),
            "connections_refused": self._refused_count,
            "audit_lines_lost": 0 if audit_log is None else audit_log.lost_lines,
            "log_ins_failed": failures.failure_count,
            "log_ins_refused": failures.refusal_count,
            "longest_turn_s": round(turn_timer.longest_turn_s, 6),
            "longest_step_s": round(turn_timer.longest_step_s, 6),
            "longest_step_task": turn_timer.longest_step_task,
            "frame_bytes_under_way": resources.frame_budget.used_bytes,
            "frames_dropped": resources.frame_budget.dropped_count,
        }


def _peer_of(stream: trio.abc.HalfCloseableStream) -> str:
    if not isinstance(stream, trio.SocketStream):
        return "no socket"
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
