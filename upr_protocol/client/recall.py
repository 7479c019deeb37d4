"""How a consumer that knows what it received lately undoes it (seed 002).

**Where it goes back to.** To the ceiling itself. Of what it received, a key whose newest change in
the common history is at or below the ceiling either holds that, or was received above the ceiling
later; and all keys of the second kind are read again. So nothing between its last complete snapshot
end and the ceiling is missing, though it never had the state at the ceiling.

**When it reads again.** Once the stream is accepted, before anything of it is handed on, and in the
history of which it was accepted. A server that has left that history meanwhile refuses; then the
stream is of no more use either, and the next one is accepted in another history.

**What is read again has a number of its own**, which may lie above where the stream goes on from. A
key that is missing has the number that the partition had come to. Before a snapshot's end has
reached these numbers the partition is not what the server had anywhere.

**The same look finds all that is not the server's**, whatever came between. Whenever a stream is
accepted each key that is known is looked at. If its number is not part of the accepted history it
is read again. If it is, and lies above the stream's start, it is ahead of the stream, and no more:
it was read again earlier, or handed to an application that was killed before it had said that it
had dealt with it.
"""

from __future__ import annotations

from typing import Final

import attrs

from upr_protocol.client.events import RolledBack, SnapshotEnd, StreamAccepted, Undone
from upr_protocol.client.keyvalue import Item
from upr_protocol.client.newest import Fetch
from upr_protocol.client.ring import Entry, Received
from upr_protocol.errors import ServerError, Status
from upr_protocol.ids import SEQ_MAX, PartitionId, SeqNo

BELOW_THE_RING: Final = "that is below what is still known of what was received, so it begins at 0"
AHEAD: Final = "what was received last is not part of this history"


@attrs.frozen
class Recalled:
    """What is undone, for the application and for what is remembered.

    Attributes:
        event: For the application.
        entries: What was read again, by key; None when nothing is left of the partition.
    """

    event: Undone
    entries: dict[bytes, Entry] | None


class Recall:
    """Undoes, with the help of what was received and of a server that is asked again.

    Args:
        received: What was received lately.
        fetch: Asks the server.
    """

    def __init__(self, received: Received, fetch: Fetch) -> None:
        self._received = received
        self._fetch = fetch
        self._rolled_back: dict[PartitionId, RolledBack] = {}
        self._settled: dict[PartitionId, SeqNo] = {}

    async def __call__(self, partition: PartitionId, ceiling: SeqNo, reason: str) -> SeqNo:  # noqa: ARG002
        """See `Undo`. Nothing is undone yet: `accepted` says what is to be."""
        # Of other partitions much may be handed on before the stream is accepted from there: none
        # of this one's keys may be let go of meanwhile.
        self._settled[partition] = SEQ_MAX
        below = ceiling < await self._received.floor(partition)
        return SeqNo(0) if below else ceiling

    def rolled_back(self, event: RolledBack) -> Recalled | None:
        """A stream goes on from further back.

        Returns:
            What is to be undone at once: everything, or None.
        """
        self._settled[event.partition] = SEQ_MAX if event.to else event.to
        if event.to:
            self._rolled_back[event.partition] = event
            return None
        self._rolled_back.pop(event.partition, None)
        reason = f"{event.reason}; {BELOW_THE_RING}" if event.ceiling else event.reason
        return Recalled(
            Undone(event.partition, event.ceiling, event.to, event.to, reason, {}), None
        )

    async def accepted(self, event: StreamAccepted, seq: SeqNo) -> Recalled | None:
        """A stream was accepted, behind `seq`.

        Returns:
            What is to be undone before anything of it is dealt with; None when nothing is.
        """
        partition, log = event.partition, event.log
        found = await self._received.look(partition, log, seq)
        documents: dict[bytes, Item | None] = {}
        entries: dict[bytes, Entry] = {}
        if found.foreign:
            try:
                newest = await self._fetch(partition, found.foreign, log.current)
            except ServerError as error:
                if error.status is not Status.HISTORY_CHANGED:
                    raise
                # Whatever this stream still brings, the next one will be looked at.
                self._settled[partition] = SEQ_MAX
                return None
            documents = newest.documents
            for key, item in documents.items():
                number = newest.high if item is None else item.seq
                entries[key] = Entry(number, log.branch_of(number))
        settled = max((entry.seq for entry in entries.values()), default=seq)
        self._settled[partition] = settled = max(found.ahead, settled)
        rollback = self._rolled_back.pop(partition, None)
        if rollback is not None:
            reason, ceiling = rollback.reason, rollback.ceiling
        elif found.foreign:
            reason, ceiling = AHEAD, seq
        else:
            return None
        return Recalled(Undone(partition, ceiling, seq, settled, reason, documents), entries)

    def settled(self, partition: PartitionId) -> SeqNo:
        """The partition is what the server had at the first snapshot's end at or above this."""
        return self._settled.get(partition, SEQ_MAX)

    def trusts(self, partition: PartitionId) -> bool:
        """Whether everything known of the partition is known to be the server's. What is not must
        not be forgotten."""
        return self.settled(partition) != SEQ_MAX

    def ends(self, event: SnapshotEnd) -> bool:
        """Whether the partition is what the server had at this end."""
        return event.end >= self._settled.get(event.partition, 0)
