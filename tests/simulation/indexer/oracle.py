"""What a bucket had at a timestamp: each numbered change, folded along the failover log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from tests.kit.history import Accepted, History, Row
from upr_protocol.client import WriteResult
from upr_protocol.failover import FailoverLog
from upr_protocol.ids import HistoryId, Operation, PartitionId, SeqNo
from upr_server.engine import Partition


class Oracle:
    """See the module.

    Args:
        history: Has what the server gave numbers to.
        server_partitions: Gives the server's partitions; none while it is down.
    """

    def __init__(
        self, history: History, server_partitions: Callable[[], Iterable[Partition]]
    ) -> None:
        self._history = history
        self._server_partitions = server_partitions
        self._taken = 0
        self._rows: defaultdict[tuple[int, int], list[Row]] = defaultdict(list)
        self._logs: dict[tuple[int, int], FailoverLog] = {}
        self._newest_logs: dict[int, FailoverLog] = {}
        self._acknowledged: dict[int, tuple[HistoryId, SeqNo]] = {}

    def acknowledged(self, result: WriteResult) -> None:
        """Notes a change that was acknowledged."""
        self._acknowledged[result.partition] = result.history_id, result.seq

    def newest(self) -> Mapping[int, tuple[HistoryId, SeqNo]]:
        """By partition, the last acknowledged change: its history and number."""
        return dict(self._acknowledged)

    def look(self) -> None:
        """Takes note of the histories that there are. Call it in each life of the server."""
        for partition in self._server_partitions():
            log = partition.failover_log
            self._logs[partition.id, log.current] = self._newest_logs[partition.id] = log
        events = self._history.events
        for _, event in events[self._taken :]:
            if isinstance(event, Accepted):
                self._rows[event.partition, event.history_id].append(event.row)
        self._taken = len(events)

    def contents_at(self, timestamps: Mapping[PartitionId, tuple[str, int]]) -> dict[bytes, bytes]:
        """The documents at a timestamp that a scan has given."""
        self.look()
        contents: dict[bytes, bytes] = {}
        for partition, (history, through) in timestamps.items():
            if int(history, 16):
                log = self._logs[partition, int(history, 16)]
                contents |= self._partition_at(partition, log, through)
        return contents

    def _partition_at(
        self, partition: PartitionId, log: FailoverLog, through: int
    ) -> dict[bytes, bytes]:
        contents: dict[bytes, bytes] = {}
        for entry in reversed(list(log)):
            end = min(log.end_of(entry.history_id), through)
            for row in self._rows[partition, entry.history_id]:
                if row.seq > end:
                    continue
                if row.op is Operation.SET:
                    contents[row.key] = row.value
                else:
                    contents.pop(row.key, None)
        return contents

    def check_fresh(
        self,
        newest: Mapping[int, tuple[HistoryId, SeqNo]],
        timestamps: Mapping[PartitionId, tuple[str, int]],
    ) -> None:
        """An answer at `now` has what was acknowledged before, unless the server has lost it.

        Args:
            newest: What had been acknowledged when the scan began.
            timestamps: Those of the answer.

        Raises:
            StaleError: It lacks a change.
        """
        self.look()
        for partition, (history_id, seq) in newest.items():
            if not self._newest_logs[partition].contains(history_id, seq):
                continue
            history, through = timestamps.get(PartitionId(partition), ("0", 0))
            if through < seq:
                raise StaleError(
                    f"partition {partition} is at {through} of {history}, and {seq} of "
                    f"{history_id:016x} was acknowledged"
                )


class StaleError(AssertionError):
    """An answer lacks a change."""
