"""Failover logs, and where a stream may start: the rollback decision (`decide_start`).

An entry is the start of a branch: a history ID and the sequence number at which that history
began. It is written once and never changed. Two logs that share an entry share everything up to the
point where the first of them left that branch. docs/guarantees.md says what follows for a client.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum, unique
from itertools import pairwise
from typing import Final

import attrs
import msgspec

from upr_protocol.ids import SEQ_MAX, HistoryId, SeqNo
from upr_protocol.limits import FAILOVER_ENTRIES_MAX


@attrs.frozen
class FailoverEntry:
    """The start of one branch.

    Attributes:
        history_id: The branch's name; never 0.
        seq: The number at which it begins: its first mutation has the next one.
    """

    history_id: HistoryId
    seq: SeqNo


@attrs.frozen
class FailoverLog:
    """The branches that led to a partition's state, newest first.

    Numbers never rise from one entry to the next; no history ID occurs twice.
    """

    entries: tuple[FailoverEntry, ...] = ()

    def __attrs_post_init__(self) -> None:
        ids = [entry.history_id for entry in self.entries]
        if 0 in ids:
            raise ValueError("a history ID must not be 0")
        if len(set(ids)) != len(ids):
            raise ValueError("a history ID occurs twice in the failover log")
        if any(newer.seq < older.seq for newer, older in pairwise(self.entries)):
            raise ValueError("the failover log's numbers rise towards its older entries")

    @classmethod
    def of_pairs(cls, pairs: Iterable[tuple[int, int]]) -> FailoverLog:
        """A log from (history ID, number) pairs, newest first."""
        return cls(tuple(FailoverEntry(HistoryId(h), SeqNo(s)) for h, s in pairs))

    def pairs(self) -> list[tuple[int, int]]:
        """The reverse of `of_pairs`."""
        return [(entry.history_id, entry.seq) for entry in self.entries]

    def __iter__(self) -> Iterator[FailoverEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def current(self) -> HistoryId:
        """The newest entry's history ID; 0 when the log is empty."""
        return self.entries[0].history_id if self.entries else HistoryId(0)

    def with_branch(self, history_id: HistoryId, seq: SeqNo) -> FailoverLog:
        """The log after a new branch began at `seq`: without entries above it. One over the limit
        is dropped: the oldest branch that gave no number, because without it the log says the same
        of each number; or else the oldest. The newer half of the log stays: a node may be in one of
        these branches, and is compared by its name."""
        entries = [FailoverEntry(history_id, seq), *self.up_to(seq).entries]
        if len(entries) > FAILOVER_ENTRIES_MAX:
            oldest, half = len(entries) - 1, FAILOVER_ENTRIES_MAX // 2
            empty = (i for i in range(oldest, half, -1) if entries[i].seq == entries[i - 1].seq)
            del entries[next(empty, oldest)]
        return FailoverLog(tuple(entries))

    def end_of(self, history_id: HistoryId) -> SeqNo:
        """The sequence number at which the branch `history_id` ended and the next one began: this
        history has everything that `history_id` had up to there. `SEQ_MAX` for the current branch,
        0 for one that is not in the log."""
        end = SEQ_MAX
        for entry in self.entries:
            if entry.history_id == history_id:
                return end
            end = entry.seq
        return SeqNo(0)

    def contains(self, history_id: HistoryId, seq: SeqNo) -> bool:
        """Whether this history is known to contain what `history_id` had at `seq`."""
        return seq <= self.end_of(history_id)

    def branch_of(self, seq: SeqNo) -> HistoryId:
        """The branch in which `seq` was given; 0 when the log does not go back so far.

        Every later history containing `seq` lists this branch, unless the entry was dropped because
        the log was full.
        """
        return next((e.history_id for e in self.entries if e.seq < seq), HistoryId(0))

    def history_with(self, seq: SeqNo) -> HistoryId:
        """A history by which to remember the change that this log has at `seq`, to ask a later log
        whether it contains that. The branch in which it was given; if the log does not go back so
        far, one in its newer half, because full logs drop older ones, and failovers the newest. 0
        when the log is empty."""
        branch = self.branch_of(seq)
        if branch or not self.entries:
            return branch
        return self.entries[len(self.entries) // 4].history_id

    def up_to(self, seq: SeqNo) -> FailoverLog:
        """The log without the entries above `seq`."""
        return FailoverLog(tuple(entry for entry in self.entries if entry.seq <= seq))


class PartialSnapshot(msgspec.Struct, frozen=True):
    """The snapshot that a client has received in part: (start, end] of `history_id`."""

    history_id: HistoryId
    start: SeqNo
    end: SeqNo


class Position(msgspec.Struct, frozen=True):
    """How far a client has come in one partition.

    Attributes:
        log: The failover log that the server last sent it.
        last_complete: The end of the last snapshot that it has received whole.
        highest_received: The highest number it has received, in a complete snapshot or not; not
            below `last_complete`.
        partial: The snapshot that it has received in part; None when `highest_received` is
            `last_complete`.
    """

    log: FailoverLog = FailoverLog()
    last_complete: SeqNo = SeqNo(0)
    highest_received: SeqNo = SeqNo(0)
    partial: PartialSnapshot | None = None


@unique
class StartReason(Enum):
    """Why a stream starts where it does."""

    FROM_THE_BEGINNING = "the client has received nothing yet"
    SAME_HISTORY = "the client's newest history is the server's current one"
    PARTIAL_SNAPSHOT = "the client has received part of a snapshot of the server's history"
    PARTIAL_OF_ANOTHER_HISTORY = "the client's partial snapshot came from another history"
    BRANCHED = "the histories of server and client diverge"
    UNKNOWN_HISTORY = "the server and the client have no history in common"
    PURGED = "the server has forgotten deletions that the client has not received"
    SERVER_BEHIND = "the server does not have all that the client has yet"


@attrs.frozen
class Start:
    """The stream may start right after what the client has.

    Attributes:
        seq: The sequence number to start after.
        end_at_least: The first snapshot sent must not end below this.
        reason: Why.
    """

    seq: SeqNo
    end_at_least: SeqNo
    reason: StartReason


@attrs.frozen
class RollBack:
    """The client has mutations that this server never had.

    Attributes:
        ceiling: The client must go back to its newest complete snapshot end at or below this.
        reason: Why.
    """

    ceiling: SeqNo
    reason: StartReason


@attrs.frozen
class Retry:
    """The server is behind the client, in the same history.

    Attributes:
        reason: Why.
    """

    reason: StartReason


Decision = Start | RollBack | Retry


def decide_start(
    server: FailoverLog, server_high: SeqNo, purge: SeqNo, client: Position
) -> Decision:
    """Where the stream of a client may start, by comparing the whole logs.

    Args:
        server: The server's log.
        server_high: The server's highest number.
        purge: Tombstones at or below this number may be gone.
        client: What the client has.

    Returns:
        A `Start` after everything that the client has, or a `RollBack`, or a `Retry`.
    """
    if client.highest_received == client.last_complete:
        # The client has received nothing of this snapshot, so it need not be completed. And its end
        # may be one that this server never reaches, since another history announced it.
        client = msgspec.structs.replace(client, partial=None)
    bound = _ceiling(server, server_high, client)
    if isinstance(bound, Retry):
        return bound
    ceiling, reason = bound
    if ceiling > server_high:
        # The client left the common history at a number that this server has yet to reach. Up to
        # there the two cannot differ: the client need not undo anything, but the server cannot
        # stream anything either.
        return Retry(StartReason.SERVER_BEHIND)
    if 0 < ceiling < purge:
        ceiling, reason = SeqNo(0), StartReason.PURGED
    if ceiling < client.highest_received:
        return RollBack(ceiling, reason)
    end_at_least = client.partial.end if client.partial else SeqNo(0)
    return Start(client.highest_received, end_at_least, reason)


def _ceiling(
    server: FailoverLog, server_high: SeqNo, client: Position
) -> tuple[SeqNo, StartReason] | Retry:
    # The client has no complete snapshot of a branch that begins above its last complete one.
    log = client.log.up_to(client.last_complete)
    position = {entry.history_id: index for index, entry in enumerate(log)}
    common = next(
        (
            (server_index, position[entry.history_id])
            for server_index, entry in enumerate(server)
            if entry.history_id in position
        ),
        None,
    )
    if common is None:
        nothing_yet = not client.highest_received
        reason = StartReason.FROM_THE_BEGINNING if nothing_yet else StartReason.UNKNOWN_HISTORY
        return SeqNo(0), reason
    server_index, client_index = common
    if server_index or client_index:
        # At least one of them left the common branch, at the next newer entry of its log. The
        # other's end is what the client has of it: no number above that can be common.
        server_left = (
            server.entries[server_index - 1].seq if server_index else client.highest_received
        )
        client_left = log.entries[client_index - 1].seq if client_index else client.last_complete
        return min(server_left, client_left), StartReason.BRANCHED
    if client.partial is None:
        return client.last_complete, StartReason.SAME_HISTORY
    if client.partial.history_id != server.current:
        return client.last_complete, StartReason.PARTIAL_OF_ANOTHER_HISTORY
    if server_high < client.partial.end:
        return Retry(StartReason.SERVER_BEHIND)
    return client.highest_received, StartReason.PARTIAL_SNAPSHOT


NOTHING_YET: Final = Position()
"""The position of a client that connects for the first time."""
