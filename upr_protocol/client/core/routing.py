"""Which node each partition is to be used at, and how long it has had none."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping

from upr_protocol.address import Address
from upr_protocol.client.core.metadata import ClusterMetadata
from upr_protocol.client.core.retry import MAP_WAIT_S_MAX, Backoff
from upr_protocol.errors import BrokenError, UprError
from upr_protocol.ids import PartitionId, PartitionState


class PartitionRouter:
    """Chooses the node of each partition.

    Args:
        state: The state that a node must hold a partition in.
        timeout_s: How long a partition that something waits for may be without a node.

    Attributes:
        placements: The node of each partition, as `route` chose it last; None while it has none.
    """

    def __init__(
        self,
        metadata: ClusterMetadata,
        state: PartitionState,
        timeout_s: float,
        draw: Callable[[], float],
    ) -> None:
        self.placements: dict[PartitionId, Address | None] = {}
        self._metadata = metadata
        self._state = state
        self._timeout_s = timeout_s
        self._draw = draw
        self._unplaced_since: dict[PartitionId, float] = {}
        self._refusals: dict[PartitionId, UprError] = {}
        self._retry_at: dict[PartitionId, float] = {}
        self._backoffs: dict[PartitionId, Backoff] = {}

    # Reports about nodes.

    def note_refused(self, partition: PartitionId, error: UprError, now: float) -> None:
        """The node of a partition refused it. It is tried again after a wait, unless a newer map
        names another node before that."""
        backoff = self._backoffs.setdefault(partition, Backoff(self._draw, cap_s=MAP_WAIT_S_MAX))
        self._retry_at[partition] = now + backoff.next_wait_s()
        # At once, not with the next `route`: what asks in between must not be sent there again.
        self.placements[partition] = None
        # The first refusal counts. A partition that is refused again and again must time out.
        self._unplaced_since.setdefault(partition, now)
        self._refusals[partition] = error

    @property
    def is_settled(self) -> bool:
        """Whether no partition waits for a node or was refused: a success says nothing new."""
        return not self._unplaced_since and not self._refusals

    def note_succeeded(self, partition: PartitionId) -> None:
        """The node of a partition did what it was asked to."""
        self._unplaced_since.pop(partition, None)
        # Only an answer ends the backoff. A node that accepts connections and refuses all that is
        # asked would otherwise be asked without a pause.
        if self._refusals.pop(partition, None) is not None:
            self._backoffs.pop(partition, None)

    def note_map_changed(self) -> None:
        """There is a newer map: partitions that were refused are tried at once."""
        # The backoffs stay: if the map's node refuses too, the waits go on growing.
        self._retry_at.clear()

    # Where partitions are.

    def route(
        self,
        partitions: Iterable[PartitionId],
        down: Container[Address],
        is_waiting_for: Callable[[PartitionId], bool],
        now: float,
    ) -> Mapping[PartitionId, Address | None]:
        """Chooses the node of each partition that needs one, none of those that are `down`.
        `is_waiting_for` says whether something waits until a partition has a node.
        O(partitions)."""
        placements: dict[PartitionId, Address | None] = {}
        for partition in partitions:
            address = None
            if self._retry_at.get(partition, now) <= now:
                # If every holder is down, one of them is chosen all the same: somebody must find
                # out when it is back.
                address = self._metadata.choose_holder(
                    partition, self._state, down=down, current=self.placements.get(partition)
                )
            if address is None:
                self._unplaced_since.setdefault(partition, now)
            elif not is_waiting_for(partition):
                # Perhaps no message arrives that would show that the node works. A caller that
                # waits later has the whole timeout.
                self._unplaced_since.pop(partition, None)
            placements[partition] = address
        self.placements = placements
        return placements

    @property
    def has_unplaced(self) -> bool:
        """Whether some partition has no node."""
        return None in self.placements.values()

    def next_retry_at(self, now: float) -> float:
        """When the next partition that was refused is tried again."""
        times = (
            retry_at
            for partition, retry_at in self._retry_at.items()
            if retry_at > now and not self.placements.get(partition)
        )
        return min(times, default=float("inf"))

    # Giving up.

    def reason_unplaced(self, partition: PartitionId) -> UprError | None:
        """Why a partition has no node: the map names none, or the node that it names refused. None
        when neither is known."""
        sentence = self._metadata.explain_no_holder(partition, self._state)
        return BrokenError(sentence) if sentence else self._refusals.get(partition)

    def unplaced_since(self, moment: float) -> tuple[list[PartitionId], str]:
        """The partitions that have had no node since `moment` or before, and why the first of them
        has none; no text when that is not known."""
        partitions = sorted(
            partition for partition, since in self._unplaced_since.items() if since <= moment
        )
        reason = self.reason_unplaced(partitions[0]) if partitions else None
        return partitions, "" if reason is None else str(reason)

    def timeout_error(
        self, is_waiting_for: Callable[[PartitionId], bool], now: float
    ) -> UprError | None:
        """The error of a partition that a caller has waited for too long; None while every wait is
        within the timeout."""
        for partition, since in list(self._unplaced_since.items()):
            if not is_waiting_for(partition):
                del self._unplaced_since[partition]  # `route` starts anew while it has no node
            elif now - since >= self._timeout_s:
                error = self.reason_unplaced(partition)
                if error is None:
                    error = BrokenError(f"no node could be used for partition {partition}")
                error.add_note(f"gave up after {now - since:.0f} s")
                return error
        return None
