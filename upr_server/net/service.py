"""What all connections share: the buckets, and the upkeep between requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import structlog
import trio

from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import HistoryId
from upr_protocol.limits import SEND_TIMEOUT_S
from upr_server.engine import Bucket, Buckets
from upr_server.net.budget import FrameBudget
from upr_server.net.connection import Connection
from upr_server.net.credit import CreditShares

COLLAPSE_MUTATIONS: Final = 2000
"""Mutations that one step of collapsing goes through: about a millisecond of the loop."""

EXPIRY_INTERVAL_S: Final = 1.0
"""How often expired items are turned into deletions; a read says missing at once in any case."""

REFUSALS_MAX: Final = 100
"""Connections beyond the limit that are told so at a time; the others are just closed."""

log = structlog.get_logger(__name__)


class Service:
    """The buckets of one server and the connections that use them.

    Args:
        identity: The server's name for itself, told to clients.
        quota_bytes_default: The memory quota of a bucket that is created without one.
        time: Seconds since 1970.
        new_history_id: Makes a random non-zero 64-bit number.
        connections_max: Connections at a time; one more is refused at once.
        send_timeout_s: How long a peer may take nothing of what waits for it.
    """

    def __init__(
        self,
        *,
        identity: str,
        quota_bytes_default: int,
        time: Callable[[], float],
        new_history_id: Callable[[], HistoryId],
        connections_max: int,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self.identity = identity
        self.quota_bytes_default = quota_bytes_default
        self.time = time
        self.buckets = Buckets(new_history_id, self._is_collapsible)
        self.connections: set[Connection] = set()
        self.frame_budget = FrameBudget()
        self.credit_shares = CreditShares()
        self.send_timeout_s = send_timeout_s
        self._connections_max = connections_max
        self._refused = 0
        self._being_refused = 0
        self._waiting_for_room: set[Connection] = set()
        # Buckets with something to collapse; a dict, so that they take turns.
        self._collapsible: dict[Bucket, None] = {}
        self._collapse_wanted = trio.Event()
        self._started_at = trio.current_time()

    async def serve(self, stream: trio.SocketStream) -> None:
        """Serves one connection until it ends; what goes wrong in it stays in it."""
        connection = Connection(self, stream, _peer_of(stream))
        if len(self.connections) >= self._connections_max:
            await self._refuse(connection, stream)
            return
        self.connections.add(connection)
        try:
            await self._run(connection)
        finally:
            self.connections.discard(connection)
            self._waiting_for_room.discard(connection)
            if connection.bucket is not None:
                self.credit_shares.leave(connection.bucket, connection)

    async def _run(self, connection: Connection) -> None:
        try:
            await connection.run()
        except Exception:
            # A fault of ours must not take the other connections with it.
            log.exception("a connection failed", peer=connection.peer)

    async def _refuse(self, connection: Connection, stream: trio.SocketStream) -> None:
        self._refused += 1
        log.warning("connection refused: too many", connections=len(self.connections))
        if self._being_refused >= REFUSALS_MAX:
            await trio.aclose_forcefully(stream)
            return
        connection.session.fail(
            Status.TOO_MANY, f"there are {len(self.connections)} connections already"
        )
        self._being_refused += 1
        try:
            await self._run(connection)
        finally:
            self._being_refused -= 1

    def bucket(self, name: str) -> Bucket:
        """The bucket of this name.

        Raises:
            ServerError: There is none.
        """
        bucket = self.buckets.get(name)
        if bucket is None:
            raise ServerError(Status.NO_BUCKET, f"there is no bucket {name!r}")
        return bucket

    def delete_bucket(self, name: str) -> None:
        """Deletes a bucket, and ends the streams of those who have it open."""
        bucket = self.buckets.delete(name)
        self._collapsible.pop(bucket, None)
        self.credit_shares.forget(bucket)
        for connection in self.connections:
            if connection.bucket is bucket:
                connection.leave_bucket()

    def wait_for_room(self, connection: Connection) -> None:
        """`connection` is to be paid its credit once its bucket has room."""
        self._waiting_for_room.add(connection)

    def shut_down(self) -> None:
        """Ends every connection with a reason; each closes once its peer took what is queued."""
        for connection in self.connections:
            connection.shut_down()

    # Upkeep.

    async def collapse(self) -> None:
        """Collapses snapshots in bounded steps, for ever, whenever there are any to collapse."""
        while True:
            if not self._collapsible:
                self._collapse_wanted = trio.Event()
                await self._collapse_wanted.wait()
            bucket = next(iter(self._collapsible))
            if not bucket.collapse_step(COLLAPSE_MUTATIONS):
                del self._collapsible[bucket]
            self._pay_credit()
            await trio.lowlevel.checkpoint()

    def _is_collapsible(self, bucket: Bucket) -> None:
        self._collapsible[bucket] = None
        self._collapse_wanted.set()

    def _pay_credit(self) -> None:
        waiting, self._waiting_for_room = self._waiting_for_room, set()
        for connection in waiting:
            connection.pay_credit()

    async def expire(self) -> None:
        """Turns expired items into deletions, for ever."""
        while True:
            await trio.sleep(EXPIRY_INTERVAL_S)
            now = self.time()
            for bucket in self.buckets:
                for partition in bucket.partitions:
                    due = partition.next_expiry()
                    while due is not None and due <= now:
                        partition.expire(now)
                        due = partition.next_expiry()
                        await trio.lowlevel.checkpoint()
            self._pay_credit()

    def statistics(self, bucket: str = "") -> dict[str, object]:
        """The server's figures, or one bucket's; sizes in bytes, times in seconds.

        Raises:
            ServerError: There is no such bucket.
        """
        if bucket:
            return {"bucket": bucket, **self.bucket(bucket).statistics()}
        return {
            "server": {
                "identity": self.identity,
                "uptime_s": trio.current_time() - self._started_at,
                "connections": len(self.connections),
                "connections_refused": self._refused,
                "frame_bytes_under_way": self.frame_budget.used,
            },
            "buckets": {found.name: found.statistics() for found in self.buckets},
            "connections": [connection.statistics() for connection in self.connections],
        }


def _peer_of(stream: trio.SocketStream) -> str:
    try:
        host, port = stream.socket.getpeername()[:2]
    except OSError:
        return "unknown"
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
