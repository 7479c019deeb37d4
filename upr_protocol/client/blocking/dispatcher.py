"""Requests to a bucket from programs that block: each to the node that holds its partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from upr_protocol.address import Address
from upr_protocol.client.blocking.connection import BlockingConnection
from upr_protocol.client.blocking.connection_pool import BlockingConnectionPool
from upr_protocol.client.core import calls
from upr_protocol.client.core.calls import (
    Call,
    HeldLease,
    LeaseRequest,
    PartitionCallFactory,
    PartitionRow,
)
from upr_protocol.client.core.results import is_wrong_node, status_of
from upr_protocol.client.core.retry import WRONG_NODE
from upr_protocol.concurrency import without_traceback
from upr_protocol.errors import BrokenError, ClosedError, ServerError, UprError
from upr_protocol.ids import PartitionId
from upr_protocol.wire import Message, Mutate, MutateReply, PartitionLog, Refusal

T = TypeVar("T")


class BlockingDispatcher:
    """Sends requests and waits for their answers."""

    def __init__(
        self,
        connections: BlockingConnectionPool,
        timeout_s: float,
        credit_timeout_s: float,
        sleep: Callable[[float], None],
    ) -> None:
        self.connections = connections
        self._timeout_s = timeout_s
        self._credit_timeout_s = credit_timeout_s
        self._sleep = sleep
        self._is_closed = False

    def close(self) -> None:
        """Closes the connections for good."""
        self._is_closed = True
        self.connections.close()

    def check_open(self) -> None:
        """Raises `ClosedError` after `close`."""
        if self._is_closed:
            raise ClosedError("the client was closed")

    def connect(self) -> BlockingConnection:
        """A connection to any node."""
        self.check_open()
        return self.connections.to_any_node()

    # Requests about one partition, or about none.

    def ask(self, call: Call[T], *, wait_s: float = 0.0) -> T:
        """Sends a request and waits for its answer; see `BlockingClient.ask`. `wait_s` is how long
        the server itself may wait before it answers."""
        return self.ask_all([call], wait_s=wait_s)[0]

    def ask_all(self, requests: Sequence[Call[T]], *, wait_s: float = 0.0) -> list[T]:
        """Sends several requests at once, and gives their answers in the same order."""
        self.connect()
        deadline = time.monotonic() + self._timeout_s + wait_s
        answers: dict[int, Message] = {}
        failure: UprError = BrokenError("no node could be asked")
        while missing_indices := [index for index in range(len(requests)) if index not in answers]:
            for address, indices in self._by_node(requests, missing_indices).items():
                try:
                    connection = (
                        self.connect() if address is None else self.connections.to_node(address)
                    )
                except BrokenError as error:
                    if self.connections.metadata.is_single_node:
                        raise
                    failure = error  # nothing was sent to it
                    continue
                batch = [requests[index] for index in indices]
                replies = self._exchange(connection, batch, deadline)
                answers.update(zip(indices, replies, strict=True))
            if self.connections.metadata.is_single_node:
                break
            failure = self._drop_misdirected(answers) or failure
            if len(answers) < len(requests) and not self._wait_for_map(deadline):
                raise self._no_holder_error(requests[index] for index in missing_indices) or failure
        return [
            call.result(calls.check_reply(answers[index])) for index, call in enumerate(requests)
        ]

    def _wait_for_map(self, deadline: float) -> bool:
        """Asks the nodes for the map, and waits until they may be asked again. False, at once, when
        that is after the deadline, or when there is no map: a single node has none."""
        again_at = self.connections.refresh()
        if self.connections.metadata.is_single_node or again_at >= deadline:
            return False
        self._sleep(max(0.0, again_at - time.monotonic()))
        return True

    def _by_node(
        self, requests: Sequence[Call[T]], indices: Iterable[int]
    ) -> dict[Address | None, list[int]]:
        """Which requests go to which node; requests under None go to any node. A request whose
        partition has no node is left out."""
        by_node: dict[Address | None, list[int]] = {}
        for index in indices:
            partition = requests[index].partition
            address = None if partition is None else self.connections.holder(partition)
            if partition is None or address is not None:
                by_node.setdefault(address, []).append(index)
        return by_node

    def _drop_misdirected(self, answers: dict[int, Message]) -> UprError | None:
        """Drops the refusals that another node may not repeat; gives the last one."""
        error: UprError | None = None
        for index, answer in list(answers.items()):
            if isinstance(answer, MutateReply | Refusal) and is_wrong_node(answer):
                del answers[index]
                if isinstance(answer, Refusal):
                    error = ServerError(status_of(answer.status), answer.sentence)
                else:
                    error = ServerError(status_of(answer.runs[0].status))
                self.connections.metadata.note_revision(answer.map_revision)
        return error

    def _no_holder_error(self, requests: Iterable[Call[T]]) -> UprError | None:
        partitions = (call.partition for call in requests if call.partition is not None)
        sentence = next(filter(None, map(self.connections.explain_no_holder, partitions)), None)
        return BrokenError(sentence) if sentence else None

    def _ask_on(
        self, connection: BlockingConnection, call: Call[T], timeout_s: float | None = None
    ) -> T:
        """Asks one node, and gives what its answer means."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        (answer,) = self._exchange(connection, [call], time.monotonic() + timeout_s)
        return call.result(calls.check_reply(answer))

    def _exchange(
        self, connection: BlockingConnection, requests: Sequence[Call[T]], deadline: float
    ) -> list[Message]:
        """Sends requests on one connection and receives their answers.

        Raises:
            LocalProtocolError: Another call waits for answers on it; nothing was sent.
        """
        connection.check_not_in_use()
        connection.is_in_use = True
        try:
            return self._exchange_alone(connection, requests, deadline)
        finally:
            connection.is_in_use = False
            connection.finish_close()

    def _exchange_alone(
        self, connection: BlockingConnection, requests: Sequence[Call[T]], deadline: float
    ) -> list[Message]:
        began_at = time.monotonic()
        replies: dict[int, Message | None] = {}
        for call in requests:
            opaque = connection.session.new_opaque()
            request = call.request(opaque=opaque)
            if isinstance(request, Mutate):
                self._await_credit(connection)
            connection.session.send(request)
            replies[opaque] = None
        missing_count = len(replies)
        while missing_count:
            message = connection.receive(deadline)
            if message is None:
                # Other nodes, and a wait for the map, may have had a part of the time.
                waited_s = round(time.monotonic() - began_at, 2)
                raise TimeoutError(f"{connection.address} did not answer in {waited_s:g} s")
            if replies.get(message.opaque, message) is None:
                replies[message.opaque] = message
                missing_count -= 1
        return [message for message in replies.values() if message is not None]

    def _await_credit(self, connection: BlockingConnection) -> None:
        deadline = time.monotonic() + self._credit_timeout_s
        while not connection.session.credit.is_open:
            if connection.receive(deadline) is None:
                raise calls.over_quota_error(
                    self.connections.metadata.address, self._credit_timeout_s
                )
            if connection.failure is not None:
                # The credit came just before the end.
                raise without_traceback(connection.failure)

    # Requests about several partitions.

    def _connections_of(
        self, partitions: Sequence[int]
    ) -> list[tuple[BlockingConnection, list[PartitionId]]]:
        """The nodes of partitions, each with its partitions. Waits until each partition has one.

        Raises:
            BrokenError: Some had no node by the deadline.
        """
        deadline = time.monotonic() + self._timeout_s
        self.connect()
        while True:
            by_node: dict[Address | None, list[PartitionId]] = {}
            for partition in map(PartitionId, partitions):
                by_node.setdefault(self.connections.holder(partition), []).append(partition)
            unplaced_partitions = by_node.pop(None, [])
            sentence = (
                self.connections.explain_no_holder(unplaced_partitions[0])
                if unplaced_partitions
                else ""
            )
            error: UprError = BrokenError(
                sentence or f"the partition map names no node for partitions {unplaced_partitions}"
            )
            try:
                groups = [(self.connections.to_node(a), group) for a, group in by_node.items() if a]
                if not unplaced_partitions:
                    return groups
            except UprError as failure:
                error = failure
            if not self._wait_for_map(deadline):
                raise error

    def logs(self) -> list[PartitionLog]:
        """The log of each partition, as its node sent it during the handshake."""
        partitions = range(self.connect().handshake.partition_count)
        return [
            connection.handshake.logs[partition]
            for connection, group in self._connections_of(partitions)
            for partition in group
            if partition in connection.handshake.logs
        ]

    def ask_about(
        self, partitions: Sequence[int], call_for: PartitionCallFactory[PartitionRow]
    ) -> list[PartitionRow]:
        """Asks about partitions, each at the node that is active for it; about all when none are
        named."""
        connection = self.connect()
        count = calls.check_partition_count(connection.handshake.partition_count)
        if unknown_partitions := [p for p in partitions if not 0 <= p < count]:
            # Any node refuses them, and says why.
            return self._ask_on(connection, call_for(unknown_partitions))
        deadline = time.monotonic() + self._timeout_s
        while True:
            rows: list[PartitionRow] = []
            try:
                for connection, group in self._connections_of(partitions or range(count)):
                    group_rows = self._ask_on(connection, call_for(group))
                    rows.extend(group_rows)
                return sorted(rows, key=lambda row: row.partition)
            except ServerError as error:
                if not self._may_ask_elsewhere(error, deadline):
                    raise

    def _may_ask_elsewhere(self, error: ServerError, deadline: float) -> bool:
        """Waits until partitions that a node refused may be asked for at another. False if that
        does not help, or comes after the deadline."""
        # The map is older than a takeover or a failover.
        self.connections.metadata.note_revision(error.map_revision)
        return error.status in WRONG_NODE and self._wait_for_map(deadline)

    def acquire_lease(self, request: LeaseRequest) -> HeldLease:
        """Acquires a lease, with the same ID at each node that has some of its ranges. The errors
        are those of `RequestDispatcher.acquire_lease`."""
        deadline = time.monotonic() + self._timeout_s
        missing_partitions = request.partitions
        leases: list[HeldLease] = []
        while True:
            groups = self._connections_of(sorted(missing_partitions)) or [(self.connect(), [])]
            try:
                for connection, partitions in groups:
                    lease = self._ask_on(connection, request.call_for(partitions))
                    if not self.connections.metadata.is_single_node:
                        request.check_granted(lease, partitions)
                    missing_partitions -= set(partitions)
                    leases.append(lease)
                return calls.merge_leases(leases)
            except ServerError as error:
                if not self._may_ask_elsewhere(error, deadline):
                    raise

    def ask_all_holders(self, call: Call[HeldLease], timeout_s: float) -> HeldLease:
        """As `RequestDispatcher.ask_all_holders`, with `TimeoutError` if some node did not answer.
        A node that cannot be asked does not keep the others from being asked. Each node may take
        `timeout_s` to answer, and to be reached."""
        deadline = time.monotonic() + timeout_s
        count = calls.check_partition_count(self.connect().handshake.partition_count)
        leases: dict[Address, HeldLease] = {}
        refusals: list[ServerError] = []
        failure: UprError | TimeoutError | None = None
        unreachable: UprError = BrokenError("no node could be asked")
        asked_addresses: set[Address] = set()
        # By the time that some have answered, a newer map may name others.
        while unasked_addresses := self._partitions_of_nodes(count).keys() - asked_addresses:
            for address in sorted(unasked_addresses, key=str):
                try:
                    connection = self.connections.to_node(address)
                except UprError as error:
                    unreachable = error
                    continue
                asked_addresses.add(address)
                try:
                    leases[address] = self._ask_on(connection, call, timeout_s)
                except ServerError as error:
                    refusals.append(error)
                except (BrokenError, TimeoutError) as error:
                    failure = error
            if not (unasked_addresses <= asked_addresses or self._wait_for_map(deadline)):
                raise unreachable
        if failure is not None:
            raise failure
        if not leases:
            raise refusals[0] if refusals else BrokenError("no node has any partition")
        partitions_of_nodes = self._partitions_of_nodes(count)
        for address, lease in leases.items():
            calls.check_active(lease, partitions_of_nodes.get(address, ()))
        return calls.merge_leases(list(leases.values()))

    def _partitions_of_nodes(self, count: int) -> dict[Address, list[PartitionId]]:
        """The nodes that the map names, each with its partitions. Partitions without a node are
        left out."""
        by_node: dict[Address, list[PartitionId]] = {}
        for partition in map(PartitionId, range(count)):
            address = self.connections.holder(partition)
            if address is not None:
                by_node.setdefault(address, []).append(partition)
        return by_node
