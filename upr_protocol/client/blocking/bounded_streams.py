"""Streams that end, read in the calling thread.

A `BlockingConsumer` reads in a thread of its own, so that its connections are read and kept alive
while the program computes. A caller that does nothing but read to an end, and hands on what it gets
before it reads on, needs no such thread: two threads that share the interpreter's lock cost a third
more processor time. So one connection is read here. As soon as that is not enough, because it
breaks or because another node is to be asked, a `BlockingConsumer` goes on where it stands.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence

import attrs

from upr_protocol.address import Address
from upr_protocol.client.blocking.connection import BlockingConnection, SocketOptions
from upr_protocol.client.blocking.consumer import BlockingConsumer
from upr_protocol.client.core.delivery_tracker import RollbackRequest
from upr_protocol.client.core.events import Event
from upr_protocol.client.core.resume_state import ResumeState
from upr_protocol.client.core.retry import RETRY_TIMEOUT_S_DEFAULT, is_retryable
from upr_protocol.client.core.stream_follower import StreamFollower
from upr_protocol.client.core.subscription import (
    Subscription,
    SubscriptionState,
)
from upr_protocol.client.options import IDENTITY_DEFAULT
from upr_protocol.concurrency import without_traceback
from upr_protocol.errors import ServerError, Status, UprError
from upr_protocol.ids import PartitionId
from upr_protocol.limits import IDLE_INTERVAL_S_DEFAULT
from upr_protocol.transport import SocketDial, dial_socket


@attrs.frozen(kw_only=True)
class BoundedStreams:
    """What to stream, and how to connect. The attributes are those of a `BlockingConsumer`, but
    that all partitions are named, and each has an end.

    Attributes:
        partitions: The partitions, at least one.
        resume: Where they start. It is not changed.
        end: Where each partition ends.
        idle_interval_s: After so much silence, each side tells the other that it is alive. While
            the caller does not ask for the next event, nobody tells that here: a server that has
            given the connection up is connected to again.
    """

    address: Address
    partitions: Sequence[int]
    resume: ResumeState
    end: Mapping[int, int]
    lease_id: int = 0
    key_prefix: bytes = b""
    with_logs: bool = False
    identity: str = IDENTITY_DEFAULT
    retry_timeout_s: float = RETRY_TIMEOUT_S_DEFAULT
    idle_interval_s: int = IDLE_INTERVAL_S_DEFAULT
    dial: SocketDial = dial_socket

    def events(self) -> Generator[Event, None, None]:
        """The events of all streams, until each has ended. By asking for the next event the caller
        acknowledges the one before. Closing the iterator closes the connection.

        Raises:
            UprError: As for `BlockingConsumer`, after it has gone on trying for `retry_timeout_s`.
        """
        subscription = Subscription(
            self.partitions,
            end=self.end,
            lease_id=self.lease_id,
            with_logs=self.with_logs,
            key_prefix=self.key_prefix,
        )
        state = SubscriptionState(subscription, self.resume.copy())
        # Where the address names several hosts, the partitions are mostly on several nodes. Or the
        # first host is down, or has not the bucket: then a consumer asks the next one.
        if not self.address.other_nodes:
            try:
                yield from self._events_of_one_connection(state)
            except UprError as error:
                if not _may_go_on_after(error):
                    raise
        if not state.is_finished:
            yield from self._remaining_events(state)

    def _events_of_one_connection(self, state: SubscriptionState) -> Generator[Event, None, None]:
        """What one connection gives, until all has ended, or another node is to be asked."""
        options = SocketOptions(
            identity=self.identity, idle_interval_s=self.idle_interval_s, dial=self.dial
        )
        connection = BlockingConnection(self.address, options)
        try:
            opened_reply = connection.handshake.opened_reply
            if opened_reply is None or opened_reply.map_revision:
                return  # the partitions may be on several nodes
            follower = StreamFollower(state)
            state.learn_partitions(connection.handshake)
            for partition in state.remaining_partitions:
                follower.add_partition(partition)
            follower.connection_made(connection.session, connection.handshake)
            while not (state.is_finished or follower.failure or follower.refused_streams):
                message = connection.receive(float("inf"))
                assert message is not None, "there is no deadline"
                if connection.failure is not None:
                    # Nothing can be answered any more. The next connection reads this again.
                    raise without_traceback(connection.failure)
                for delivery in follower.receive(message):
                    event = delivery.event
                    assert not isinstance(event, RollbackRequest), "nobody here undoes a rollback"
                    if event is not None:
                        yield event
                    follower.acknowledge(delivery)
        finally:
            connection.close()

    def _remaining_events(self, state: SubscriptionState) -> Generator[Event, None, None]:
        """What is left, by a consumer that finds nodes and connects again."""
        remaining_partitions: Sequence[PartitionId | int] = (
            sorted(state.remaining_partitions) or self.partitions
        )
        with BlockingConsumer(
            self.address,
            partitions=remaining_partitions,
            resume=state.resume_state,
            end=self.end,
            lease_id=self.lease_id,
            key_prefix=self.key_prefix,
            with_logs=self.with_logs,
            identity=self.identity,
            retry_timeout_s=self.retry_timeout_s,
            idle_interval_s=self.idle_interval_s,
            dial=self.dial,
        ) as consumer:
            # The server may be starting again just now.
            consumer.connect()
            yield from consumer


def _may_go_on_after(error: UprError) -> bool:
    """Whether a consumer may fare better than the one connection did."""
    # It tries a refused log-in again: the node may not know of a changed password yet.
    is_log_in = isinstance(error, ServerError) and error.status is Status.LOG_IN_FAILED
    return is_retryable(error) or is_log_in
