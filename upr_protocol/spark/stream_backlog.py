"""What a stream has yet to read, as a query's progress shows it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, Self

import attrs

from upr_protocol.ids import PartitionId, SeqNo

MOMENTS_MAX: Final = 64
"""How many moments are kept for the age of a backlog, which is then too high by some percent at
most."""


@attrs.frozen
class StreamBacklog:
    """What a server has that a stream has in no batch yet.

    Attributes:
        numbers: Sequence numbers, one for each partition.
        nbytes: Bytes, about, as far as the sizes of earlier batches tell; None where sizes are
            unknown.
        age_s: How old the newest state of the server is that the stream has, in seconds; None
            until it has what there was when it began.
    """

    numbers: tuple[int, ...]
    nbytes: int | None
    age_s: float | None

    @classmethod
    def merged(cls, backlogs: Iterable[StreamBacklog]) -> Self:
        """Adds up the backlogs of several buckets."""
        parts = list(backlogs)
        sizes = [part.nbytes for part in parts if part.nbytes is not None]
        ages_s = [part.age_s for part in parts if part.age_s is not None]
        return cls(
            tuple(number for part in parts for number in part.numbers),
            sum(sizes) if len(sizes) == len(parts) else None,
            max(ages_s, default=0.0) if len(ages_s) == len(parts) else None,
        )

    def metrics(self) -> dict[str, int | float]:
        """The backlog under the names that Spark's source for Kafka uses: numbers of the partition
        that is the least, the most, and the average one; and all bytes. Its age has no name
        there."""
        counts = self.numbers
        metrics: dict[str, int | float] = {
            "minOffsetsBehindLatest": min(counts, default=0),
            "maxOffsetsBehindLatest": max(counts, default=0),
            "avgOffsetsBehindLatest": round(sum(counts) / len(counts), 1) if counts else 0.0,
            "totalOffsetsBehindLatest": sum(counts),
        }
        if self.nbytes is not None:
            metrics["estimatedTotalBytesBehindLatest"] = self.nbytes
        if self.age_s is not None:
            metrics["secondsBehindLatest"] = round(self.age_s, 1)
        return metrics


class BacklogAge:
    """How old the newest state of a server is that a stream has: of all moments at which it was
    seen how far the partitions are, the newest of which the stream has everything.

    Args:
        clock: Gives the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moments: list[tuple[float, Mapping[PartitionId, SeqNo]]] = []
        """Times, and how far the partitions were then; from the newest one on of which the stream
        had everything when it was asked last."""

    def note_ends(self, ends: Mapping[PartitionId, SeqNo]) -> None:
        """Notes how far the partitions are now."""
        if self._moments and self._moments[-1][1] == ends:
            self._moments.pop()
        self._moments.append((self._clock(), ends))
        if len(self._moments) > MOMENTS_MAX:
            times_s, now_s = [time_s for time_s, _ in self._moments], self._moments[-1][0]
            # The one that stands closest to its neighbours for how long ago it was.
            closest = min(
                range(1, len(times_s) - 1),
                key=lambda index: (
                    (times_s[index + 1] - times_s[index - 1]) / (now_s - times_s[index - 1] or 1.0)
                ),
            )
            del self._moments[closest]

    def age_s(self, seqs: Mapping[PartitionId, SeqNo]) -> float | None:
        """The age at the moment that was noted last, in seconds; 0 if the stream has everything,
        None if it has not had everything of any moment.

        Args:
            seqs: Where the stream stands; 0 in partitions that are missing.
        """
        now_s, latest = self._moments[-1]
        for index in reversed(range(len(self._moments))):
            time_s, ends = self._moments[index]
            # After a failover the numbers of earlier moments may never be reached.
            if all(
                seqs.get(partition, 0) >= min(seq, latest.get(partition, 0))
                for partition, seq in ends.items()
            ):
                del self._moments[:index]
                return now_s - time_s
        return None


@attrs.frozen
class BacklogSize:
    """What there is for the next batches of a stream.

    Attributes:
        numbers: How many sequence numbers.
        may_wait: Whether the next batch may wait for more. It may not where the stream has to go
            back, is inside a snapshot, or is to end at what there is.
    """

    numbers: int
    may_wait: bool
